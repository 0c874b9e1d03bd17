"""Tensors that lie the wrong way round, or are turned around for nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.payoff.case import Loop, Scale, pair
from benchmarks.payoff.data import image_batch, resident
from benchmarks.payoff.networks import resnet
from benchmarks.payoff.training import Training, sgd
from benchmarks.payoff.transformer import Shape, direct, language_model


@pair(
    "layout.channels_last",
    title="convolutions on NCHW tensors in bf16",
    fix="model and images in torch.channels_last",
    tolerance=2e-2,
)
def channels_last(fixed: bool, n: Scale) -> Loop:
    layout = torch.channels_last if fixed else torch.contiguous_format
    net = resnet(n, layout=layout)
    images, labels = image_batch(n(64, 4), n(224, 32))
    batch = (images.contiguous(memory_format=layout), labels)
    module = Training(net, nn.functional.cross_entropy, sgd(momentum=0.9))
    return Loop(module, resident(batch, n), "bf16-mixed")


def time_first_and_back(block: nn.Module, x: Tensor) -> Tensor:
    """Turn the stream to (length, batch, width) in memory and back, around each block."""
    x = x.transpose(0, 1).contiguous().transpose(0, 1).contiguous()
    return block(x).transpose(0, 1).contiguous().transpose(0, 1).contiguous()


@pair(
    "layout.copies",
    title="the residual stream is turned around and back at each block",
    fix="without transpose(0, 1).contiguous()",
)
def needless_copies(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, width=512, heads=8, layers=6, batch=16, vocabulary=4096)
    return language_model(n, shape, precision="bf16-true", run=direct if fixed else time_first_and_back)
