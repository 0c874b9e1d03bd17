"""FBGEMM's table-batched embeddings, as TorchRec uses them.

Many tables lie one after another in one tensor. How wide each is and how many look-ups it gets are values,
which a trace lacks: every table counts as the mean width, and every row is as likely to be looked up. What is
read and written beside the rows, mostly the pooled result and its gradient, is exact. Arguments: fbgemm_gpu,
``codegen/embedding_backward_split_host_template.cpp`` and ``src/sparse_ops``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from advisor.roofline.costs.args import (
    Unknown,
    checked,
    footprint,
    itemsize,
    optional,
    tensor,
    vector_pipe,
)
from advisor.roofline.costs.conventions import ADD, DIV, FMA, SQRT
from advisor.roofline.costs.model import Arg, Cost, OpCall
from advisor.roofline.costs.registry import Result, assign, cost
from advisor.roofline.costs.traffic import distinct

#: The family of operators that these count under.
FAMILY = "embedding"

_LOOKUP = "fbgemm::split_embedding_codegen_lookup_"
_LOOKUP_BACKWARD = "torch::autograd::CppNode<SplitLookupFunction_"
#: Rows looked up more often than this are summed by a whole block, others by a warp
#: (``max_segment_length_per_warp``).
_LONG = 32
_RUN_BYTES = 4
#: FLOPs an element of a row's update: Adagrad's, of which a row has one state.
_UPDATE = FMA + DIV + SQRT


@dataclass(frozen=True)
class _Lookup:
    """Sizes of one look-up in many tables.

    Attributes:
        count: indices.
        rows: of all tables, at the mean width.
        width: mean elements of a row.
        width_bytes, index_bytes: of an element, of an index.
        fetched: bytes of the indices, their offsets and weights.
        pooled: bytes of the result.
        bags: rows of the result, of all tables.
    """

    count: int
    rows: float
    width: float
    width_bytes: float
    index_bytes: float
    fetched: float
    pooled: float
    bags: int

    @property
    def touched(self) -> float:
        """Rows that are looked up at all."""
        return distinct(self.count, self.rows)

    @property
    def gradient(self) -> float:
        """Bytes of the result's gradient that are read: not of bags that are empty."""
        return self.pooled * distinct(self.count, self.bags) / self.bags


def _lookup(arguments: tuple[Arg, ...], pooled: Arg) -> _Lookup:
    """From a look-up's arguments and its result, or the result's gradient."""
    given = OpCall("", arguments)
    weights, tables, indices, offsets = (tensor(given, at) for at in (1, 5, 11, 12))
    if optional(given, 2) is not None:
        raise Unknown("tables in the host's memory")
    result = checked(pooled)
    bags = offsets.numel - 1
    if len(result.shape) != 2 or bags % tables.numel or bags // tables.numel != result.shape[0]:
        raise Unknown("not pooled by bag, or contradicting itself")
    width = result.shape[1] / tables.numel
    weight = optional(given, 14)
    return _Lookup(
        indices.numel,
        weights.numel / width,
        width,
        itemsize(weights.dtype),
        itemsize(indices.dtype),
        footprint(indices) + footprint(offsets) + (footprint(weight) if weight else 0.0),
        footprint(result),
        bags,
    )


@cost(f"{_LOOKUP}*", partner=_LOOKUP_BACKWARD)
def lookup(call: OpCall) -> Cost:
    """Rows looked up and summed by bag; the gradient tells the size of the result."""
    found = _lookup(call.inputs, call.partner[0] if call.partner else None)
    rows = found.touched * found.width * found.width_bytes
    flops = (FMA if optional(call, 14) else ADD) * found.count * found.width
    return Cost(flops, rows + found.fetched, found.pooled, "vector_fp32")


