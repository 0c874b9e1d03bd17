"""The bundled weight-only products: packed weights read once, products at the rate of x's type.

For few rows the words, scales and zero points are nearly all that moves. For many rows of x, and for the
gradient, the weight is unpacked into a temporary matrix: the unpacking kernel has a cost of its own, and the
product the cost of any other.
"""

from __future__ import annotations

from advisor.roofline.costs.args import Unknown, footprint, integer, itemsize, optional, size_bytes, tensor
from advisor.roofline.costs.conventions import ADD, MUL
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import Result, assign, cost
from advisor.roofline.costs.roles import matrix_pipe

#: The family of operators that these count under.
FAMILY = "matmul"

#: Columns are filled up to whole blocks.
_BLOCK = 128


def _packed_bytes(call: OpCall) -> float:
    """Words, scales and, where given, zero points: arguments 1 to 3."""
    given = tensor(call, 1), tensor(call, 2), optional(call, 3)
    return sum(footprint(t) for t in given if t)


def _rows_of_words(words: Tensor, columns: int, bits: int) -> int:
    """Rows of the weight.

    Raises:
        Unknown: the words are not as many as that many columns take.
    """
    filled = -(-columns // _BLOCK) * _BLOCK
    if len(words.shape) != 2 or bits not in (4, 8) or words.shape[1] * 32 != filled * bits:
        raise Unknown("packed words contradict the columns")
    return words.shape[0]


def _product(call: OpCall, a: Tensor, rows: int, n: int, k: int, added: float) -> Result:
    packed, width = _packed_bytes(call), itemsize(a.dtype)
    flops, written = 2.0 * rows * n * k, size_bytes((rows, n), a.dtype)
    pipe = matrix_pipe("", a.dtype, call.settings)
    whole = Cost(flops, footprint(a) + packed + added, written, pipe)
    plain = Cost(flops, footprint(a) + packed + added, written, "vector_fp32")
    # Of the weight as it is unpacked: (out, in) forward, the same transposed backward.
    matrix = float(n * k * width)
    unpacking = Cost(float((ADD + MUL) * n * k), packed, matrix, "vector_fp32")
    matmul = Cost(flops, footprint(a) + matrix + added, written, pipe)
    return assign(
        call, matmul, ("_gemv_kernel", plain), ("_stream_kernel", whole), ("_split_kernel", whole),
        ("_tile_kernel", whole), ("_dequantize_kernel", unpacking), whole=whole,
    )  # fmt: skip


@cost("advisor_kernels::weight_only_linear")
def forward(call: OpCall) -> Result:
    """``(rows, in) @ (out, in).T + bias``."""
    x, bias = tensor(call, 0), optional(call, 4)
    if len(x.shape) != 2:
        raise Unknown("x is not a matrix")
    rows, k = x.shape
    n = _rows_of_words(tensor(call, 1), k, integer(call, 5))
    return _product(call, x, rows, n, k, footprint(bias) if bias else 0.0)


@cost("advisor_kernels::weight_only_linear_backward")
def backward(call: OpCall) -> Result:
    """``(rows, out) @ (out, in)``."""
    dy, k = tensor(call, 0), integer(call, 5)
    n = _rows_of_words(tensor(call, 1), k, integer(call, 4))
    if len(dy.shape) != 2 or dy.shape[1] != n:
        raise Unknown("the gradient contradicts the weight")
    return _product(call, dy, dy.shape[0], k, n, 0.0)
