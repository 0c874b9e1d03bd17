"""Embedding tables: rows are read where they are looked up, and gradients summed by row.

Which rows is not recorded: as many are distinct as in draws that are all as likely.
"""

from __future__ import annotations

import math

from advisor.roofline.costs.args import (
    Unknown,
    footprint,
    integer,
    itemsize,
    optional,
    tensor,
    vector_pipe,
)
from advisor.roofline.costs.model import Cost, OpCall
from advisor.roofline.costs.registry import Result, assign, cost
from advisor.roofline.costs.traffic import distinct, looked_up


@cost("aten::embedding")
def embedding(call: OpCall) -> Cost:
    """A row for each distinct index."""
    table, index = tensor(call, 0), tensor(call, 1)
    if len(table.shape) != 2:
        raise Unknown("not a table")
    rows, width = table.shape
    row = width * itemsize(table.dtype)
    read, again = looked_up(call, index.numel, rows, row)
    return Cost(0.0, read + footprint(index), index.numel * row, "none", again)


@cost("aten::embedding_dense_backward", "aten::embedding_backward")
def embedding_backward(call: OpCall) -> Result:
    """Sort the indices with their positions, sum the gradient's rows in segments, scatter the sums.

    The segment sums are fp32 partial rows, one for each distinct index (long segments have more). Zeroing the
    table is a fill of its own (aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu).
    """
    grad, index = tensor(call, 0), tensor(call, 1)
    if grad.numel % index.numel:
        raise Unknown("gradient and indices contradict each other")
    rows, width = index.numel, grad.numel // index.numel
    segments = distinct(rows, integer(call, 2))
    table = segments * width * itemsize(grad.dtype)
    partial = segments * width * 4.0
    pipe = vector_pipe(grad.dtype)
    read = footprint(grad) + footprint(index)
    whole = Cost(float(grad.numel), read, table, pipe)
    sum_rows = Cost(float(grad.numel), read, partial, pipe)
    scatter = Cost(float(grad.numel), partial, table, pipe)
    pairs = 16.0 * rows
    sort_pass = Cost(0.0, pairs, pairs, "none")
    keys = Cost(0.0, 8.0 * rows, 8.0 * rows, "none")
    return assign(
        call,
        whole,
        (r"compute_grad_weight", sum_rows),
        (r"sum_and_scatter", scatter),
        (r"histogram|krn_|segment|scan|unique|compact|exclusivesum|adjacent|arange|with_index", keys),
        (r"onesweep|radix|sort|merge", sort_pass),
        whole=whole,
    )


@cost("aten::_embedding_bag", "aten::_embedding_bag_forward_only", "aten::embedding_bag")
def bag(call: OpCall) -> Result:
    """Rows looked up, summed by bag: an addition an element."""
    table, index, offsets = tensor(call, 0), tensor(call, 1), tensor(call, 2)
    row = table.shape[-1] * itemsize(table.dtype)
    read = distinct(index.numel, table.shape[0]) * row + footprint(index) + footprint(offsets)
    written = offsets.numel * row + 2 * footprint(index)
    main = Cost(float(index.numel * table.shape[-1]), read, written, vector_pipe(table.dtype))
    keys = Cost(0.0, footprint(index), footprint(index), "none")
    return assign(call, main, (r"fill|copy|arange|scan", keys))


@cost("aten::_embedding_bag_dense_backward", "aten::_embedding_bag_per_sample_weights_backward")
def bag_backward(call: OpCall) -> Result:
    """The bags' gradients are summed by row of the table in fp32, and the sums scattered into it.

    Summing reads the sorted indices' positions, their segments and their bags.
    """
    grad, index = tensor(call, 0), tensor(call, 1)
    width = grad.shape[-1]
    segments = float(index.numel)
    if call.name == "aten::_embedding_bag_dense_backward":
        segments = distinct(index.numel, integer(call, 5))
    table, partial = segments * width * itemsize(grad.dtype), segments * width * 4.0
    flops, pipe = float(index.numel * width), vector_pipe(grad.dtype)
    positions = 3 * footprint(index)
    whole = Cost(flops, footprint(grad) + footprint(index), table, pipe)
    sum_rows = Cost(flops, footprint(grad) + positions, partial, pipe)
    scatter = Cost(segments * width, partial, table, pipe)
    pairs = Cost(0.0, 16.0 * index.numel, 16.0 * index.numel, "none")
    return assign(
        call,
        whole,
        (r"compute_grad_weight", sum_rows),
        (r"sum_and_scatter", scatter),
        (r"radix|sort|scan|histogram|unique|arange|with_index|krn_|segment|compact", pairs),
        whole=whole,
    )


@cost("aten::embedding_renorm_")
def renorm(call: OpCall) -> Cost:
    """Reads and rescales the rows looked up."""
    table, index = tensor(call, 0), optional(call, 1)
    if index is None:
        raise Unknown("indices not recorded")
    moved = min(table.shape[0], index.numel) * math.prod(table.shape[1:]) * itemsize(table.dtype)
    return Cost(3 * moved / itemsize(table.dtype), moved, moved, vector_pipe(table.dtype))
