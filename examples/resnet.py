"""Train a ResNet-50 in NCHW layout and 16-bit mixed precision, with a GradScaler.

python examples/resnet.py                   on the GPU if there is one, else a narrow one on the CPU
python examples/resnet.py --channels-last   the layout that tensor cores want
"""

from __future__ import annotations

import torch
from common import ON_GPU, Example, L, as_floats, labelled_images, loader, parser, run
from torch import nn
from torch.nn import functional as F

#: Bottleneck blocks per stage.
DEPTHS = {"resnet50": (3, 4, 6, 3), "tiny": (1, 1, 1, 1)}


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.reduce = conv(inputs, width, 1)
        self.spatial = conv(width, width, 3, stride)
        self.expand = conv(width, outputs, 1)
        self.shortcut = conv(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.reduce(x))
        y = F.relu(self.spatial(y))
        return F.relu(self.expand(y) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        inputs, stages = width, []
        for stage, depth in enumerate(depths):
            blocks = []
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(inputs, width << stage, stride))
                inputs = 4 * (width << stage)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(as_floats(x))).mean((2, 3)))


def main() -> None:
    options = parser("ResNet", batch_size=64 if ON_GPU else 4, precision="16-mixed")
    options.add_argument("--size", choices=DEPTHS, default="resnet50" if ON_GPU else "tiny")
    options.add_argument("--width", type=int, default=64 if ON_GPU else 16)
    options.add_argument("--image", type=int, default=224 if ON_GPU else 32)
    options.add_argument("--channels-last", action="store_true")
    args = options.parse_args()

    L.seed_everything(args.seed, verbose=False)
    generator = torch.Generator().manual_seed(args.seed)
    labels = torch.randint(10, (128,), generator=generator)
    images = labelled_images(labels, args.image, generator)
    model = ResNet(DEPTHS[args.size], args.width, 1000)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    run(args, Example(model, F.cross_entropy, args.fused), loader(args, images, labels))


if __name__ == "__main__":
    main()
