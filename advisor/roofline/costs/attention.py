"""Fused attention, forward and backward, of every backend.

Forward multiplies twice (``q k^T`` and ``p v``), backward five times (``q k^T`` again, ``dv``, ``dp``,
``dq``, ``dk``), so 2.5 times as much (Dao, FlashAttention-2, 2023, section 3.1). A causal mask leaves half of
the products. Blocks of scores are computed whole, those on the diagonal and at the edges too, and the head
dimension is padded to the one that the kernel was built for; the block is in the names of FlashAttention's
and CUTLASS' kernels. Where it is not, the diagonal's blocks are taken as 128 wide: an H200's counters show
``(1 + 128 / s) / 2`` of the full count for cuDNN.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from advisor.roofline.costs import roles
from advisor.roofline.costs.args import Unknown, flag, footprint, integer, itemsize, optional, tensor, text
from advisor.roofline.costs.attention_layouts import BACKWARD, FORWARD, Layout
from advisor.roofline.costs.bundled_attention import seen_pairs
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import Result, cost, split
from advisor.roofline.costs.tiles import whole

#: What traces write for an argument that is left out.
_UNSET = ("", "None", "-1", "False", "0")
_TILE = 128
_TILE_EFFICIENT = 64
#: Head dimension, queries and keys of a block; CUTLASS' kernels tell the latter two.
_FLASH_BLOCK = re.compile(r"flash_(?:fwd|bwd)_kernel_traits<(\d+), (\d+), (\d+)", re.I)
_CUTLASS_BLOCK = re.compile(r"fmha_cutlass[FB]_\w*?aligned_(\d+)x(\d+)")


@dataclass(frozen=True)
class _Problem:
    """Score entries over all batches and query heads, and the head dimensions."""

    pairs: float
    dim_qk: int
    dim_v: int

    @property
    def forward_flops(self) -> float:
        return 2.0 * self.pairs * (self.dim_qk + self.dim_v)

    @property
    def backward_flops(self) -> float:
        return 2.0 * self.pairs * (3 * self.dim_qk + 2 * self.dim_v)


@dataclass(frozen=True)
class _Work:
    """What a call's results need, and what its kernel executes for them."""

    needed: _Problem
    executed: _Problem


