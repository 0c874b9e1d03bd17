"""The bundled softmax: a causal row's excluded scores are not read, its zeros are written.

Rows longer than 16384 columns are swept twice, and what the cache has lost by then is fetched again.
"""

from __future__ import annotations

from advisor.roofline.costs.args import (
    Unknown,
    flag,
    footprint,
    integer,
    itemsize,
    named_dtype,
    optional,
    tensor,
)
from advisor.roofline.costs.conventions import ADD, DIV, EXP, FMA, MUL
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import cost
from advisor.roofline.costs.traffic import missed

#: The family of operators that these count under.
FAMILY = "softmax"

_WHOLE_ROW = 16384


def seen_share(queries: int, keys: int, diagonal: int) -> float:
    """Share of the scores that causality leaves: query i sees keys up to i + `diagonal`."""
    return sum(min(max(i + diagonal + 1, 0), keys) for i in range(queries)) / (queries * keys)


def _share(call: OpCall, x: Tensor, causal: int) -> float:
    if not flag(call, causal):
        return 1.0
    if len(x.shape) < 2:
        raise Unknown("causal without queries")
    return seen_share(x.shape[-2], x.shape[-1], integer(call, causal + 1))


def _again(call: OpCall, once: float, row: int, row_bytes: float, rows: float) -> float:
    return once * missed(call, row_bytes, rows) if row > _WHOLE_ROW else 0.0


@cost("advisor_kernels::softmax")
def forward(call: OpCall) -> Cost:
    """Scale, mask, maximum, exponential, sum, division (or logarithm, in the log form)."""
    x, mask = tensor(call, 0), optional(call, 1)
    share = _share(call, x, 3)
    width = itemsize(named_dtype(call, 6) or x.dtype)
    per_element = MUL + EXP + 2 * ADD + (ADD if flag(call, 5) else DIV) + (ADD if mask else 0)
    once = share * footprint(x)
    row = x.shape[-1]
    again = _again(call, once, row, row * (itemsize(x.dtype) + width), x.numel / row)
    read = once + (footprint(mask) if mask else 0.0) + again
    return Cost(float(per_element * share * x.numel), read, x.numel * width, "vector_fp32", again)


@cost("advisor_kernels::softmax_backward")
def backward(call: OpCall) -> Cost:
    """``scale y (dy - sum y dy)``, or ``scale (dy - exp(y) sum dy)``, whose every dy is read."""
    dy, y = tensor(call, 0), tensor(call, 1)
    log = flag(call, 5)
    share = 1.0 if log else _share(call, y, 3)
    width = itemsize(named_dtype(call, 7) or y.dtype)
    per_element = ADD + (EXP + FMA + MUL if log else FMA + ADD + MUL)
    once = share * (footprint(dy) + footprint(y))
    row = y.shape[-1]
    again = _again(call, once, row, row * (itemsize(dy.dtype) + itemsize(y.dtype) + width), y.numel / row)
    return Cost(float(per_element * share * y.numel), once + again, y.numel * width, "vector_fp32", again)
