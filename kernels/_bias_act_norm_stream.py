"""The backward of bias, activation and LayerNorm in 16 bits with rows in shared memory, in Gluon.

As the norms' in `_norm_stream`, with three sums over rows instead of two. What an activation costs is paid
once: of each element h and the slope stay in registers between the two readings of a row. So a program needs
half of the registers that Triton's own takes, and another one works while its threads wait for each other.
"""

# Gluon takes no starred tuples.
# ruff: noqa: RUF005

import torch
from torch import Tensor

from ._device import sm_count
from ._launch import LaunchTable
from ._math import activation, activation_gradient, at_once, sum_as_eager, widened
from ._norm_stream import AVAILABLE, WIDTH

#: Size: columns. As `_norm_stream.STREAM`.
STREAM = LaunchTable(
    "bias_act_norm_backward_stream",
    {
        "default": [(None, {"num_warps": 0})],
        "sm_90": [
            (4096, {"num_warps": 0}),
            (None, {"num_warps": 16, "STAGES": 2, "programs_per_sm": 1, "maxnreg": 128}),
        ],
        "interpreter": [(None, {"num_warps": 0, "STAGES": 3, "programs_per_sm": 1})],
    },
)

if AVAILABLE:
    from ._norm_stream import add_both, ask, async_copy, gl, gluon, row_of

    @gluon.jit
    def weighted(dy, w_row, c, WEIGHTED: gl.constexpr):
        """A thread's piece `c` of dy, times the weight."""
        if WEIGHTED:
            dy = dy * widened(w_row.slice(c * dy.shape[0], dy.shape[0]).load(dy.type.layout))
        return dy

    @gluon.jit
    def bias_act_norm_backward_stream_kernel(
        dy_ptr, x_ptr, bias_ptr, w_ptr, stats_ptr, dx_ptr, partial_ptr, dy_stride, x_stride, n_rows,
        ACT: gl.constexpr, ROUGH: gl.constexpr, PARTS: gl.constexpr, N: gl.constexpr, WIDTH: gl.constexpr,
        STAGES: gl.constexpr,
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
        w_row, bias_row = x_rows, x_rows
        if WEIGHTED:
            w_row = gl.allocate_shared_memory(w_ptr.dtype.element_ty, [N // WIDTH, WIDTH], flat)
            for c in gl.static_range(PIECES):
                w_row.slice(c * SIZE, SIZE).store(gl.load(w_ptr + (at + c * SIZE * WIDTH)))
        if bias_ptr is not None:
            bias_row = gl.allocate_shared_memory(bias_ptr.dtype.element_ty, [N // WIDTH, WIDTH], flat)
            for c in gl.static_range(PIECES):
                bias_row.slice(c * SIZE, SIZE).store(gl.load(bias_ptr + (at + c * SIZE * WIDTH)))
        nothing = gl.zeros([SIZE, WIDTH], gl.float32, layout)
        dw = (nothing,) * PIECES
        dc = (nothing,) * PIECES
        dbias = (nothing,) * PIECES
        stage = first * 0
        mean, rstd = gl.load(stats_ptr + first), gl.load(stats_ptr + n_rows + first)
        for row in range(first, n_rows, step):
            async_copy.wait_group(STAGES - 2)
            # All threads are past the row before this one, whose buffers are free.
            later, free = row + (STAGES - 1) * step, gl.where(stage == 0, STAGES - 1, stage - 1)
            ask(x_rows, dy_rows, x_ptr, dy_ptr, x_stride, dy_stride, later, n_rows, free)
            # The next row's moments are asked for now, lest it wait for them.
            ahead = gl.minimum(row + step, n_rows - 1)
            next_mean, next_rstd = gl.load(stats_ptr + ahead), gl.load(stats_ptr + n_rows + ahead)
            x_row, dy_row = x_rows.index(stage), dy_rows.index(stage)
            along = gl.zeros([SIZE], gl.float32, gl.SliceLayout(1, layout))
            level = along
            hs, slopes, next_dw, next_dc, next_dbias = dw[:0], dw[:0], dw[:0], dw[:0], dw[:0]
            for c in gl.static_range(PIECES):
                x = x_row.slice(c * SIZE, SIZE).load(layout)
                if bias_ptr is None:
                    u = widened(x)
                else:
                    u = sum_as_eager(x, bias_row.slice(c * SIZE, SIZE).load(layout))
                h = (activation(u, ACT, ROUGH) - mean) * rstd
                dy = widened(dy_row.slice(c * SIZE, SIZE).load(layout))
                g = weighted(dy, w_row, c, WEIGHTED)
                along = along + gl.sum(g * h, axis=1)
                level = level + gl.sum(g, axis=1)
                hs = hs + (h,)
                slopes = slopes + (at_once(activation_gradient(u, ACT, False, ROUGH)),)
                next_dw = next_dw + (gl.fma(dy, h, dw[c]),)
                next_dc = next_dc + (dc[c] + dy,)
            dw = next_dw
            dc = next_dc
            along_all, level_all = gl.reduce((along, level), 0, add_both)
            scaled_along = along_all * (rstd / N)
            scaled_level = level_all * (rstd / N)
            dx_row = row_of(dx_ptr, row, N)
            for c in gl.static_range(PIECES):
                g = weighted(widened(dy_row.slice(c * SIZE, SIZE).load(layout)), w_row, c, WEIGHTED)
                dx = gl.fma(hs[c], -scaled_along, g * rstd - scaled_level) * slopes[c]
                gl.store(dx_row + (at + c * SIZE * WIDTH), dx.to(dx_ptr.dtype.element_ty))
                next_dbias = next_dbias + (dbias[c] + dx,)
            dbias = next_dbias
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            mean, rstd = next_mean, next_rstd
        partial_ptr += first.to(gl.int64) * PARTS * N
        for c in gl.static_range(PIECES):
            place = at + c * SIZE * WIDTH
            if PARTS > 1:
                gl.store(partial_ptr + place, dw[c])
                gl.store(partial_ptr + (place + N), dc[c])
            if PARTS == 1:
                gl.store(partial_ptr + place, dbias[c])
            if PARTS == 3:
                gl.store(partial_ptr + (place + 2 * N), dbias[c])


def backward_stream(
    dy: Tensor, x: Tensor, bias: Tensor | None, weight: Tensor | None, stats: Tensor, dx: Tensor, name: str,
    rough: bool, parts: int, params: dict[str, int],
) -> Tensor:  # fmt: skip
    """Fill `dx`; fp32 partials of the sums that are asked for: (programs, parts, columns)."""
    n_rows, n_cols = x.shape
    programs = min(params.pop("programs_per_sm") * sm_count(x.device), n_rows)
    partial = torch.empty(programs, parts, n_cols, dtype=torch.float32, device=x.device)
    bias_act_norm_backward_stream_kernel[(programs,)](
        dy, x, bias, weight, stats, dx, partial, dy.stride(0), x.stride(0), n_rows,
        ACT=name, ROUGH=int(rough), PARTS=parts, N=n_cols, WIDTH=WIDTH, **params,
    )  # fmt: skip
    return partial
