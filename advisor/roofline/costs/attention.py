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
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import Result, cost, split
from advisor.roofline.costs.tiles import whole

_TILE = 128
_TILE_EFFICIENT = 64
#: Head dimension, queries and keys of a block; CUTLASS' kernels tell the latter two.
_FLASH_BLOCK = re.compile(r"flash_(?:fwd|bwd)_kernel_traits<(\d+), (\d+), (\d+)", re.I)
_CUTLASS_BLOCK = re.compile(r"fmha_cutlass[FB]_\w*?aligned_(\d+)x(\d+)")


@dataclass(frozen=True)
class _Layout:
    """Where an operator keeps its arguments.

    Attributes:
        heads_first: sizes are (batch, heads, tokens, dim), else (batch, tokens, heads, dim).
        causal: position of the flag, or of ``custom_mask_type``.
        cumulative: position of the cumulative lengths of packed sequences, or None.
        bias: position of an additive mask, or None.
        windows: positions of a sliding window's sizes; -1 for none.
        paged: positions of tensors that keep keys elsewhere than in the arguments: new keys, a page table.
    """

    heads_first: bool
    causal: int
    cumulative: int | None = None
    bias: int | None = None
    windows: tuple[int, ...] = ()
    paged: tuple[int, ...] = ()


_FORWARD = {
    "aten::_scaled_dot_product_flash_attention": _Layout(True, 4),
    "aten::_scaled_dot_product_efficient_attention": _Layout(True, 6, bias=3),
    "aten::_scaled_dot_product_cudnn_attention": _Layout(True, 6, bias=3),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _Layout(True, 4, bias=5),
    "aten::_scaled_dot_product_fused_attention_overrideable": _Layout(True, 5, bias=3),
    "aten::_flash_attention_forward": _Layout(False, 8, cumulative=3),
    "aten::_efficient_attention_forward": _Layout(False, 9, cumulative=4, bias=3),
    "aten::_cudnn_attention_forward": _Layout(True, 10, cumulative=4, bias=3),
    "flash_attn::_flash_attn_forward": _Layout(False, 5, windows=(6, 7)),
    "flash_attn_3::fwd": _Layout(False, 24, cumulative=7, windows=(25, 26), paged=(3, 14)),
    "xformers::efficient_attention_forward_cutlass": _Layout(False, 10, cumulative=4, bias=3),
}
_BACKWARD = {
    "aten::_scaled_dot_product_flash_attention_backward": _Layout(True, 11, cumulative=6),
    "aten::_scaled_dot_product_efficient_attention_backward": _Layout(True, 11, bias=4),
    "aten::_scaled_dot_product_cudnn_attention_backward": _Layout(True, 14, cumulative=9, bias=8),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _Layout(True, 7),
    "aten::_flash_attention_backward": _Layout(False, 11, cumulative=6),
    "aten::_efficient_attention_backward": _Layout(False, 14, cumulative=6, bias=4),
    "aten::_cudnn_attention_backward": _Layout(True, 14, cumulative=9, bias=8),
    "flash_attn::_flash_attn_backward": _Layout(False, 11, windows=(12, 13)),
    "flash_attn_3::bwd": _Layout(False, 16, cumulative=9, windows=(17, 18)),
}


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


def block_pairs(queries: int, keys: int, block: tuple[int, int], causal: bool) -> float:
    """Score entries in the blocks (queries x keys) that a kernel visits, each in full.

    A causal mask ends in the last column, and a block of queries visits keys up to its last row's.
    """
    height, width = block
    if not causal:
        return float(whole(queries, height)) * whole(keys, width)
    if queries > 1_000_000:
        raise Unknown("impossible length")
    visited = 0
    for end in range(height, whole(queries, height) + 1, height):
        last = min(keys, end + keys - queries)
        visited += math.ceil(max(0, last) / width)
    return float(visited) * height * width


def causal_pairs(queries: int, keys: int, tile: int) -> float:
    """Score entries that a causal mask leaves, whole tiles on the diagonal.

    With fewer queries than keys the diagonal ends in the last column (decoding); with more, rows past the
    last key see all of it.
    """
    if queries > keys:
        return causal_pairs(keys, keys, tile) + float(queries - keys) * keys
    return min(float(queries) * keys, queries * (keys - queries / 2) + queries * tile / 2)


def _work(call: OpCall, layout: _Layout, q: Tensor, k: Tensor, v: Tensor) -> _Work:
    if layout.cumulative is not None and optional(call, layout.cumulative) is not None:
        raise Unknown("packed sequences: their lengths are not recorded")
    if any(text(call, at) not in ("", "-1", "None") for at in layout.windows):
        raise Unknown("a sliding window")
    if any(optional(call, at) is not None for at in layout.paged):
        raise Unknown("keys in a cache: their length is not recorded")
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
    efficient = "efficient" in call.name
    is_typed = (
        "efficient_attention_forward" in call.name or call.name == "aten::_efficient_attention_backward"
    )
    causal = integer(call, layout.causal) > 0 if is_typed else flag(call, layout.causal)
    queries, keys = q.shape[tokens], k.shape[tokens]
    rows = float(q.shape[0] * q.shape[heads])
    dims = q.shape[3], v.shape[3]
    needed = causal_pairs(queries, keys, 1) if causal else float(queries) * keys
    block, built_for = _block(call)
    if block:
        executed = block_pairs(queries, keys, block, causal)
        padded = (max(dims[0], built_for), max(dims[1], built_for)) if built_for else dims
    else:
        tile = _TILE_EFFICIENT if efficient else _TILE
        executed, padded = causal_pairs(queries, keys, tile) if causal else needed, dims
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
    return q.numel / q.shape[3]


@cost(*_FORWARD)
def forward(call: OpCall) -> Result:
    """Reads q, k, v and a bias, writes the output and its log-sum-exp; scores never leave the chip."""
    layout = _FORWARD[call.name]
    q, k, v = tensor(call, 0), tensor(call, 1), tensor(call, 2)
    work = _work(call, layout, q, k, v)
    bias = optional(call, layout.bias) if layout.bias is not None else None
    read = footprint(q) + footprint(k) + footprint(v) + (footprint(bias) if bias else 0.0)
    output = q.numel / q.shape[3] * v.shape[3] * itemsize(q.dtype)
    written = output + 4.0 * _rows(q)
    flops = work.executed.forward_flops
    padding = flops - work.needed.forward_flops
    main = Cost(flops, read, written, _pipe(call, q), flops_padding=padding)
    return _with_roles(call, main, {"sum_partials": Cost(_rows(q) * v.shape[3], output, output)}, main)


@cost(*_BACKWARD)
def backward(call: OpCall) -> Result:
    """A kernel for ``sum(o * do)``, the main one, and one that rounds dq from its fp32 accumulator.

    The main kernel reads q, k, v, do and two statistics a row, and reads and writes the accumulator of dq,
    which its blocks add to. AOTriton has two main kernels, of four and of three products.
    """
    layout = _BACKWARD[call.name]
    grad, q, k, v = (tensor(call, index) for index in range(4))
    out = tensor(call, 5 if "efficient" in call.name else 4)
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