@cost(f"{_LOOKUP_BACKWARD}*", partner=_LOOKUP)
def lookup_backward(call: OpCall) -> Result:
    """Sorts the indices of all tables, sums the gradient's rows by row of a table, and updates the rows.

    Kernels: ``linearize_index`` numbers the rows of all tables; a radix sort of (number, bag); run lengths;
    the sums and the optimizer's step, one kernel for rows with many look-ups and one for those with few. All
    of it goes to the one that a row's mean count speaks for.
    """
    found = _lookup(call.partner, call.inputs[0])
    rows = found.touched * found.width * found.width_bytes
    infos, keys = 4.0 * found.count, found.index_bytes * found.count
    runs = found.touched * _RUN_BYTES
    flops = found.count * found.width + _UPDATE * found.touched * found.width
    main = Cost(flops, found.gradient + infos + rows + runs, rows + runs, "vector_fp32")
    few = Cost(0.0, runs, 0.0, "none")
    is_long = found.count > _LONG * found.touched
    small = Cost(0.0, 4096.0, 4096.0, "none")
    whole = replace(main, bytes_read=main.bytes_read + keys, bytes_written=main.bytes_written + keys + infos)
    return assign(
        call,
        whole,
        (r"linearize_index", Cost(0.0, found.fetched, keys + infos, "none")),
        (r"radixsorthistogram", Cost(0.0, keys, 0.0, "none")),
        (r"exclusivesum|compactinit|scaninit", small),
        (r"onesweep", Cost(0.0, keys + infos, keys + infos, "none")),
        (r"reducebykey", Cost(0.0, keys, 2 * runs, "none")),
        (r"devicescan", Cost(0.0, infos, infos, "none")),
        (r"find_long_segments", few),
        (r"cta_per_row", main if is_long else few),
        (r"warp_per_row", few if is_long else main),
        (
            r"grad_indice_weights",
            Cost(
                FMA * found.count * found.width, found.gradient + rows + found.fetched, infos, "vector_fp32"
            ),
        ),
        whole=whole,
    )


@cost(
    "fbgemm::permute_pooled_embs_auto_grad",
    "fbgemm::permute_pooled_embs",
    "torch::autograd::CppNode<fbgemm_gpu::PermutePooledEmbsFunction*",
    "fbgemm::recat_embedding_grad_output_mixed_D_batch",
    "fbgemm::recat_embedding_grad_output_mixed_D",
)
def permute_pooled(call: OpCall) -> Cost:
    """Columns of pooled embeddings in another order, or by rank: as many elements out as in."""
    pooled = tensor(call, 0)
    return Cost(0.0, footprint(pooled), pooled.numel * itemsize(pooled.dtype), "none")


@cost("fbgemm::bounds_check_indices")
def bounds_check(call: OpCall) -> Cost:
    """Reads every index and offset; writes only those that are wrong."""
    return Cost(0.0, footprint(tensor(call, 1)) + footprint(tensor(call, 2)), 0.0, "none")


@cost(
    "fbgemm::asynchronous_complete_cumsum",
    "fbgemm::asynchronous_inclusive_cumsum",
    "fbgemm::asynchronous_exclusive_cumsum",
)
def running_sum(call: OpCall) -> Result:
    """As many sums as lengths."""
    lengths = tensor(call, 0)
    size = footprint(lengths)
    whole = Cost(0.0, size, lengths.numel * itemsize(lengths.dtype), vector_pipe(lengths.dtype))
    return assign(call, whole, (r"scaninit", Cost(0.0, 0.0, 4096.0, "none")), whole=whole)


@cost("fbgemm::permute_sparse_features", "fbgemm::permute_2D_sparse_data")
def permute_sparse(call: OpCall) -> Result:
    """Features (tables by batch) in another order, some twice: lengths, their running sums, and the values.

    Arguments: order, lengths, values, weights. A feature that is taken is as likely to be any of them.
    """
    order, lengths, values, weights = tensor(call, 0), tensor(call, 1), tensor(call, 2), optional(call, 3)
    if len(lengths.shape) != 2:
        raise Unknown("lengths are not by feature and batch")
    taken = order.numel / lengths.shape[0]
    moved = footprint(values) + (footprint(weights) if weights else 0.0)
    size = footprint(lengths)
    data = Cost(0.0, moved * min(taken, 1.0) + size * (1 + taken), moved * taken, "none")
    counts = Cost(0.0, size * min(taken, 1.0) + footprint(order), size * taken, "none")
    sums = Cost(0.0, size * max(taken, 1.0), size * max(taken, 1.0), "none")
    whole = Cost(0.0, moved * min(taken, 1.0) + size, (moved + size) * taken, "none")
    return assign(
        call,
        data,
        (r"lengths_kernel", counts),
        (r"scaninit", Cost(0.0, 0.0, 4096.0, "none")),
        (r"devicescan", sums),
        whole=whole,
    )
