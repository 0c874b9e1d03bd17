"""Pooling and interpolation: the input is read once, the result written once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from advisor.roofline.costs.args import (
    Unknown,
    flag,
    footprint,
    integers,
    itemsize,
    optional,
    size_bytes,
    tensor,
    text,
    vector_pipe,
)
from advisor.roofline.costs.conventions import ADD, FMA, MUL
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import cost


def _spread(values: Sequence[int], rank: int, default: Sequence[int]) -> tuple[int, ...]:
    values = tuple(values) or tuple(default)
    return values * rank if len(values) == 1 else values


def _pooled(
    x: Tensor, call: OpCall, first: int, rank: int, *, has_dilation: bool
) -> tuple[tuple[int, ...], int]:
    """Output shape and window size; the arguments are kernel, stride, padding[, dilation], ceil mode."""
    kernel = _spread(integers(call, first), rank, ())
    stride = _spread(integers(call, first + 1), rank, kernel)
    pad = _spread(integers(call, first + 2), rank, (0,))
    dilation = _spread(integers(call, first + 3), rank, (1,)) if has_dilation else (1,) * rank
    at_ceil = first + (4 if has_dilation else 3)
    is_ceil = bool(text(call, at_ceil)) and flag(call, at_ceil)
    if len(x.shape) < rank + 1 or min(stride) < 1:
        raise Unknown("rank or stride does not fit")
    sizes = []
    for size, k, s, p, d in zip(x.shape[-rank:], kernel, stride, pad, dilation, strict=True):
        steps = size + 2 * p - d * (k - 1) - 1
        out = (-(-steps // s) if is_ceil else steps // s) + 1
        if is_ceil and (out - 1) * s >= size + p:
            out -= 1
        if out < 1:
            raise Unknown("the window does not fit the input")
        sizes.append(out)
    return (*x.shape[:-rank], *sizes), math.prod(kernel)


@cost("aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices")
def max_pool(call: OpCall) -> Cost:
    """Writes the maxima and their positions (int64)."""
    x = tensor(call, 0)
    shape, _ = _pooled(x, call, 1, 3 if "3d" in call.name else 2, has_dilation=True)
    return Cost(0.0, footprint(x), size_bytes(shape, x.dtype) + size_bytes(shape, "int64"), "none")


@cost("aten::max_pool2d_with_indices_backward", "aten::max_pool3d_with_indices_backward")
def max_pool_backward(call: OpCall) -> Cost:
    """Reads the gradient and the positions, writes a gradient of the input's size."""
    grad, x = tensor(call, 0), tensor(call, 1)
    indices = next(
        (arg for arg in reversed(call.inputs) if isinstance(arg, Tensor) and arg.dtype == "int64"), None
    )
    if indices is None or indices.shape != grad.shape:
        raise Unknown("positions not recorded")
    written = x.numel * itemsize(x.dtype)
    return Cost(float(ADD * grad.numel), footprint(grad) + footprint(indices), written, vector_pipe(x.dtype))


@cost("aten::avg_pool2d", "aten::avg_pool3d")
def average_pool(call: OpCall) -> Cost:
    """An addition for each element of each window."""
    x = tensor(call, 0)
    shape, window = _pooled(x, call, 1, 3 if "3d" in call.name else 2, has_dilation=False)
    flops = float((window + 1) * math.prod(shape))
    return Cost(flops, footprint(x), size_bytes(shape, x.dtype), vector_pipe(x.dtype))


@cost(
    "aten::avg_pool2d_backward",
    "aten::avg_pool3d_backward",
    "aten::_adaptive_avg_pool2d_backward",
    "aten::_adaptive_avg_pool3d_backward",
    "aten::adaptive_max_pool2d_backward",
)
def average_pool_backward(call: OpCall) -> Cost:
    """Reads the gradient, writes one of the input's size."""
    grad, x = tensor(call, 0), tensor(call, 1)
    flops = float(FMA * max(grad.numel, x.numel))
    return Cost(flops, footprint(grad), x.numel * itemsize(x.dtype), vector_pipe(x.dtype))


