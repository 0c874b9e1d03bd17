"""Norms of Apex, Liger and flash-attn, which launch their kernels from autograd functions.

A backward call records gradients alone: the rest are arguments of its forward call (``apex/normalization``,
``liger_kernel/ops``, ``flash_attn/ops/triton/layer_norm.py``).
"""

from __future__ import annotations

from advisor.roofline.costs.args import Unknown, footprint, itemsize, optional, tensor, vector_pipe
from advisor.roofline.costs.model import Arg, Cost, OpCall, Tensor
from advisor.roofline.costs.registry import Result, assign, cost

#: The family of operators that these count under.
FAMILY = "norm"

_WEIGHT_KERNEL = r"gammabeta|gamma_beta|partgrad|gradgamma"


def _size(x: Tensor) -> float:
    return x.numel * itemsize(x.dtype)


def _at(arguments: tuple[Arg, ...], index: int) -> Tensor:
    return tensor(OpCall("", arguments), index)


@cost("FusedLayerNormAffineFunctionBackward", partner="FusedLayerNormAffineFunction")
@cost("FusedRMSNormAffineFunctionBackward", partner="FusedRMSNormAffineFunction")
@cost("LigerRMSNormFunctionBackward", partner="LigerRMSNormFunction")
@cost("LigerLayerNormFunctionBackward", partner="LigerLayerNormFunction")
@cost("LayerNormFnBackward", partner="LayerNormFn")
def norm_backward(call: OpCall) -> Result:
    """Reads dy, x and the weight; writes dx and the weight's gradients (a kernel of their own in Apex')."""
    grad, x, weight = tensor(call, 0), _at(call.partner, 0), _at(call.partner, 1)
    if grad.numel != x.numel or x.numel % weight.numel:
        raise Unknown("gradient, input and weight contradict each other")
    both = footprint(grad) + footprint(x)
    summed = _size(weight) * (1 if "RMS" in call.name else 2)
    of_weight = Cost(5.0 * x.numel, both, summed, vector_pipe(x.dtype))
    has_own = any("gamma" in launch.name.lower() for launch in call.launches)
    of_input = Cost(
        (10.0 if has_own else 15.0) * x.numel,
        both + _size(weight),
        _size(x) + (0.0 if has_own else summed),
        vector_pipe(x.dtype),
    )
    whole = Cost(15.0 * x.numel, both + _size(weight), _size(x) + summed, vector_pipe(x.dtype))
    return assign(call, of_input, (_WEIGHT_KERNEL, of_weight), whole=whole)


@cost("LayerNormFn")
def norm_with_residual(call: OpCall) -> Cost:
    """flash-attn's: x, weight, bias, residual; their sum, where there is one, is written as well."""
    x, weight, bias, residual = tensor(call, 0), tensor(call, 1), optional(call, 2), optional(call, 3)
    if x.numel % weight.numel:
        raise Unknown("the weight does not span a row")
    adds = residual is not None and residual.shape == x.shape
    read = footprint(x) + footprint(weight) + (footprint(bias) if bias else 0.0)
    written = _size(x)
    if adds and residual is not None:
        read, written = read + footprint(residual), written + _size(residual)
    return Cost(float((7 + adds) * x.numel), read, written, vector_pipe(x.dtype))
