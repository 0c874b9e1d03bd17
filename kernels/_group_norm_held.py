"""Group norms whose groups a program holds in registers: x is read once, y written once.

A tile is `ROWS` groups of `DEPTH` planes (a channel of a sample) of `BLOCK` positions, powers of two; what
exceeds a group's own depth and size is masked. See `group_norm` for the mathematics.
"""

import torch
from torch import Tensor

from ._launch import LaunchTable, Row, cdiv, next_power_of_2
from ._math import activation, activation_gradient, both_sums, widened
from ._rows import load_tile, store_tile, sum_partials
from ._triton import tl, triton

_INTERPRETED: list[Row] = [(64, {"ROWS": 4, "num_warps": 1}), (None, {"ROWS": 1, "num_warps": 1})]
#: Size: elements of a group's tile. 32 elements a thread: of 16 bits, four loads of 16 bytes on their way at
#: once. No row has been timed.
FORWARD = LaunchTable(
    "group_norm_forward",
    {
        "default": [
            (16, {"ROWS": 64, "num_warps": 1}),
            (64, {"ROWS": 32, "num_warps": 2}),
            (128, {"ROWS": 16, "num_warps": 2}),
            (256, {"ROWS": 8, "num_warps": 2}),
            (512, {"ROWS": 4, "num_warps": 2}),
            (1024, {"ROWS": 2, "num_warps": 2}),
            (2048, {"ROWS": 1, "num_warps": 2}),
            (4096, {"ROWS": 1, "num_warps": 4}),
            (8192, {"ROWS": 1, "num_warps": 8}),
            (None, {"ROWS": 1, "num_warps": 16}),
        ],
        "interpreter": _INTERPRETED,
    },
)
#: 16 elements a thread, of two tensors. No row has been timed.
BACKWARD = LaunchTable(
    "group_norm_backward",
    {
        "default": [
            (16, {"ROWS": 32, "num_warps": 1}),
            (64, {"ROWS": 16, "num_warps": 2}),
            (128, {"ROWS": 16, "num_warps": 4}),
            (256, {"ROWS": 8, "num_warps": 4}),
            (512, {"ROWS": 4, "num_warps": 4}),
            (1024, {"ROWS": 2, "num_warps": 4}),
            (2048, {"ROWS": 1, "num_warps": 4}),
            (4096, {"ROWS": 1, "num_warps": 8}),
            (None, {"ROWS": 1, "num_warps": 16}),
        ],
        "interpreter": _INTERPRETED,
    },
)


