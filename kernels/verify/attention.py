"""Attention with causality, grouped queries, a mask, a window and a cap."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .. import attention as family
from .probe import Probe, random


def _pair(options: dict[str, Any]) -> tuple[Any, Any]:
    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return family.attention(q, k, v, **options)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return family.attention_reference(q, k, v, **options)

    return ours, reference


def probes() -> Iterator[Probe]:
    """Head dimensions 64 and 128; lengths that fill no block."""
    settings: list[tuple[str, int, int, int, int, dict[str, Any], tuple[str, ...]]] = [
        ("attention, causal", 2, 2, 67, 64, {"causal": True, "align": "lower_right"}, ("fp16", "bf16")),
        ("attention, grouped", 4, 2, 67, 128, {}, ("bf16",)),
        ("attention, window", 1, 1, 67, 64, {"window": (20, 3)}, ("bf16",)),
        ("attention, soft-capped", 1, 1, 40, 64, {"softcap": 20.0}, ("fp32",)),
    ]
    for name, heads, heads_k, tokens, dim, options, dtypes in settings:
        ours, reference = _pair(options)
        keys = (1, heads_k, tokens, dim)
        yield Probe(
            name, f"1x{heads}/{heads_k}x{tokens}x{dim}", ours, reference,
            random({"q": (1, heads, tokens, dim), "k": keys, "v": keys}),
            dtypes=dtypes,
        )  # fmt: skip
