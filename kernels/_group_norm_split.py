"""Group norms whose groups several programs share: too large for one, or too few to keep all busy.

A group's planes are cut into bands of `DEPTH`, and their positions into parts. Forward, each (band, part) has
its own moments, which every program of the second kernel joins (Chan, Golub, LeVeque, 1983) before it
normalises one tile. Backward, each (band, part) has a plane's sums of du h and of du, from which come a
group's means as well as the sums for weight and shift. The second reading of x and dy goes from the end, so
that it finds in the L2 cache what fits there. See `group_norm` for the mathematics.
"""

import torch
from torch import Tensor

from ._device import sm_count
from ._group_norm_held import per_plane, plane_mask, planes_of, scaled_and_shifted
from ._launch import LaunchTable, cdiv, next_power_of_2
from ._math import activation, activation_gradient, both_sums, widened
from ._rows import load_tile, store_tile, sum_partials
from ._triton import tl, triton

#: Size: elements of a group. programs_per_sm: of the kernels that sum, as many as give each one tile or more.
#: No row has been timed.
FORWARD = LaunchTable(
    "group_norm_split_forward",
    {
        "default": [(None, {"TILE": 8192, "num_warps": 8, "programs_per_sm": 8})],
        "interpreter": [(None, {"TILE": 1024, "num_warps": 1, "programs_per_sm": 2})],
    },
)
BACKWARD = LaunchTable(
    "group_norm_split_backward",
    {
        "default": [(None, {"TILE": 4096, "num_warps": 8, "programs_per_sm": 8})],
        "interpreter": [(None, {"TILE": 1024, "num_warps": 1, "programs_per_sm": 2})],
    },
)
#: Partials that a program joins at once.
_PIECES = 1024


@triton.jit
def _place(program, along, bands):
    """Of a program, which of so many places along the positions is its own, its band, and its group."""
    return program % along, program // along % bands, program // along // bands


