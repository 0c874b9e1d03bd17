"""Work that is done twice to save memory."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.payoff.case import Loop, Scale, pair
from benchmarks.payoff.transformer import Shape, direct, language_model


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    """Run a block and forget what it computed."""
    return checkpoint(block, x, use_reentrant=False)


@pair(
    "memory.checkpointing",
    title="every block checkpointed, with memory to spare",
    fix="without torch.utils.checkpoint",
)
def checkpointing(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, width=1024, heads=16, layers=6, vocabulary=8192)
    return language_model(n, shape, run=direct if fixed else checkpointed)
