"""The kernels behind `norm` and `add_norm`: rows held in registers. See those for the mathematics."""

from typing import Any

import torch
from torch import Tensor

from ._device import sm_count
from ._launch import LaunchTable, Row, cdiv, next_power_of_2
from ._math import widened
from ._norm_stream import STREAM, backward_stream, stream_row
from ._norm_wide import backward_wide, forward_wide, weight_partials_wide
from ._random import keep_8, keep_scale, keep_threshold
from ._rows import (
    as_rows,
    fitting_stages,
    gradient_means,
    input_gradient,
    load_tile,
    load_vector,
    normalised,
    shares,
    store_tile,
    sum_partials,
    tile_mask,
)
from ._triton import tl, triton

#: Columns beyond which rows are walked in blocks.
MAX_BLOCK = 32768
MAX_BACKWARD_BLOCK = 16384
_FORWARD: list[Row] = [
    (128, {"ROWS": 16, "num_warps": 4}),
    (256, {"ROWS": 8, "num_warps": 4}),
    (512, {"ROWS": 4, "num_warps": 4}),
    (1024, {"ROWS": 2, "num_warps": 4}),
    (2048, {"ROWS": 1, "num_warps": 4}),
]
_BACKWARD: list[Row] = [
    (128, {"ROWS": 8, "num_warps": 4, "STAGES": 2, "programs_per_sm": 4, "SUMMED": 2}),
    (256, {"ROWS": 4, "num_warps": 4, "STAGES": 2, "programs_per_sm": 4, "SUMMED": 2}),
    (512, {"ROWS": 2, "num_warps": 4, "STAGES": 2, "programs_per_sm": 4, "SUMMED": 2}),
    (1024, {"ROWS": 1, "num_warps": 4, "STAGES": 3, "programs_per_sm": 6, "SUMMED": 2}),
    (2048, {"ROWS": 1, "num_warps": 4, "STAGES": 3, "programs_per_sm": 3, "SUMMED": 2}),
    (4096, {"ROWS": 1, "num_warps": 8, "STAGES": 3, "programs_per_sm": 2, "SUMMED": 2}),
    (8192, {"ROWS": 1, "num_warps": 16, "STAGES": 3, "programs_per_sm": 1, "SUMMED": 2}),
]

#: Size: columns, rounded up to a power of two. JOIN: warps that share a row wait for each other once. EARLY:
#: weights are loaded with the row, not when they are needed, of RMSNorm alone: LayerNorm loses by it.
FORWARD = LaunchTable(
    "norm_forward",
    {
        "default": [
            *_FORWARD,
            (8192, {"ROWS": 1, "num_warps": 8}),
            (16384, {"ROWS": 1, "num_warps": 16}),
            (None, {"ROWS": 1, "num_warps": 32}),
        ],
        # With 64 registers a thread a multiprocessor holds two such programs, and one loads while one counts.
        "sm_90": [
            *_FORWARD,
            (4096, {"ROWS": 1, "num_warps": 8, "EARLY": 1}),
            (8192, {"ROWS": 1, "num_warps": 8}),
            (16384, {"ROWS": 1, "num_warps": 16, "JOIN": 1, "EARLY": 1, "maxnreg": 64}),
            (None, {"ROWS": 1, "num_warps": 32, "JOIN": 1}),
        ],
        "interpreter": [
            (256, {"ROWS": 4, "num_warps": 1}),
            (None, {"ROWS": 1, "num_warps": 1, "EARLY": 1}),
        ],
    },
)
#: SUMMED: vectors (dw, db) that a program sums in registers beside its rows; more take a pass of their own.
BACKWARD = LaunchTable(
    "norm_backward",
    {
        "default": [
            *_BACKWARD,
            (None, {"ROWS": 1, "num_warps": 32, "STAGES": 2, "programs_per_sm": 1, "SUMMED": 1}),
        ],
        "sm_90": [
            *_BACKWARD,
            (None, {"ROWS": 1, "num_warps": 32, "STAGES": 3, "programs_per_sm": 1, "SUMMED": 1}),
        ],
        "interpreter": [
            (256, {"ROWS": 2, "num_warps": 1, "STAGES": 1, "programs_per_sm": 1, "SUMMED": 2}),
            (8192, {"ROWS": 1, "num_warps": 1, "STAGES": 1, "programs_per_sm": 1, "SUMMED": 2}),
            (None, {"ROWS": 1, "num_warps": 1, "STAGES": 1, "programs_per_sm": 1, "SUMMED": 1}),
        ],
    },
)


