"""A decoder-only transformer whose parts can be exchanged for faulty ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.payoff.case import Loop, Scale
from benchmarks.payoff.data import Batch, resident, token_batch
from benchmarks.payoff.training import MakeOptimizer, Training, token_loss

#: (batch, heads, length, head_dim) three times to the same shape.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and its batch."""

    width: int = 768
    heads: int = 12
    layers: int = 4
    length: int = 1024
    batch: int = 8
    vocabulary: int = 50304
    hidden: int = 0

    @classmethod
    def of(cls, n: Scale, **sizes: int) -> Shape:
        """These sizes on the GPU, small ones elsewhere."""
        tiny = cls(width=16, heads=2, layers=1, length=8, batch=2, vocabulary=64, hidden=24)
        return n(cls(**sizes), tiny)

    def tokens(self) -> Batch:
        """A batch of random text."""
        return token_batch(self.batch, self.length, self.vocabulary)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention on whichever backend is the fastest."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Self-attention with several heads around an `Attend`."""

    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.heads, self.attend = shape.heads, attend
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        return self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Sequential):
    """Linear, GELU, linear."""

    def __init__(self, shape: Shape) -> None:
        hidden = shape.hidden or 4 * shape.width
        super().__init__(nn.Linear(shape.width, hidden), nn.GELU(), nn.Linear(hidden, shape.width))


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """A gated activation in two operators."""
    return F.silu(gate) * up


class GatedMlp(nn.Module):
    """The feed-forward part of Llama."""

    def __init__(self, shape: Shape, gated: Callable[[Tensor, Tensor], Tensor] = silu_gate) -> None:
        super().__init__()
        hidden = shape.hidden or 4 * shape.width
        self.gate = nn.Linear(shape.width, hidden, bias=False)
        self.up = nn.Linear(shape.width, hidden, bias=False)
        self.down = nn.Linear(hidden, shape.width, bias=False)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gated(self.gate(x), self.up(x)))


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm and beside a residual."""

    def __init__(self, shape: Shape, attend: Attend, norm: Callable[..., nn.Module], mlp: Any) -> None:
        super().__init__()
        self.norm1, self.attention = norm(shape.width), Attention(shape, attend)
        self.norm2, self.mlp = norm(shape.width), mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def direct(block: nn.Module, x: Tensor) -> Tensor:
    """Run a block as it is."""
    return block(x)


class Transformer(nn.Module):
    """Tokens (batch, length) to logits (batch, length, vocabulary).

    Args:
        shape: sizes.
        attend: attention of one layer.
        norm: makes the norm of a width.
        mlp: makes the feed-forward part of a shape.
        run: runs a block.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        attend: Attend = causal,
        norm: Callable[..., nn.Module] = nn.LayerNorm,
        mlp: Callable[[Shape], nn.Module] = Mlp,
        run: Callable[[nn.Module, Tensor], Tensor] = direct,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape, attend, norm, mlp) for _ in range(shape.layers))
        self.norm = norm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.run = run

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x))


def language_model(
    n: Scale,
    shape: Shape,
    *,
    precision: str = "bf16-mixed",
    optimizer: MakeOptimizer | None = None,
    loss: Callable[..., Tensor] = token_loss,
    batches: Any = None,
    training: type[Training] = Training,
    **parts: Any,
) -> Loop:
    """A loop that trains a transformer on a batch that lies on the device, unless other batches are given."""
    module = training(Transformer(shape, **parts), loss, optimizer)
    return Loop(module, batches or resident(shape.tokens(), n), precision)
