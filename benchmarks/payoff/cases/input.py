"""Batches that come late or slowly, and tensors made on the wrong side."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.payoff.case import Loop, Scale, pair
from benchmarks.payoff.data import Augmented, Stored, image_batch, loader
from benchmarks.payoff.networks import resnet
from benchmarks.payoff.training import Training, sgd
from benchmarks.payoff.transformer import Shape, causal, language_model


def _resnet_loop(n: Scale, batches: Iterable[Any], blocks: tuple[int, ...]) -> Loop:
    net = resnet(n, blocks)
    return Loop(Training(net, nn.functional.cross_entropy, sgd(momentum=0.9)), batches, "bf16-mixed")


@pair(
    "input.dataloader",
    title="images augmented by the training process",
    fix="num_workers=8, persistent_workers=True",
    on_device=False,
    warmup=25,
)
def dataloader_workers(fixed: bool, n: Scale) -> Loop:
    data = Augmented(n(160, 32), n(2, 1))
    workers = n(8, 1) if fixed else 0
    batches = loader(data, workers, batch_size=n(32, 2), pin_memory=torch.cuda.is_available())
    return _resnet_loop(n, batches, (2, 2, 2, 2))


@pair(
    "input.pageable_copy",
    title="batches of 38 MB from pageable memory",
    fix="pin_memory=True",
    on_device=False,
    warmup=20,
)
def pageable_copy(fixed: bool, n: Scale) -> Loop:
    data = Stored([image_batch(n(64, 2), n(224, 32))], 0.0)
    return _resnet_loop(n, loader(data, n(4, 0), batch_size=None, pin_memory=fixed), (3, 4, 6, 3))


def scale_from_host(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with a scale a head that is made on the host in each call."""
    scale = torch.linspace(0.9, 1.1, q.shape[1]).view(-1, 1, 1).to(q.device)
    return causal((q * scale).to(q.dtype), k, v)


def scale_on_device(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same, made where it is needed."""
    scale = torch.linspace(0.9, 1.1, q.shape[1], device=q.device).view(-1, 1, 1)
    return causal((q * scale).to(q.dtype), k, v)


@pair(
    "input.made_on_host",
    title="a small tensor made on the host in each layer",
    fix="device=q.device at the call that makes it",
)
def host_tensors(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, width=512, heads=8, layers=12, length=512, batch=4, vocabulary=8192)
    return language_model(n, shape, attend=scale_on_device if fixed else scale_from_host)
