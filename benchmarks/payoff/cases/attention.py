"""Attention written out, or kept from its fast backends."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.payoff.case import Loop, Scale, pair
from benchmarks.payoff.transformer import Shape, causal, language_model


class Explicit(nn.Module):
    """Causal attention by two products and a softmax."""

    mask: Tensor

    def __init__(self, length: int) -> None:
        super().__init__()
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        self.register_buffer("mask", hidden, persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return scores.masked_fill(self.mask, float("-inf")).softmax(-1) @ v


class Masked(nn.Module):
    """Causal attention by an explicit mask."""

    mask: Tensor

    def __init__(self, length: int) -> None:
        super().__init__()
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        self.register_buffer("mask", seen, persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


def by_mathematics(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention pinned to the mathematical backend."""
    with sdpa_kernel(SDPBackend.MATH):
        return causal(q, k, v)


@pair(
    "attention.explicit",
    title="attention by two products and a softmax",
    fix="scaled_dot_product_attention(is_causal=True)",
    tolerance=1e-2,
)
def naive_attention(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, width=1024, heads=16)
    return language_model(n, shape, attend=causal if fixed else Explicit(shape.length))


@pair(
    "attention.backend",
    title="a causal mask given as a tensor",
    fix="is_causal=True in place of attn_mask",
    tolerance=1e-2,
)
def masked_sdpa(fixed: bool, n: Scale) -> Loop:
    shape = Shape.of(n, length=4096, batch=2, vocabulary=8192)
    return language_model(n, shape, attend=causal if fixed else Masked(shape.length))


@pair(
    "attention.backend",
    title="attention pinned to the mathematical backend",
    fix="without sdpa_kernel(SDPBackend.MATH)",
    tolerance=1e-2,
)
def math_sdpa(fixed: bool, n: Scale) -> Loop:
    attend = causal if fixed else by_mathematics
    return language_model(n, Shape.of(n, vocabulary=8192), attend=attend)
