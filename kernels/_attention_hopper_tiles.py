"""What the attention kernels for Hopper share: Gluon itself, the order of work, and descriptors.

Gluon is Triton's own language below Triton, for what its compiler does not decide well by itself. It is
experimental and is not interpreted: `AVAILABLE` says whether this Triton has what the kernels need.
"""

# Gluon takes no chained conditions on constants.
# ruff: noqa: SIM102

import functools
from typing import Any

import torch
from torch import Tensor

from ._launch import next_power_of_2

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    AVAILABLE = hasattr(tma, "async_copy_global_to_shared") and hasattr(gl, "warp_specialize")
except ImportError:
    AVAILABLE = False

#: Rows that a group of four warps owns: those of one matrix instruction.
ROWS = 64

if AVAILABLE:

    @gluon.jit
    def turns(n_items, PAIRED: gl.constexpr):
        """Blocks that are this program's, of `n_items` pieces of work: blocks, or pairs of them."""
        own = gl.cdiv(n_items - gl.program_id(0), gl.num_programs(0))
        return own * 2 if PAIRED else own

    @gluon.jit
    def work_tile(turn, n_blocks, n_planes, together, DESCENDING: gl.constexpr, PAIRED: gl.constexpr):
        """The block and the plane (batch and head) of this program's turn, ordered as in `work_item`.

        Where they come in pairs, the block with the most work under a causal mask is followed by the one with
        the least, and so on inwards: each pair is as much work as any other.
        """
        if PAIRED:
            item, size = gl.program_id(0) + turn // 2 * gl.num_programs(0), n_blocks // 2
        else:
            item, size = gl.program_id(0) + turn * gl.num_programs(0), n_blocks
        bundle = item // (together * size)
        width = gl.minimum(together, n_planes - bundle * together)
        rest = item - bundle * together * size
        block = rest // width
        if DESCENDING:
            block = n_blocks - 1 - block
        if PAIRED:
            block = gl.where(turn % 2 == 0, block, n_blocks - 1 - block)
        return block, bundle * together + rest % width

    @gluon.jit
    def key_blocks(row, size, low, high, n_k, BLOCK_N: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
        """Blocks of keys that the queries from `row` on see.

        Returns:
            start, whole, until, stop: some query sees those from start to stop, at least one block; each sees
            those from whole to until, which need no mask.
        """
        stop = gl.cdiv(n_k, BLOCK_N)
        start, whole, until = stop * 0, stop * 0, n_k // BLOCK_N
        if RIGHT:
            stop = gl.minimum(stop, gl.cdiv(gl.maximum(row + size + high, 1), BLOCK_N))
            until = gl.minimum(until, gl.maximum(row + high + 1, 0) // BLOCK_N)
        if LEFT:
            start = gl.minimum(gl.maximum(row + low, 0) // BLOCK_N, stop - 1)
            whole = gl.cdiv(gl.maximum(row + size - 1 + low, 0), BLOCK_N)
        until = gl.minimum(gl.maximum(until, start), stop)
        whole = gl.minimum(gl.maximum(whole, start), until)
        return start, whole, until, stop

    @gluon.jit
    def rows_of(tiles, index):
        """Buffer `index` of a ring as [rows, columns]."""
        ROWS: gl.constexpr = tiles.shape[3]
        COLS: gl.constexpr = tiles.shape[4]
        return tiles.index(index).reshape([ROWS, COLS])

    @gluon.jit
    def seen_alone(raw, row, col, n_k, low, high, LEFT: gl.constexpr, RIGHT: gl.constexpr):
        """The scores of the queries from `row` and the keys from `col` on: -inf where a key is not seen."""
        layout: gl.constexpr = raw.type.layout
        i = row + gl.arange(0, raw.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
        j = col + gl.arange(0, raw.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
        end = i * 0 + n_k
        if RIGHT:
            end = gl.minimum(i + (high + 1), end)
        raw = gl.where(j < end, raw, float("-inf"))
        if LEFT:
            raw = gl.where(j >= i + low, raw, float("-inf"))
        return raw

    @gluon.jit
    def visits(lists, start, stop, MASKED: gl.constexpr):
        """Blocks to visit: those that a mask's list has, else all from start to stop."""
        return gl.load(lists) if MASKED % 4 != 0 else stop - start

    @gluon.jit
    def visited(lists, step, start, MASKED: gl.constexpr):
        """The block that comes at `step`, and what a mask does there: hide some (1), nothing (2), add (3)."""
        if MASKED % 4 != 0:
            entry = gl.load(lists + 1 + step)
            block, code = entry >> 2, entry & 3
        else:
            block, code = start + step, 3
        return block, code

    @gluon.jit
    def bit_places(words, row, end, stride, ROWS: gl.constexpr, BLOCK: gl.constexpr, layout: gl.constexpr):
        """Where the bits of a tile's rows from `row` on are, [ROWS, 4]: one word of a row for each thread.

        Rows from `end` on have the last one's: nothing comes of them.
        """
        tile = gl.zeros([ROWS, BLOCK], gl.float32, layout).reshape([ROWS, BLOCK // 8, 4, 2])
        parts: gl.constexpr = tile.type.layout
        own: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts))
        rows = gl.minimum(row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, own)), end - 1)
        lanes = gl.arange(0, 4, layout=gl.SliceLayout(0, own))
        return words + (rows.to(gl.int64) * stride)[:, None] + lanes[None, :]

    @gluon.jit
    def load_bits(places, col, BLOCK: gl.constexpr):
        """The bits of the tile from column `col` on: of 128 columns four words a row, of 64 half of each."""
        bits = gl.load(places + col // 128 * 4)
        if BLOCK == 64:
            bits = bits >> (col // 64 % 2 * 16)
        return bits

    @gluon.jit
    def masked_by(raw, bits):
        """The scores whose bits are set, -inf elsewhere; which bit is whose is known at compile time."""
        layout: gl.constexpr = raw.type.layout
        ROWS: gl.constexpr = raw.shape[0]
        BLOCK: gl.constexpr = raw.shape[1]
        split = raw.reshape([ROWS, BLOCK // 8, 4, 2])
        parts: gl.constexpr = split.type.layout
        along: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, parts)))
        within: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, parts)))
        group = gl.arange(0, BLOCK // 8, layout=along)[None, :, None, None]
        side = gl.arange(0, 2, layout=within)[None, None, None, :]
        seen = (bits[:, None, :, None] & (1 << (group * 2 + side))) != 0
        raw = gl.where(seen, split, float("-inf")).reshape([ROWS, BLOCK])
        return gl.convert_layout(raw, layout)

    @gluon.jit
    def load_bias(where, first, end, AXIS: gl.constexpr, layout: gl.constexpr):
        """Of each key from `first` on, what is added to its scores; keys lie along the axis beside `AXIS`."""
        SIZE: gl.constexpr = where.shape[0]
        j = first + gl.arange(0, SIZE, layout=gl.SliceLayout(AXIS, layout))
        return gl.load(where, mask=j < end, other=0.0)

    @gluon.jit
    def load_numbers(
        source, row, col, n_rows, n_cols, stride_m, stride_n, code, ROWS: gl.constexpr, BLOCK: gl.constexpr,
        layout: gl.constexpr, MASKED: gl.constexpr,
    ):  # fmt: skip
        """What is added to the tile of scores from (row, col) on, 0 where that is nothing."""
        numbers = gl.zeros([ROWS, BLOCK], source.dtype.element_ty, layout)
        if MASKED > 2:
            if code == 3:
                i = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
                j = col + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
                places = (i.to(gl.int64) * stride_m)[:, None] + (j.to(gl.int64) * stride_n)[None, :]
                inside = (i < n_rows)[:, None] & (j < n_cols)[None, :]
                numbers = gl.load(source + places, mask=inside, other=0.0)
        return numbers

    @gluon.jit
    def mask_applied(raw, code, bits, numbers, scale_2, MASKED: gl.constexpr):
        """The scores with what a mask hides or adds, scaled where it adds."""
        if MASKED == 1:
            raw = gl.fma(raw, scale_2, bits)
        if MASKED == 2:
            if code == 1:
                raw = masked_by(raw, bits)
        if MASKED == 3:
            if code == 3:
                raw = gl.fma(raw, scale_2, numbers.to(gl.float32) * 1.4426950408889634)
            else:
                raw = raw * scale_2
                if code == 1:
                    raw = masked_by(raw, bits)
        if MASKED == 4:
            raw = gl.fma(raw, scale_2, numbers.to(gl.float32) * 1.4426950408889634)
        return raw

    @gluon.jit
    def load_pair(first, second, tiles, more_tiles, at, ready, batch, head, row, MORE: gl.constexpr = 0):
        """Ask for the tiles of two tensors at the same place; `MORE` bytes come with them."""
        mbarrier.expect(ready, first.block_type.nbytes + second.block_type.nbytes + MORE)
        tma.async_copy_global_to_shared(first, [batch, head, row, 0], ready, tiles.index(at))
        tma.async_copy_global_to_shared(second, [batch, head, row, 0], ready, more_tiles.index(at))

    @gluon.jit
    def store_tile(
        target, tile, batch, head, row, end, stride_b, stride_h, stride_n, DIM: gl.constexpr,
        AHEAD: gl.constexpr,
    ):  # fmt: skip
        """A tile of one head's rows, in the target's dtype; with `AHEAD` 16 bytes a thread at once."""
        dtype: gl.constexpr = target.dtype.element_ty
        if AHEAD:
            # As the matrix units leave it a thread has two numbers side by side.
            WIDE: gl.constexpr = 16 // dtype.itemsize
            LANES: gl.constexpr = tile.shape[1] // WIDE
            wide: gl.constexpr = gl.BlockedLayout([1, WIDE], [32 // LANES, LANES], [4, 1], [1, 0])
            tile = gl.convert_layout(tile.to(dtype), wide)
        layout: gl.constexpr = tile.type.layout
        i = row + gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
        cols = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
        at = target + batch.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h
        inside = (i < end) & (cols < DIM)
        gl.store(at + i.to(gl.int64) * stride_n + cols, tile.to(dtype), mask=inside)

    @gluon.jit
    def wait_for_kernel_before():
        """Until the kernel before this one has ended, where this one may start before that."""
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )

    @gluon.jit
    def let_next_kernel_start():
        """As soon as all programs of this one have come here and there is room."""
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )

    @gluon.jit
    def exponentials(raw, reference, factor, EXACT: gl.constexpr):
        """2 to the power of `factor` (raw - reference), with a reference that broadcasts.

        One instruction scales and subtracts the reference, scaled and rounded beforehand. From scores of 2^28
        on that rounding is 16 and more, which in fp16 is too much: with EXACT it does not take place.
        """
        if EXACT:
            p = gl.exp2((raw - reference) * factor)
        else:
            p = gl.exp2(gl.fma(raw, factor, -(reference * factor)))
        return p


def aligned(x: Tensor) -> bool:
    """Whether the copy engine takes `x`: 16-byte aligned rows, none expanded."""
    step = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and all(stride > 0 and stride % step == 0 for stride in x.stride()[:3])


@functools.cache
def _layout(rows: int, cols: int, dtype: torch.dtype) -> Any:
    # Worked out once: it takes longer than the rest of a descriptor.
    of = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[dtype]
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, cols], of)


