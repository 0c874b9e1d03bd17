"""Losses over a large vocabulary."""

from __future__ import annotations

from torch import Tensor

from benchmarks.payoff.case import Loop, Scale, pair
from benchmarks.payoff.training import token_loss
from benchmarks.payoff.transformer import Shape, language_model


def in_fp32(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of a copy in fp32."""
    return token_loss(logits.float(), targets)


@pair(
    "loss.fp32_logits",
    title="logits.float() before the loss",
    fix="without .float()",
    tolerance=2e-2,
)
def fp32_logits(fixed: bool, n: Scale) -> Loop:
    return language_model(n, Shape.of(n), precision="bf16-true", loss=token_loss if fixed else in_fp32)


@pair(
    "loss.cross_entropy",
    title="eager cross-entropy over 50304 classes under autocast",
    fix="torch.compile of the loss",
    tolerance=1e-2,
)
def eager_cross_entropy(fixed: bool, n: Scale) -> Loop:
    return language_model(n, Shape.of(n), loss=n.compile(token_loss) if fixed else token_loss)
