"""GroupNorm and SiLU beside eager PyTorch and torch.compile, at a Stable Diffusion U-Net's shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import group_norm as ours
from .norm import WAYS
from .timing import Case, compiled

Shape = tuple[int, int, int, int]
SHAPES: list[tuple[Shape, int]] = [
    ((16, channels, side, side), groups)
    for groups in (8, 32)
    for channels, side in ((128, 64), (256, 32), (512, 16))
] + [((16, 320, 64, 64), 32), ((16, 1280, 8, 8), 32), ((1, 128, 512, 512), 32)]
QUICK: list[tuple[Shape, int]] = [((16, 128, 64, 64), 8), ((16, 256, 32, 32), 32)]


def _inputs(shape: Shape) -> Callable[[], Sequence[Any]]:
    def make() -> Sequence[Any]:
        sizes = (shape, shape[1:2], shape[1:2])
        return [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in sizes]

    return make


def _traffic(shape: Shape, groups: int, direction: str) -> int:
    """Compulsory bytes: x in, y out; dy and x in, dx out; vectors and moments on top."""
    elements, size = torch.Size(shape).numel(), 2
    there = 2 * elements * size + 2 * shape[1] * size + 8 * shape[0] * groups
    back = 3 * elements * size + 4 * shape[1] * size + 8 * shape[0] * groups
    return {"forward": there, "backward": back, "forward+backward": there + back}[direction]


def cases(quick: bool) -> Iterator[Case]:
    """With SiLU, each way."""
    for shape, groups in QUICK if quick else SHAPES:

        def bundled(x, weight, shift, groups=groups):
            return ours.group_norm(x, groups, weight, shift, 1e-5, "silu")

        def eager(x, weight, shift, groups=groups):
            return ours.group_norm_reference(x, groups, weight, shift, 1e-5, "silu")

        functions = {"ours": bundled, "eager": eager}
        if not quick:
            functions["compile"] = compiled(eager)
        for direction in WAYS:
            yield Case(
                "group_norm_silu",
                f"{'x'.join(map(str, shape))} in {groups}",
                "bf16",
                direction,
                _inputs(shape),
                {name: WAYS[direction](f) for name, f in functions.items()},
                _traffic(shape, groups, direction),
            )
