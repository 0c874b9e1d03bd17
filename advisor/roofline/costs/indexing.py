"""Gather, scatter, index and masked operators: the indices and as many elements as they pick."""

from __future__ import annotations

import math

from advisor.roofline.costs.args import (
    Unknown,
    broadcast,
    footprint,
    integer,
    itemsize,
    size_bytes,
    tensor,
    text,
    vector_pipe,
)
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import Result, assign, cost
from advisor.roofline.costs.traffic import FETCH_BYTES, distinct, looked_up

_INDEX_BYTES = 8.0


def _scattered(x: Tensor, draws: float) -> float:
    """Bytes fetched to see single elements in no order: whole fetches, each once."""
    fetches = footprint(x) / FETCH_BYTES
    return min(distinct(draws, max(1.0, fetches)) * FETCH_BYTES, footprint(x))


def _touched(x: Tensor, draws: float) -> float:
    """Bytes of the elements that so many updates in no order touch, each once."""
    return distinct(draws, x.numel) * itemsize(x.dtype)


@cost("aten::gather", "aten::take_along_dim", "aten::take")
def gather(call: OpCall) -> Cost:
    """One element for each index; whole rows where an index is expanded over them, and read once."""
    x = tensor(call, 0)
    index = tensor(call, 1 if call.name == "aten::take" else 2)
    written = index.numel * itemsize(x.dtype)
    is_row = index.strides is not None and len(index.shape) == 2 and index.strides[1] == 0 < index.shape[1]
    if is_row and len(x.shape) == 2 and index.shape[1] == x.shape[1] > 1:
        read, again = looked_up(call, index.shape[0], x.shape[0], x.shape[1] * itemsize(x.dtype))
        return Cost(0.0, read + footprint(index), written, "none", again)
    return Cost(0.0, _scattered(x, index.numel) + footprint(index), written, "none")


@cost("aten::index_select")
def index_select(call: OpCall) -> Cost:
    """One slice for each index."""
    x, index = tensor(call, 0), tensor(call, 2)
    dim = integer(call, 1)
    if not -len(x.shape) <= dim < len(x.shape):
        raise Unknown("no such dimension")
    slice_bytes = footprint(x) / x.shape[dim]
    read, again = looked_up(call, index.numel, x.shape[dim], slice_bytes)
    count = x.numel // x.shape[dim] * index.numel
    return Cost(0.0, read + footprint(index), count * itemsize(x.dtype), "none", again)


def _index_lists(call: OpCall, position: int) -> list[Tensor]:
    listed = call.inputs[position] if position < len(call.inputs) else None
    if not isinstance(listed, tuple):
        raise Unknown("indices not recorded")
    return [item for item in listed if item.shape]


def _may_be_mask(x: Tensor, indices: list[Tensor]) -> bool:
    """A list does not tell int64 from bool: an index shaped like x's leading dimensions may be a mask."""
    return any(len(item.shape) > 1 and item.shape == x.shape[: len(item.shape)] for item in indices)


@cost("aten::index")
def index(call: OpCall) -> Cost:
    """``x[i, j, ...]``: the broadcast indices times the dimensions that are not indexed."""
    x, indices = tensor(call, 0), _index_lists(call, 1)
    if not indices or len(indices) > len(x.shape) or _may_be_mask(x, indices):
        raise Unknown("a mask's count is not recorded")
    points = math.prod(broadcast(*(item.shape for item in indices)))
    places = math.prod(x.shape[: len(indices)])
    read, again = looked_up(call, points, places, footprint(x) / places)
    read += sum(item.numel for item in indices) * _INDEX_BYTES
    return Cost(0.0, read, points * x.numel // places * itemsize(x.dtype), "none", again)


@cost("aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::_unsafe_index_put")
def index_put(call: OpCall) -> Result:
    """Writes the values at the indices; accumulating reads them first, and sorts the indices to do so."""
    x, values = tensor(call, 0), tensor(call, 2)
    indices = _index_lists(call, 1)
    if not indices or _may_be_mask(x, indices):
        raise Unknown("a mask's count is not recorded")
    points = math.prod(broadcast(*(item.shape for item in indices)))
    places = math.prod(x.shape[: len(indices)])
    count = points * x.numel // places
    accumulates = text(call, 3).lower() == "true"
    index_bytes = sum(item.numel for item in indices) * _INDEX_BYTES
    moved = distinct(points, places) / places * x.numel * itemsize(x.dtype)
    flops = float(count) if accumulates else 0.0
    read = footprint(values) + index_bytes + (moved if accumulates else 0.0)
    whole = Cost(flops, read, moved, vector_pipe(x.dtype, flops))
    keys = Cost(0.0, 2 * _INDEX_BYTES * points, 2 * _INDEX_BYTES * points, "none")
    return assign(
        call, whole, (r"radix|sort|scan|histogram|elementwise_kernel_with_index|arange", keys), whole=whole
    )


@cost(
    "aten::scatter_",
    "aten::scatter",
    "aten::scatter_add_",
    "aten::scatter_add",
    "aten::scatter_reduce_",
    "aten::scatter_reduce",
)
def scatter(call: OpCall) -> Result:
    """One element for each index: read from the source, written (or added) into x.

    Out of place x is copied first, by an operator of its own.
    """
    x, where = tensor(call, 0), tensor(call, 2)
    source = call.inputs[3] if len(call.inputs) > 3 else None
    adds = "add" in call.name or "reduce" in call.name
    count, touched = where.numel, _touched(x, where.numel)
    given = count * itemsize(x.dtype) if isinstance(source, Tensor) and source.shape else 0.0
    flops = float(count) if adds else 0.0
    read = footprint(where) + given + (touched if adds else 0.0)
    main = Cost(flops, read, touched, vector_pipe(x.dtype, flops))
    if call.launches or call.name.endswith("_"):
        return main
    size = size_bytes(x.shape, x.dtype)
    return Cost(flops, read + footprint(x), touched + size, main.pipe)


@cost("aten::index_add_", "aten::index_add", "aten::index_copy_", "aten::index_copy", "aten::index_reduce_")
def index_add(call: OpCall) -> Cost:
    """Adds (copies) a slice of the source for each index."""
    x, where, source = tensor(call, 0), tensor(call, 2), tensor(call, 3)
    adds = "copy" not in call.name
    dim = integer(call, 1)
    if not -len(x.shape) <= dim < len(x.shape):
        raise Unknown("no such dimension")
    moved = distinct(where.numel, x.shape[dim]) / x.shape[dim] * x.numel * itemsize(x.dtype)
    flops = float(source.numel) if adds else 0.0
    return Cost(
        flops,
        footprint(source) + footprint(where) + (moved if adds else 0.0),
        moved,
        vector_pipe(x.dtype, flops),
    )


@cost("aten::index_fill_", "aten::put_")
def index_fill(call: OpCall) -> Cost:
    """Writes a slice for each index."""
    x, where = tensor(call, 0), tensor(call, 2 if "fill" in call.name else 1)
    count = x.numel // x.shape[integer(call, 1)] * where.numel if "fill" in call.name else where.numel
    return Cost(0.0, footprint(where), count * itemsize(x.dtype), "none")


@cost("aten::masked_scatter_", "aten::masked_scatter")
def masked_scatter(call: OpCall) -> Cost:
    """Reads mask and target, takes from the source at most as much."""
    x, mask, source = tensor(call, 0), tensor(call, 1), tensor(call, 2)
    size = x.numel * itemsize(x.dtype)
    return Cost(0.0, footprint(x) + footprint(mask) + min(footprint(source), size), size, "none")
