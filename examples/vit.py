"""Train a ViT-B/16 with scaled_dot_product_attention in bf16 mixed precision.

python examples/vit.py                      on the GPU if there is one, else a tiny one on the CPU
"""

from __future__ import annotations

import torch
from common import ON_GPU, Example, L, as_floats, labelled_images, loader, parser, run
from torch import nn
from torch.nn import functional as F

#: Layers, heads, width.
SIZES = {"base": (12, 12, 768), "tiny": (2, 2, 64)}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv)
        x = x + self.dropout(self.proj(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, size: str, image: int, patch: int, classes: int, dropout: float) -> None:
        super().__init__()
        layers, heads, width = SIZES[size]
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(as_floats(x)).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


def main() -> None:
    options = parser("ViT", batch_size=64 if ON_GPU else 4, precision="bf16-mixed")
    options.add_argument("--size", choices=SIZES, default="base" if ON_GPU else "tiny")
    options.add_argument("--image", type=int, default=224 if ON_GPU else 32)
    options.add_argument("--patch", type=int, default=16 if ON_GPU else 8)
    options.add_argument("--dropout", type=float, default=0.1)
    args = options.parse_args()

    L.seed_everything(args.seed, verbose=False)
    generator = torch.Generator().manual_seed(args.seed)
    labels = torch.randint(10, (128,), generator=generator)
    images = labelled_images(labels, args.image, generator)
    model = ViT(args.size, args.image, args.patch, 1000, args.dropout)
    run(args, Example(model, F.cross_entropy, args.fused), loader(args, images, labels))


if __name__ == "__main__":
    main()
