"""Softmax, plain and as attention scores with scale and causality: memory-bound."""

from collections.abc import Iterator

import torch

from .. import softmax as sm
from .timing import Case, compiled, forward, forward_backward

PLAIN = [
    (16384, 4096), (8192, 16384), (4096, 1024), (2048, 32768), (65536, 1024), (512, 4096), (1024, 65536),
    (4096, 8192), (8192, 1000), (256, 262144), (32768, 2048), (128, 16384),
]  # fmt: skip
CAUSAL = [(96, 1024), (64, 2048)]


def _eager(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _causal(x: torch.Tensor) -> torch.Tensor:
    return sm.softmax(x, scale=0.125, causal=True)


def _causal_eager(x: torch.Tensor) -> torch.Tensor:
    return sm.softmax_reference(x, scale=0.125, causal=True)


def _liger(x: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x)


def cases(quick: bool) -> Iterator[Case]:
    """Forward, and forward with backward, of each."""
    for rows, columns in PLAIN[:2] if quick else PLAIN:
        yield from _plain(rows, columns)
    for heads, tokens in CAUSAL[:1] if quick else CAUSAL:
        functions = {"ours": _causal, "eager": _causal_eager}
        # Half of the scores, of y and of dy need not be read; y and dx are written whole.
        yield from _both(
            "softmax_causal", f"{heads}x{tokens}x{tokens}", (heads, tokens, tokens), functions, _causal_eager,
            (1.5, 3.5),
        )  # fmt: skip


def grid() -> Iterator[Case]:
    """Plain softmax over twelve sizes."""
    for rows, columns in PLAIN:
        yield from _plain(rows, columns)


def _plain(rows: int, columns: int) -> Iterator[Case]:
    functions = {"ours": sm.softmax, "eager": _eager, "liger": _liger}
    yield from _both("softmax", f"{rows}x{columns}", (rows, columns), functions, _eager, (2, 5))


def _both(kernel, name, shape, functions, eager, passes) -> Iterator[Case]:
    def inputs() -> tuple[torch.Tensor]:
        return (torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True),)

    directions = (("forward", forward), ("forward+backward", forward_backward))
    for (direction, timed), visits in zip(directions, passes, strict=True):
        variants = {n: timed(f) for n, f in (functions | {"compile": compiled(eager)}).items()}
        size_bytes = int(visits * torch.Size(shape).numel() * 2)
        yield Case(kernel, name, "bf16", direction, inputs, variants, bytes=size_bytes)
