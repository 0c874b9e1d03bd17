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
    (rows, cols) for cols in (1024, 2048, 4096, 8192, 16384) for rows in (2**24 // cols, 2**27 // cols)
] + [(16384, 4096), (4096, 5120)]
QUICK = [(65536, 1024), (16384, 4096), (4096, 16384)]
WAYS: dict[str, Callable[..., Variant]] = {
    "forward": forward,
    "backward": backward,
    "forward+backward": forward_backward,
}


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
    dtype = torch.bfloat16
    for rows, cols in QUICK if quick else SHAPES:
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
            if not quick:
                functions["compile"] = compiled(eager)
            for direction in ("forward", "backward") if quick else WAYS:
                yield Case(
                    kernel,
                    f"{rows}x{cols}",
                    "bf16",
                    direction,
                    inputs(rows, cols, vectors, dtype),
                    {name: WAYS[direction](f) for name, f in functions.items() if f is not None},
                    traffic(rows, cols, 2, direction, gradients=vectors),
                )
