"""The backward of norms over long rows in 16 bits: rows stream through shared memory, in Gluon.

What does not fit into registers there is a row of x and of dy beside the sums of dw and db. Here asynchronous
copies bring rows into a ring of buffers while an earlier one is worked on, and a row is read from its buffer
twice, 8 columns a thread at a time: for the sums, then for dx. Registers hold the sums of dw and db alone.
See `norm` for the mathematics.
"""

# Gluon takes no starred tuples.
# ruff: noqa: RUF005

import torch
from torch import Tensor

from ._device import shared_bytes, sm_count
from ._launch import LaunchTable
from ._math import widened

try:
    import triton
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy

    # Gluon is experimental: earlier versions have other names and fewer tuples.
    AVAILABLE = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
except ImportError:
    AVAILABLE = False

#: Columns of a thread in one piece, 16 bytes.
WIDTH = 8

#: Size: columns. With 0 warps rows are not for this kernel, which on Hopper loses where the others' sums fit
#: into registers. STAGES: rows that there are buffers for.
STREAM = LaunchTable(
    "norm_backward_stream",
    {
        "default": [(None, {"num_warps": 0})],
        "sm_90": [
            (8192, {"num_warps": 0}),
            (16384, {"num_warps": 32, "STAGES": 3, "programs_per_sm": 1}),
            (None, {"num_warps": 0}),
        ],
        "interpreter": [(None, {"num_warps": 0, "STAGES": 3, "programs_per_sm": 1})],
    },
)