def described(x: Tensor, rows: int, cols: int = 0) -> Any:
    """A descriptor of x, (batch, heads, tokens, dim), for tiles of `rows` tokens of one head.

    Tiles have as many columns as x, in a power of two, unless `cols` are given.
    """
    cols = cols or max(16, next_power_of_2(x.shape[3]))
    layout = _layout(rows, cols, x.dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, cols], layout)


#: Pairs are formed where their last round leaves programs idle for no more than this share of the time.
_IDLE = 0.15


def items(blocks: int, planes: int, programs: int, uneven: bool, params: Any) -> tuple[int, int, bool]:
    """Pieces of work, how many programs share them, and whether a piece is a pair of blocks.

    As many programs as the device holds, if PERSISTENT. Each then has every so-manieth piece, which under a
    causal mask can be a third more work for one than for another: where work is `uneven`, pairs are formed.
    """
    count = blocks * planes
    if not params["PERSISTENT"]:
        return count, count, False
    pairs = count // 2
    rounds = -(-pairs // programs)
    if uneven and blocks % 2 == 0 and rounds * programs <= pairs * (1 + _IDLE):
        return pairs, min(pairs, programs), True
    return count, min(count, programs), False


__all__ = ["AVAILABLE", "ROWS", "aligned", "described", "items"]
if AVAILABLE:
    __all__ += [
        "bit_places",
        "exponentials",
        "fence_async_shared",
        "gl",
        "gluon",
        "key_blocks",
        "let_next_kernel_start",
        "load_bias",
        "load_bits",
        "load_numbers",
        "load_pair",
        "mask_applied",
        "mbarrier",
        "rows_of",
        "seen_alone",
        "store_tile",
        "tma",
        "turns",
        "visited",
        "visits",
        "wait_for_kernel_before",
        "warpgroup_mma",
        "warpgroup_mma_wait",
        "work_tile",
    ]  # fmt: skip
