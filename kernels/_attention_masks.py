"""Bool masks of attention as bits, 32 keys (or queries) a word.

A byte for each score is an instruction and an address for each score in every head that the mask is broadcast
to. As bits, a row's share of a tile of 128 keys is four words, and a mask that heads share stays in L2.
"""

import math

import torch
from torch import Tensor

from ._launch import cdiv, next_power_of_2
from ._triton import tl, triton

#: Words of a row are a multiple of this, so that tiles of up to 128 need no check; bits past the end are 0.
_WORDS = 4


@triton.jit
def pack_kernel(
    mask, words, stride_b, stride_h, stride_m, stride_n, heads, n_rows, n_cols, n_words,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """words[row, w] has bit c where mask[row, 32 w + c] is true."""
    across, down = tl.cdiv(n_words, WORDS), tl.cdiv(n_rows, ROWS)
    pid = tl.program_id(0)
    part, rest = pid % across, pid // across
    plane = rest // down
    rows = rest % down * ROWS + tl.arange(0, ROWS)
    cols = part * (WORDS * 32) + tl.arange(0, WORDS * 32)
    source = mask + (plane // heads).to(tl.int64) * stride_b + (plane % heads).to(tl.int64) * stride_h
    where = rows[:, None].to(tl.int64) * stride_m + cols[None, :].to(tl.int64) * stride_n
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    seen = (tl.load(source + where, mask=inside, other=0) != 0).to(tl.int32).reshape(ROWS, WORDS, 32)
    packed = tl.sum(seen << tl.arange(0, 32)[None, None, :], 2)
    at = part * WORDS + tl.arange(0, WORDS)
    target = words + (plane.to(tl.int64) * n_rows + rows[:, None]) * n_words + at[None, :]
    tl.store(target, packed, mask=(rows < n_rows)[:, None] & (at < n_words)[None, :])


@triton.jit
def summary_kernel(
    words, codes, stride_b, stride_h, stride_m, heads, n_rows, down, across, rows_a_block, words_a_block,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """For each block of scores 0 where no bit is set, 2 where all are, 1 else."""
    pid = tl.program_id(0)
    plane, rest = pid // (down * across), pid % (down * across)
    rows = rest // across * rows_a_block + tl.arange(0, ROWS)
    at = rest % across * words_a_block + tl.arange(0, WORDS)
    inside = (rows < tl.minimum((rest // across + 1) * rows_a_block, n_rows))[:, None] & (
        tl.arange(0, WORDS) < words_a_block
    )[None, :]
    source = words + (plane // heads).to(tl.int64) * stride_b + (plane % heads).to(tl.int64) * stride_h
    bits = tl.load(source + rows[:, None].to(tl.int64) * stride_m + at[None, :], mask=inside, other=0)
    some = tl.max(tl.max((bits != 0).to(tl.int32), 1), 0)
    lacking = tl.max(tl.max(((bits != -1) & inside).to(tl.int32), 1), 0)
    tl.store(codes + pid, some * (2 - lacking))


def summarised(words: Tensor, rows: int, block: int) -> Tensor:
    """Which blocks of a packed mask hide all, some or none of their scores: 0, 1, 2.

    Args:
        words: as `packed` gives them.
        rows: of a block.
        block: columns of a block, a multiple of 32 that divides 128.

    Returns:
        (batch, heads, blocks of rows, blocks of columns) int32, expanded as the mask is.
    """
    batch, heads, n_rows, count = words.shape
    own = words[tuple(slice(0, 1) if words.stride(d) == 0 else slice(None) for d in range(3))]
    down, across = cdiv(own.shape[2], rows), count * 32 // block
    codes = torch.empty((*own.shape[:2], down, across), dtype=torch.int32, device=words.device)
    summary_kernel[(codes.numel(),)](
        own, codes, *own.stride()[:3], own.shape[1], own.shape[2], down, across, rows, block // 32,
        ROWS=next_power_of_2(rows), WORDS=block // 32, num_warps=4,
    )  # fmt: skip
    return codes.expand(batch, heads, cdiv(n_rows, rows), across)


def packed(mask: Tensor, transposed: bool = False) -> Tensor:
    """A mask's bits along its keys, or, `transposed`, along its queries.

    Args:
        mask: (batch, heads, queries, keys), bool; expanded dimensions are packed once.
        transposed: whether the result's rows are keys.

    Returns:
        (batch, heads, queries or keys, words) int32, expanded as the mask is.
    """
    if transposed:
        mask = mask.transpose(2, 3)
    batch, heads, rows, cols = mask.shape
    own = mask[tuple(slice(0, 1) if mask.stride(d) == 0 else slice(None) for d in range(3))]
    count = cdiv(cols, 32 * _WORDS) * _WORDS
    words = torch.empty((*own.shape[:3], count), dtype=torch.int32, device=mask.device)
    tile_rows, tile_words = (32, 4) if own.stride(3) == 1 else (128, 1)
    grid = own.shape[0] * own.shape[1] * cdiv(own.shape[2], tile_rows) * cdiv(count, tile_words)
    pack_kernel[(grid,)](
        own.view(torch.uint8), words, *own.stride(), own.shape[1], own.shape[2], cols, count,
        ROWS=tile_rows, WORDS=tile_words, num_warps=4,
    )  # fmt: skip
    return words.expand(batch, heads, rows, count)


#: What a kernel is told of a mask: nothing, bits of packed scores, or numbers that are added for a key.
NOTHING, BITS, PER_KEY = 0, 1, 2


def prepared(bias: Tensor | None, transposed: bool = False) -> Tensor | None:
    """A mask as the kernels with roles take it.

    Args:
        bias: (batch, heads, queries, keys), expanded; bool, or added and the same for all queries.
        transposed: whether bits are to lie along queries.

    Returns:
        Packed bits, or (batch, heads, keys) fp32 in base-2 units, expanded as the bias is.
    """
    if bias is None or bias.dtype == torch.bool:
        return None if bias is None else packed(bias, transposed)
    batch, heads, _, keys = bias.shape
    own = bias[tuple(slice(0, 1) if bias.stride(d) == 0 else slice(None) for d in range(2))][:, :, 0]
    return (own.to(torch.float32) * math.log2(math.e)).contiguous().expand(batch, heads, keys)


def kind(mask: Tensor | None) -> int:
    """Of a mask as `prepared` gives it."""
    return NOTHING if mask is None else BITS if mask.dtype == torch.int32 else PER_KEY


def arguments(
    mask: Tensor | None, rows: int, block: int, stand_in: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[int, ...]]:
    """What a kernel is given of a mask and of the codes of its blocks, then their strides; or anything."""
    if mask is None:
        return (stand_in, stand_in), (0,) * 6
    if kind(mask) == PER_KEY:
        return (mask, mask), (*mask.stride(), 0, 0, 0)
    codes = summarised(mask, rows, block)
    return (mask, codes), (*mask.stride()[:3], *codes.stride()[:3])
