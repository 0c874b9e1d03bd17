"""Elementwise operators: operands broadcast, each is read once, the result is written once."""

from __future__ import annotations

import math

from advisor.roofline.costs.args import (
    Unknown,
    broadcast,
    footprint,
    is_float,
    itemsize,
    promote,
    tensors,
    vector_pipe,
)
from advisor.roofline.costs.conventions import (
    ADD,
    DIV,
    ERF,
    EXP,
    FMA,
    GELU,
    LOG,
    LOG1P,
    MUL,
    POW,
    RSQRT,
    SIGMOID,
    SILU,
    SQRT,
    TANH,
    TRIG,
)
from advisor.roofline.costs.model import Cost, OpCall
from advisor.roofline.costs.registry import cost

#: Operators of one tensor: FLOPs an element.
UNARY = {
    "abs": 0, "neg": 0, "negative": 0, "sign": 0, "sgn": 0, "signbit": 0, "positive": 0, "floor": 0,
    "ceil": 0, "round": 0, "trunc": 0, "frac": ADD, "square": MUL, "reciprocal": DIV, "sqrt": SQRT,
    "rsqrt": RSQRT, "exp": EXP, "exp2": EXP, "expm1": EXP, "log": LOG, "log2": LOG, "log10": LOG,
    "log1p": LOG1P, "sin": TRIG, "cos": TRIG, "tan": TRIG, "asin": TRIG, "acos": TRIG, "atan": TRIG,
    "sinh": TRIG, "cosh": TRIG, "tanh": TANH, "sigmoid": SIGMOID, "erf": ERF, "erfc": ERF, "erfinv": ERF,
    "lgamma": 2 * LOG, "digamma": 2 * LOG, "logit": LOG + DIV, "sinc": TRIG + DIV, "relu": 0, "relu6": 0,
    "clamp_min": 0, "clamp_max": 0, "clamp": 0, "clip": 0, "hardtanh": 0, "threshold": 0, "hardshrink": 0,
    "softshrink": ADD, "leaky_relu": MUL, "elu": EXP + FMA, "selu": EXP + FMA, "celu": EXP + FMA,
    "gelu": GELU, "silu": SILU, "mish": EXP + LOG1P, "hardsigmoid": FMA, "hardswish": FMA + MUL,
    "softplus": EXP + LOG1P, "log_sigmoid": EXP + LOG1P, "log_sigmoid_forward": EXP + LOG1P,
    "conj_physical": 0, "nan_to_num": 0, "deg2rad": MUL, "rad2deg": MUL, "real": 0, "imag": 0,
    "angle": TRIG, "isnan": 0,
    "isinf": 0, "isfinite": 0, "logical_not": 0, "bitwise_not": 0, "pow_scalar": POW, "i0": TRIG,
    "special_expit": SIGMOID, "special_erf": ERF, "special_erfcx": ERF, "special_i0": TRIG,
    "special_i1": TRIG, "special_ndtri": TRIG, "special_log_ndtr": ERF + LOG, "mvlgamma": 2 * LOG,
}  # fmt: skip
#: Operators of two tensors (or a tensor and a number).
BINARY = {
    "add": FMA, "sub": FMA, "rsub": FMA, "subtract": FMA, "mul": MUL, "multiply": MUL, "div": DIV,
    "divide": DIV, "true_divide": DIV, "floor_divide": DIV, "remainder": DIV + FMA, "fmod": DIV + FMA,
    "pow": POW, "float_power": POW, "maximum": 0, "minimum": 0, "fmax": 0, "fmin": 0, "atan2": TRIG,
    "hypot": SQRT + FMA + MUL, "copysign": 0, "logaddexp": 2 * EXP + LOG, "logaddexp2": 2 * EXP + LOG,
    "xlogy": LOG + MUL, "lerp_scalar": FMA + ADD, "eq": 0, "ne": 0, "lt": 0, "le": 0, "gt": 0, "ge": 0,
    "logical_and": 0, "logical_or": 0, "logical_xor": 0, "bitwise_and": 0, "bitwise_or": 0,
    "bitwise_xor": 0, "__and__": 0, "__or__": 0, "__xor__": 0, "bitwise_left_shift": 0,
    "bitwise_right_shift": 0, "__lshift__": 0, "__rshift__": 0, "heaviside": 0, "isclose": FMA,
    "ldexp": MUL, "nextafter": 0, "gcd": 0, "lcm": 0, "complex": 0, "polar": TRIG, "prelu": MUL,
    "_prelu_kernel": MUL, "masked_fill": 0, "gelu_backward": GELU + EXP + 4 * FMA,
    "silu_backward": SILU + 2 * FMA, "threshold_backward": 0, "sigmoid_backward": 3 * MUL,
    "tanh_backward": FMA + MUL, "hardtanh_backward": 0, "leaky_relu_backward": MUL,
    "elu_backward": EXP + MUL, "hardsigmoid_backward": MUL, "hardswish_backward": FMA + MUL,
    "softplus_backward": SIGMOID + MUL, "mish_backward": EXP + LOG1P + SIGMOID + 4 * FMA,
    "logit_backward": DIV + MUL, "softshrink_backward": 0, "hardshrink_backward": 0,
    "rrelu_with_noise_backward": MUL,
}  # fmt: skip
#: Operators of three tensors.
TERNARY = {
    "addcmul": FMA + MUL, "addcdiv": DIV + FMA, "lerp": FMA + ADD, "where": 0, "_s_where": 0,
    "log_sigmoid_backward": SIGMOID + MUL, "_prelu_kernel_backward": FMA, "clamp_tensor": 0,
}  # fmt: skip
#: Operators whose tensors do not come first.
_APART = {"elu_backward": (0, 5)}
_OPERANDS = {**dict.fromkeys(UNARY, 1), **dict.fromkeys(BINARY, 2), **dict.fromkeys(TERNARY, 3)}
#: FLOPs an element of every operator above; also read for the names that Inductor gives its fused kernels.
FLOPS = {**UNARY, **BINARY, **TERNARY}
_TO_BOOL = frozenset({
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not",
    "isnan", "isinf", "isfinite", "isclose", "signbit",
})  # fmt: skip
_TO_FLOAT = frozenset({
    "div", "true_divide", "divide", "reciprocal", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log2",
    "log10", "log1p", "sigmoid", "tanh", "sin", "cos", "erf",
})  # fmt: skip
_NAMES = [
    f"aten::{name}{suffix}" for name in _OPERANDS for suffix in ("", "_") if not name.endswith("_backward_")
]


