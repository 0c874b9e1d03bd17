"""Matrix products: ``2 m n k`` FLOPs a product; each operand read once, the result written once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from advisor.roofline.costs import roles
from advisor.roofline.costs.args import (
    Unknown,
    broadcast,
    footprint,
    itemsize,
    named_dtype,
    optional,
    size_bytes,
    tensor,
)
from advisor.roofline.costs.model import Cost, Launch, OpCall, Tensor
from advisor.roofline.costs.registry import Result, cost, split
from advisor.roofline.costs.tiles import product_padding
from advisor.roofline.costs.traffic import Product, gemm_reread, split_count


def product(
    call: OpCall,
    a: Tensor,
    b: Tensor,
    m: int,
    n: int,
    k: int,
    *,
    batch: int = 1,
    added: Tensor | None = None,
    out_dtype: str | None = None,
) -> Cost | tuple[Cost | None, ...]:
    """The cost of ``batch`` products of ``m x k`` by ``k x n``, with an optional term added to the result.

    FLOPs ``2 batch m n k`` (Golub & Van Loan, Matrix Computations, 1.1.11), and what whole tiles add; a
    complex multiply-add is four real ones. A kernel that sums the partial results of a split k reads each of
    them.
    """
    dtype = out_dtype or a.dtype
    real = batch * (4 if a.dtype.startswith("complex") else 1)
    flops = 2.0 * real * m * n * k
    written = size_bytes((batch, m, n), dtype)
    read = footprint(a) + footprint(b) + (footprint(added) if added else 0.0)

    def main(launch: Launch | None) -> Cost:
        pipe = roles.matrix_pipe(launch.name if launch else "", a.dtype, call.settings)
        if launch is None:
            return Cost(flops, read, written, pipe)
        again, padding = gemm_reread(call, launch, problem), real * product_padding(launch.name, m, n, k)
        return Cost(flops + padding, read + again, written, pipe, again, padding)

    problem = Product(m, n, k, itemsize(a.dtype), itemsize(b.dtype), itemsize(dtype), batch)
    if not call.launches:
        return main(None)
    return by_role(call.launches, main, lambda launch: _sum_of_partials(call, launch, problem))


def _sum_of_partials(call: OpCall, launch: Launch, problem: Product) -> Cost:
    """A kernel beside the product: the sum over slices of k, each a result in fp32 or, as named, 16 bits."""
    elements = problem.batch * problem.m * problem.n
    written = elements * problem.width_out
    slices = max(
        (split_count(matrix, problem) for matrix in call.launches if roles.is_matrix(matrix.name)), default=1
    )
    width = 2 if re.search(r"int, __(nv_bfloat16|half)", launch.name) else 4
    return Cost(float(slices * elements), max(slices * elements * width, written), written, "vector_fp32")


def by_role(
    launches: tuple[Launch, ...], main: Callable[[Launch], Cost], helper: Callable[[Launch], Cost]
) -> tuple[Cost | None, ...]:
    """Give the product to the matrix kernels (shared, if several) and `helper` to each kernel beside them."""
    matrix = [launch for launch in launches if roles.is_matrix(launch.name)]
    if not matrix:
        matrix = [launch for launch in launches if roles.role(launch.name) == "other"]
    if not matrix:
        raise Unknown("no matrix kernel among the launches")
    shares = iter(split(main(matrix[0]), matrix))
    return tuple(next(shares) if launch in matrix else _beside(launch, helper) for launch in launches)


def _beside(launch: Launch, helper: Callable[[Launch], Cost]) -> Cost:
    return Cost(0.0, 0.0, 0.0, "none") if roles.role(launch.name) == "workspace" else helper(launch)


def _matrix(arg: Tensor, rank: int) -> Tensor:
    if len(arg.shape) != rank:
        raise Unknown(f"not a {rank}-d tensor")
    return arg


def _mm(call: OpCall, first: int, added: Tensor | None = None, out_dtype: str | None = None) -> Result:
    a, b = _matrix(tensor(call, first), 2), _matrix(tensor(call, first + 1), 2)
    if a.shape[1] != b.shape[0]:
        raise Unknown("inner sizes differ")
    (m, k), n = a.shape, b.shape[1]
    if added:
        broadcast(added.shape, (m, n))
    return product(call, a, b, m, n, k, added=added, out_dtype=out_dtype)


@cost("aten::mm")
def mm(call: OpCall) -> Result:
    """``(m, k) @ (k, n)``."""
    return _mm(call, 0)


@cost("aten::_int_mm", "aten::_int_mm_out")
def int_mm(call: OpCall) -> Result:
    """``(m, k) @ (k, n)``, int8 in, int32 out."""
    return _mm(call, 0, out_dtype="int32")


@cost("aten::addmm", "aten::addmm_", "aten::_addmm_activation", "aten::sspaddmm")
def addmm(call: OpCall) -> Result:
    """``input + (m, k) @ (k, n)``."""
    return _mm(call, 1, added=tensor(call, 0))


def _bmm(call: OpCall, first: int, added: Tensor | None = None, summed: bool = False) -> Result:
    a, b = _matrix(tensor(call, first), 3), _matrix(tensor(call, first + 1), 3)
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise Unknown("batch or inner sizes differ")
    (batch, m, k), n = a.shape, b.shape[2]
    if summed:
        return product(call, a, b, m, n, k * batch, added=added)
    return product(call, a, b, m, n, k, batch=batch, added=added)


@cost("aten::bmm")
def bmm(call: OpCall) -> Result:
    """``(b, m, k) @ (b, k, n)``."""
    return _bmm(call, 0)


@cost("aten::baddbmm", "aten::baddbmm_")
def baddbmm(call: OpCall) -> Result:
    """``input + (b, m, k) @ (b, k, n)``; with ``beta = 0`` the input is not read."""
    added = tensor(call, 0)
    beta = call.concrete[3] if len(call.concrete) > 3 else ""
    return _bmm(call, 1, added=None if beta in ("0", "0.", "0.0") else added)


@cost("aten::addbmm", "aten::addbmm_")
def addbmm(call: OpCall) -> Result:
    """``input + sum over b of (b, m, k) @ (b, k, n)``."""
    return _bmm(call, 1, added=tensor(call, 0), summed=True)


@cost(
    "aten::linear",
    "aten::mkldnn_linear",
    "aten::_mkl_linear",
    "mkl::_mkl_linear",
    "mkldnn::_linear_pointwise",
)
def linear(call: OpCall) -> Result:
    """``(..., k) @ (n, k).T + bias``."""
    x, weight = tensor(call, 0), _matrix(tensor(call, 1), 2)
    n, k = weight.shape
    if not x.shape or x.shape[-1] != k:
        raise Unknown("inner sizes differ")
    return product(call, x, weight, x.numel // k, n, k, added=optional(call, 2))


@cost("aten::matmul")
def matmul(call: OpCall) -> Result:
    """``torch.matmul``: leading dimensions broadcast; a vector counts as one row or one column."""
    a, b = tensor(call, 0), tensor(call, 1)
    if not a.shape or not b.shape:
        raise Unknown("a scalar has no product")
    m, k = (1, a.shape[0]) if len(a.shape) == 1 else a.shape[-2:]
    inner, n = (b.shape[0], 1) if len(b.shape) == 1 else b.shape[-2:]
    if k != inner:
        raise Unknown("inner sizes differ")
    batch = math.prod(broadcast(a.shape[:-2], b.shape[:-2]))
    return product(call, a, b, m, n, k, batch=batch)


@cost("aten::mv", "aten::addmv", "aten::addmv_", "aten::dot", "aten::vdot")
def vector_product(call: OpCall) -> Cost:
    """Matrix by vector, or vector by vector: two FLOPs an element of the larger; never on tensor cores."""
    first = 1 if "addmv" in call.name else 0
    a, b = tensor(call, first), tensor(call, first + 1)
    if not a.shape or a.shape[-1] != b.shape[0]:
        raise Unknown("inner sizes differ")
    rows = math.prod(a.shape[:-1])
    read = footprint(a) + footprint(b) + (footprint(tensor(call, 0)) if first else 0.0)
    return Cost(
        2.0 * a.numel,
        read,
        size_bytes((rows,), a.dtype),
        "vector_fp64" if a.dtype == "fp64" else "vector_fp32",
    )


@cost("aten::addr", "aten::ger", "aten::outer")
def outer(call: OpCall) -> Cost:
    """Outer product of two vectors, added to a matrix for ``addr``."""
    first = 1 if call.name == "aten::addr" else 0
    a, b = _matrix(tensor(call, first), 1), _matrix(tensor(call, first + 1), 1)
    size = a.shape[0] * b.shape[0]
    read = footprint(a) + footprint(b) + (footprint(tensor(call, 0)) if first else 0.0)
    return Cost(float(size * (2 if first else 1)), read, size * itemsize(a.dtype), "vector_fp32")


@cost("aten::_scaled_mm")
def scaled_mm(call: OpCall) -> Result:
    """fp8 ``(m, k) @ (k, n)`` with scales; without a recorded output dtype the result is taken as 16-bit."""
    return _mm(call, 0, out_dtype=named_dtype(call, 6) or "bf16")


@cost("aten::_grouped_mm", "aten::_scaled_grouped_mm")
def grouped_mm(call: OpCall) -> Result:
    """Grouped products: 2-d by 3-d routes each row of A to one group; 3-d by 3-d is a batch.

    2-d by 2-d sums over rows of unknown group sizes: each group makes a full ``m x n`` result from its part
    of k.
    """
    a, b = tensor(call, 0), tensor(call, 1)
    out_dtype = a.dtype if a.dtype != "fp8" else "bf16"
    if len(a.shape) == 3 and len(b.shape) == 3:
        return _bmm(call, 0)
    if len(a.shape) == 2 and len(b.shape) == 3 and a.shape[1] == b.shape[1]:
        return product(call, a, b, a.shape[0], b.shape[2], a.shape[1], out_dtype=out_dtype)
    if len(a.shape) == 3 and len(b.shape) == 2 and a.shape[2] == b.shape[0]:
        return product(call, a, b, a.shape[1], b.shape[1], a.shape[2], out_dtype=out_dtype)
    if len(a.shape) == 2 and len(b.shape) == 2 and a.shape[1] == b.shape[0]:
        return product(call, a, b, a.shape[0], b.shape[1], a.shape[1], out_dtype=out_dtype)
    raise Unknown("shapes of no grouped product")


@cost("aten::_weight_int4pack_mm", "aten::_weight_int8pack_mm")
def packed_mm(call: OpCall) -> Cost:
    """Weight-only quantised product: int4 or int8 weights, read packed, are widened to A's type."""
    a, weight = _matrix(tensor(call, 0), 2), tensor(call, 1)
    m, k = a.shape
    per_weight = 8 if "int4" in call.name else 1
    n = weight.numel * (per_weight if weight.dtype == "int32" else 2 if "int4" in call.name else 1) // k
    return Cost(
        2.0 * m * n * k, footprint(a) + footprint(weight), m * n * itemsize(a.dtype), f"tensor_{a.dtype}"
    )