@triton.jit
def _group_norm_moments_kernel(
    x_ptr, partial_ptr, n_groups, groups, depth, size, bands, parts, FULL: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    part, band, group = _place(tl.program_id(0), parts, bands)
    planes, _, exist = planes_of(group, band * DEPTH, n_groups, groups, depth, 1, DEPTH)
    deep = tl.minimum(depth - band * DEPTH, DEPTH)
    mean = 0.0
    rest = 0.0
    square = 0.0
    count = 0.0
    for start in range(part * BLOCK, size, parts * BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = plane_mask(exist, cols, size, FULL)
        x = widened(load_tile(x_ptr + planes[:, None] * size + cols[None, :], mask, 1, FULL))
        here = (deep * tl.minimum(size - start, BLOCK)).to(tl.float32)
        own = tl.sum(x) / here
        centred = x - own
        if not FULL:
            centred = tl.where(mask, centred, 0.0)
        lacks = tl.sum(centred) / here
        mean = tl.where(count == 0.0, own, mean)
        apart = ((own - mean) + lacks) - rest
        share = here / (count + here)
        square += tl.sum(centred * centred) - lacks * lacks * here + apart * apart * count * share
        rest += apart * share
        count += here
    partial_ptr += tl.program_id(0)
    programs = tl.num_programs(0)
    tl.store(partial_ptr, mean)
    tl.store(partial_ptr + programs, rest)
    tl.store(partial_ptr + 2 * programs, square)
    tl.store(partial_ptr + 3 * programs, count)


@triton.jit
def _joined(partial_ptr, group, n_groups, pieces, count, PIECES: tl.constexpr):
    """A group's mean, what that lacks, and the mean square about both, from its pieces' differences."""
    partial_ptr += group * pieces
    programs = n_groups * pieces
    mean = tl.load(partial_ptr)
    total = 0.0
    for start in range(0, pieces, PIECES):
        i = start + tl.arange(0, PIECES)
        apart = tl.load(partial_ptr + i, mask=i < pieces, other=0.0) - mean
        apart += tl.load(partial_ptr + programs + i, mask=i < pieces, other=0.0)
        total += tl.sum(apart * tl.load(partial_ptr + 3 * programs + i, mask=i < pieces, other=0.0))
    rest = total / count
    square = 0.0
    for start in range(0, pieces, PIECES):
        i = start + tl.arange(0, PIECES)
        apart = tl.load(partial_ptr + i, mask=i < pieces, other=0.0) - mean
        apart += tl.load(partial_ptr + programs + i, mask=i < pieces, other=0.0) - rest
        weight = tl.load(partial_ptr + 3 * programs + i, mask=i < pieces, other=0.0)
        own = tl.load(partial_ptr + 2 * programs + i, mask=i < pieces, other=0.0)
        square += tl.sum(own + apart * apart * weight)
    return mean, rest, square / count


@triton.jit
def _group_norm_apply_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, stats_ptr, partial_ptr, n_groups, groups, depth, size, count, eps, bands,
    pieces, blocks, ACT: tl.constexpr, ROUGH: tl.constexpr, FULL: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    # From the end: what the kernel before this one read last is in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    block, band, group = _place(program, blocks, bands)
    planes, channel, exist = planes_of(group, band * DEPTH, n_groups, groups, depth, 1, DEPTH)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    mask = plane_mask(exist, cols, size, FULL)
    where = planes[:, None] * size + cols[None, :]
    x = widened(load_tile(x_ptr + where, mask, 1, FULL))
    mean, rest, variance = _joined(partial_ptr, group, n_groups, pieces, count, PIECES)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    if block + band == 0:
        tl.store(stats_ptr + group, mean)
        tl.store(stats_ptr + n_groups + group, rest)
        tl.store(stats_ptr + 2 * n_groups + group, rstd)
    u = scaled_and_shifted(((x - mean) - rest) * rstd, w_ptr, b_ptr, channel, exist)
    store_tile(y_ptr + where, activation(u, ACT, ROUGH), mask, 1, FULL)


@triton.jit
def _centred_and_gradient(
    dy_ptr, x_ptr, w_ptr, b_ptr, stats_ptr, group, n_groups, planes, channel, exist, cols, mask, size,
    ACT: tl.constexpr, EXACT: tl.constexpr, ROUGH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """h, du and rstd of a tile."""
    where = planes[:, None] * size + cols[None, :]
    x = widened(load_tile(x_ptr + where, mask, 1, FULL))
    dy = widened(load_tile(dy_ptr + where, mask, 1, FULL))
    rstd = tl.load(stats_ptr + 2 * n_groups + group)
    h = ((x - tl.load(stats_ptr + group)) - tl.load(stats_ptr + n_groups + group)) * rstd
    if not FULL:
        h = tl.where(mask, h, 0.0)
    u = scaled_and_shifted(h, w_ptr, b_ptr, channel, exist)
    return h, dy * activation_gradient(u, ACT, EXACT, ROUGH), rstd


@triton.jit
def _group_norm_sums_kernel(
    dy_ptr, x_ptr, w_ptr, b_ptr, stats_ptr, partial_ptr, n_groups, groups, depth, size, bands, parts,
    ACT: tl.constexpr, EXACT: tl.constexpr, ROUGH: tl.constexpr, FULL: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    part, band, group = _place(tl.program_id(0), parts, bands)
    planes, channel, exist = planes_of(group, band * DEPTH, n_groups, groups, depth, 1, DEPTH)
    along = tl.zeros([DEPTH], tl.float32)
    level = tl.zeros([DEPTH], tl.float32)
    for start in range(part * BLOCK, size, parts * BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = plane_mask(exist, cols, size, FULL)
        h, du, _ = _centred_and_gradient(
            dy_ptr, x_ptr, w_ptr, b_ptr, stats_ptr, group, n_groups, planes, channel, exist, cols, mask,
            size, ACT, EXACT, ROUGH, FULL,
        )  # fmt: skip
        more_along, more_level = both_sums(du * h, du)
        along += more_along
        level += more_level
    channels = groups * depth
    partial_ptr += (group // groups * parts + part).to(tl.int64) * 2 * channels + channel
    tl.store(partial_ptr, along, mask=exist)
    tl.store(partial_ptr + channels, level, mask=exist)


@triton.jit
def _group_norm_gradient_kernel(
    dy_ptr, x_ptr, w_ptr, b_ptr, stats_ptr, dx_ptr, partial_ptr, n_groups, groups, depth, size, count,
    bands, parts, blocks, ACT: tl.constexpr, ROUGH: tl.constexpr, FULL: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = dx_ptr.dtype.element_ty == tl.float32
    # From the end: what the kernel before this one read last is in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    block, band, group = _place(program, blocks, bands)
    planes, channel, exist = planes_of(group, band * DEPTH, n_groups, groups, depth, 1, DEPTH)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    mask = plane_mask(exist, cols, size, FULL)
    h, g, rstd = _centred_and_gradient(
        dy_ptr, x_ptr, w_ptr, b_ptr, stats_ptr, group, n_groups, planes, channel, exist, cols, mask, size,
        ACT, EXACT, ROUGH, FULL,
    )  # fmt: skip
    channels = groups * depth
    along = 0.0
    level = 0.0
    for start in range(0, depth * parts, PIECES):
        i = start + tl.arange(0, PIECES)
        there = i < depth * parts
        of_piece = group % groups * depth + i % depth
        where = (group // groups * parts + i // depth).to(tl.int64) * 2 * channels + of_piece
        w = 1.0
        if w_ptr is not None:
            w = tl.load(w_ptr + of_piece, mask=there, other=0.0).to(tl.float32)
        along += tl.sum(tl.load(partial_ptr + where, mask=there, other=0.0) * w)
        level += tl.sum(tl.load(partial_ptr + where + channels, mask=there, other=0.0) * w)
    if w_ptr is not None:
        g *= per_plane(w_ptr, channel, exist)
    dx = (g - h * (along / count) - level / count) * rstd
    store_tile(dx_ptr + planes[:, None] * size + cols[None, :], dx, mask, 1, FULL)


def cut(depth: int, size: int, tile: int) -> tuple[int, int]:
    """Planes and positions of a tile of up to `tile` elements: what leaves the fewest of it empty.

    Of several the largest, and of those the one with the longest runs.
    """
    found = []
    deep = 1
    while deep <= min(next_power_of_2(depth), tile):
        # No fewer than 8 elements: the compiler takes those of 16 bits in pairs.
        block = max(min(next_power_of_2(size), tile // deep), 8 // deep)
        held = cdiv(depth, deep) * deep * cdiv(size, block) * block
        found.append((held, -deep * block, deep, block))
        deep *= 2
    return min(found)[2:]


def _geometry(x: Tensor, groups: int, params: dict[str, int]) -> tuple[dict[str, int], int, int, int]:
    """DEPTH, BLOCK and FULL of the kernels; bands, parts and blocks of a group."""
    samples, channels, size = x.shape
    depth = channels // groups
    deep, block = cut(depth, size, params.pop("TILE"))
    bands, blocks = cdiv(depth, deep), cdiv(size, block)
    wanted = cdiv(params.pop("programs_per_sm") * sm_count(x.device), samples * groups * bands)
    full = depth % deep == 0 and size % block == 0
    return {"DEPTH": deep, "BLOCK": block, "FULL": full}, bands, min(blocks, wanted), blocks


def forward_split(
    x: Tensor, weight: Tensor | None, shift: Tensor | None, y: Tensor, stats: Tensor, groups: int, eps: float,
    name: str, rough: bool,
) -> None:  # fmt: skip
    """Fill `y` and `stats` from `x`, (samples, channels, positions)."""
    samples, channels, size = x.shape
    depth, n_groups = channels // groups, samples * groups
    params = dict(FORWARD.pick(depth * size, x.device))
    shape, bands, parts, blocks = _geometry(x, groups, params)
    pieces = bands * parts
    partial = torch.empty(4, n_groups * pieces, dtype=torch.float32, device=x.device)
    _group_norm_moments_kernel[(n_groups * pieces,)](
        x, partial, n_groups, groups, depth, size, bands, parts, **shape, **params
    )
    _group_norm_apply_kernel[(n_groups * bands * blocks,)](
        x, weight, shift, y, stats, partial, n_groups, groups, depth, size, float(depth * size), eps, bands,
        pieces, blocks, ACT=name, ROUGH=int(rough), PIECES=min(next_power_of_2(pieces), _PIECES),
        **shape, **params,
    )  # fmt: skip


def backward_split(
    dy: Tensor, x: Tensor, weight: Tensor | None, shift: Tensor | None, stats: Tensor, dx: Tensor,
    groups: int, name: str, rough: bool, dtypes: list[torch.dtype],
) -> list[Tensor]:  # fmt: skip
    """Fill `dx`; the sums for weight and shift if their `dtypes` are given."""
    samples, channels, size = x.shape
    depth, n_groups = channels // groups, samples * groups
    params = dict(BACKWARD.pick(depth * size, x.device))
    shape, bands, parts, blocks = _geometry(x, groups, params)
    partial = torch.empty(samples * parts, 2, channels, dtype=torch.float32, device=x.device)
    _group_norm_sums_kernel[(n_groups * bands * parts,)](
        dy, x, weight, shift, stats, partial, n_groups, groups, depth, size, bands, parts,
        ACT=name, EXACT=dx.dtype == torch.float32, ROUGH=int(rough), **shape, **params,
    )  # fmt: skip
    _group_norm_gradient_kernel[(n_groups * bands * blocks,)](
        dy, x, weight, shift, stats, dx, partial, n_groups, groups, depth, size, float(depth * size),
        bands, parts, blocks, ACT=name, ROUGH=int(rough),
        PIECES=min(next_power_of_2(depth * parts), _PIECES), **shape, **params,
    )  # fmt: skip
    return sum_partials(partial, dtypes) if dtypes else []
