"""What the kernels that work on whole rows share: moments of a row, input gradients, sums of partials.

A program holds `ROWS` rows of `BLOCK` columns in registers, BLOCK being the next power of two. A thread's
columns are the same in each of its rows, so sums over rows stay within threads.
"""

import torch
from torch import Tensor

from ._device import l2_bytes, shared_bytes
from ._launch import LaunchTable, cdiv
from ._math import both_sums
from ._triton import tl, triton

#: Size: columns.
SUM_PARTIALS = LaunchTable(
    "sum_partials",
    {
        "default": [(None, {"ROWS": 64, "BLOCK": 32, "num_warps": 4})],
        "interpreter": [(None, {"ROWS": 8, "BLOCK": 4096, "num_warps": 1})],
    },
)


@triton.jit
def tile_mask(rows, cols, n_rows, n_cols, FULL: tl.constexpr):
    """Which elements of a tile exist; FULL says that columns fill it, which saves a selection an element."""
    mask = (rows < n_rows)[:, None]
    if not FULL:
        mask = mask & (cols < n_cols)[None, :]
    return mask


@triton.jit
def load_tile(ptrs, mask, ROWS: tl.constexpr, FULL: tl.constexpr):
    """A tile as it is stored, 0 where nothing exists. A whole row needs no mask, nor zeros to begin with."""
    return tl.load(ptrs) if FULL and ROWS == 1 else tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def store_tile(ptrs, x, mask, ROWS: tl.constexpr, FULL: tl.constexpr, STREAM: tl.constexpr = False):
    """What `load_tile` reads. STREAM: what is stored leaves the cache before what is read."""
    POLICY: tl.constexpr = ".cs" if STREAM else ""
    if FULL and ROWS == 1:
        tl.store(ptrs, x, cache_modifier=POLICY)
    else:
        tl.store(ptrs, x, mask=mask, cache_modifier=POLICY)


@triton.jit
def load_vector(ptr, cols, n_cols, FULL: tl.constexpr):
    """A vector of weights as it is stored, for a row."""
    x = tl.load(ptr + cols) if FULL else tl.load(ptr + cols, mask=cols < n_cols, other=0.0)
    return x[None, :]


