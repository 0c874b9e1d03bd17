"""What keeps the host from launching."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from advisor.demo.flavour import pl
from benchmarks.payoff.case import Loop, Scale, pair
from benchmarks.payoff.data import feature_batch, resident
from benchmarks.payoff.networks import DeepMlp, WideMlp
from benchmarks.payoff.training import Training, projection, sgd
from benchmarks.payoff.transformer import Shape, language_model


def watched(read: Callable[[Tensor], Any]) -> Callable[[nn.Module, Tensor], Tensor]:
    """Run blocks and keep the mean size of what comes out, read by `read`."""
    seen: deque[Any] = deque(maxlen=64)

    def run(block: nn.Module, x: Tensor) -> Tensor:
        x = block(x)
        seen.append(read(x.detach().abs().mean()))
        return x

    return run


@pair(
    "host.sync",
    title="a statistic of each layer read by .item()",
    fix="the statistic stays a tensor on the device",
)
def host_sync(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, width=512, heads=8, layers=12, length=512, batch=4, vocabulary=8192)
    return language_model(n, shape, run=watched(torch.clone if fixed else Tensor.item))


@pair(
    "host.launch_bound",
    title="32 small layers, launched one by one",
    fix='torch.compile(mode="reduce-overhead")',
    tolerance=1e-3,
    warmup=15,
)
def launch_bound(fixed: bool, n: Scale) -> Loop:
    width = n(256, 16)
    net = DeepMlp(n(32, 2), width)
    if fixed:
        n.compile(net, mode="reduce-overhead")
    return Loop(Training(net, projection), resident(feature_batch(n(128, 4), width), n))


class ZeroFilled(Training):
    """Training that fills gradients with zeros."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


@pair(
    "host.zero_grad",
    title="gradients filled with zeros",
    fix="zero_grad(set_to_none=True), the default",
)
def zeroed_gradients(fixed: bool, n: Scale) -> Loop:
    width = n(4096, 16)
    training = Training if fixed else ZeroFilled
    module = training(WideMlp(n(16, 2), width), projection, sgd())
    return Loop(module, resident(feature_batch(n(1024, 8), width), n), "bf16-mixed")


class EmptiesCache(Training):
    """Training that gives its cached memory back after each step."""

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.empty_cache()


@pair(
    "host.allocator",
    title="torch.cuda.empty_cache() after each step",
    fix="without it",
)
def emptied_cache(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, width=512, heads=8, layers=6, vocabulary=8192)
    return language_model(n, shape, training=Training if fixed else EmptiesCache)


class SlowMetric(pl.Callback):
    """A metric in plain Python, over a history that it walks after each batch."""

    def __init__(self, length: int) -> None:
        self.length = length

    def on_train_batch_end(self, *_: Any) -> None:
        total = 0.0
        for i in range(self.length):
            total += i * 0.5


@pair(
    "host.hooks",
    title="a callback computes a metric in plain Python after each batch",
    fix="the metric is computed once an epoch",
)
def slow_callback(fixed: bool, n: Scale) -> Loop:
    width = n(256, 16)
    callbacks = [] if fixed else [SlowMetric(n(200_000, 10))]
    batches = resident(feature_batch(n(128, 4), width), n)
    return Loop(Training(DeepMlp(n(32, 2), width), projection), batches, trainer={"callbacks": callbacks})
