"""What the attention kernels for Hopper share: Gluon itself, the order of work, and descriptors.

Gluon is Triton's own language below Triton, for what its compiler does not decide well by itself. It is
experimental and is not interpreted: `AVAILABLE` says whether this Triton has what the kernels need.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from ._launch import next_power_of_2

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
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
    def code_of(codes, at, MASKED: gl.constexpr):
        """Whether a mask hides all (0), some (1) or none (2) of a block."""
        return gl.load(codes + at) if MASKED == 1 else 1

    @gluon.jit
    def load_bits(words, row, end, BLOCK: gl.constexpr, layout: gl.constexpr):
        """Of each score of a tile, the word that holds its bit; `words`: where those of the rows begin.

        Which word that is, is known at compile time: a thread holds one register for each word of its rows.
        """
        ROWS: gl.constexpr = words.shape[0]
        inside = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)) < end
        j = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))[None, :]
        bits = gl.load(words, mask=inside, other=0)[:, None]
        for part in gl.static_range(1, BLOCK // 32):
            bits = gl.where(j < 32 * part, bits, gl.load(words + part, mask=inside, other=0)[:, None])
        return bits

    @gluon.jit
    def load_bias(where, first, end, AXIS: gl.constexpr, layout: gl.constexpr):
        """Of each key from `first` on, what is added to its scores; keys lie along the axis beside `AXIS`."""
        SIZE: gl.constexpr = where.shape[0]
        j = first + gl.arange(0, SIZE, layout=gl.SliceLayout(AXIS, layout))
        return gl.load(where, mask=j < end, other=0.0)

    @gluon.jit
    def masked_by(raw, bits):
        """The scores whose bits are set, -inf elsewhere."""
        j = gl.arange(0, raw.shape[1], layout=gl.SliceLayout(0, raw.type.layout))[None, :]
        return gl.where((bits & (1 << (j & 31))) != 0, raw, float("-inf"))

    @gluon.jit
    def load_pair(first, second, tiles, more_tiles, at, ready, batch, head, row):
        """Ask for the tiles of two tensors at the same place."""
        mbarrier.expect(ready, first.block_type.nbytes + second.block_type.nbytes)
        tma.async_copy_global_to_shared(first, [batch, head, row, 0], ready, tiles.index(at))
        tma.async_copy_global_to_shared(second, [batch, head, row, 0], ready, more_tiles.index(at))

    @gluon.jit
    def store_tile(target, tile, batch, head, row, end, stride_b, stride_h, stride_n, DIM: gl.constexpr):
        """A tile of one head's rows, in the target's dtype."""
        layout: gl.constexpr = tile.type.layout
        i = row + gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
        cols = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
        at = target + batch.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h
        inside = (i < end) & (cols < DIM)
        gl.store(at + i.to(gl.int64) * stride_n + cols, tile.to(target.dtype.element_ty), mask=inside)

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


@functools.cache
def _layout(rows: int, cols: int, dtype: torch.dtype) -> Any:
    # Worked out once: it takes longer than the rest of a descriptor.
    of = gl.float16 if dtype == torch.float16 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, cols], of)


def described(x: Tensor, rows: int) -> Any:
    """A descriptor of x, (batch, heads, tokens, dim), for tiles of `rows` tokens of one head."""
    cols = max(16, next_power_of_2(x.shape[3]))
    layout = _layout(rows, cols, x.dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, cols], layout)


#: Pairs are formed where their last round leaves programs idle for no more than this share of the time.
_IDLE = 0.15


def items(
    blocks: int, planes: int, programs: int, limits: tuple[bool, bool], params: Any
) -> tuple[int, int, bool]:
    """Pieces of work, how many programs share them, and whether a piece is a pair of blocks.

    As many programs as the device holds, if PERSISTENT. Each then has every so-manieth piece, which under a
    causal mask can be a third more work for one than for another: there, pairs even it out.
    """
    count = blocks * planes
    if not params["PERSISTENT"]:
        return count, count, False
    pairs = count // 2
    rounds = -(-pairs // programs)
    if limits[0] != limits[1] and blocks % 2 == 0 and rounds * programs <= pairs * (1 + _IDLE):
        return pairs, min(pairs, programs), True
    return count, min(count, programs), False


__all__ = ["AVAILABLE", "ROWS", "described", "items"]
if AVAILABLE:
    __all__ += [
        "code_of",
        "exponentials",
        "gl",
        "gluon",
        "key_blocks",
        "load_bias",
        "load_bits",
        "load_pair",
        "masked_by",
        "mbarrier",
        "rows_of",
        "seen_alone",
        "store_tile",
        "tma",
        "turns",
        "warpgroup_mma",
        "warpgroup_mma_wait",
        "work_tile",
    ]  # fmt: skip
