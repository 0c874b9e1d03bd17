"""The operators of paged attention: what is launched, in how many splits, and what a profile sees of it."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ._device import device_reasons, guard, refuse, sm_count
from ._launch import LaunchTable, cdiv, next_power_of_2
from ._ops import NAMESPACE, operator
from ._paged_kernels import cache_write_kernel, paged_attention_kernel, paged_combine_kernel
from ._tf32 import tf32_allowed

#: By the head dimension, padded to a power of two. The loads of block numbers take half of the pipeline's
#: stages, so that 5 hold two tiles of keys and values. `per_sm` programs fit on a multiprocessor. Where
#: `OVERLAP` is 1, what puts splits together is launched while they are worked on.
SPLIT = LaunchTable(
    "paged_attention",
    {
        "default": [
            (64, {"BLOCK_N": 64, "num_warps": 4, "num_stages": 5, "per_sm": 2}),
            (128, {"BLOCK_N": 32, "num_warps": 4, "num_stages": 5, "per_sm": 2}),
            (None, {"BLOCK_N": 16, "num_warps": 4, "num_stages": 5, "per_sm": 2}),
        ],
        "sm_80": [
            (64, {"BLOCK_N": 128, "num_warps": 4, "num_stages": 5, "per_sm": 2}),
            (128, {"BLOCK_N": 64, "num_warps": 4, "num_stages": 5, "per_sm": 2}),
            (None, {"BLOCK_N": 32, "num_warps": 4, "num_stages": 5, "per_sm": 2}),
        ],
        "sm_90": [
            (64, {"BLOCK_N": 128, "num_warps": 4, "num_stages": 5, "per_sm": 3}),
            # Three programs, with a limit on registers, are slower.
            (128, {"BLOCK_N": 64, "num_warps": 4, "num_stages": 5, "per_sm": 2, "OVERLAP": 1}),
            (None, {"BLOCK_N": 32, "num_warps": 4, "num_stages": 5, "per_sm": 3, "maxnreg": 168}),
        ],
        "interpreter": [(None, {"BLOCK_N": 16, "num_warps": 4, "num_stages": 1, "per_sm": 1})],
    },
)
SPLIT_FP32 = LaunchTable(
    "paged_attention_fp32",
    {
        "default": [
            (64, {"BLOCK_N": 32, "num_warps": 4, "num_stages": 5, "per_sm": 2}),
            (None, {"BLOCK_N": 16, "num_warps": 4, "num_stages": 5, "per_sm": 2}),
        ],
        "interpreter": [(None, {"BLOCK_N": 16, "num_warps": 4, "num_stages": 1, "per_sm": 1})],
    },
)
#: Rows, that is queries times query heads of a key head, that a program takes at most; fewer in fp32, whose
#: products run on the plain units and in registers.
_MOST_ROWS, _MOST_ROWS_FP32 = 64, 16
#: Tiles that a split has at least, if the sequence has them.
_LEAST_TILES = 2
#: Splits that the second kernel takes at a time: more than a long sequence has on one of today's devices.
_SPLITS_AT_A_TIME = 64
#: What a program costs before its first tile and after its last, in tiles: loads that wait for each other.
_PROGRAM_TILES = 2
#: Times that the multiprocessors are filled, beyond which a finer cut is not looked for.
_MOST_WAVES = 4
#: What stored numbers of a cache of 8 bits reach.
LIMITS = {torch.int8: 127, torch.float8_e4m3fn: 448}


@lru_cache(maxsize=1024)
def split_count(programs: int, slots: int, tiles: int) -> int:
    """The fewest splits whose time is near the least.

    Programs run in waves of `slots`. A wave takes the tiles of a split, and `_PROGRAM_TILES` for what a
    program costs besides. Within 2 % of the least is near enough.

    Args:
        programs: of one split.
        slots: programs that the device runs at a time.
        tiles: of the longest sequence; a split has `_LEAST_TILES` or more.
    """
    most = max(1, min(tiles // _LEAST_TILES, cdiv(_MOST_WAVES * slots, programs)))
    costs = [cdiv(programs * n, slots) * (cdiv(tiles, n) + _PROGRAM_TILES) for n in range(1, most + 1)]
    return next(n for n, cost in enumerate(costs, 1) if cost <= 1.02 * min(costs))


def _fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    slopes: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    max_context_len: int,
    total_context_len: int,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _no_gradient(ctx: Any, *grads: Tensor) -> Any:
    raise NotImplementedError(
        f"{NAMESPACE}::paged_attention has no gradient: it is for decoding. Call it under torch.no_grad(), "
        "and train with advisor.kernels.attention"
    )


@operator("paged_attention", fake=_fake, backward=_no_gradient)
def paged_attention_op(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    slopes: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float,
    softcap: float,
    left: int,
    max_context_len: int,
    total_context_len: int,
) -> tuple[Tensor, Tensor]:
    """The output, dense, and the log-sum-exp of each row's scores.

    q is (batch, queries, heads, dim); `left` bounds the window, negative for no bound; `softcap` 0 is none.
    `max_context_len` decides on splits and on no result; `total_context_len`, negative if not known, is there
    to be recorded: without it a profile cannot tell how much of the cache was read.
    """
    out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
    if not q.numel():
        return out, lse
    batch, n_queries, heads, dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    q, block_table = _dense_rows(q), _dense_rows(block_table)
    context_lens = context_lens.contiguous()
    cols = max(16, next_power_of_2(dim))
    fp32 = q.dtype == torch.float32
    params = dict((SPLIT_FP32 if fp32 else SPLIT).pick(cols, q.device))
    group, rows = heads // kv_heads, n_queries * (heads // kv_heads)
    block_m = min(max(16, next_power_of_2(rows)), _MOST_ROWS_FP32 if fp32 else _MOST_ROWS)
    if block_m > 16:
        # The limit is that of the tightest fit; more rows would spill.
        params.pop("maxnreg", None)
    row_blocks = cdiv(rows, block_m)
    # Sums of a token and a split must stay within 32 bits.
    capacity = min(block_table.shape[1] * block_size, 2**30)

    programs = batch * kv_heads * row_blocks
    tiles = cdiv(min(max_context_len, capacity), params["BLOCK_N"])
    splits = split_count(programs, sm_count(q.device) * params.pop("per_sm"), tiles)
    overlap = bool(params.pop("OVERLAP", 0)) and splits > 1
    parts, stats = out, lse
    if splits > 1:
        parts = q.new_empty((batch, n_queries, heads, splits, dim), dtype=torch.float32)
        stats = q.new_empty((batch, n_queries, heads, splits, 2), dtype=torch.float32)
    cut = {"WINDOW": left >= 0, "BLOCK_N": params.pop("BLOCK_N"), "LEAST": _LEAST_TILES}
    tf32 = fp32 and tf32_allowed()
    paged_attention_kernel[(programs * splits,)](
        q, k_cache, v_cache, block_table, context_lens, slopes, k_scale, v_scale, parts, stats,
        *q.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3], block_table.stride(0),
        *parts.stride()[:3], parts.stride(3) if splits > 1 else 0,
        group, kv_heads, n_queries, row_blocks, splits, capacity, scale, softcap, left, splits > 1,
        DIM=dim, COLS=cols, BLOCK_SIZE=block_size, SOFTCAP=softcap > 0.0, ALIBI=slopes is not None,
        SCALED=k_scale is not None, PRECISION="tf32" if tf32 else "ieee", BLOCK_M=block_m,
        OVERLAP=overlap, **cut, **params,
    )  # fmt: skip
    # Launched as a programmatic dependent: before it waits for the splits it reads nothing that they write.
    dependent = {"OVERLAP": True, "launch_pdl": True} if overlap else {}
    if splits > 1:
        paged_combine_kernel[(batch * n_queries * heads,)](
            parts, stats, context_lens, out, lse, *out.stride()[:3],
            heads, n_queries, splits, capacity, left,
            DIM=dim, COLS=cols, BLOCK_S=min(_SPLITS_AT_A_TIME, next_power_of_2(splits)), **cut, num_warps=4,
            **dependent,
        )  # fmt: skip
    return out, lse


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op(f"{NAMESPACE}::write_to_cache", mutates_args=("k_cache", "v_cache"))
def write_to_cache_op(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Put the rows of `key` and `value`, (tokens, heads, dim), into the slots of the caches."""
    refuse(device_reasons(key, value, k_cache, v_cache, slots, k_scale, v_scale), "write_to_cache")
    if not key.numel() or not k_cache.numel():
        return
    tokens, heads, dim = key.shape
    key, value, slots = _dense_rows(key), _dense_rows(value), slots.contiguous()
    cols = next_power_of_2(dim)
    with guard(key.device):
        cache_write_kernel[(tokens,)](
            key, value, k_cache, v_cache, slots, k_scale, v_scale,
            *key.stride()[:2], *value.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
            k_cache.shape[0] * k_cache.shape[1], heads,
            DIM=dim, COLS=cols, BLOCK_SIZE=k_cache.shape[1], SCALED=k_scale is not None,
            LIMIT=LIMITS.get(k_cache.dtype, 0), HEADS=min(next_power_of_2(heads), max(1, 2048 // cols)),
            num_warps=4,
        )  # fmt: skip


@write_to_cache_op.register_fake
def _(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    return None
