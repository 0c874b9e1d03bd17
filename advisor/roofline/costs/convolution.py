"""Forward convolutions of 1 to 3 dimensions: grouped, depthwise, transposed; FLOPs: `convolution_problem`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from advisor.roofline.costs import roles
from advisor.roofline.costs.args import Unknown, flag, integer, integers, itemsize, tensor, text
from advisor.roofline.costs.convolution_problem import (
    Problem,
    as_executed,
    batched,
    beside,
    problem_of,
    which_multiply,
)
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import Result, cost, split

#: Positions of stride, padding, dilation, groups and, if it has one, the transposed flag or output padding.
_FORWARD = {
    "aten::convolution": (3, 4, 5, 8, 6), "aten::_convolution": (3, 4, 5, 8, 6),
    "aten::convolution_overrideable": (3, 4, 5, 8, 6), "aten::cudnn_convolution": (3, 2, 4, 5, None),
    "aten::miopen_convolution": (4, 3, 5, 6, None),
    "aten::miopen_depthwise_convolution": (4, 3, 5, 6, None),
    "aten::mkldnn_convolution": (4, 3, 5, 6, None), "aten::cudnn_convolution_relu": (3, 4, 5, 6, None),
    "aten::miopen_convolution_relu": (3, 4, 5, 6, None),
    "aten::cudnn_convolution_add_relu": (5, 6, 7, 8, None),
    "aten::_conv_depthwise2d": (4, 5, 6, None, None), "aten::conv_depthwise3d": (4, 5, 6, None, None),
    "aten::_slow_conv2d_forward": (4, 5, None, None, None), "aten::thnn_conv2d": (4, 5, None, None, None),
    "aten::slow_conv3d_forward": (4, 5, None, None, None),
    "aten::_nnpack_spatial_convolution": (4, 3, None, None, None),
    "aten::slow_conv_dilated2d": (4, 5, 6, None, None),
    "aten::slow_conv_dilated3d": (4, 5, 6, None, None),
}  # fmt: skip


def _listed(call: OpCall, position: int | None, default: tuple[int, ...], spatial: int) -> tuple[int, ...]:
    values = default if position is None else integers(call, position)
    return values * spatial if len(values) == 1 else values


def _out_shape(
    x: Tensor, w: Tensor, stride: Sequence[int], pad: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    spatial = [
        (size + 2 * p - d * (kernel - 1) - 1) // s + 1
        for size, kernel, s, p, d in zip(x.shape[2:], w.shape[2:], stride, pad, dilation, strict=True)
    ]
    if any(size < 1 for size in spatial):
        raise Unknown("the kernel does not fit the input")
    return (x.shape[0], w.shape[0], *spatial)


def _transposed_out(
    x: Tensor,
    w: Tensor,
    stride: Sequence[int],
    pad: Sequence[int],
    dilation: Sequence[int],
    extra: Sequence[int],
    groups: int,
) -> tuple[int, ...]:
    spatial = [
        (size - 1) * s - 2 * p + d * (kernel - 1) + e + 1
        for size, kernel, s, p, d, e in zip(
            x.shape[2:], w.shape[2:], stride, pad, dilation, extra, strict=True
        )
    ]
    return (x.shape[0], w.shape[1] * groups, *spatial)


@cost(*_FORWARD)
def forward(call: OpCall) -> Result:
    """Reads input and weight, writes the output; layout kernels beside it are copies."""
    at_stride, at_padding, at_dilation, at_groups, at_transposed = _FORWARD[call.name]
    w = tensor(call, 1)
    x = batched(tensor(call, 0), w)
    spatial = len(w.shape) - 2
    if not call.concrete and at_transposed is None and call.following is not None:
        y = _plausible_result(x, w, call.following)
        problem = problem_of(
            x.shape, y, w.shape, [max(1, round(a / b)) for a, b in zip(x.shape[2:], y[2:], strict=True)]
        )
        return _forward_cost(call, x.dtype, problem, problem.wide, problem.narrow, problem.touched)
    stride = _listed(call, at_stride, (1,), spatial)
    pad = _listed(call, at_padding, (0,), spatial)
    dilation = _listed(call, at_dilation, (1,), spatial)
    groups = integer(call, at_groups) if at_groups is not None and text(call, at_groups) else 1
    if at_transposed is not None and flag(call, at_transposed):
        return _transposed(
            call, x, w, stride, pad, dilation, _listed(call, at_transposed + 1, (0,), spatial), groups
        )
    y = _out_shape(x, w, stride, pad, dilation)
    if at_groups is not None and x.shape[1] != w.shape[1] * groups:
        raise Unknown("groups and channels contradict each other")
    problem = problem_of(x.shape, y, w.shape, stride)
    return _forward_cost(call, x.dtype, problem, problem.wide, problem.narrow, problem.touched)


def _plausible_result(x: Tensor, w: Tensor, following: Tensor) -> tuple[int, ...]:
    """The shape of what the next operator takes, if it can be this convolution's result.

    Batch and channels have to be the result's, and the sides those of some whole stride with the padding that
    keeps a side at stride 1: traces before PyTorch 2.0 record no values.
    """
    shape = following.shape
    if len(shape) != len(x.shape) or shape[:2] != (x.shape[0], w.shape[0]) or following.dtype != x.dtype:
        raise Unknown("what follows is not the result")
    for size, kernel, out in zip(x.shape[2:], w.shape[2:], shape[2:], strict=True):
        step = max(1, round(size / out)) if out else 0
        if not step or out not in ((size - 1) // step + 1, (size - kernel) // step + 1):
            raise Unknown("what follows is not the result")
    return shape


@cost("aten::cudnn_convolution_transpose", "aten::miopen_convolution_transpose")
def transpose_forward(call: OpCall) -> Result:
    """A transposed convolution: each input element multiplies the whole kernel."""
    first = 2 if "cudnn" in call.name else 3
    x, w = tensor(call, 0), tensor(call, 1)
    spatial = len(w.shape) - 2
    pad, extra, stride, dilation = (_listed(call, first + index, (1,), spatial) for index in range(4))
    return _transposed(call, x, w, stride, pad, dilation, extra, integer(call, first + 4))


def _transposed(
    call: OpCall,
    x: Tensor,
    w: Tensor,
    stride: Sequence[int],
    pad: Sequence[int],
    dilation: Sequence[int],
    extra: Sequence[int],
    groups: int,
) -> Result:
    y = _transposed_out(x, w, stride, pad, dilation, extra, groups)
    if min(y) < 1:
        raise Unknown("sizes leave no output")
    problem = problem_of(y, x.shape, w.shape, stride)
    return _forward_cost(call, x.dtype, problem, problem.narrow, problem.wide, 1.0)


def _forward_cost(
    call: OpCall, dtype: str, problem: Problem, x: tuple[int, ...], y: tuple[int, ...], touched: float
) -> Result:
    width = itemsize(dtype)
    read = width * (math.prod(x) * touched + math.prod(problem.weight))
    written = width * math.prod(y)
    whole = Cost(
        problem.flops, read, written, roles.matrix_pipe("", dtype, call.settings, "allow_tf32_cudnn")
    )
    if not call.launches:
        return whole
    shapes = (x, problem.weight, y)
    is_main = which_multiply(call.launches)
    main = [launch for launch, multiplies in zip(call.launches, is_main, strict=True) if multiplies]
    shares = iter(split(as_executed(whole, problem, main[0], dtype, call), main) if main else ())
    return tuple(
        next(shares) if multiplies else beside(launch, shapes, width, y)
        for launch, multiplies in zip(call.launches, is_main, strict=True)
    )
