"""What autocast makes of the parts of a step that run in 32 bits: kernels shrink, casts come on top."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from advisor.advice.calls import Unit
from advisor.advice.edits import Edit, Estimate, Insert, Retime
from advisor.advice.rates import at_most
from advisor.advice.sdpa import fused_ns, heads_of, is_causal

if TYPE_CHECKING:
    from advisor.advice.loop import Loop

#: How pointwise and other memory-bound work changes under autocast, from pessimistic to optimistic: what
#: follows a product comes in 16 bits and halves, residual sums and norms stay in fp32.
_UNDER_AUTOCAST = {
    "half": (0.75, 0.55, 0.48),
    "mixed": (1.0, 0.87, 0.75),
    "same": (1.0, 1.0, 0.9),
    "softmax": (3.0, 2.3, 1.0),
    # Half the bytes, but NCHW in bf16 falls back from cuDNN's kernels to slower ones.
    "batch_norm": (1.4, 0.9, 0.55),
}
_HALVES = frozenset({
    "silu", "gelu", "relu", "sigmoid", "tanh", "mul", "div", "masked_fill", "where", "dropout",
    "native_dropout", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "cat", "clone",
    "contiguous", "reshape", "leaky_relu", "elu", "hardswish", "matmul", "linear",
})  # fmt: skip


def attention_in_16_bits(loop: Loop, rows: np.ndarray, dtype: str) -> list[Edit]:
    """Fused attention in fp32 becomes FlashAttention."""
    edits: list[Edit] = []
    for row in rows.tolist():
        unit = loop.calls.of_row.get(row)
        heads = heads_of(unit) if unit is not None else None
        if unit is None or heads is None:
            continue
        found = fused_ns(loop.device, heads, causal=is_causal(unit), dtype=dtype)
        if found is not None:
            time = found[0] if row in unit.forward else found[1]
            edits.append(Retime(np.array([row]), at_most(time, float(loop.rows.dur_ns[row]))))
    return edits


def memory_bound_in_16_bits(loop: Loop, products: set[int]) -> list[Edit]:
    """What is neither product nor optimizer, each by how autocast treats it."""
    rows: list[int] = []
    kinds: list[str] = []
    for unit in loop.calls.units:
        if not any(tensor.dtype == "fp32" for tensor in unit.tensors):
            continue
        kind = _kind_under_autocast(unit)
        for row in unit.rows:
            if row not in products and loop.rows.dur_ns[row] > 5_000:
                rows.append(row)
                kinds.append(kind)
    if not rows:
        return []
    now = loop.rows.dur_ns[rows].astype(float)
    factor = np.array([_UNDER_AUTOCAST[kind] for kind in kinds])
    return [Retime(np.array(rows), Estimate(now * factor[:, 0], now * factor[:, 1], now * factor[:, 2]))]


def _kind_under_autocast(unit: Unit) -> str:
    if unit.name == "softmax":
        return "softmax"
    if "batch_norm" in unit.name:
        return "batch_norm"
    if "conv" in unit.name or unit.name in _HALVES:
        return "half"
    return "mixed" if unit.name in ("add", "sub", "sum", "mean", "view", "transpose", "split") else "same"


def casts(loop: Loop, products: np.ndarray) -> list[Edit]:
    """Casts of weights (forward) and of their gradients (backward), and of inputs that come in fp32."""
    after: list[int] = []
    nbytes: list[float] = []
    bandwidth = loop.device.bandwidth_bytes_per_s
    if not bandwidth:
        return []
    weights = {frozenset(tensor.shape) for tensor in loop.trained}
    of_unit: dict[int, list[int]] = defaultdict(list)
    for row in products.tolist():
        if row in loop.calls.of_row:
            of_unit[id(loop.calls.of_row[row])].append(row)
    for rows in of_unit.values():
        unit = loop.calls.of_row[rows[0]]
        operands = [tensor for tensor in unit.tensors if len(tensor.shape) >= 2]
        weight = next((one for one in operands[1:] if frozenset(one.shape) in weights), None)
        if weight is None:
            continue
        for half in (set(unit.forward), set(unit.backward)):
            own = [row for row in rows if row in half]
            if own:
                after.append(own[-1])
                # fp32 read and 16 bits written, or the other way round; every other input comes in fp32.
                nbytes.append(6.0 * (weight.numel + 0.5 * operands[0].numel))
    if not after:
        return []
    time = np.array(nbytes) / bandwidth * 1e9 / 0.6 + 3_000
    return [Insert(np.array(after), Estimate(time * 1.4, time, time * 0.5), host_ns=20_000.0)]