@triton.jit
def normalised(
    z, cols, n_cols, eps, IS_RMS: tl.constexpr, FULL: tl.constexpr, ROUGH: tl.constexpr, SHARES: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """(z - mean) / sqrt(variance + eps) of each row of z, the mean (0 for RMS), and that root's reciprocal.

    z must be 0 beyond the columns. Two passes over registers: the variance is of centred values, as exact
    as fp32 gives it. ROUGH: results have 16 bits, and the root may be off by an ulp or two. With SHARES, as
    `shares` gives them, each warp centres its own columns, and warps wait for each other once, not twice.
    """
    if IS_RMS:
        mean = tl.zeros([z.shape[0]], tl.float32)
        rstd = _root(tl.sum(z * z, axis=1) / n_cols + eps, ROUGH)
        h = z * rstd[:, None]
    elif SHARES > 1:
        parts = tl.reshape(z, [z.shape[0], z.shape[1] // (SHARES * CHUNK), SHARES, CHUNK])
        own = tl.sum(tl.sum(parts, axis=1), axis=2) * (SHARES / z.shape[1])
        centred = parts - own[:, None, :, None]
        square = tl.sum(tl.sum(centred * centred, axis=1), axis=2)
        count = tl.full(own.shape, z.shape[1] // SHARES, tl.float32)
        mean, square, _ = tl.reduce((own, square, count), 1, _joined_moments)
        rstd = _root(square * (1.0 / z.shape[1]) + eps, ROUGH)
        # Differences first: a constant row gives exactly 0, however far from 0 it lies.
        apart = (own - mean[:, None]) * rstd[:, None]
        h = tl.reshape(tl.fma(centred, rstd[:, None, None, None], apart[:, None, :, None]), z.shape)
    else:
        mean = tl.sum(z, axis=1) / n_cols if ROUGH else tl.div_rn(tl.sum(z, axis=1), n_cols * 1.0)
        centred = z - mean[:, None]
        if not FULL:
            centred = tl.where((cols < n_cols)[None, :], centred, 0.0)
        rstd = _root(tl.sum(centred * centred, axis=1) / n_cols + eps, ROUGH)
        h = centred * rstd[:, None]
    return h, mean, rstd


@triton.jit
def _root(x, ROUGH: tl.constexpr):
    """1 / sqrt(x)."""
    return tl.rsqrt(x) if ROUGH else tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit
def _joined_moments(mean, square, count, other_mean, other_square, other_count):
    """Of two sets their union's mean, sum of squares about it, and size (Chan, Golub, LeVeque, 1983)."""
    total = count + other_count
    apart = other_mean - mean
    share = other_count / total
    return mean + apart * share, square + other_square + apart * apart * (count * share), total


@triton.jit
def gradient_means(g, xhat, n_cols, IS_RMS: tl.constexpr):
    """mean(g xhat) and mean(g), for RMS 0, of each row; g is 0 beyond the columns."""
    if IS_RMS:
        along = tl.sum(g * xhat, axis=1)
        level = along * 0.0
    else:
        along, level = both_sums(g * xhat, g)
    return (along / n_cols)[:, None], (level / n_cols)[:, None]


@triton.jit
def input_gradient(g, xhat, rstd, along, level, IS_RMS: tl.constexpr):
    """rstd (g - xhat along - level), by `gradient_means`."""
    dx = g - xhat * along
    if not IS_RMS:
        dx -= level
    return dx * rstd[:, None]


@triton.jit
def _sum_partials_kernel(
    partial_ptr, a_ptr, b_ptr, c_ptr, n_partials, n_cols, blocks, PARTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) // blocks
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, n_partials, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < n_partials)[:, None] & (cols < n_cols)[None, :]
        where = (rows * PARTS + part).to(tl.int64)[:, None] * n_cols + cols[None, :]
        total += tl.load(partial_ptr + where, mask=mask, other=0.0)
    column = tl.sum(total, axis=0)
    if part == 0:
        tl.store(a_ptr + cols, column, mask=cols < n_cols)
    elif part == 1:
        tl.store(b_ptr + cols, column, mask=cols < n_cols)
    else:
        tl.store(c_ptr + cols, column, mask=cols < n_cols)


def sum_partials(partial: Tensor, dtypes: list[torch.dtype]) -> list[Tensor]:
    """Sum fp32 partials in a fixed order, rounding once.

    Args:
        partial: (partials, parts, columns), fp32, contiguous; one to three parts.
        dtypes: of each part's sum.

    Returns:
        One vector of `columns` a part.
    """
    n_partials, parts, n_cols = partial.shape
    sums = [torch.empty(n_cols, dtype=dtype, device=partial.device) for dtype in dtypes]
    pointers = [*sums, *[sums[0]] * (3 - parts)]
    params = SUM_PARTIALS.pick(n_cols, partial.device)
    blocks = cdiv(n_cols, params["BLOCK"])
    _sum_partials_kernel[(parts * blocks,)](
        partial, *pointers, n_partials, n_cols, blocks, PARTS=parts, **params
    )
    return sums


def shares(wanted: int, block: int, rows: int, warps: int, stored: Tensor) -> dict[str, int]:
    """SHARES and CHUNK of `normalised`: warps that share a row, and columns that one of them loads at once.

    Args:
        wanted: 0 for none: warps wait twice. Rows that do not fill their tile have none either.
        block: columns of a tile.
        rows: of a tile.
        warps: of a program.
        stored: what the tile is loaded from, 16 bytes a thread.
    """
    chunk = min(32 * 16 // stored.element_size(), rows * block // warps)
    found = min(warps, block // max(chunk, 1)) if wanted and block == stored.shape[-1] else 1
    return {"SHARES": found, "CHUNK": chunk}


def streams(wanted: int, result: Tensor) -> bool:
    """Whether to pass the cache by: the table says so, and it could not hold the result for a next kernel."""
    return bool(wanted) and result.numel() * result.element_size() > l2_bytes(result.device)


def fitting_stages(stages: int, tile_bytes: int, device: torch.device) -> int:
    """The most stages up to `stages` whose buffers, one tile of inputs for each but the last, fit.

    A kibibyte is left to reductions.
    """
    room = (shared_bytes(device) - 1024) // max(tile_bytes, 1)
    return max(min(stages, room + 1), 1)


def as_rows(x: Tensor) -> Tensor:
    """`x` as (rows, columns) with adjacent columns: a view, whatever the row stride, where there is one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