def block_pairs(queries: int, keys: int, block: tuple[int, int], left: int, right: int) -> float:
    """Score entries in the blocks (queries x keys) that a kernel visits, each in full.

    Query i sees keys from ``i - left`` to ``i + right``, counted from the last query and the last key; a
    negative number is no bound. A block of queries visits keys from its first row's to its last row's.
    """
    height, width = block
    if left < 0 and right < 0:
        return float(whole(queries, height)) * whole(keys, width)
    if queries > 1_000_000:
        raise Unknown("impossible length")
    shift, visited = keys - queries, 0
    for end in range(height, whole(queries, height) + 1, height):
        last = keys if right < 0 else min(keys, end + shift + right)
        first = 0 if left < 0 else max(0, end - height + shift - left)
        visited += max(0, math.ceil(max(0, last) / width) - first // width)
    return float(visited) * height * width


def causal_pairs(queries: int, keys: int, tile: int) -> float:
    """Score entries that a causal mask leaves, whole tiles on the diagonal.

    With fewer queries than keys the diagonal ends in the last column (decoding); with more, rows past the
    last key see all of it.
    """
    if queries > keys:
        return causal_pairs(keys, keys, tile) + float(queries - keys) * keys
    return min(float(queries) * keys, queries * (keys - queries / 2) + queries * tile / 2)


def _apart(call: OpCall, layout: Layout, *packed: Tensor) -> tuple[Tensor, ...]:
    """q, k and v of sequences that are packed one after another, with the sequences as a dimension.

    Lengths are values. Only if as many as there are, each as long as the longest, make up all tokens, they
    are known: all are equal.
    """
    if layout.cumulative is None or optional(call, layout.cumulative) is None:
        return packed
    if layout.longest is None:
        raise Unknown("packed sequences: their lengths are not recorded")
    found = []
    for arg, at in zip(packed, (0, 1, 1), strict=True):
        sequences = tensor(call, layout.cumulative + at).numel - 1
        longest = integer(call, layout.longest + at)
        if sequences < 1 or math.prod(arg.shape[:-2]) != sequences * longest:
            raise Unknown("packed sequences of different lengths, which are not recorded")
        found.append(Tensor((sequences, longest, *arg.shape[-2:]), arg.dtype))
    return tuple(found)


def _window(call: OpCall, layout: Layout) -> tuple[int, int]:
    """How far to the left and to the right a query sees; -1 for no bound."""
    if not layout.windows:
        return -1, -1
    left, right = (-1 if text(call, at) in ("", "None") else integer(call, at) for at in layout.windows)
    return left, right


def _is_causal(call: OpCall, layout: Layout) -> bool:
    # The type of mask is a number where the library knows several.
    value = text(call, layout.causal)
    return int(value) > 0 if value.isdigit() else flag(call, layout.causal)


def _work(call: OpCall, layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> _Work:
    if any(optional(call, at) is not None or text(call, at) not in _UNSET for at in layout.elsewhere):
        raise Unknown("keys in a cache, or a setting that is not modelled")
    q, k, v = _apart(call, layout, q, k, v)
    if not len(q.shape) == len(k.shape) == len(v.shape) == 4:
        raise Unknown("not four-dimensional")
    heads, tokens = (1, 2) if layout.heads_first else (2, 1)
    if not (
        q.shape[0] == k.shape[0] == v.shape[0]
        and q.shape[3] == k.shape[3]
        and k.shape[tokens] == v.shape[tokens]
    ):
        raise Unknown("sizes of q, k and v contradict each other")
    if q.shape[heads] % k.shape[heads]:
        raise Unknown("query heads are no multiple of key heads")
    left, right = _window(call, layout)
    causal = _is_causal(call, layout)
    right = 0 if causal else right
    queries, keys = q.shape[tokens], k.shape[tokens]
    rows = float(q.shape[0] * q.shape[heads])
    dims = q.shape[3], v.shape[3]
    is_windowed = left >= 0 or right > 0
    if is_windowed:
        needed = seen_pairs(queries, keys, left, right, lower_right=True)
    else:
        needed = causal_pairs(queries, keys, 1) if causal else float(queries) * keys
    block, built_for = _block(call)
    tile = _TILE_EFFICIENT if "efficient" in call.name else _TILE
    if block or (is_windowed and call.launches):
        executed = block_pairs(queries, keys, block or (tile, tile), left, right)
    else:
        executed = causal_pairs(queries, keys, tile) if causal and not is_windowed else needed
    padded = (max(dims[0], built_for), max(dims[1], built_for)) if built_for else dims
    return _Work(_Problem(rows * needed, *dims), _Problem(rows * max(executed, needed), *padded))


def _block(call: OpCall) -> tuple[tuple[int, int] | None, int]:
    """By a kernel's name: queries and keys of a block, and the head dimension it is built for (or 0)."""
    for launch in call.launches:
        found = _FLASH_BLOCK.search(launch.name) if roles.is_matrix(launch.name) else None
        if found:
            return (int(found[2]), int(found[3])), int(found[1])
        found = _CUTLASS_BLOCK.search(launch.name)
        if found:
            return (int(found[1]), int(found[2])), 0
    return None, 0


def _dense(arg: Tensor) -> float:
    return arg.numel * itemsize(arg.dtype)


def _rows(q: Tensor) -> float:
    """Rows of scores, one fp32 statistic each."""
    return q.numel / q.shape[-1]


@cost(*FORWARD)
def forward(call: OpCall) -> Result:
    """Reads q, k, v and a bias, writes the output and its log-sum-exp; scores never leave the chip."""
    layout = FORWARD[call.name]
    q, k, v = (tensor(call, index) for index in range(3))
    work = _work(call, layout, q, k, v)
    bias = optional(call, layout.bias) if layout.bias is not None else None
    read = footprint(q) + footprint(k) + footprint(v) + (footprint(bias) if bias else 0.0)
    output = _rows(q) * v.shape[-1] * itemsize(q.dtype)
    written = output + 4.0 * _rows(q)
    flops = work.executed.forward_flops
    padding = flops - work.needed.forward_flops
    main = Cost(flops, read, written, _pipe(call, q), flops_padding=padding)
    return _with_roles(call, main, {"sum_partials": Cost(_rows(q) * v.shape[-1], output, output)}, main)


@cost(*BACKWARD)
def backward(call: OpCall) -> Result:
    """A kernel for ``sum(o * do)``, the main one, and one that rounds dq from its fp32 accumulator.

    The main kernel reads q, k, v, do and two statistics a row, and reads and writes the accumulator of dq,
    which its blocks add to. AOTriton has two main kernels, of four and of three products.
    """
    layout = BACKWARD[call.name]
    grad, q, k, v = (tensor(call, layout.first + index) for index in range(4))
    out = tensor(call, layout.out)
    work = _work(call, layout, q, k, v)
    bias = optional(call, layout.bias) if layout.bias is not None else None
    statistics, accumulator = 8.0 * _rows(q), 4.0 * q.numel
    inputs = sum(footprint(arg) for arg in (q, k, v, grad)) + (footprint(bias) if bias else 0.0)
    has_rounding = any(roles.role(launch.name) == "attention_convert" for launch in call.launches)
    extra = accumulator if has_rounding else 0.0
    pipe = _pipe(call, q)
    of_q, of_kv = _dense(q), _dense(k) + _dense(v)
    flops = work.executed.backward_flops
    padding = flops - work.needed.backward_flops

    def multiplied(share: float, read: float, written: float) -> Cost:
        return Cost(share * flops, read, written, pipe, flops_padding=share * padding)

    main = multiplied(1.0, inputs + statistics + extra, of_kv + (extra or of_q))
    parts = {
        "attention_delta": Cost(2.0 * out.numel, _dense(out) + _dense(grad), statistics / 2),
        "attention_convert": Cost(0.0, accumulator, of_q, "none"),
        "attention_dkdv": multiplied(4 / 5, inputs + statistics, of_kv),
        "attention_dq": multiplied(3 / 5, inputs + statistics, of_q),
    }
    return _with_roles(call, main, parts, multiplied(1.0, inputs + _dense(out), of_q + of_kv))


def _pipe(call: OpCall, q: Tensor) -> str:
    if q.dtype not in ("fp16", "bf16", "fp8", "fp32"):
        raise Unknown("no fused attention in this dtype")
    main = next((launch.name for launch in call.launches if roles.is_matrix(launch.name)), "")
    return roles.matrix_pipe(main, q.dtype, call.settings)


def _with_roles(call: OpCall, main: Cost, parts: dict[str, Cost], whole: Cost) -> Result:
    if not call.launches:
        return whole
    rest = [launch for launch in call.launches if roles.role(launch.name) not in parts]
    shares = iter(split(main, rest) if rest else ())
    return tuple(parts.get(roles.role(launch.name)) or next(shares) for launch in call.launches)