@cost(*_NAMES)
def elementwise(call: OpCall) -> Cost:
    """Reads each operand once, after broadcasting; writes the result in the promoted dtype.

    An in-place operator writes its first operand's shape and dtype. ``addcmul_`` is counted with one factor
    read, not two, where the two have the same shape: in ``torch.optim`` both are the gradient (Adam, Adagrad,
    RMSprop).
    """
    name = call.name.removeprefix("aten::")
    in_place = name.endswith("_") and not name.endswith("__")
    name = name.rstrip("_") if in_place else name
    positions = _APART.get(name) or tuple(range(_OPERANDS.get(name, 1)))
    operands = tensors(call, *positions)
    if not operands or len(operands) < min(len(call.inputs), 1):
        raise Unknown("operands not recorded")
    _reject_unreadable(call, positions)
    shape = broadcast(*(arg.shape for arg in operands))
    if in_place:
        if shape != operands[0].shape:
            raise Unknown("the result does not fit in place")
        dtype = operands[0].dtype
    elif name in _TO_BOOL:
        dtype = "bool"
    else:
        dtype = promote(*(operands[1:] if name in ("where", "_s_where") and len(operands) > 1 else operands))
        if name in _TO_FLOAT and not is_float(dtype):
            dtype = "fp32"
    if call.name == "aten::addcmul_" and len(operands) == 3 and operands[1].shape == operands[2].shape:
        operands = operands[:2]
    elements = math.prod(shape)
    compute = promote(*operands)
    flops = float(FLOPS[name] * elements) if is_float(compute) or is_float(dtype) else 0.0
    read = sum(footprint(arg) for arg in operands)
    return Cost(
        flops, read, elements * itemsize(dtype), vector_pipe(compute if is_float(compute) else dtype, flops)
    )


def _reject_unreadable(call: OpCall, positions: tuple[int, ...]) -> None:
    """A tensor operand of unknown dtype or empty shape leaves the cost unknown."""
    given = [at for at in positions if at < len(call.inputs) and call.inputs[at] is not None]
    if len(given) != len(tensors(call, *given)):
        raise Unknown("an operand cannot be read")


def elementwise_binary(call: OpCall, flops_per_element: int) -> Cost:
    """Two tensors, broadcast against each other, to one."""
    a, b = tensors(call, 0, 1)
    shape, dtype = broadcast(a.shape, b.shape), promote(a, b)
    flops = float(flops_per_element * math.prod(shape))
    return Cost(
        flops, footprint(a) + footprint(b), math.prod(shape) * itemsize(dtype), vector_pipe(dtype, flops)
    )


@cost("aten::glu")
def glu(call: OpCall) -> Cost:
    """``a * sigmoid(b)`` of the two halves of the input: the result is half its size."""
    (x,) = tensors(call, 0)
    flops = (SIGMOID + MUL) * x.numel / 2
    return Cost(flops, footprint(x), x.numel / 2 * itemsize(x.dtype), vector_pipe(x.dtype))


@cost("aten::glu_backward")
def glu_backward(call: OpCall) -> Cost:
    """Reads the gradient (half size) and the input, writes the input's gradient."""
    grad, x = tensors(call, 0, 1)
    flops = (SIGMOID + 4 * MUL) * grad.numel
    return Cost(flops, footprint(grad) + footprint(x), x.numel * itemsize(x.dtype), vector_pipe(x.dtype))
