"""Cross-entropy: memory-bound; the logits read once and their gradient written once."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from .. import cross_entropy as ce
from .timing import Case, compiled, forward, forward_backward

SIZES = [
    (8192, 50257), (8192, 50304), (4096, 128256), (1024, 1000), (8192, 32000), (65536, 1024), (16384, 16384),
    (2048, 50257), (32768, 4096), (2048, 128256), (16384, 8192), (4096, 32000),
]  # fmt: skip


def _ours(logits, target):
    return ce.cross_entropy(logits, target)


def _late(logits, target):
    return ce.cross_entropy(logits, target, gradient_in_forward=False)


def _eager(logits, target):
    return F.cross_entropy(logits, target)


def _eager_fp32(logits, target):
    return F.cross_entropy(logits.float(), target)


def _liger(logits, target):
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    # It writes the gradient over the logits, which the next call would find.
    return LigerCrossEntropyFunction.apply(logits, target, None, -100, 0.0, 0.0, "mean", None, False)[0]


def cases(quick: bool) -> Iterator[Case]:
    """Forward, and forward with backward."""
    for rows, classes in SIZES[:2] if quick else SIZES:
        yield from _both(rows, classes, {"eager_fp32": _eager_fp32}, {"ours_late": _late})


def grid() -> Iterator[Case]:
    """Twelve sizes, without other forms of ours and of eager PyTorch."""
    for rows, classes in SIZES:
        yield from _both(rows, classes, {}, {})


def _both(rows: int, classes: int, always: dict, with_backward: dict) -> Iterator[Case]:
    def inputs():
        logits = torch.randn(rows, classes, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        return logits, torch.randint(0, classes, (rows,), device="cuda")

    for direction, timed, visits in (("forward", forward, 1), ("forward+backward", forward_backward, 2)):
        functions = {"ours": _ours, "eager": _eager, "compile": compiled(_eager), "liger": _liger} | always
        if direction != "forward":
            functions |= with_backward
        yield Case(
            "cross_entropy", f"{rows}x{classes}", "bf16", direction, inputs,
            {name: timed(function) for name, function in functions.items()},
            bytes=visits * rows * classes * 2,
        )  # fmt: skip
