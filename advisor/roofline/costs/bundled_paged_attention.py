"""The bundled attention over a paged cache, and writing to that cache.

How much of the cache is read hangs on lengths that only the device holds; shapes give the cache as a whole
and the table's width, which may be many times that. So there is a cost only where the caller handed over
`total_context_len`, the sum of lengths, for the trace to record.
"""

from __future__ import annotations

from advisor.roofline.costs.args import Unknown, footprint, integer, itemsize, optional, tensor
from advisor.roofline.costs.model import Cost, OpCall
from advisor.roofline.costs.registry import Result, assign, cost
from advisor.roofline.costs.roles import matrix_pipe

#: The family of operators that these count under.
FAMILY = "attention"


@cost("advisor_kernels::paged_attention")
def attention(call: OpCall) -> Result:
    """Keys and values of the tokens that are seen, queries and the table in, the output out.

    A sequence is taken to hold its own queries. What splits write and the second kernel reads again is no
    part of the operator's work, and how many there were is not recorded: that kernel has no cost.
    """
    q, k, v, table, lens = (tensor(call, i) for i in range(5))
    if not (len(q.shape) == len(k.shape) == 4 and k.shape == v.shape and q.shape[3] == k.shape[3]):
        raise Unknown("sizes of q and of the cache contradict each other")
    batch, queries, heads, dim = q.shape
    _, block_size, kv_heads, _ = k.shape
    tokens = _tokens_seen(call, batch, queries)
    if not 0 <= tokens <= batch * table.shape[1] * block_size:
        raise Unknown("lengths contradict the table")
    pairs = heads * max(queries * tokens - batch * queries * (queries - 1) / 2, 0.0)
    element = itemsize(k.dtype)
    read = 2 * tokens * kv_heads * dim * element + footprint(q) + footprint(lens)
    read += tokens / block_size * itemsize(table.dtype)
    read += sum(footprint(x) for x in (optional(call, i) for i in (5, 6, 7)) if x)
    written = q.numel * itemsize(q.dtype) + 4 * q.numel / dim
    whole = Cost(4.0 * pairs * dim, read, written, matrix_pipe("", q.dtype, call.settings))
    return assign(call, whole, ("paged_combine_kernel", None), whole=whole)


def _tokens_seen(call: OpCall, batch: int, queries: int) -> int:
    """The sum of what is seen of each sequence, where the recorded numbers say it."""
    left, longest, total = integer(call, 10), integer(call, 11), integer(call, 12)
    if total < 0:
        raise Unknown("lengths are on the device and were not recorded")
    if left < 0 or longest <= left + queries:
        return total
    if batch == 1:
        return min(total, left + queries)
    raise Unknown("how many sequences outgrow the window is not recorded")


@cost("advisor_kernels::write_to_cache")
def write(call: OpCall) -> Cost:
    """Each row read and written once, in the cache's dtype; tokens without a slot are not told apart."""
    key, value, cache, slots = tensor(call, 0), tensor(call, 1), tensor(call, 2), tensor(call, 4)
    scales = sum(footprint(x) for x in (optional(call, 5), optional(call, 6)) if x)
    written = (key.numel + value.numel) * itemsize(cache.dtype)
    return Cost(0.0, footprint(key) + footprint(value) + footprint(slots) + scales, written, "none")
