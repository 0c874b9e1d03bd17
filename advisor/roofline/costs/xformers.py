"""xFormers' operators beside attention (see `attention_layouts`): SwiGLU and indexing.

Sources: ``csrc/swiglu/swiglu_op.cpp``, ``ops/indexing.py``. ``xformers::swiglu_packedw`` and the
sequence-parallel ``xformers_python::`` operators call others, which have costs of their own.
"""

from __future__ import annotations

from advisor.roofline.costs import roles
from advisor.roofline.costs.args import Unknown, footprint, itemsize, optional, tensor, vector_pipe
from advisor.roofline.costs.conventions import FMA, MUL, SIGMOID, SILU
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import cost

#: The family of operators that these count under.
FAMILY = "matmul"


def _pipe(call: OpCall, dtype: str) -> str:
    kernel = next((launch.name for launch in call.launches if roles.is_matrix(launch.name)), "")
    return roles.matrix_pipe(kernel, dtype, call.settings)


@cost("xformers::dual_gemm_silu_identity_mul")
def dual_product(call: OpCall) -> Cost:
    """``silu(x w1^T) * (x w2^T)``; both products are kept for the backward pass: three results."""
    x, first, second = tensor(call, 0), tensor(call, 1), tensor(call, 3)
    if (
        len(x.shape) != 2
        or len(first.shape) != 2
        or first.shape != second.shape
        or first.shape[1] != x.shape[1]
    ):
        raise Unknown("weights and input contradict each other")
    read = footprint(x) + footprint(first) + footprint(second)
    written = 3 * x.shape[0] * first.shape[0] * itemsize(x.dtype)
    return Cost(4.0 * x.numel * first.shape[0], read, written, _pipe(call, x.dtype))


@cost("xformers::silu_bw_fused")
def silu_backward(call: OpCall) -> Cost:
    """From both products and the gradient: both gradients, and the activation once more."""
    a, b, grad = (tensor(call, index) for index in range(3))
    if not a.shape == b.shape == grad.shape:
        raise Unknown("sizes contradict each other")
    per_element = SILU + SIGMOID + 5 * MUL
    read = footprint(a) + footprint(b) + footprint(grad)
    return Cost(float(per_element * a.numel), read, 3 * a.numel * itemsize(a.dtype), vector_pipe(a.dtype))


@cost("xformers::gemm_fused_operand_sum")
def product_and_sum(call: OpCall) -> Cost:
    """``a b``, and the sum of a's rows on the way."""
    a, b = tensor(call, 0), tensor(call, 1)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        raise Unknown("inner sizes differ")
    written = (a.shape[0] * b.shape[1] + a.shape[0]) * itemsize(a.dtype)
    return Cost(2.0 * a.numel * b.shape[1], footprint(a) + footprint(b), written, _pipe(call, a.dtype))


@cost("_ScaledIndexAdd")
def scaled_index_add(call: OpCall) -> Cost:
    """``x[index] += alpha * scaling * source``: the rows meant are read, and written in place."""
    x, index, source, scaling = tensor(call, 0), tensor(call, 1), tensor(call, 2), optional(call, 3)
    if source.shape[0] != index.numel or source.shape[1:] != x.shape[1:]:
        raise Unknown("index and source contradict each other")
    rows = source.numel * itemsize(x.dtype)
    read = footprint(source) + rows + footprint(index) + (footprint(scaling) if scaling else 0.0)
    return Cost(float((FMA + MUL) * source.numel), read, rows, vector_pipe(x.dtype))


@cost("_IndexSelectCat")
def index_select_cat(call: OpCall) -> tuple[Cost | None, ...] | Cost:
    """Sources, then as many indices: the rows picked of each, one launch a pair."""
    given = [arg for arg in call.inputs if isinstance(arg, Tensor)]
    half = len(given) // 2
    pairs = [(tensor(call, at), tensor(call, half + at)) for at in range(half)]
    if not pairs or len(given) % 2 or any(len(x.shape) != 2 or len(index.shape) != 1 for x, index in pairs):
        raise Unknown("not pairs of a source and an index")
    each = []
    for x, index in pairs:
        rows = index.numel * x.shape[1] * itemsize(x.dtype)
        each.append(Cost(0.0, min(rows, footprint(x)) + footprint(index), rows, "none"))
    if len(call.launches) == len(each):
        return tuple(each)
    return Cost(0.0, sum(one.bytes_read for one in each), sum(one.bytes_written for one in each), "none")