@cost(
    "aten::_adaptive_avg_pool2d",
    "aten::_adaptive_avg_pool3d",
    "aten::adaptive_max_pool2d",
    "aten::adaptive_max_pool3d",
    "aten::mkldnn_adaptive_avg_pool2d",
)
def adaptive_pool(call: OpCall) -> Cost:
    """The output size is an argument; the maximum also writes positions."""
    x, sizes = tensor(call, 0), integers(call, 1)
    rank = 3 if "3d" in call.name else 2
    shape = (*x.shape[:-rank], *_spread(sizes, rank, ()))
    written = size_bytes(shape, x.dtype) + (size_bytes(shape, "int64") if "max" in call.name else 0.0)
    flops = 0.0 if "max" in call.name else float(ADD * x.numel)
    return Cost(flops, footprint(x), written, vector_pipe(x.dtype, flops))


#: FLOPs an output element: 1, 2 or 3 linear interpolations in each direction, or a 4 x 4 cubic stencil.
_UPSAMPLE = {
    "upsample_nearest1d": MUL, "upsample_nearest2d": MUL, "upsample_nearest3d": MUL,
    "_upsample_nearest_exact2d": MUL, "_upsample_nearest_exact1d": MUL, "upsample_linear1d": 2 * FMA,
    "upsample_bilinear2d": 4 * FMA, "upsample_trilinear3d": 8 * FMA, "upsample_bicubic2d": 40,
    "_upsample_bilinear2d_aa": 8 * FMA, "_upsample_bicubic2d_aa": 40,
}  # fmt: skip


@cost(*(f"aten::{name}" for name in _UPSAMPLE))
def upsample(call: OpCall) -> Cost:
    """Reads the input once, writes the listed output size."""
    x, sizes = tensor(call, 0), integers(call, 1)
    if len(sizes) >= len(x.shape) or min(sizes, default=0) < 1:
        raise Unknown("output size not recorded")
    shape = (*x.shape[: -len(sizes)], *sizes)
    flops = float(_UPSAMPLE[call.name.removeprefix("aten::")] * math.prod(shape))
    return Cost(flops, footprint(x), size_bytes(shape, x.dtype), vector_pipe(x.dtype))


@cost(*(f"aten::{name}_backward" for name in _UPSAMPLE))
def upsample_backward(call: OpCall) -> Cost:
    """Reads the gradient, writes one of the listed input size."""
    grad, shape = tensor(call, 0), integers(call, 2)
    flops = float(_UPSAMPLE[call.name.removeprefix("aten::").removesuffix("_backward")] * grad.numel)
    return Cost(flops, footprint(grad), size_bytes(shape, grad.dtype), vector_pipe(grad.dtype))


@cost("aten::grid_sampler_2d", "aten::grid_sampler_3d", "aten::cudnn_grid_sampler")
def grid_sample(call: OpCall) -> Cost:
    """Reads input and grid, writes a value a channel at each grid point, of 4 (in 3-d 8) neighbours."""
    x, grid = tensor(call, 0), tensor(call, 1)
    points = grid.numel // grid.shape[-1] * x.shape[1]
    neighbours = 8 if "3d" in call.name else 4
    flops = float((neighbours * FMA + 10) * points)
    return Cost(flops, footprint(x) + footprint(grid), points * itemsize(x.dtype), vector_pipe(x.dtype))


@cost("aten::im2col", "aten::col2im")
def columns(call: OpCall) -> Cost:
    """Unfolds windows into columns, or sums them back: as many moved as the larger side holds."""
    x = tensor(call, 0)
    if call.name == "aten::col2im":
        return Cost(
            float(ADD * x.numel),
            footprint(x),
            footprint(x) / max(1, math.prod(integers(call, 2))),
            vector_pipe(x.dtype),
        )
    kernel, dilation, pad, stride = (_spread(integers(call, index), 2, ()) for index in (1, 2, 3, 4))
    spatial = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, d, p, s in zip(x.shape[-2:], kernel, dilation, pad, stride, strict=True)
    ]
    written = math.prod(x.shape[:-2]) * math.prod(kernel) * math.prod(spatial) * itemsize(x.dtype)
    return (
        Cost(0.0, footprint(x), written, "none") if optional(call, 0) and min(spatial) > 0 else _no_window()
    )


def _no_window() -> Cost:
    raise Unknown("the window does not fit the input")
