"""Residual addition with a norm, dropout with residual addition, beside eager PyTorch and torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .. import add_norm
from .norm import GRID_WAYS, WAYS
from .timing import Case, compiled

SHAPES = [(2**26 // cols, cols) for cols in (4096, 1024, 16384, 2048, 8192)]
QUICK = [(16384, 4096)]
P = 0.1


def _add_rms_ours(x, residual, w):
    return add_norm.add_rms_norm(x, residual, w.shape, w, 1e-5)


def _add_rms_eager(x, residual, w):
    total = x + residual
    return F.rms_norm(total, w.shape, w, 1e-5), total


def _add_rms_liger(x, residual, w):
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, residual, w, 1e-5, 0.0, "llama", False)


def _dropout_norm_ours(x, residual, w):
    return add_norm.add_layer_norm(x, residual, w.shape, w, p=P)


def _dropout_norm_eager(x, residual, w):
    total = F.dropout(x, P) + residual
    return F.layer_norm(total, w.shape, w), total


def _dropout_add_ours(x, residual, w):
    return add_norm.dropout_add(x, residual, P)


def _dropout_add_eager(x, residual, w):
    return F.dropout(x, P) + residual


#: Kernel: ours, eager, tensors moved forward, tensors moved backward.
KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int, int]] = {
    "add_rms_norm": (_add_rms_ours, _add_rms_eager, 4, 4),
    "dropout_add_layer_norm": (_dropout_norm_ours, _dropout_norm_eager, 4, 5),
    "dropout_add": (_dropout_add_ours, _dropout_add_eager, 3, 2),
}


def inputs(rows: int, cols: int) -> Callable[[], Sequence[Any]]:
    """Makes one set of inputs."""

    def make() -> Sequence[Any]:
        shapes = ((rows, cols), (rows, cols), (cols,))
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]

    return make


def cases(quick: bool) -> Iterator[Case]:
    """Each way through the kernels, over sizes of 2^26 elements."""
    for shape in QUICK if quick else SHAPES:
        yield from _all(*shape, ("forward", "backward") if quick else tuple(WAYS), compile=not quick)


def grid() -> Iterator[Case]:
    """Forward, and with backward, over the same sizes."""
    for shape in SHAPES:
        yield from _all(*shape, GRID_WAYS, compile=True)


def _all(rows: int, cols: int, directions: Sequence[str], *, compile: bool) -> Iterator[Case]:
    for kernel, (ours, eager, there, back) in KERNELS.items():
        functions = {"ours": ours, "eager": eager}
        if compile:
            functions["compile"] = compiled(eager)
        if kernel == "add_rms_norm":
            functions["liger"] = _add_rms_liger
        for direction in directions:
            moved = {"forward": there, "backward": back, "forward+backward": there + back}[direction]
            yield Case(
                kernel,
                f"{rows}x{cols}",
                "bf16",
                direction,
                inputs(rows, cols),
                {name: WAYS[direction](f) for name, f in functions.items()},
                moved * rows * cols * 2,
            )