@triton.jit
def keep_tile(seed_ptr, rows, n_cols, THRESHOLD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Which elements of a (ROWS, BLOCK) tile dropout keeps; 8 neighbours in a row share a draw."""
    # Columns come in groups of 8, so that a thread draws once for what it loads at once.
    at = tl.arange(0, BLOCK // 8)
    group = rows.to(tl.int64)[:, None] * tl.cdiv(n_cols, 8) + at[None, :]
    group = tl.reshape(group, [ROWS * BLOCK // 8, 1])
    kept = keep_8(tl.load(seed_ptr), group, tl.arange(0, 8)[None, :], THRESHOLD)
    return tl.reshape(kept.to(tl.int8), [ROWS, BLOCK]) != 0


@triton.jit
def _norm_forward_kernel(
    x_ptr, residual_ptr, seed_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, stats_ptr, x_stride, residual_stride,
    n_rows, n_cols, eps, offset, scale,
    IS_RMS: tl.constexpr, ROUND: tl.constexpr, THRESHOLD: tl.constexpr,
    FULL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = tile_mask(rows, cols, n_rows, n_cols, FULL)
    row = rows.to(tl.int64)[:, None]
    x = load_tile(x_ptr + row * x_stride + cols[None, :], mask, ROWS, FULL)
    if EARLY and w_ptr is not None:
        w = load_vector(w_ptr, cols, n_cols, FULL)
    z = widened(x)
    if residual_ptr is not None:
        residual = load_tile(residual_ptr + row * residual_stride + cols[None, :], mask, ROWS, FULL)
        if seed_ptr is not None:
            z = tl.where(keep_tile(seed_ptr, rows, n_cols, THRESHOLD, ROWS, BLOCK), z * scale, 0.0)
        # The norm is of the sum as it is stored, which is what the backward will see.
        total = (z + widened(residual)).to(sum_ptr.dtype.element_ty)
        store_tile(sum_ptr + row * n_cols + cols[None, :], total, mask, ROWS, FULL)
        z = total.to(tl.float32)
    ROUGH: tl.constexpr = y_ptr.dtype.element_ty != tl.float32
    y, mean, rstd = normalised(z, cols, n_cols, eps, IS_RMS, FULL, ROUGH, SHARES, CHUNK)
    if not IS_RMS:
        tl.store(stats_ptr + rows, mean, mask=rows < n_rows)
        stats_ptr += n_rows
    tl.store(stats_ptr + rows, rstd, mask=rows < n_rows)
    if ROUND:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    if w_ptr is not None:
        if not EARLY:
            w = load_vector(w_ptr, cols, n_cols, FULL)
        y *= widened(w) + offset
    if b_ptr is not None:
        y += widened(load_vector(b_ptr, cols, n_cols, FULL))
    store_tile(y_ptr + row * n_cols + cols[None, :], y, mask, ROWS, FULL)


@triton.jit
def _standardised(x, mean, rstd, IS_RMS: tl.constexpr):
    if not IS_RMS:
        x -= mean[:, None]
    return x * rstd[:, None]


@triton.jit
def _norm_backward_kernel(
    dy_ptr, dsum_ptr, x_ptr, w_ptr, stats_ptr, seed_ptr, dx_ptr, dropped_ptr, partial_ptr,
    dy_stride, dsum_stride, x_stride, n_rows, n_cols, offset, scale,
    IS_RMS: tl.constexpr, ROUND: tl.constexpr, PARTS: tl.constexpr, THRESHOLD: tl.constexpr,
    FULL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.arange(0, BLOCK)
    if w_ptr is not None:
        w = widened(load_vector(w_ptr, cols, n_cols, FULL)) + offset
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    mean = tl.zeros([ROWS], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        row = rows.to(tl.int64)[:, None]
        mask = tile_mask(rows, cols, n_rows, n_cols, FULL)
        x = load_tile(x_ptr + row * x_stride + cols[None, :], mask, ROWS, FULL)
        dy = load_tile(dy_ptr + row * dy_stride + cols[None, :], mask, ROWS, FULL)
        if IS_RMS:
            rstd = tl.load(stats_ptr + rows, mask=rows < n_rows, other=0.0)
        else:
            mean = tl.load(stats_ptr + rows, mask=rows < n_rows, other=0.0)
            rstd = tl.load(stats_ptr + n_rows + rows, mask=rows < n_rows, other=0.0)
        xhat = _standardised(widened(x), mean, rstd, IS_RMS)
        g = widened(dy)
        if PARTS > 0:
            if ROUND:
                dw += tl.sum(g * xhat.to(x_ptr.dtype.element_ty).to(tl.float32), axis=0)
            else:
                dw += tl.sum(g * xhat, axis=0)
        if PARTS > 1:
            db += tl.sum(g, axis=0)
        if w_ptr is not None:
            g *= w
        along, level = gradient_means(g, xhat, n_cols, IS_RMS)
        dx = input_gradient(g, xhat, rstd, along, level, IS_RMS)
        if dsum_ptr is not None:
            dx += widened(load_tile(dsum_ptr + row * dsum_stride + cols[None, :], mask, ROWS, FULL))
        store_tile(dx_ptr + row * n_cols + cols[None, :], dx, mask, ROWS, FULL)
        if dropped_ptr is not None:
            if seed_ptr is not None:
                dx = tl.where(keep_tile(seed_ptr, rows, n_cols, THRESHOLD, ROWS, BLOCK), dx * scale, 0.0)
            store_tile(dropped_ptr + row * n_cols + cols[None, :], dx, mask, ROWS, FULL)
    partial_ptr += tl.program_id(0).to(tl.int64) * PARTS * n_cols
    if PARTS > 0:
        tl.store(partial_ptr + cols, dw, mask=cols < n_cols)
    if PARTS > 1:
        tl.store(partial_ptr + n_cols + cols, db, mask=cols < n_cols)


def _empty_like_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _row_stride(rows: Tensor | None) -> int:
    return 0 if rows is None else rows.stride(0)


def _n_rows(x: Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)


def weight_dtypes(weight: Tensor | None, bias: Tensor | None, parts: int) -> list[torch.dtype]:
    """Of the first `parts` of dw and db."""
    return [torch.float32 if t is None else t.dtype for t in (weight, bias)][:parts]


def launch_forward(
    x: Tensor, residual: Tensor | None, seed: Tensor | None, p: float, weight: Tensor | None,
    bias: Tensor | None, eps: float, offset: float, is_rms: bool, round_first: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Normalise the rows of `x`, or of dropout(x) + residual: the result, that sum, the rows' moments.

    Returns:
        y of `dtype`; the sum, of the promoted dtype, or None; in fp32 mean and rstd as (2, rows), for RMS
        rstd as (1, rows).
    """
    n_rows, n_cols = _n_rows(x), x.shape[-1]
    y = _empty_like_rows(x, dtype)
    stats = torch.empty(1 if is_rms else 2, n_rows, dtype=torch.float32, device=x.device)
    total = None
    if residual is not None:
        total = _empty_like_rows(x, torch.promote_types(x.dtype, residual.dtype))
    if not x.numel():
        return y, total, stats
    rows = as_rows(x)
    if n_cols > MAX_BLOCK:
        assert residual is None, "wide rows are added before they are normalised"
        forward_wide(rows, weight, bias, y, stats, eps, offset, is_rms, round_first)
        return y, None, stats
    other = None if residual is None else as_rows(residual)
    block = max(next_power_of_2(n_cols), 8)
    params = dict(FORWARD.pick(block, x.device))
    shared = shares(params.pop("JOIN", 0), block, params["ROWS"], params["num_warps"], rows)
    params["EARLY"] = params.get("EARLY", 0) * (is_rms and residual is None)
    _norm_forward_kernel[(cdiv(n_rows, params["ROWS"]),)](
        rows, other, seed, weight, bias, y, total, stats, rows.stride(0), _row_stride(other),
        n_rows, n_cols, eps, offset, keep_scale(p),
        IS_RMS=is_rms, ROUND=round_first, THRESHOLD=keep_threshold(p),
        FULL=block == n_cols, BLOCK=block, **shared, **params,
    )  # fmt: skip
    return y, total, stats


def launch_backward(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor,
    seed: Tensor | None, p: float, offset: float, is_rms: bool, round_first: bool, parts: int,
    dropped_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:  # fmt: skip
    """Gradients: of the normalised rows, of what dropout was applied to, of weight and bias.

    Args:
        dsum: gradient that reaches the rows beside the norm, added to theirs.
        parts: gradients of weight and bias: 0 none, 1 dw, 2 both.
        dropped_dtype: write the gradient through dropout too, in this dtype.
    """
    n_rows, n_cols = _n_rows(x), x.shape[-1]
    dx = _empty_like_rows(x, x.dtype)
    dropped = None if dropped_dtype is None else _empty_like_rows(x, dropped_dtype)
    dtypes = weight_dtypes(weight, bias, parts)
    if not x.numel():
        return dx, dropped, [torch.zeros(n_cols, dtype=d, device=x.device) for d in dtypes]
    rows, drows = as_rows(x), as_rows(dy)
    alone = dsum is None and dropped is None
    streamed = stream_row(STREAM, rows, drows, weight) if alone else None
    if streamed is not None:
        partial = backward_stream(
            drows, rows, weight, stats, dx, offset, is_rms, round_first, parts, streamed
        )
        fused = parts
    elif n_cols > MAX_BACKWARD_BLOCK and alone:
        backward_wide(drows, rows, weight, stats, dx, offset, is_rms)
        fused = 0
    else:
        carried = None if dsum is None else as_rows(dsum)
        block = max(next_power_of_2(n_cols), 8)
        params = dict(BACKWARD.pick(block, x.device))
        fused = parts if parts <= params.pop("SUMMED") else 0
        most = params.pop("programs_per_sm") * sm_count(x.device)
        programs = min(most, cdiv(n_rows, params["ROWS"]))
        read = [t.element_size() for t in (rows, drows, carried) if t is not None]
        tile_bytes = params["ROWS"] * block * sum(read)
        params["STAGES"] = fitting_stages(params["STAGES"], tile_bytes, x.device)
        partial = torch.empty(programs, fused, n_cols, dtype=torch.float32, device=x.device)
        _norm_backward_kernel[(programs,)](
            drows, carried, rows, weight, stats, seed, dx, dropped, partial,
            drows.stride(0), _row_stride(carried), rows.stride(0), n_rows, n_cols, offset, keep_scale(p),
            IS_RMS=is_rms, ROUND=round_first, PARTS=fused, THRESHOLD=keep_threshold(p),
            FULL=block == n_cols, BLOCK=block, **params,
        )  # fmt: skip
    if parts and not fused:
        partial = weight_partials_wide(drows, rows, stats, parts, is_rms, round_first)
    return dx, dropped, sum_partials(partial, dtypes) if parts else []


def parts_wanted(ctx: Any, weight_at: int) -> int:
    """How many of dw and db autograd asks for: 0, 1 (dw) or 2, by the argument where the weight stands.

    The bias follows the weight; where it alone is trained, dw comes along, which costs next to nothing.
    """
    needs = ctx.needs_input_grad
    return 2 if needs[weight_at + 1] else int(needs[weight_at])


def handed_out(ctx: Any, grads: list[Tensor], weight_at: int) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of weight and bias out of the `parts_wanted`."""
    needs = ctx.needs_input_grad
    return grads[0] if needs[weight_at] else None, grads[1] if needs[weight_at + 1] else None
