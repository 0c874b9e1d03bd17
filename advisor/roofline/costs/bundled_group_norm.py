"""The bundled GroupNorm with the activation behind it: each tensor moved once.

Groups that several programs share take a kernel for the sums, which reads all that the next one reads again.
FLOPs an element are those of LayerNorm, and the activation's.
"""

from __future__ import annotations

from advisor.roofline.costs.args import flag, footprint, integer, itemsize, named_dtype, optional, tensor
from advisor.roofline.costs.bundled_norm import _LAYER, _PIPE, _activation, _bytes
from advisor.roofline.costs.conventions import MUL
from advisor.roofline.costs.model import Cost, OpCall
from advisor.roofline.costs.registry import Result, assign, cost

#: The family of operators that these count under.
FAMILY = "norm"

#: Of an element, for the moments alone, and for the two sums alone.
_MOMENTS, _SUMS = 3, 3


@cost("advisor_kernels::group_norm")
def forward(call: OpCall) -> Result:
    """Reads x, weight and shift; writes y and three fp32 numbers a group."""
    x, groups, (active, _) = tensor(call, 0), integer(call, 3), _activation(call, 5)
    vectors = _bytes(optional(call, 1), optional(call, 2))
    written = x.numel * itemsize(named_dtype(call, 6) or x.dtype) + 12.0 * x.shape[0] * groups
    main = Cost(float((_LAYER[0] + active) * x.numel), footprint(x) + vectors, written, _PIPE)
    moments = Cost(float(_MOMENTS * x.numel), footprint(x), 0.0, _PIPE)
    return assign(call, main, (r"group_norm_moments", moments), whole=main)


@cost("advisor_kernels::group_norm_backward")
def backward(call: OpCall) -> Result:
    """Reads dy, x, the vectors and the moments; writes dx, and the sums for weight and shift if asked."""
    dy, x, stats, summed = tensor(call, 0), tensor(call, 1), tensor(call, 4), flag(call, 7)
    weight, shift = optional(call, 2), optional(call, 3)
    both = _bytes(dy, x, weight, shift, stats)
    per_element = _LAYER[1] + sum(_activation(call, 6)) + MUL
    written = _bytes(weight, shift) if summed else 0.0
    main = Cost(float(per_element * x.numel), both, x.numel * itemsize(x.dtype) + written, _PIPE)
    apart = Cost(float((_SUMS + sum(_activation(call, 6)) + MUL) * x.numel), both, 0.0, _PIPE)
    planes = 2.0 * x.shape[0] * x.shape[1]
    adding = Cost(planes, 4.0 * planes, written, _PIPE)
    return assign(call, main, (r"group_norm_sums", apart), (r"sum_partials", adding), whole=main)
