"""Sort, top-k, unique, nonzero, searches: many short kernels, each a pass over keys or over small tables."""

from __future__ import annotations

from advisor.roofline.costs.args import Unknown, footprint, integer, itemsize, tensor
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import Result, assign, cost

_INDEX_BYTES = 8.0
#: Radix select counts 256 digits a block in 16-bit counters (aten/src/ATen/native/cuda/TensorTopK.cu).
_COUNTS_BYTES = 256 * 2


def _pairs(x: Tensor) -> float:
    return x.numel * (itemsize(x.dtype) + _INDEX_BYTES)


@cost("aten::sort", "aten::argsort", "aten::msort")
def sort(call: OpCall) -> Result:
    """Reads keys, writes sorted keys and positions; each radix or merge pass moves both once more."""
    x = tensor(call, 0)
    whole = Cost(0.0, footprint(x), _pairs(x), "none")
    one_pass = Cost(0.0, _pairs(x), _pairs(x), "none")
    keys = Cost(0.0, footprint(x), 0.0, "none")
    small = Cost(0.0, 0.0, 0.0, "none")
    return assign(
        call,
        whole,
        (r"exclusivesum|init", small),
        (r"histogram|upsweep", keys),
        (r"fill_index|fill_reverse", Cost(0.0, 0.0, _INDEX_BYTES * x.numel, "none")),
        (r"postprocess", Cost(0.0, _pairs(x), _pairs(x), "none")),
        (r"onesweep|downsweep|merge|blocksort|radix|segmented|bitonic|sortkv", one_pass),
        whole=whole,
    )


@cost("aten::topk", "aten::kthvalue")
def topk(call: OpCall) -> Result:
    """Each digit pass reads all keys and writes digit counts; then the keys are read to gather the best k."""
    x, k = tensor(call, 0), integer(call, 1)
    if not x.shape or not 0 < k <= max(x.shape):
        raise Unknown("k does not fit")
    slices = max(1, x.numel // x.shape[-1])
    found = slices * (1 if "kth" in call.name else k) * (itemsize(x.dtype) + _INDEX_BYTES)
    blocks = max(
        (launch.grid_blocks or 0 for launch in call.launches if "DigitCounts" in launch.name), default=slices
    )
    counts = float(max(slices, blocks) * _COUNTS_BYTES)
    whole = Cost(0.0, footprint(x), found, "none")
    return assign(
        call,
        whole,
        (r"computeblockdigitcounts", Cost(0.0, footprint(x), counts, "none")),
        (r"digitcumsum|withinkcounts", Cost(0.0, counts, counts / 128, "none")),
        (r"kthcounts|fill|scan|init", Cost(0.0, counts / 128, counts / 128, "none")),
        (r"gathertopk|gatherkth", whole),
        (r"sort", Cost(0.0, found, found, "none")),
        whole=whole,
    )


@cost("aten::_unique2", "aten::_unique", "aten::unique_consecutive", "aten::unique_dim")
def unique(call: OpCall) -> Result:
    """Sort passes, then one that compacts; how many are left is not recorded: no more than came in."""
    x = tensor(call, 0)
    one_pass = Cost(0.0, _pairs(x), _pairs(x), "none")
    keys = Cost(0.0, footprint(x), footprint(x), "none")
    return assign(
        call,
        keys,
        (r"histogram|exclusivesum|init", Cost(0.0, footprint(x), 0.0, "none")),
        (r"onesweep|radix|merge|sort", one_pass),
        whole=keys,
    )


@cost("aten::nonzero", "aten::masked_select", "aten::nonzero_static")
def nonzero(call: OpCall) -> Result:
    """Counts, then compacts, reading all each time. How many are found is not recorded: none are written."""
    x = tensor(call, 0)
    read = sum(footprint(arg) for arg in call.inputs if isinstance(arg, Tensor) and arg.shape)
    main = Cost(0.0, read or footprint(x), 0.0, "none")
    return assign(
        call,
        main,
        (r"init", Cost(0.0, 0.0, 0.0, "none")),
        (r"reduce|select|compact|partition|compute_agg|write_indices", main),
        whole=main,
    )


@cost("aten::searchsorted", "aten::bucketize")
def search(call: OpCall) -> Cost:
    """Reads the boundaries and the values, writes a position for each value."""
    a, b = tensor(call, 0), tensor(call, 1)
    values = a if call.name == "aten::bucketize" else b
    return Cost(0.0, footprint(a) + footprint(b), values.numel * _INDEX_BYTES, "none")
