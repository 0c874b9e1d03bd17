"""Gated activations and rotations of vLLM, SGLang, Liger and flash-attn."""

from __future__ import annotations

from advisor.roofline.costs.args import Unknown, footprint, itemsize, tensor, tensors, vector_pipe
from advisor.roofline.costs.conventions import FMA, GELU, MUL, SIGMOID, SILU, TANH
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.pointwise import elementwise_binary
from advisor.roofline.costs.registry import cost

#: The family of operators that these count under.
FAMILY = "pointwise"


def _size(x: Tensor) -> float:
    return x.numel * itemsize(x.dtype)


#: FLOPs an element of the gate's function in vLLM's and SGLang's ``*_and_mul`` operators.
_GATED = {"silu": SILU, "gelu": GELU, "gelu_tanh": TANH + 6 * MUL, "fatrelu": 0, "mul_and_silu": SILU}


@cost(*(f"{space}::{name}_and_mul" for space in ("_C", "sgl_kernel") for name in _GATED if "mul" not in name))
@cost("_C::mul_and_silu")
def gated(call: OpCall) -> Cost:
    """``f(x1) * x2`` of the halves of the input's rows: (out, x)."""
    out, x = tensors(call, 0, 1)
    if x.numel != 2 * out.numel:
        raise Unknown("the input is not twice the output")
    name = call.name.rpartition("::")[2]
    flops = float((_GATED[name.removesuffix("_and_mul") if name not in _GATED else name] + MUL) * out.numel)
    return Cost(flops, footprint(x), out.numel * itemsize(out.dtype), vector_pipe(x.dtype, flops))


@cost("LigerSiLUMulFunction", "LigerGELUMulFunction")
def liger_gated(call: OpCall) -> Cost:
    """Liger's ``silu(a) * b``, ``gelu(a) * b``: two tensors in, one out."""
    return elementwise_binary(call, (SILU if "SiLU" in call.name else TANH + 6 * MUL) + MUL)


@cost("_C::rotary_embedding")
def rotary(call: OpCall) -> Cost:
    """vLLM's rotation of queries and keys in place: two multiply-adds an element, a table's row a token."""
    positions, query, table = tensors(call, 0, 1, 4)
    keys = [arg for arg in tensors(call, 2) if arg.shape]
    moved = sum(arg.numel * itemsize(arg.dtype) for arg in [query, *keys])
    rows = min(positions.numel, table.shape[0]) * table.shape[-1] * itemsize(table.dtype)
    flops = float(2 * FMA * sum(arg.numel for arg in [query, *keys]))
    return Cost(flops, moved + rows + footprint(positions), moved, vector_pipe(query.dtype))


@cost("LigerSiLUMulFunctionBackward", "LigerGELUMulFunctionBackward")
def gated_backward(call: OpCall) -> Cost:
    """Reads the gradient and both inputs, writes both gradients over the inputs: all of one shape."""
    grad = tensor(call, 0)
    per_element = SILU + SIGMOID + 5 * MUL if "SiLU" in call.name else 2 * TANH + 12 * MUL
    size = _size(grad)
    return Cost(float(per_element * grad.numel), 3 * size, 2 * size, vector_pipe(grad.dtype))


@cost("LigerRopeFunction", "ApplyRotaryEmb", "ApplyRotaryEmbQKV_")
def rotary_functions(call: OpCall) -> Cost:
    """The first tensors are turned, by tables of cosines and sines: q and k for Liger, x or qkv else."""
    turned = [tensor(call, index) for index in range(2 if call.name.startswith("Liger") else 1)]
    tables = [tensor(call, len(turned) + index) for index in range(2)]
    # Of a packed qkv, (batch, tokens, 3, heads, dim), v stays as it is.
    share = 2 / 3 if call.name.endswith("QKV_") else 1.0
    moved = share * sum(map(_size, turned))
    flops = 2.0 * FMA * share * sum(x.numel for x in turned)
    return Cost(flops, moved + sum(map(_size, tables)), moved, vector_pipe(turned[0].dtype))
