"""Reductions and scans: the input is read once, the reduced result written once."""

from __future__ import annotations

import math

from advisor.roofline.costs.args import (
    Unknown,
    footprint,
    is_float,
    itemsize,
    named_dtype,
    size_bytes,
    tensor,
    text,
    vector_pipe,
)
from advisor.roofline.costs.conventions import ADD, EXP, FMA, MUL
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.pointwise import elementwise_binary
from advisor.roofline.costs.registry import cost

#: FLOPs an input element, and the position of the ``dim`` argument.
_REDUCTIONS = {
    "sum": (ADD, 1), "nansum": (ADD, 1), "mean": (ADD, 1), "nanmean": (ADD, 1), "prod": (MUL, 1),
    "amax": (0, 1), "amin": (0, 1), "max": (0, 1), "min": (0, 1), "argmax": (0, 1), "argmin": (0, 1),
    "any": (0, 1), "all": (0, 1), "norm": (FMA, 2), "frobenius_norm": (FMA, 1),
    "linalg_vector_norm": (FMA, 2), "var": (4, 1), "std": (4, 1), "var_mean": (4, 1), "std_mean": (4, 1),
    "logsumexp": (EXP + 2 * ADD, 1), "count_nonzero": (0, 1), "median": (0, 1), "nanmedian": (0, 1),
    "mode": (0, 1), "aminmax": (0, 1), "trace": (ADD, 9), "equal": (0, 9),
}  # fmt: skip
_WITH_DTYPE = frozenset({"sum", "nansum", "mean", "prod"})
_TO_BOOL = frozenset({"any", "all", "equal"})
_TO_INDEX = frozenset({"argmax", "argmin", "count_nonzero"})
_VALUES_AND_INDEX = frozenset({"max", "min", "median", "nanmedian", "mode"})
_PAIRS = frozenset({"var_mean", "std_mean", "aminmax"})
_SCANS = {
    "cumsum": ADD, "cumprod": MUL, "logcumsumexp": 2 * EXP, "cummax": 0, "cummin": 0, "_cummax_helper": 0,
    "_cummin_helper": 0, "_cumsum": ADD, "_cumprod": MUL,
}  # fmt: skip


def reduced_shape(x: Tensor, dims: str) -> tuple[int, ...]:
    """The shape without these dimensions (text: ``"[0, 1]"``, ``"-1"``; none means all)."""
    listed = [int(dim) for dim in dims.strip("[]").split(",") if dim.strip()]
    if any(not -len(x.shape) <= dim < len(x.shape) for dim in listed) and x.shape:
        raise Unknown("no such dimension")
    gone = {dim % len(x.shape) for dim in listed} if x.shape else set()
    return tuple(size for index, size in enumerate(x.shape) if gone and index not in gone)


@cost(*(f"aten::{name}" for name in _REDUCTIONS), "aten::sum_out", "aten::_softmax_sum")
def reduce(call: OpCall) -> Cost:
    """Reads x, writes the result; integer sums are int64, comparisons bool, positions int64."""
    name = call.name.removeprefix("aten::").removesuffix("_out")
    if name in ("max", "min") and len(call.inputs) > 1 and isinstance(call.inputs[1], Tensor):
        return elementwise_binary(call, 0)
    per_element, position = _REDUCTIONS.get(name, (ADD, 1))
    x = tensor(call, 0)
    # ``sum(x, dtype)`` has no dimensions: its second argument is the dtype.
    is_total = name in _WITH_DTYPE and len(call.inputs) == 2
    dims = "" if is_total else text(call, position)
    shape = reduced_shape(x, dims if dims.lower() not in ("true", "false", "none") else "")
    dtype = x.dtype
    if name in _TO_BOOL:
        dtype = "bool"
    elif name in _TO_INDEX or (name in ("sum", "prod") and not is_float(dtype)):
        dtype = "int64"
    if name in _WITH_DTYPE:
        dtype = named_dtype(call, 1 if is_total else 3) or dtype
    written = size_bytes(shape, dtype)
    if name in _VALUES_AND_INDEX and dims:
        written += size_bytes(shape, "int64")
    if name in _PAIRS:
        written *= 2
    flops = float(per_element * x.numel) if is_float(x.dtype) else 0.0
    return Cost(flops, footprint(x), written, vector_pipe(x.dtype, flops))


@cost(
    *(
        f"aten::{name}{suffix}"
        for name in _SCANS
        for suffix in ("", "_")
        if not name.startswith("_") or not suffix
    )
)
def scan(call: OpCall) -> Cost:
    """As many results as inputs; ``cummax`` and ``cummin`` write positions too."""
    x = tensor(call, 0)
    name = call.name.removeprefix("aten::").strip("_")
    width = itemsize(x.dtype if is_float(x.dtype) or "max" in name or "min" in name else "int64")
    index = 8 if "cummax" in name or "cummin" in name else 0
    flops = float(_SCANS.get(name, ADD) * x.numel) if is_float(x.dtype) else 0.0
    return Cost(flops, footprint(x), x.numel * (width + index), vector_pipe(x.dtype, flops))


@cost("aten::cdist", "aten::_cdist_forward", "aten::_euclidean_dist")
def distances(call: OpCall) -> Cost:
    """Pairwise distances of ``(..., p, d)`` and ``(..., r, d)``: a difference and a multiply-add for each."""
    a, b = tensor(call, 0), tensor(call, 1)
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-1]:
        raise Unknown("sizes differ")
    pairs = math.prod(a.shape[:-1]) * b.shape[-2]
    return Cost(
        float((ADD + FMA) * pairs * a.shape[-1]),
        footprint(a) + footprint(b),
        pairs * itemsize(a.dtype),
        vector_pipe(a.dtype),
    )


@cost("aten::histc", "aten::bincount", "aten::_histogramdd_bin_edges")
def histogram(call: OpCall) -> Cost:
    """Reads x; the bins are few."""
    x = tensor(call, 0)
    return Cost(0.0, footprint(x), 0.0, "none")
