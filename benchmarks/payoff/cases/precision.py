"""More bits than needed, and what autocast costs."""

from __future__ import annotations

import torch

from benchmarks.payoff.case import Loop, Scale, pair
from benchmarks.payoff.data import feature_batch, resident
from benchmarks.payoff.networks import WideMlp
from benchmarks.payoff.training import Training, allow_tf32, sgd
from benchmarks.payoff.transformer import Shape, language_model


@pair(
    "precision.tf32",
    title="fp32 products on the plain units",
    fix='torch.set_float32_matmul_precision("high")',
    tolerance=1e-2,
)
def tf32(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, width=1024, heads=16, length=512, batch=4, vocabulary=8192)
    loop = language_model(n, shape, precision="32-true")
    if fixed:
        loop.around = allow_tf32
    return loop


@pair(
    "precision.mixed",
    title="TF32 where bf16 would do",
    fix='Trainer(precision="bf16-mixed")',
    tolerance=2e-2,
)
def mixed_precision(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, width=1024, heads=16, vocabulary=8192)
    loop = language_model(n, shape, precision="bf16-mixed" if fixed else "32-true")
    loop.around = allow_tf32
    return loop


@pair(
    "precision.weight_casts",
    title="large fp32 weights under autocast, with a small batch",
    fix='Trainer(precision="bf16-true")',
    tolerance=5e-2,
)
def weight_casts(fixed: bool, n: Scale) -> Loop:
    width = n(4096, 16)
    module = Training(WideMlp(n(16, 2), width), torch.nn.functional.mse_loss, sgd())
    features, _ = feature_batch(n(1024, 8), width)
    batch = (features, features.roll(1, 0))
    return Loop(module, resident(batch, n), "bf16-true" if fixed else "bf16-mixed")