@triton.jit
def planes_of(group, offset, n_groups, groups, depth, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Of a tile's planes, from `group` on and `offset` planes into it: their numbers, their channels, and
    which of them exist. Division is of 32 bits, since that of 64 is a call."""
    i = tl.arange(0, ROWS * DEPTH)
    group = group + i // DEPTH
    inside = offset + i % DEPTH
    exist = (group < n_groups) & (inside < depth)
    return group.to(tl.int64) * depth + inside, group % groups * depth + inside, exist


@triton.jit
def plane_mask(exist, cols, size, FULL: tl.constexpr):
    """Which elements of a tile exist; FULL says that positions and planes fill it."""
    mask = exist[:, None]
    if not FULL:
        mask = mask & (cols < size)[None, :]
    return mask


@triton.jit
def per_plane(ptr, channel, exist):
    """A vector's number for each plane's channel."""
    return tl.load(ptr + channel, mask=exist, other=0.0).to(tl.float32)[:, None]


@triton.jit
def scaled_and_shifted(h, w_ptr, b_ptr, channel, exist):
    """h w + b."""
    if w_ptr is not None:
        h = h * per_plane(w_ptr, channel, exist)
    if b_ptr is not None:
        h = h + per_plane(b_ptr, channel, exist)
    return h


@triton.jit
def _sums(x, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Of each group's elements, of a tile or of its planes' sums."""
    if ROWS == 1:
        total = tl.full([1], tl.sum(x), tl.float32)
    else:
        if len(x.shape) == 2:
            x = tl.sum(x, axis=1)
        total = tl.sum(tl.reshape(x, [ROWS, DEPTH]), axis=1)
    return total


@triton.jit
def _to_planes(of_group, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """A number for each group as one for each of its planes."""
    if ROWS > 1:
        wide = tl.broadcast_to(of_group[:, None], [ROWS, DEPTH])
        of_group = tl.reshape(wide, [ROWS * DEPTH])
    return of_group[:, None]


@triton.jit
def _loaded(stats_ptr, first, n_groups, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Mean, what that lacks, and root's reciprocal for each plane."""
    group = first + tl.arange(0, ROWS)
    mean = tl.load(stats_ptr + group, mask=group < n_groups, other=0.0)
    rest = tl.load(stats_ptr + n_groups + group, mask=group < n_groups, other=0.0)
    rstd = tl.load(stats_ptr + 2 * n_groups + group, mask=group < n_groups, other=0.0)
    return _to_planes(mean, ROWS, DEPTH), _to_planes(rest, ROWS, DEPTH), _to_planes(rstd, ROWS, DEPTH)


@triton.jit
def _group_norm_forward_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, n_groups, groups, depth, size, count, eps,
    ACT: tl.constexpr, ROUGH: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    planes, channel, exist = planes_of(first, 0, n_groups, groups, depth, ROWS, DEPTH)
    cols = tl.arange(0, BLOCK)
    mask = plane_mask(exist, cols, size, FULL)
    where = planes[:, None] * size + cols[None, :]
    x = widened(load_tile(x_ptr + where, mask, ROWS, FULL))
    mean = tl.div_rn(_sums(x, ROWS, DEPTH), count)
    centred = x - _to_planes(mean, ROWS, DEPTH)
    if not FULL:
        centred = tl.where(mask, centred, 0.0)
    rest = _sums(centred, ROWS, DEPTH) / count
    variance = _sums(centred * centred, ROWS, DEPTH) / count - rest * rest
    rstd = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    group = first + tl.arange(0, ROWS)
    tl.store(stats_ptr + group, mean, mask=group < n_groups)
    tl.store(stats_ptr + n_groups + group, rest, mask=group < n_groups)
    tl.store(stats_ptr + 2 * n_groups + group, rstd, mask=group < n_groups)
    h = (centred - _to_planes(rest, ROWS, DEPTH)) * _to_planes(rstd, ROWS, DEPTH)
    u = scaled_and_shifted(h, w_ptr, b_ptr, channel, exist)
    store_tile(y_ptr + where, activation(u, ACT, ROUGH), mask, ROWS, FULL)


@triton.jit
def _group_norm_backward_kernel(
    dy_ptr, x_ptr, w_ptr, b_ptr, stats_ptr, dx_ptr, partial_ptr, n_groups, groups, depth, size, count,
    ACT: tl.constexpr, ROUGH: tl.constexpr, SUMMED: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = dx_ptr.dtype.element_ty == tl.float32
    first = tl.program_id(0) * ROWS
    planes, channel, exist = planes_of(first, 0, n_groups, groups, depth, ROWS, DEPTH)
    cols = tl.arange(0, BLOCK)
    mask = plane_mask(exist, cols, size, FULL)
    where = planes[:, None] * size + cols[None, :]
    x = widened(load_tile(x_ptr + where, mask, ROWS, FULL))
    dy = widened(load_tile(dy_ptr + where, mask, ROWS, FULL))
    mean, rest, rstd = _loaded(stats_ptr, first, n_groups, ROWS, DEPTH)
    h = ((x - mean) - rest) * rstd
    if not FULL:
        h = tl.where(mask, h, 0.0)
    u = scaled_and_shifted(h, w_ptr, b_ptr, channel, exist)
    g = dy * activation_gradient(u, ACT, EXACT, ROUGH)
    along, level = both_sums(g * h, g)
    if SUMMED:
        # Twice the planes of the samples before it, and its channel.
        partial_ptr += 2 * planes - channel
        tl.store(partial_ptr, along, mask=exist)
        tl.store(partial_ptr + groups * depth, level, mask=exist)
    if w_ptr is not None:
        w = per_plane(w_ptr, channel, exist)
        g *= w
        along *= tl.reshape(w, along.shape)
        level *= tl.reshape(w, level.shape)
    along = _to_planes(_sums(along, ROWS, DEPTH) / count, ROWS, DEPTH)
    level = _to_planes(_sums(level, ROWS, DEPTH) / count, ROWS, DEPTH)
    store_tile(dx_ptr + where, (g - h * along - level) * rstd, mask, ROWS, FULL)


def tile_of(depth: int, size: int) -> int:
    """Elements of a group's tile."""
    return next_power_of_2(depth) * next_power_of_2(size)


def forward_held(
    x: Tensor, weight: Tensor | None, shift: Tensor | None, y: Tensor, stats: Tensor, groups: int, eps: float,
    name: str, rough: bool,
) -> None:  # fmt: skip
    """Fill `y` and `stats` from `x`, (samples, channels, positions)."""
    samples, channels, size = x.shape
    depth, n_groups = channels // groups, samples * groups
    params = FORWARD.pick(tile_of(depth, size), x.device)
    wide, block = next_power_of_2(depth), next_power_of_2(size)
    _group_norm_forward_kernel[(cdiv(n_groups, params["ROWS"]),)](
        x, weight, shift, y, stats, n_groups, groups, depth, size, float(depth * size), eps,
        ACT=name, ROUGH=int(rough), FULL=(wide, block) == (depth, size), DEPTH=wide, BLOCK=block, **params,
    )  # fmt: skip


def backward_held(
    dy: Tensor, x: Tensor, weight: Tensor | None, shift: Tensor | None, stats: Tensor, dx: Tensor,
    groups: int, name: str, rough: bool, dtypes: list[torch.dtype],
) -> list[Tensor]:  # fmt: skip
    """Fill `dx`; the sums for weight and shift if their `dtypes` are given."""
    samples, channels, size = x.shape
    depth, n_groups = channels // groups, samples * groups
    params = BACKWARD.pick(tile_of(depth, size), x.device)
    wide, block = next_power_of_2(depth), next_power_of_2(size)
    partial = torch.empty(samples, 2 if dtypes else 0, channels, dtype=torch.float32, device=x.device)
    _group_norm_backward_kernel[(cdiv(n_groups, params["ROWS"]),)](
        dy, x, weight, shift, stats, dx, partial, n_groups, groups, depth, size, float(depth * size),
        ACT=name, ROUGH=int(rough), SUMMED=bool(dtypes), FULL=(wide, block) == (depth, size), DEPTH=wide,
        BLOCK=block, **params,
    )  # fmt: skip
    return sum_partials(partial, dtypes) if dtypes else []
