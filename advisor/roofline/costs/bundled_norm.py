"""The bundled norms, alone, after a residual addition and after bias and activation: each tensor moved once.

FLOPs an element: LayerNorm 3 for the moments and 4 to normalise, scale and shift; RMSNorm 2 and 2; their
gradients 9 and 7, and 3 or 2 for the sums over rows. An activation's come on top.
"""

from __future__ import annotations

from advisor.roofline.costs.args import (
    Unknown,
    flag,
    footprint,
    integer,
    itemsize,
    named_dtype,
    optional,
    promote,
    tensor,
    text,
)
from advisor.roofline.costs.bundled_activations import _FLOPS
from advisor.roofline.costs.conventions import ADD, MUL
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import Result, assign, cost

#: The family of operators that these count under.
FAMILY = "norm"

_LAYER, _RMS = (7, 9, 3), (4, 7, 2)
#: Of one Philox 4x32 draw nothing is floating-point: a kept element is scaled.
_DROPOUT = MUL
_PIPE = "vector_fp32"


def _bytes(*args: Tensor | None) -> float:
    return sum(footprint(arg) for arg in args if arg is not None)


def _moments(x: Tensor, is_rms: bool) -> float:
    """fp32 mean and reciprocal deviation of each row, RMS the latter."""
    return x.numel / x.shape[-1] * 4 * (1 if is_rms else 2)


def _with_sums(call: OpCall, main: Cost, cols: int, parts: int, read_apart: float, written: float) -> Result:
    """`main` for the kernel that walks the rows; the kernels for the sums over rows by their names.

    Args:
        cols: of a row.
        parts: vectors that are summed.
        read_apart: what a kernel reads that makes the partials by itself.
        written: bytes of the sums.
    """
    blocks = [k.grid_blocks for k in call.launches if "sum_partials" not in k.name and k.grid_blocks]
    partials = blocks[-1] * parts * cols if blocks else 0
    adding = Cost(float(partials), 4.0 * partials, written, _PIPE) if partials else None
    apart = Cost(3.0 * read_apart, read_apart, 0.0, _PIPE)
    return assign(call, main, (r"sum_partials", adding), (r"norm_weight_wide", apart), whole=main)


@cost("advisor_kernels::norm")
def forward(call: OpCall) -> Cost:
    """Reads x, weight and bias; writes y and the rows' moments."""
    x, weight, bias, is_rms = tensor(call, 0), optional(call, 1), optional(call, 2), flag(call, 5)
    written = x.numel * itemsize(named_dtype(call, 7) or x.dtype) + _moments(x, is_rms)
    flops = float((_RMS if is_rms else _LAYER)[0] * x.numel)
    return Cost(flops, _bytes(x, weight, bias), written, _PIPE)


@cost("advisor_kernels::norm_backward")
def backward(call: OpCall) -> Result:
    """Reads dy, x, weight and the moments; writes dx and the sums for weight and bias."""
    dy, x, weight, stats = tensor(call, 0), tensor(call, 1), optional(call, 2), tensor(call, 4)
    bias, parts = optional(call, 3), integer(call, 8)
    _, of_input, of_sums = _RMS if flag(call, 6) else _LAYER
    flops = float((of_input + (of_sums if parts else 0)) * x.numel)
    sums = _bytes(*(weight, bias)[:parts])
    main = Cost(flops, _bytes(dy, x, weight, stats), x.numel * itemsize(x.dtype) + sums, _PIPE)
    return _with_sums(call, main, x.shape[-1], parts, _bytes(dy, x, stats), sums)


@cost("advisor_kernels::add_norm")
def add_forward(call: OpCall) -> Cost:
    """Reads x and residual; writes their sum, y and the moments; dropout moves nothing but its seed."""
    x, residual, seed, is_rms = tensor(call, 0), tensor(call, 1), optional(call, 2), flag(call, 8)
    total = promote(x, residual)
    written = x.numel * (itemsize(total) + itemsize(named_dtype(call, 10) or total)) + _moments(x, is_rms)
    per_element = (_RMS if is_rms else _LAYER)[0] + ADD + (_DROPOUT if seed else 0)
    read = _bytes(x, residual, seed, optional(call, 4), optional(call, 5))
    return Cost(float(per_element * x.numel), read, written, _PIPE)


