"""Bool masks of attention as bits, 32 keys (or queries) a word.

A byte for each score is an instruction and an address for each score in every head that the mask is broadcast
to. As bits, a row's share of a tile of 128 keys is four words, and a mask that heads share stays in L2.
"""

import torch
from torch import Tensor

from ._launch import cdiv
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
    tile_rows, tile_words = (8, 4) if own.stride(3) == 1 else (128, 1)
    grid = own.shape[0] * own.shape[1] * cdiv(own.shape[2], tile_rows) * cdiv(count, tile_words)
    pack_kernel[(grid,)](
        own.view(torch.uint8), words, *own.stride(), own.shape[1], own.shape[2], cols, count,
        ROWS=tile_rows, WORDS=tile_words, num_warps=4,
    )  # fmt: skip
    return words.expand(batch, heads, rows, count)
