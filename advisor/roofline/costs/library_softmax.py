"""Scaled and masked softmax of Apex and Megatron (``megatron/core/fusions/fused_softmax.py``)."""

from __future__ import annotations

from advisor.roofline.costs.args import footprint, itemsize, optional, tensor, vector_pipe
from advisor.roofline.costs.conventions import ADD, DIV, EXP, FMA, MUL
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import cost

#: The family of operators that these count under.
FAMILY = "softmax"

_SOFTMAX = 2 * EXP + DIV + 3 * ADD


def _size(x: Tensor) -> float:
    return x.numel * itemsize(x.dtype)


@cost("ScaledUpperTriangMaskedSoftmax", "ScaledMaskedSoftmax", "ScaledSoftmax", "GenericScaledMaskedSoftmax")
def scaled_softmax(call: OpCall) -> Cost:
    """Scores to probabilities; under a triangle the upper half is written as zeros, and not read."""
    x, mask = tensor(call, 0), optional(call, 1)
    seen = 1.0
    if call.name == "ScaledUpperTriangMaskedSoftmax":
        mask = None
        seen = (1 + 1 / x.shape[-1]) / 2
    read = footprint(x) * seen + (footprint(mask) if mask and mask.shape else 0.0)
    return Cost((_SOFTMAX + MUL) * x.numel * seen, read, _size(x), vector_pipe(x.dtype))


@cost(
    "ScaledUpperTriangMaskedSoftmaxBackward",
    "ScaledMaskedSoftmaxBackward",
    "ScaledSoftmaxBackward",
    "GenericScaledMaskedSoftmaxBackward",
)
def scaled_softmax_backward(call: OpCall) -> Cost:
    """``y (dy - sum(y dy))``: the result, of the gradient's shape, is read too."""
    grad = tensor(call, 0)
    seen = (1 + 1 / grad.shape[-1]) / 2 if "UpperTriang" in call.name else 1.0
    flops = (ADD + FMA + 2 * MUL) * grad.numel * seen
    return Cost(flops, 2 * footprint(grad) * seen, _size(grad), vector_pipe(grad.dtype))
