"""Rotary embedding of queries and keys: memory-bound; the tables are small."""

from collections.abc import Iterator

import torch

from .. import rope as rp
from .timing import Case, compiled, forward, forward_backward

#: Batch, tokens, query heads, key heads, head dim.
SIZES = [
    (4, 4096, 32, 8, 128), (8, 2048, 32, 32, 128), (16, 1024, 12, 12, 64), (2, 8192, 64, 8, 128),
    (1, 512, 32, 8, 128), (8, 4096, 16, 4, 256), (1, 2048, 32, 8, 128), (8, 1024, 12, 12, 64),
    (1, 8192, 40, 8, 128), (1, 128, 32, 8, 128), (1, 32768, 32, 8, 128), (2, 2048, 32, 32, 64),
]  # fmt: skip


def _ours(q, k, cos, sin):
    return rp.rope(q, k, cos, sin)


def _eager(q, k, cos, sin):
    return rp.rope_reference(q, k, cos, sin)


def _liger(q, k, cos, sin):
    from liger_kernel.ops.rope import LigerRopeFunction

    # It writes into its arguments.
    return LigerRopeFunction.apply(q.clone(), k.clone(), cos[None], sin[None])


def cases(quick: bool) -> Iterator[Case]:
    """Forward, and forward with backward, on (batch, heads, tokens, d) seen through a transposition."""
    for size in SIZES[:1] if quick else SIZES:
        yield from _both(*size)


def grid() -> Iterator[Case]:
    """Twelve sizes."""
    return cases(quick=False)


def _both(batch: int, tokens: int, heads: int, k_heads: int, dim: int) -> Iterator[Case]:
    def inputs():
        q, k = (
            torch.randn(batch, tokens, n, dim, device="cuda", dtype=torch.bfloat16)
            .transpose(1, 2)
            .requires_grad_()
            for n in (heads, k_heads)
        )
        cos, sin = (torch.randn(tokens, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return q, k, cos, sin

    elements = batch * tokens * (heads + k_heads) * dim
    for direction, timed, visits in (("forward", forward, 2), ("forward+backward", forward_backward, 4)):
        functions = {"ours": _ours, "eager": _eager, "compile": compiled(_eager), "liger": _liger}
        yield Case(
            "rope", f"{batch}x{tokens}x{heads}/{k_heads}x{dim}", "bf16", direction, inputs,
            {name: timed(function) for name, function in functions.items()},
            bytes=visits * elements * 2,
        )  # fmt: skip
