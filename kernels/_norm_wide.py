"""Norms of rows that a program cannot hold in registers: walked in blocks of columns.

The forward joins the blocks' moments, then normalises; the second walk finds the row in the L2 cache. The
gradients of weight and bias take a kernel of their own, which reads x and dy again: five passes where short
rows need three. See `norm` for the mathematics.
"""

import torch
from torch import Tensor

from ._device import sm_count
from ._launch import LaunchTable, cdiv
from ._triton import tl, triton

#: Rows that are walked in blocks. Size: columns.
WIDE = LaunchTable(
    "norm_wide",
    {
        "default": [(None, {"BLOCK": 8192, "num_warps": 16})],
        "interpreter": [(None, {"BLOCK": 16384, "num_warps": 1})],
    },
)
WIDE_WEIGHT = LaunchTable(
    "norm_wide_weight",
    {
        "default": [(None, {"ROWS": 4, "BLOCK": 512, "programs_per_sm": 6, "num_warps": 4})],
        "interpreter": [(None, {"ROWS": 4, "BLOCK": 16384, "programs_per_sm": 1, "num_warps": 1})],
    },
)


@triton.jit
def _norm_forward_wide_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, x_stride, n_rows, n_cols, eps, offset,
    IS_RMS: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    mean = 0.0
    square = 0.0
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        if IS_RMS:
            square += tl.sum(x * x, axis=0)
        else:
            # Chan, Golub, LeVeque (1983): moments of the columns so far joined with those of this block.
            here = tl.minimum(n_cols - start, BLOCK).to(tl.float32)
            block_mean = tl.sum(x, axis=0) / here
            centred = tl.where(cols < n_cols, x - block_mean, 0.0)
            apart = block_mean - mean
            share = here / (start + here)
            square += tl.sum(centred * centred, axis=0) + apart * apart * start * share
            mean += apart * share
    rstd = tl.div_rn(1.0, tl.sqrt_rn(square / n_cols + eps))
    if not IS_RMS:
        tl.store(stats_ptr + row, mean)
        stats_ptr += n_rows
    tl.store(stats_ptr + row, rstd)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        y = (x - mean) * rstd
        if ROUND:
            y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
        if w_ptr is not None:
            y *= tl.load(w_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32) + offset
        if b_ptr is not None:
            y += tl.load(b_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * n_cols + cols, y, mask=cols < n_cols)


@triton.jit
def _wide_block(dy_ptr, x_ptr, w_ptr, cols, n_cols, mean, rstd, offset):
    """g and h of one block of a row."""
    x = tl.load(x_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    g = tl.load(dy_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
    if w_ptr is not None:
        g *= tl.load(w_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32) + offset
    return g, (x - mean) * rstd


@triton.jit
def _norm_backward_wide_kernel(
    dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, dy_stride, x_stride, n_rows, n_cols, offset,
    IS_RMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    mean = 0.0
    if not IS_RMS:
        mean = tl.load(stats_ptr + row)
        stats_ptr += n_rows
    rstd = tl.load(stats_ptr + row)
    dy_ptr += row * dy_stride
    x_ptr += row * x_stride
    along = 0.0
    level = 0.0
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        g, xhat = _wide_block(dy_ptr, x_ptr, w_ptr, cols, n_cols, mean, rstd, offset)
        along += tl.sum(g * xhat, axis=0)
        if not IS_RMS:
            level += tl.sum(g, axis=0)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        g, xhat = _wide_block(dy_ptr, x_ptr, w_ptr, cols, n_cols, mean, rstd, offset)
        dx = (g - xhat * (along / n_cols) - level / n_cols) * rstd
        tl.store(dx_ptr + row * n_cols + cols, dx, mask=cols < n_cols)


@triton.jit
def _norm_weight_wide_kernel(
    dy_ptr, x_ptr, stats_ptr, partial_ptr, dy_stride, x_stride, n_rows, n_cols, blocks, bands,
    IS_RMS: tl.constexpr, ROUND: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    band = tl.program_id(0) // blocks
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    # Rows are added up after the last band, so that threads need not wait for each other before.
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(band * ROWS, n_rows, bands * ROWS):
        rows = start + tl.arange(0, ROWS)
        row = rows.to(tl.int64)[:, None]
        mask = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
        x = tl.load(x_ptr + row * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if IS_RMS:
            xhat = x * tl.load(stats_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        else:
            mean = tl.load(stats_ptr + rows, mask=rows < n_rows, other=0.0)
            rstd = tl.load(stats_ptr + n_rows + rows, mask=rows < n_rows, other=0.0)
            xhat = (x - mean[:, None]) * rstd[:, None]
        if ROUND:
            xhat = xhat.to(x_ptr.dtype.element_ty).to(tl.float32)
        dw += dy * xhat
        if PARTS > 1:
            db += dy
    partial_ptr += band.to(tl.int64) * PARTS * n_cols
    tl.store(partial_ptr + cols, tl.sum(dw, axis=0), mask=cols < n_cols)
    if PARTS > 1:
        tl.store(partial_ptr + n_cols + cols, tl.sum(db, axis=0), mask=cols < n_cols)


def forward_wide(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, y: Tensor, stats: Tensor, eps: float,
    offset: float, is_rms: bool, round_first: bool,
) -> None:  # fmt: skip
    """Fill `y` and `stats` from the rows of `x`."""
    n_rows, n_cols = x.shape
    _norm_forward_wide_kernel[(n_rows,)](
        x, weight, bias, y, stats, x.stride(0), n_rows, n_cols, eps, offset,
        IS_RMS=is_rms, ROUND=round_first, **WIDE.pick(n_cols, x.device),
    )  # fmt: skip


def backward_wide(
    dy: Tensor, x: Tensor, weight: Tensor | None, stats: Tensor, dx: Tensor, offset: float, is_rms: bool
) -> None:
    """Fill `dx`."""
    n_rows, n_cols = x.shape
    _norm_backward_wide_kernel[(n_rows,)](
        dy, x, weight, stats, dx, dy.stride(0), x.stride(0), n_rows, n_cols, offset,
        IS_RMS=is_rms, **WIDE.pick(n_cols, x.device),
    )  # fmt: skip


def weight_partials_wide(
    dy: Tensor, x: Tensor, stats: Tensor, parts: int, is_rms: bool, round_first: bool
) -> Tensor:
    """fp32 partials of dw and, for two parts, db: (bands of rows, parts, columns)."""
    n_rows, n_cols = x.shape
    params = dict(WIDE_WEIGHT.pick(n_cols, x.device))
    blocks = cdiv(n_cols, params["BLOCK"])
    most = max(1, sm_count(x.device) * params.pop("programs_per_sm") // blocks)
    bands = min(most, cdiv(n_rows, params["ROWS"]))
    partial = torch.empty(bands, parts, n_cols, dtype=torch.float32, device=x.device)
    _norm_weight_wide_kernel[(bands * blocks,)](
        dy, x, stats, partial, dy.stride(0), x.stride(0), n_rows, n_cols, blocks, bands,
        IS_RMS=is_rms, ROUND=round_first, PARTS=parts, **params,
    )  # fmt: skip
    return partial
