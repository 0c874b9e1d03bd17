"""A small residual ConvNet as it is often written by hand.

It leaves speed on the table where many models do: tensors stay NCHW on tensor cores that want NHWC,
batch norm and ReLU are separate passes, and images are augmented one by one in the training process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advisor.demo.flavour import pl

CLASSES = 10


@dataclass(frozen=True)
class ConvNetSize:
    """How large the model and its batch are.

    Attributes:
        pixels: height and width of an image.
        width: channels of the first stage; each later stage doubles them and halves the image.
        blocks: residual blocks in each of the three stages.
        batch: images in a step.
    """

    pixels: int
    width: int
    blocks: int
    batch: int


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut around them."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        stride = 1 if channels_in == channels else 2
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels_in, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels_in, height, width) to (batch, channels, height / stride, width / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ConvNet(pl.LightningModule):
    """A residual network of three stages that tells classes of images apart."""

    def __init__(self, size: ConvNetSize) -> None:
        super().__init__()
        widths = [size.width, 2 * size.width, 4 * size.width]
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1)]
        before = widths[0]
        for width in widths:
            for _ in range(size.blocks):
                layers.append(Residual(before, width))
                before = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(before, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, classes) of images (batch, 3, height, width)."""
        return self.head(self.features(images).mean(dim=(2, 3)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of the image's class."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)


class Images(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Made-up images: a pattern for each class, shifted, mirrored and noised by its index."""

    def __init__(self, pixels: int, count: int) -> None:
        self.count = count
        self.pixels = pixels
        generator = torch.Generator().manual_seed(0)
        coarse = torch.randn(CLASSES, 3, 8, 8, generator=generator)
        self.patterns = F.interpolate(coarse, size=pixels, mode="bilinear")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        label = index % CLASSES
        shift = torch.randint(-4, 5, (2,), generator=generator).tolist()
        image = self.patterns[label].roll(shift, dims=(1, 2))
        if torch.rand((), generator=generator) < 0.5:
            image = image.flip(2)
        return image + 0.5 * torch.randn(image.shape, generator=generator), label


def images(size: ConvNetSize, steps: int) -> torch.utils.data.DataLoader[tuple[Tensor, int]]:
    """Batches of made-up images, enough for `steps` steps.

    Yields:
        ``[float32 (batch, 3, pixels, pixels), int64 (batch,)]``.
    """
    return torch.utils.data.DataLoader(Images(size.pixels, size.batch * steps), batch_size=size.batch)