if AVAILABLE:

    @gluon.jit
    def add_both(a, b, c, d):
        return a + c, b + d

    @gluon.jit
    def row_of(ptr, row, stride):
        return ptr + row.to(gl.int64) * stride

    @gluon.jit
    def ask(x_rows, dy_rows, x_ptr, dy_ptr, x_stride, dy_stride, row, n_rows, stage):
        """Have a row of x and of dy copied to their buffers; one past the last is a group of no copies."""
        UNITS: gl.constexpr = x_rows.shape[1]
        WIDTH: gl.constexpr = x_rows.shape[2]
        layout: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32, 1], [gl.num_warps(), 1], [1, 0])
        if row < n_rows:
            unit = gl.arange(0, UNITS, layout=gl.SliceLayout(1, layout))[:, None]
            at = unit * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))[None, :]
            async_copy.async_copy_global_to_shared(x_rows.index(stage), row_of(x_ptr, row, x_stride) + at)
            async_copy.async_copy_global_to_shared(dy_rows.index(stage), row_of(dy_ptr, row, dy_stride) + at)
        async_copy.commit_group()

    @gluon.jit
    def piece(x_row, dy_row, w_row, c, mean, rstd, offset, WEIGHTED: gl.constexpr, SHIFTED: gl.constexpr):
        """Of a thread's piece `c` of a row h, dy, and dy times the weight."""
        SIZE: gl.constexpr = gl.num_warps() * 32
        layout: gl.constexpr = gl.BlockedLayout([1, x_row.shape[1]], [32, 1], [gl.num_warps(), 1], [1, 0])
        xhat = (widened(x_row.slice(c * SIZE, SIZE).load(layout)) - mean) * rstd
        dy = widened(dy_row.slice(c * SIZE, SIZE).load(layout))
        g = dy
        if WEIGHTED:
            w = widened(w_row.slice(c * SIZE, SIZE).load(layout))
            if SHIFTED:
                w = w + offset
            g = dy * w
        return xhat, dy, g

    @gluon.jit
    def norm_backward_stream_kernel(
        dy_ptr, x_ptr, w_ptr, stats_ptr, dx_ptr, partial_ptr, dy_stride, x_stride, n_rows, offset,
        IS_RMS: gl.constexpr, ROUND: gl.constexpr, PARTS: gl.constexpr, SHIFTED: gl.constexpr,
        N: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    ):  # fmt: skip
        SIZE: gl.constexpr = gl.num_warps() * 32
        PIECES: gl.constexpr = N // (SIZE * WIDTH)
        WEIGHTED: gl.constexpr = w_ptr is not None
        layout: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32, 1], [gl.num_warps(), 1], [1, 0])
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        unit = gl.arange(0, SIZE, layout=gl.SliceLayout(1, layout))[:, None]
        at = unit * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))[None, :]
        x_rows = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, N // WIDTH, WIDTH], flat)
        dy_rows = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [STAGES, N // WIDTH, WIDTH], flat)
        first = gl.program_id(0)
        step = gl.num_programs(0)
        for s in gl.static_range(STAGES - 1):
            ask(x_rows, dy_rows, x_ptr, dy_ptr, x_stride, dy_stride, first + s * step, n_rows, s)
        w_row = x_rows
        if WEIGHTED:
            w_row = gl.allocate_shared_memory(w_ptr.dtype.element_ty, [N // WIDTH, WIDTH], flat)
            for c in gl.static_range(PIECES):
                w_row.slice(c * SIZE, SIZE).store(gl.load(w_ptr + (at + c * SIZE * WIDTH)))
        nothing = gl.zeros([SIZE, WIDTH], gl.float32, layout)
        dw = (nothing,) * PIECES
        db = (nothing,) * PIECES
        stage = first * 0
        mean = 0.0
        rstd_ptr = stats_ptr
        if not IS_RMS:
            mean = gl.load(stats_ptr + first)
            rstd_ptr += n_rows
        rstd = gl.load(rstd_ptr + first)
        for row in range(first, n_rows, step):
            async_copy.wait_group(STAGES - 2)
            # All threads are past the row before this one, whose buffers are free.
            coming = gl.where(stage == 0, STAGES - 1, stage - 1)
            ask(
                x_rows, dy_rows, x_ptr, dy_ptr, x_stride, dy_stride, row + (STAGES - 1) * step, n_rows, coming
            )
            # The next row's moments are asked for now, lest it wait for them.
            ahead = gl.minimum(row + step, n_rows - 1)
            next_rstd = gl.load(rstd_ptr + ahead)
            if not IS_RMS:
                next_mean = gl.load(stats_ptr + ahead)
            x_row, dy_row = x_rows.index(stage), dy_rows.index(stage)
            along = gl.zeros([SIZE], gl.float32, gl.SliceLayout(1, layout))
            level = along
            next_dw = dw[:0]
            next_db = db[:0]
            for c in gl.static_range(PIECES):
                xhat, dy, g = piece(x_row, dy_row, w_row, c, mean, rstd, offset, WEIGHTED, SHIFTED)
                along = along + gl.sum(g * xhat, axis=1)
                level = level + gl.sum(g, axis=1)
                if ROUND:
                    xhat = xhat.to(x_ptr.dtype.element_ty).to(gl.float32)
                next_dw = next_dw + (gl.fma(dy, xhat, dw[c]),)
                next_db = next_db + (db[c] + dy,)
            dw = next_dw
            db = next_db
            if IS_RMS:
                scaled_along = gl.sum(along, axis=0) * (rstd / N)
                scaled_level = 0.0
            else:
                along_all, level_all = gl.reduce((along, level), 0, add_both)
                scaled_along = along_all * (rstd / N)
                scaled_level = level_all * (rstd / N)
            dx_row = row_of(dx_ptr, row, N)
            for c in gl.static_range(PIECES):
                xhat, dy, g = piece(x_row, dy_row, w_row, c, mean, rstd, offset, WEIGHTED, SHIFTED)
                dx = gl.fma(xhat, -scaled_along, g * rstd - scaled_level)
                gl.store(dx_row + (at + c * SIZE * WIDTH), dx.to(dx_ptr.dtype.element_ty))
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            rstd = next_rstd
            if not IS_RMS:
                mean = next_mean
        partial_ptr += first.to(gl.int64) * PARTS * N
        for c in gl.static_range(PIECES):
            if PARTS > 0:
                gl.store(partial_ptr + (at + c * SIZE * WIDTH), dw[c])
            if PARTS > 1:
                gl.store(partial_ptr + (at + (N + c * SIZE * WIDTH)), db[c])


def stream_row(table: LaunchTable, x: Tensor, dy: Tensor, *vectors: Tensor | None) -> dict[str, int] | None:
    """What to launch a kernel of this kind with on these rows, from its table; None if they are not for it.

    Args:
        table: with num_warps, STAGES and programs_per_sm.
        x: (rows, columns).
        dy: the same.
        vectors: as long as a row each, held in shared memory beside the rows.
    """
    n_cols = x.shape[1]
    params = dict(table.pick(n_cols, x.device))
    piece = params["num_warps"] * 32 * WIDTH
    if not AVAILABLE or not piece or n_cols % piece or n_cols & (n_cols - 1):
        return None
    if any(t.element_size() != 2 or t.data_ptr() % 16 or t.stride(0) % 16 for t in (x, dy)):
        return None
    held = [v for v in vectors if v is not None]
    if any(v.data_ptr() % 16 for v in held):
        return None
    # A kibibyte is left to sums over threads.
    room = shared_bytes(x.device) // params["programs_per_sm"] - 1024
    room -= n_cols * sum(v.element_size() for v in held)
    params["STAGES"] = min(params["STAGES"], room // (4 * n_cols))
    return params if params["STAGES"] > 1 else None


def backward_stream(
    dy: Tensor, x: Tensor, weight: Tensor | None, stats: Tensor, dx: Tensor, offset: float, is_rms: bool,
    round_first: bool, parts: int, params: dict[str, int],
) -> Tensor:  # fmt: skip
    """Fill `dx`; fp32 partials of dw and, for two parts, db: (programs, parts, columns)."""
    n_rows, n_cols = x.shape
    programs = min(params.pop("programs_per_sm") * sm_count(x.device), n_rows)
    partial = torch.empty(programs, parts, n_cols, dtype=torch.float32, device=x.device)
    norm_backward_stream_kernel[(programs,)](
        dy, x, weight, stats, dx, partial, dy.stride(0), x.stride(0), n_rows, offset,
        IS_RMS=is_rms, ROUND=round_first, PARTS=parts, SHIFTED=offset != 0.0, N=n_cols, WIDTH=WIDTH,
        **params,
    )  # fmt: skip
    return partial
