"""The bundled activations with bias, and gated activations: each input read once, each output written once.

The sums of a bias gradient's partials are ``aten::sum`` calls of their own.
"""

from __future__ import annotations

from advisor.roofline.costs.args import Unknown, footprint, itemsize, optional, promote, tensor, text
from advisor.roofline.costs.conventions import ADD, EXP, FMA, GELU, MUL, SIGMOID, SILU
from advisor.roofline.costs.model import Cost, OpCall
from advisor.roofline.costs.registry import cost

#: The family of operators that these count under.
FAMILY = "pointwise"

#: FLOPs an element of the activation and of its derivative.
_FLOPS = {
    "none": (0, 0), "relu": (0, 0), "relu_squared": (MUL, MUL), "silu": (SILU, SIGMOID + ADD + FMA),
    "gelu": (GELU, GELU + EXP + FMA), "gelu_tanh": (SIGMOID + 3 * MUL + FMA, SIGMOID + 6 * MUL + 2 * FMA),
}  # fmt: skip


def _flops(call: OpCall, index: int) -> tuple[int, int]:
    name = text(call, index).strip("'\"")
    if name not in _FLOPS:
        raise Unknown("activation not recorded")
    return _FLOPS[name]


@cost("advisor_kernels::bias_activation")
def bias_forward(call: OpCall) -> Cost:
    """``f(x + bias)``."""
    x, bias = tensor(call, 0), optional(call, 1)
    given = [x] if bias is None else [x, bias]
    per_element = _flops(call, 2)[0] + (ADD if bias else 0)
    written = x.numel * itemsize(promote(*given))
    return Cost(float(per_element * x.numel), sum(map(footprint, given)), written, "vector_fp32")


@cost("advisor_kernels::bias_activation_backward")
def bias_backward(call: OpCall) -> Cost:
    """``dy f'(x + bias)``, and its sum over rows; the partial sums are small beside it."""
    dy, x, bias = tensor(call, 0), tensor(call, 1), optional(call, 2)
    per_element = _flops(call, 3)[1] + MUL + (2 * ADD if bias else 0)
    read = footprint(dy) + footprint(x) + (footprint(bias) if bias else 0.0)
    return Cost(float(per_element * x.numel), read, x.numel * itemsize(x.dtype), "vector_fp32")


@cost("advisor_kernels::gated_activation")
def gated_forward(call: OpCall) -> Cost:
    """``f(gate) * up``."""
    gate, up = tensor(call, 0), tensor(call, 1)
    flops = float((_flops(call, 2)[0] + MUL) * gate.numel)
    written = gate.numel * itemsize(promote(gate, up))
    return Cost(flops, footprint(gate) + footprint(up), written, "vector_fp32")


@cost("advisor_kernels::gated_activation_backward")
def gated_backward(call: OpCall) -> Cost:
    """Both gradients; the activation is computed again."""
    dy, gate, up = (tensor(call, i) for i in range(3))
    flops = float((sum(_flops(call, 3)) + 3 * MUL) * gate.numel)
    written = gate.numel * (itemsize(gate.dtype) + itemsize(up.dtype))
    return Cost(flops, footprint(dy) + footprint(gate) + footprint(up), written, "vector_fp32")


@cost("advisor_kernels::gated_activation_packed")
def packed_forward(call: OpCall) -> Cost:
    """Gate and linear part are the halves of one tensor."""
    packed = tensor(call, 0)
    elements = packed.numel // 2
    flops = float((_flops(call, 1)[0] + MUL) * elements)
    return Cost(flops, footprint(packed), elements * itemsize(packed.dtype), "vector_fp32")


@cost("advisor_kernels::gated_activation_packed_backward")
def packed_backward(call: OpCall) -> Cost:
    """Both gradients, the halves of one tensor."""
    dy, packed = tensor(call, 0), tensor(call, 1)
    flops = float((sum(_flops(call, 2)) + 3 * MUL) * dy.numel)
    written = packed.numel * itemsize(packed.dtype)
    return Cost(flops, footprint(dy) + footprint(packed), written, "vector_fp32")
