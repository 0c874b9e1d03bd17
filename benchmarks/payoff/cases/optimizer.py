"""Optimizers that step by many kernels."""

from __future__ import annotations

from benchmarks.payoff.case import Loop, Scale, pair
from benchmarks.payoff.training import adamw, sgd
from benchmarks.payoff.transformer import Shape, language_model


@pair(
    "optimizer.fused",
    title="AdamW that loops over its parameters",
    fix="AdamW(fused=True)",
)
def fused_optimizer(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, layers=12, length=512)
    return language_model(n, shape, optimizer=adamw() if fixed else adamw(fused=False, foreach=False))


@pair(
    "optimizer.fused",
    title="foreach SGD with momentum over many parameters",
    fix="SGD(fused=True)",
)
def foreach_sgd(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, width=1024, heads=16, layers=24, length=512, batch=4, vocabulary=8192)
    make = sgd(momentum=0.9) if fixed else sgd(momentum=0.9, fused=False, foreach=True)
    return language_model(n, shape, optimizer=make)
