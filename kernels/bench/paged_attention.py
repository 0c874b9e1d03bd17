"""Paged attention of one new token a sequence, beside PyTorch's attention on the same cache made contiguous.

What the others read is gathered before the clock starts, which a server could not do: they are a yardstick.
Bytes are keys and values of the tokens that are seen; the caches' other blocks are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import paged_attention as family
from .timing import Call, Case, Variant, compiled, forward


@dataclass(frozen=True)
class Shape:
    """Sequences of these lengths, in blocks of one size."""

    lens: Sequence[int]
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    window_left: int | None = None

    @property
    def seen(self) -> int:
        """Tokens whose keys and values are read."""
        most = max(self.lens) if self.window_left is None else self.window_left + 1
        return sum(min(n, most) for n in self.lens)

    @property
    def is_uniform(self) -> bool:
        """Whether all sequences are seen whole and are of one length, as PyTorch's attention needs them."""
        return len(set(self.lens)) == 1 and self.window_left is None

    def __str__(self) -> str:
        lens = f"{self.lens[0]}" if self.is_uniform else f"<={max(self.lens)}"
        window = "" if self.window_left is None else f"w{self.window_left + 1}"
        return f"{len(self.lens)}x{lens}{window}x{self.heads}/{self.kv_heads}x{self.dim}b{self.block_size}"


QUICK = [
    Shape([8192] * 16, 32, 8, 128, 16),
    Shape([32768], 32, 8, 128, 16),
]
SHAPES = [
    *QUICK,
    *[Shape([8192] * 16, 32, 8, 128, size) for size in (64, 256)],
    Shape([4096] * 64, 32, 8, 128, 16),
    Shape([2048] * 128, 32, 8, 128, 16),
    Shape([131072], 32, 8, 128, 16),
    Shape([4096] * 40, 12, 12, 64, 16),
    Shape([16384] * 8, 64, 8, 64, 16),
    Shape([8192] * 8, 16, 8, 256, 16),
    Shape([8192] * 8, 32, 8, 96, 16),
    Shape([32768] * 4, 32, 1, 128, 16),
    Shape([512 * n for n in range(1, 33)], 32, 8, 128, 16),
    Shape([32768] * 16, 32, 8, 128, 16, window_left=4095),
]
WRITTEN = [(8192, 8, 128)]
_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(shape: Shape) -> Callable[[], Sequence[Any]]:
    """q, both caches, the table with blocks in random order, and lengths."""

    def make() -> Sequence[Any]:
        held = [-(-n // shape.block_size) for n in shape.lens]
        order = iter(torch.randperm(sum(held), dtype=torch.int32).split(held))
        table = torch.zeros(len(held), max(held), dtype=torch.int32)
        for row, n in zip(table, held, strict=True):
            row[:n] = next(order)
        cache = (sum(held), shape.block_size, shape.kv_heads, shape.dim)
        q, k, v = (
            torch.randn(size, device=_DEVICE, dtype=torch.bfloat16)
            for size in ((len(held), shape.heads, shape.dim), cache, cache)
        )
        lens = torch.tensor(shape.lens, dtype=torch.int32, device=_DEVICE)
        return q, k, v, table.to(_DEVICE), lens

    return make


def contiguous(function: Callable[..., Any]) -> Variant:
    """Times `function(q, k, v)` on (batch, heads, tokens, dim), gathered before."""

    def prepare(given: Sequence[Any]) -> Call:
        q, k_cache, v_cache, table, _ = given
        k, v = (c[table.long()].flatten(1, 2).transpose(1, 2).contiguous() for c in (k_cache, v_cache))
        return lambda: function(q[:, :, None], k, v)

    return prepare


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return compiled(lambda q, k, v: flex_attention(q, k, v, enable_gqa=True))


def _write(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    family.write_to_cache(key, value, k_cache, v_cache, slots)


def _write_eager(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    k_cache.flatten(0, 1).index_copy_(0, slots, key)
    v_cache.flatten(0, 1).index_copy_(0, slots, value)


def cases(quick: bool) -> Iterator[Case]:
    """Attention over each shape, and writing a prompt's keys and values."""
    for shape in QUICK if quick else SHAPES:

        def ours(*given: Tensor, shape: Shape = shape) -> Any:
            return family.paged_attention(
                *given, window_left=shape.window_left, max_context_len=max(shape.lens)
            )

        variants = {"ours": forward(ours)}
        if shape.is_uniform:
            variants["sdpa contiguous"] = contiguous(_sdpa)
            if not quick:
                variants["flex contiguous"] = contiguous(_flex())
        row_bytes = 2 * shape.dim
        yield Case(
            "paged_attention", str(shape), "bf16", "forward", inputs(shape), variants,
            bytes=row_bytes * (2 * shape.kv_heads * shape.seen + 2 * shape.heads * len(shape.lens)),
        )  # fmt: skip
    for tokens, heads, dim in WRITTEN:

        def rows(tokens: int = tokens, heads: int = heads, dim: int = dim) -> Sequence[Any]:
            made = [torch.randn(tokens, heads, dim, device=_DEVICE, dtype=torch.bfloat16) for _ in range(4)]
            slots = torch.randperm(tokens).to(_DEVICE)
            return *made[:2], *(x.view(-1, 16, heads, dim) for x in made[2:]), slots

        yield Case(
            "write_to_cache", f"{tokens}x{heads}x{dim}", "bf16", "forward", rows,
            {"ours": forward(_write), "eager": forward(_write_eager)},
            bytes=4 * 2 * tokens * heads * dim,
        )  # fmt: skip
