"""The bundled attention: two products forward, seven backward, since no gradient is summed by atomics.

One kernel computes dq (scores, dp, dq), another dk and dv (scores, dp, dv, dk). With ``precise_gradient`` the
forward also writes what rounding takes from a 16-bit output, and the first of the two reads it. An ideal
operator would need five products, and that is its cost as a whole; what the kernels compute again is theirs.
"""

from __future__ import annotations

from advisor.roofline.costs.args import Unknown, flag, footprint, integer, itemsize, optional, tensor, text
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import Result, assign, cost
from advisor.roofline.costs.roles import matrix_pipe

#: A number of what rounding takes from the output.
_RESIDUE_BYTES = 2
#: The family of operators that these count under.
FAMILY = "attention"


def pairs_up_to(queries: int, keys: int, distance: int) -> float:
    """Pairs of query i and key j with ``j - i <= distance``."""

    def below(last: int) -> float:
        # Sum over t up to `last` of t held between 0 and the number of keys.
        inside = max(min(last, keys), 0)
        return inside * (inside + 1) / 2 + max(last - keys, 0) * float(keys)

    return below(distance + queries) - below(distance)


def seen_pairs(queries: int, keys: int, left: int, right: int, lower_right: bool) -> float:
    """Scores within the window: key i - left to key i + right, negative for no bound."""
    shift = keys - queries if lower_right else 0
    upper = pairs_up_to(queries, keys, shift + right) if right >= 0 else float(queries) * keys
    lower = pairs_up_to(queries, keys, shift - left - 1) if left >= 0 else 0.0
    return upper - lower


def _pairs(call: OpCall, q: Tensor, k: Tensor, packed: int, window: int) -> float:
    if optional(call, packed) is not None:
        raise Unknown("packed sequences: their lengths are not recorded")
    if not (len(q.shape) == len(k.shape) == 4 and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]):
        raise Unknown("sizes of q and k contradict each other")
    left, right, lower_right = integer(call, window), integer(call, window + 1), flag(call, window + 2)
    return q.shape[0] * q.shape[1] * seen_pairs(q.shape[2], k.shape[2], left, right, lower_right)


def _size(x: Tensor) -> float:
    return x.numel * itemsize(x.dtype)


@cost("advisor_kernels::attention")
def forward(call: OpCall) -> Cost:
    """q, k, v and a mask in, the output, a statistic a row and, if asked for, the output's residue out."""
    q, k, v, mask = tensor(call, 0), tensor(call, 1), tensor(call, 2), optional(call, 3)
    pairs = _pairs(call, q, k, packed=4, window=10)
    rows = q.numel / q.shape[3]
    read = footprint(q) + footprint(k) + footprint(v) + (footprint(mask) if mask else 0.0)
    size = itemsize(q.dtype)
    # Traces of before there was a residue lack the argument.
    size += _RESIDUE_BYTES if size == 2 and text(call, 15).lower() in ("true", "1") else 0
    written = rows * v.shape[3] * size + 4 * rows
    pipe = matrix_pipe("", q.dtype, call.settings)
    return Cost(2.0 * pairs * (q.shape[3] + v.shape[3]), read, written, pipe)


@cost("advisor_kernels::attention_backward")
def backward(call: OpCall) -> Result:
    """Both kernels read q, k, v, the output's gradient and the row statistics; the first also the output,
    and its residue."""
    grad, q, k, v, out = (tensor(call, index) for index in range(5))
    mask = optional(call, 6)
    pairs = _pairs(call, q, k, packed=7, window=13)
    dim, dim_v, rows = q.shape[3], v.shape[3], q.numel / q.shape[3]
    inputs = sum(map(footprint, (grad, q, k, v))) + (footprint(mask) if mask else 0.0)
    pipe = matrix_pipe("", q.dtype, call.settings)
    of_q, of_kv = _size(q), _size(k) + _size(v)
    residue = optional(call, 18)
    results = footprint(out) + (footprint(residue) if residue else 0.0)
    query = Cost(2.0 * pairs * (2 * dim + dim_v), inputs + results + 4 * rows, of_q + 4 * rows, pipe)
    key = Cost(4.0 * pairs * (dim + dim_v), inputs + 8 * rows, of_kv, pipe)
    whole = Cost(2.0 * pairs * (3 * dim + 2 * dim_v), inputs + results + 4 * rows, of_q + of_kv, pipe)
    # Sums of parts, where few key heads are shared out: an ideal kernel has none.
    rest = Cost(0.0, 2 * of_kv, of_kv, "vector_fp32")
    return assign(call, rest, ("query_gradient", query), ("key_gradient", key), whole=whole)
