"""The LightningModule of every loop, and its losses and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advisor.demo.flavour import pl

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(**options: Any) -> MakeOptimizer:
    """AdamW, fused unless told otherwise."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, **{"fused": True, **options})


def sgd(**options: Any) -> MakeOptimizer:
    """SGD, fused unless told otherwise."""
    return lambda parameters: torch.optim.SGD(parameters, lr=1e-3, **{"fused": True, **options})


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of (batch, length, vocabulary) logits."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def projection(outputs: Tensor, direction: Tensor) -> Tensor:
    """A loss that costs next to nothing beside what it is the loss of."""
    return (outputs @ direction).float().square().mean()


class Training(pl.LightningModule):
    """A network, its loss and its optimizer."""

    def __init__(
        self, net: nn.Module, loss: Callable[..., Tensor] = token_loss, optimizer: MakeOptimizer | None = None
    ) -> None:
        super().__init__()
        self.net, self.loss, self.make_optimizer = net, loss, optimizer or adamw()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return self.loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


@contextmanager
def allow_tf32() -> Iterator[None]:
    """fp32 products may run in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