@cost("advisor_kernels::add_norm_backward")
def add_backward(call: OpCall) -> Result:
    """Reads dy, what reaches the sum beside it, the sum; writes its gradient, and x's where that differs."""
    dy, beside, total, seed = tensor(call, 0), optional(call, 1), tensor(call, 2), optional(call, 6)
    weight, bias, stats, parts = optional(call, 3), optional(call, 4), tensor(call, 5), integer(call, 11)
    apart = named_dtype(call, 12)
    _, of_input, of_sums = _RMS if flag(call, 9) else _LAYER
    per_element = of_input + (of_sums if parts else 0) + (ADD if beside else 0) + (_DROPOUT if seed else 0)
    sums = _bytes(*(weight, bias)[:parts])
    written = total.numel * (itemsize(total.dtype) + (itemsize(apart) if apart else 0)) + sums
    read = _bytes(dy, beside, total, weight, stats, seed)
    main = Cost(float(per_element * total.numel), read, written, _PIPE)
    return _with_sums(call, main, total.shape[-1], parts, _bytes(dy, total, stats), sums)


@cost("advisor_kernels::dropout_add")
def dropout_add(call: OpCall) -> Cost:
    """``dropout(x) + residual``."""
    x, residual = tensor(call, 0), tensor(call, 1)
    written = x.numel * itemsize(promote(x, residual))
    return Cost(float((_DROPOUT + ADD) * x.numel), _bytes(x, residual), written, _PIPE)


@cost("advisor_kernels::dropout_gradient")
def dropout_gradient(call: OpCall) -> Cost:
    """The mask, drawn again, on the gradient."""
    dy = tensor(call, 0)
    written = dy.numel * itemsize(named_dtype(call, 3) or dy.dtype)
    return Cost(float(_DROPOUT * dy.numel), _bytes(dy), written, _PIPE)


def _activation(call: OpCall, index: int) -> tuple[int, int]:
    name = text(call, index).strip("'\"")
    if name not in _FLOPS:
        raise Unknown("activation not recorded")
    return _FLOPS[name]


@cost("advisor_kernels::bias_act_norm")
def bias_act_forward(call: OpCall) -> Cost:
    """Reads x and the vectors; writes y and the moments."""
    x, bias = tensor(call, 0), optional(call, 1)
    per_element = _LAYER[0] + _activation(call, 5)[0] + (ADD if bias else 0)
    written = x.numel * itemsize(named_dtype(call, 6) or x.dtype) + _moments(x, False)
    read = _bytes(x, bias, optional(call, 2), optional(call, 3))
    return Cost(float(per_element * x.numel), read, written, _PIPE)


@cost("advisor_kernels::bias_act_norm_backward")
def bias_act_backward(call: OpCall) -> Result:
    """Reads dy, x, the vectors and the moments; writes dx and up to three sums over rows."""
    dy, x, stats = tensor(call, 0), tensor(call, 1), tensor(call, 5)
    bias, weight, shift = (optional(call, i) for i in (2, 3, 4))
    parts = integer(call, 7)
    of_bias, of_norm = parts % 2, parts > 1
    _, of_input, of_sums = _LAYER
    per_element = of_input + sum(_activation(call, 6)) + MUL + (ADD if bias else 0)
    per_element += (of_sums if of_norm else 0) + of_bias * ADD
    sums = _bytes(bias if of_bias else None, *((weight, shift) if of_norm else ()))
    read = _bytes(dy, x, bias, weight, stats)
    main = Cost(float(per_element * x.numel), read, x.numel * itemsize(x.dtype) + sums, _PIPE)
    return _with_sums(call, main, x.shape[-1], parts, 0.0, sums)
