"""Smaller networks: a ResNet, deep perceptrons, chains of memory-bound work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.payoff.case import Scale


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with batch norms, and a shortcut around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *self._layer(channels_in, channels, 1), nn.ReLU(),
            *self._layer(channels, channels, 3, stride), nn.ReLU(),
            *self._layer(channels, 4 * channels, 1),
        )  # fmt: skip
        changes = stride > 1 or channels_in != 4 * channels
        self.shortcut = nn.Sequential(*self._layer(channels_in, 4 * channels, 1, stride) if changes else ())

    @staticmethod
    def _layer(channels_in: int, channels: int, size: int, stride: int = 1) -> list[nn.Module]:
        convolution = nn.Conv2d(channels_in, channels, size, stride, size // 2, bias=False)
        return [convolution, nn.BatchNorm2d(channels)]

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Images (batch, 3, height, width) to logits of ten classes."""

    def __init__(self, blocks: Sequence[int], width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers.append(nn.MaxPool2d(3, 2, 1))
        before = width
        for stage, count in enumerate(blocks):
            for i in range(count):
                channels = width << stage
                layers.append(Bottleneck(before, channels, 2 if stage and not i else 1))
                before = 4 * channels
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(before, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((2, 3)))


def resnet(
    n: Scale, blocks: Sequence[int] = (3, 4, 6, 3), layout: torch.memory_format = torch.channels_last
) -> ResNet:
    """ResNet-50 by default."""
    net = ResNet(n(blocks, (1, 1)), n(64, 4))
    return net.to(memory_format=layout)  # type: ignore[call-overload, no-any-return]


class DeepMlp(nn.Module):
    """Many small layers: norm, linear, GELU, residual."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return x


class WideMlp(nn.Sequential):
    """A few large linear layers with GELU between them."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())))


def bias_gelu_norm(x: Tensor, bias: Tensor, weight: Tensor, beta: Tensor) -> Tensor:
    """Three operators, each of which reads and writes the whole tensor."""
    return F.layer_norm(F.gelu(x + bias), (x.shape[-1],), weight, beta)


class NormChain(nn.Module):
    """Layers of bias, GELU and LayerNorm, with nothing between them.

    Args:
        depth: layers.
        width: columns.
        layer: computes one of them.
        repeat: times that the rows of the batch are repeated on the device first.
    """

    def __init__(
        self, depth: int, width: int, layer: Callable[..., Tensor] = bias_gelu_norm, repeat: int = 1
    ) -> None:
        super().__init__()
        self.layer, self.repeat = layer, repeat
        self.biases = nn.ParameterList(torch.randn(width) * 0.1 for _ in range(depth))
        self.weights = nn.ParameterList(torch.ones(width) for _ in range(depth))
        self.betas = nn.ParameterList(torch.zeros(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(self.repeat, 1)
        for bias, weight, beta in zip(self.biases, self.weights, self.betas, strict=True):
            x = self.layer(x, bias, weight, beta)
        return x


def blend(x: Tensor) -> Tensor:
    """Five pointwise operators."""
    return torch.tanh(0.9 * F.gelu(x) + 0.1 * x)


class PointwiseChain(nn.Module):
    """A product, then blends of its result with itself.

    Args:
        depth: blends.
        width: columns.
        layer: computes one of them.
    """

    def __init__(self, depth: int, width: int, layer: Callable[[Tensor], Tensor] = blend) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = self.layer(linear(x))
        return x
