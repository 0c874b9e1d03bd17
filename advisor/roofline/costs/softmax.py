"""Softmax and log-softmax, forward and backward.

The largest rows do not fit a block's registers or shared memory: then ATen's ``cunn_SoftMaxForward`` visits
the row three times (maximum, sum, result) and ``cunn_SoftMaxBackward`` the gradient twice, and what the cache
cannot keep is fetched again (aten/src/ATen/native/cuda/SoftMax.cu; seen in an H200's counters).
"""

from __future__ import annotations

from advisor.roofline.costs.args import (
    Unknown,
    flag,
    footprint,
    integer,
    itemsize,
    named_dtype,
    tensor,
    text,
    vector_pipe,
)
from advisor.roofline.costs.conventions import ADD, DIV, EXP, FMA, MUL
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import cost
from advisor.roofline.costs.traffic import missed

_SINGLE_BLOCK_FORWARD = "cunn_SoftMaxForward<"
_SINGLE_BLOCK_BACKWARD = "cunn_SoftMaxBackward<"


def _row(x: Tensor, dim: int) -> int:
    if not x.shape or not -len(x.shape) <= dim < len(x.shape):
        raise Unknown("no such dimension")
    return x.shape[dim]


def _launched(call: OpCall, kernel: str) -> bool:
    return any(kernel in launch.name for launch in call.launches)


@cost("aten::_softmax", "aten::_log_softmax", "aten::_safe_softmax", "aten::_masked_softmax")
def forward(call: OpCall) -> Cost:
    """Subtract the maximum, exp, sum, and divide (or subtract the logarithm)."""
    x = tensor(call, 0)
    masked = call.name == "aten::_masked_softmax"
    row = _row(x, -1 if masked else integer(call, 1))
    to_float = not masked and text(call, 2) != "" and call.name != "aten::_safe_softmax" and flag(call, 2)
    dtype = "fp32" if to_float else x.dtype
    per_element = EXP + 4 * ADD if "log" in call.name else 2 * EXP + DIV + 3 * ADD
    written = x.numel * itemsize(dtype)
    read = footprint(x) + (footprint(tensor(call, 1)) if masked else 0.0)
    again = 0.0
    visited = row * (itemsize(x.dtype) + itemsize(dtype))
    if _launched(call, _SINGLE_BLOCK_FORWARD):
        again = 2 * footprint(x) * missed(call, visited, x.numel / row)
    return Cost(float(per_element * x.numel), read + again, written, vector_pipe(x.dtype), again)


@cost("aten::_softmax_backward_data", "aten::_log_softmax_backward_data", "aten::_masked_softmax_backward")
def backward(call: OpCall) -> Cost:
    """Softmax: ``y * (dy - sum(y * dy))``; log-softmax: ``dy - exp(y) * sum(dy)``. Reads dy and y."""
    grad, y = tensor(call, 0), tensor(call, 1)
    if grad.shape != y.shape:
        raise Unknown("gradient and output differ in shape")
    dtype = named_dtype(call, 3) or grad.dtype
    per_element = EXP + FMA + ADD if "log" in call.name else ADD + FMA + MUL
    again = 0.0
    if _launched(call, _SINGLE_BLOCK_BACKWARD):
        row = _row(grad, integer(call, 2))
        visited = row * (itemsize(grad.dtype) + itemsize(y.dtype) + itemsize(dtype))
        again = footprint(grad) * missed(call, visited, grad.numel / row)
    return Cost(
        float(per_element * grad.numel),
        footprint(grad) + footprint(y) + again,
        grad.numel * itemsize(dtype),
        vector_pipe(grad.dtype),
        again,
    )
