"""LayerNorm and RMSNorm beside `torch.nn.functional`, torch.compile and Liger."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .. import norm
from .timing import Case, Variant, backward, compiled, forward, forward_backward

SHAPES = [
    (16384, 4096), (4096, 16384), (65536, 1024), (2048, 1024), (4096, 4096), (16384, 8192), (8192, 768),
    (1024, 16384), (512, 4096), (16384, 1024), (4096, 5120), (128, 16384),
]  # fmt: skip
QUICK = [(65536, 1024), (16384, 4096), (4096, 16384)]
WAYS: dict[str, Callable[..., Variant]] = {
    "forward": forward,
    "backward": backward,
    "forward+backward": forward_backward,
}
GRID_WAYS = ("forward", "forward+backward")


def traffic(rows: int, cols: int, size: int, direction: str, *, reads: int = 1, gradients: int = 2) -> int:
    """Compulsory bytes: x in, y out; dy and x in, dx out; weights and row moments on top.

    Args:
        size: bytes an element.
        reads: of an activation forward, with as many gradients written backward.
        gradients: vectors of weights.
    """
    elements = rows * cols
    there = (reads + 1) * elements * size + gradients * cols * size + 8 * rows
    back = (2 + 1) * elements * size + 2 * gradients * cols * size + 8 * rows
    return {"forward": there, "backward": back, "forward+backward": there + back}[direction]


def liger(name: str) -> Callable[..., Any] | None:
    """A function of liger_kernel.ops.<name>, if Liger is installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    functions: dict[str, Callable[..., Any]] = {
        "layer_norm": lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5),
        "rms_norm": lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-5, 0.0, "llama", False),
    }
    return functions[name]


def inputs(rows: int, cols: int, vectors: int, dtype: torch.dtype) -> Callable[[], Sequence[Any]]:
    """Makes one set of inputs."""

    def make() -> Sequence[Any]:
        x = torch.randn(rows, cols, device="cuda", dtype=dtype).requires_grad_()
        return [x, *[torch.randn(cols, device="cuda", dtype=dtype).requires_grad_() for _ in range(vectors)]]

    return make


def cases(quick: bool) -> Iterator[Case]:
    """Both norms, each way, over small and large numbers of rows."""
    for shape in QUICK if quick else SHAPES:
        yield from _both(*shape, ("forward", "backward") if quick else tuple(WAYS), compile=not quick)


def grid() -> Iterator[Case]:
    """Both norms over twelve sizes."""
    for shape in SHAPES:
        yield from _both(*shape, GRID_WAYS, compile=True)


def _both(rows: int, cols: int, directions: Sequence[str], *, compile: bool) -> Iterator[Case]:
    for kernel, vectors, ours, eager in (
        (
            "layer_norm",
            2,
            lambda x, w, b: norm.layer_norm(x, w.shape, w, b),
            lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        ),
        (
            "rms_norm",
            1,
            lambda x, w: norm.rms_norm(x, w.shape, w, 1e-5),
            lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
        ),
    ):
        functions = {"ours": ours, "eager": eager, "liger": liger(kernel)}
        if compile:
            functions["compile"] = compiled(eager)
        for direction in directions:
            yield Case(
                kernel,
                f"{rows}x{cols}",
                "bf16",
                direction,
                inputs(rows, cols, vectors, torch.bfloat16),
                {name: WAYS[direction](f) for name, f in functions.items() if f is not None},
                traffic(rows, cols, 2, direction, gradients=vectors),
            )
