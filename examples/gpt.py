"""Train a GPT with attention written out by hand, so that there is something to find.

python examples/gpt.py                      on the GPU if there is one, else a tiny one on the CPU
python examples/gpt.py --no-advisor         the same without the callback
python examples/gpt.py --devices 2 --strategy ddp --ranks all
"""

from __future__ import annotations

import math

import torch
from common import ON_GPU, Example, L, loader, parser, run
from torch import nn
from torch.nn import functional as F

SIZES = {"tiny": (2, 4, 128), "small": (6, 6, 384), "gpt2": (12, 12, 768)}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, block: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.tril(torch.ones(block, block, dtype=torch.bool)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
        mixed = self.dropout(scores.softmax(-1)) @ v
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, block: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, block, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, size: str, vocabulary: int, block: int, dropout: float) -> None:
        super().__init__()
        layers, heads, width = SIZES[size]
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block, width)
        self.blocks = nn.ModuleList(Block(width, heads, block, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    options = parser("GPT", batch_size=8 if ON_GPU else 4, precision="bf16-mixed")
    options.add_argument("--size", choices=SIZES, default="gpt2" if ON_GPU else "tiny")
    options.add_argument("--block-size", type=int, default=1024 if ON_GPU else 64)
    options.add_argument("--vocabulary", type=int, default=50257 if ON_GPU else 512)
    options.add_argument("--dropout", type=float, default=0.1)
    args = options.parse_args()

    L.seed_everything(args.seed, verbose=False)
    # Each token follows from the one before, with some noise: there is something to learn.
    generator = torch.Generator().manual_seed(args.seed)
    text = torch.randint(args.vocabulary, (64, args.block_size + 1), generator=generator)
    kept = torch.rand(64, args.block_size, generator=generator) < 0.8
    for i in range(1, args.block_size + 1):
        text[:, i] = torch.where(kept[:, i - 1], (text[:, i - 1] * 7 + 3) % args.vocabulary, text[:, i])
    data = loader(args, text[:, :-1].contiguous(), text[:, 1:].contiguous())
    run(args, Example(GPT(args.size, args.vocabulary, args.block_size, args.dropout), loss, args.fused), data)


if __name__ == "__main__":
    main()
