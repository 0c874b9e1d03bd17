"""Masks of attention made ready: bits for its kernels, and lists of the blocks of scores worth visiting.

A byte for each score is an instruction and an address for each score in every head that the mask is broadcast
to. As bits, a mask that heads share stays in L2, and a thread of a matrix product needs one word for the
scores of a row that it holds, see `survey_kernel`. The mask is read once for that, and what is seen of each
cell of 64 x 64 scores is noted; from it a list is made for each block of queries (or keys): which blocks of
the other axis have anything to be seen, and whether they hide some of it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ._launch import cdiv
from ._triton import tl, triton

#: What a kernel is told of a mask: nothing; numbers that are added for a key; bits; bits, and numbers for the
#: blocks that have others than 0 and -inf; numbers for all blocks. Those in the middle come with lists.
NOTHING, PER_KEY, BITS, NUMBERS, DENSE = 0, 1, 2, 3, 4
#: Of a listed block: some of its scores are hidden, none is, or numbers are added.
SOME, ALL, ADDED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
#: Rows and columns of a cell; every block of the kernels with roles is made of such.
CELL = 64
_CHUNK = tl.constexpr(128)
#: Blocks that are listed at a time.
_LISTED = 128


@triton.jit
def survey_kernel(
    mask, words, cells, stride_b, stride_h, stride_m, stride_n, heads, n_rows, n_cols, chunks, down, across,
    ROWS: tl.constexpr, COLS: tl.constexpr, PACK: tl.constexpr, SURVEY: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Bits of a mask's rows, and what its cells of `ROWS` x `COLS` have: seen scores (1), hidden ones (2),
    numbers to add (4). With `FLOAT` the mask is one that is added, and hides where that is -inf to base 2.

    In a product of matrix units, a thread has the columns 8 g + 2 t and 8 g + 2 t + 1 of its rows, t of 0
    to 3 being its own. So word t of a row's chunk of 128 columns has those of t: column 8 g + 2 t + b as its
    bit 2 g + b. Past the end all bits are 0.
    """
    pid = tl.program_id(0)
    chunk, rest = pid % chunks, pid // chunks
    plane, part = rest // down, rest % down
    rows, cols = part * ROWS + tl.arange(0, ROWS), chunk * _CHUNK + tl.arange(0, _CHUNK)
    source = mask + (plane // heads).to(tl.int64) * stride_b + (plane % heads).to(tl.int64) * stride_h
    where = rows[:, None].to(tl.int64) * stride_m + cols[None, :].to(tl.int64) * stride_n
    inside = (rows < n_rows)[:, None] & (cols < n_cols)[None, :]
    values = tl.load(source + where, mask=inside, other=0)
    if FLOAT:
        values = values.to(tl.float32)
        seen = ((values * 1.4426950408889634 != float("-inf")) & inside).to(tl.int32)
        added = seen & (values != 0.0).to(tl.int32)
    else:
        seen = (values != 0).to(tl.int32)
        added = seen * 0
    if PACK:
        bit = 2 * tl.arange(0, 16)[:, None, None] + tl.arange(0, 2)[None, None, :]
        own = tl.sum(tl.sum(seen.reshape(ROWS, 16, 4, 2) << bit[None, :, :, :], 3), 1)
        at = (
            (plane.to(tl.int64) * n_rows + rows[:, None]) * (chunks * 4)
            + chunk * 4
            + tl.arange(0, 4)[None, :]
        )
        tl.store(words + at, own, mask=(rows < n_rows)[:, None])
    if SURVEY:
        some = tl.max(tl.max(seen.reshape(ROWS, _CHUNK // COLS, COLS), 2), 0)
        lacking = (1 - seen) * inside.to(tl.int32)
        found = some | 2 * tl.max(tl.max(lacking.reshape(ROWS, _CHUNK // COLS, COLS), 2), 0)
        if FLOAT:
            found |= 4 * tl.max(tl.max(added.reshape(ROWS, _CHUNK // COLS, COLS), 2), 0)
        at = chunk * (_CHUNK // COLS) + tl.arange(0, _CHUNK // COLS)
        tl.store(cells + (plane * down + part) * across + at, found, mask=at < across)


@triton.jit
def list_kernel(
    cells, lists, cells_b, cells_h, cells_own, cells_other, heads, n_own, n_other, n_blocks, size, block,
    low, high, length,
    OWN: tl.constexpr, OTHER: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """For one block of `OWN` cells: how many blocks of `OTHER` cells to visit, then 4 x which + how.

    Blocks outside of the window, as `key_blocks` gives it, are left out. At least one is listed.
    """
    pid = tl.program_id(0)
    plane, own = pid // n_blocks, pid % n_blocks
    source = cells + (plane // heads).to(tl.int64) * cells_b + (plane % heads).to(tl.int64) * cells_h
    row, start, stop = own * size, 0, tl.cdiv(length, block)
    if RIGHT:
        stop = tl.minimum(stop, tl.cdiv(tl.maximum(row + size + high, 1), block))
    if LEFT:
        start = tl.minimum(tl.maximum(row + low, 0) // block, stop - 1)
    lists += pid.to(tl.int64) * (tl.cdiv(length, block) + 1)
    count = pid * 0
    for first in range(start, stop, LISTED):
        at = first + tl.arange(0, LISTED)
        found = tl.zeros([LISTED], tl.int32)
        for i in tl.static_range(OWN):
            for j in tl.static_range(OTHER):
                there = (own * OWN + i < n_own) & (at * OTHER + j < n_other) & (at < stop)
                place = (own * OWN + i) * cells_own + (at * OTHER + j) * cells_other
                found |= tl.load(source + place, mask=there, other=0)
        visited = found & 1
        code = tl.where((found & 4) != 0, ADDED, tl.where((found & 2) != 0, SOME, ALL))
        tl.store(lists + count + tl.cumsum(visited, 0), at * 4 + code, mask=visited != 0)
        count += tl.sum(visited, 0)
    if count == 0:
        tl.store(lists + 1, (stop - 1) * 4 + SOME)
    tl.store(lists, tl.maximum(count, 1))


def _own(x: Tensor, dims: int) -> Tensor:
    """`x` without its copies: expanded dimensions, of the first `dims`, are of size 1."""
    return x[tuple(slice(0, 1) if x.stride(d) == 0 else slice(None) for d in range(dims))]


def surveyed(
    mask: Tensor, rows: int = CELL, cols: int = CELL, *, pack: bool = False, survey: bool = True
) -> tuple[Tensor, Tensor]:
    """A mask's bits and what is seen of its cells; nothing is made of what is not asked for.

    Args:
        mask: (batch, heads, rows, columns), bool or added; expanded dimensions are read once.
        rows: of a cell, a power of two.
        cols: of a cell, a power of two up to 128.
        pack: whether bits are wanted.
        survey: whether cells are.

    Returns:
        (batch, heads, rows, words) and (batch, heads, rows of cells, columns of cells), both int32 and
        expanded as the mask is.
    """
    batch, heads, n_rows, n_cols = mask.shape
    own = _own(mask, 3)
    chunks, down, across = cdiv(n_cols, 128), cdiv(own.shape[2], rows), cdiv(n_cols, cols)
    words = torch.empty((*own.shape[:3], 4 * chunks if pack else 0), dtype=torch.int32, device=mask.device)
    shape = (*own.shape[:2], down, across) if survey else (0, 0, 0, 0)
    cells = torch.empty(shape, dtype=torch.int32, device=mask.device)
    added = own.dtype != torch.bool
    survey_kernel[(own.shape[0] * own.shape[1] * down * chunks,)](
        own if added else own.view(torch.uint8), words, cells, *own.stride(), own.shape[1], own.shape[2],
        n_cols, chunks, down, across, ROWS=rows, COLS=cols, PACK=pack, SURVEY=survey, FLOAT=added,
        num_warps=4,
    )  # fmt: skip
    words = words.expand(batch, heads, n_rows, words.shape[3])
    return words, cells.expand(batch, heads, cdiv(n_rows, rows), across) if survey else cells


def listed(
    cells: Tensor, own: int, other: int, size: int, block: int, length: int, low: int, high: int,
    limits: tuple[bool, bool],
) -> Tensor:  # fmt: skip
    """For each block of rows the blocks of columns to visit.

    Args:
        cells: (batch, heads, rows, columns) of them, as `surveyed` gives them, or with the last two swapped.
        own: cells to a block of rows.
        other: cells to a block of columns.
        size: rows of a block.
        block: columns of a block.
        length: columns in all.
        low: column j is visited by row i only if ``j - i >= low``, if the first of `limits` is set.
        high: and only if ``j - i <= high``, if the second is.
        limits: which of the two hold.

    Returns:
        (batch, heads, blocks of rows, 1 + blocks of columns) int32, expanded as the cells are: how many, then
        4 x which + SOME, ALL or ADDED.
    """
    batch, heads, down, across = cells.shape
    per_plane = _own(cells, 2)
    blocks = cdiv(down, own)
    lists = torch.empty(
        (*per_plane.shape[:2], blocks, cdiv(length, block) + 1), dtype=torch.int32, device=cells.device
    )
    list_kernel[(lists[..., 0].numel(),)](
        per_plane, lists, *per_plane.stride(), per_plane.shape[1], down, across, blocks, size, block, low,
        high, length, OWN=own, OTHER=other, LEFT=limits[0], RIGHT=limits[1], LISTED=_LISTED, num_warps=1,
    )  # fmt: skip
    return lists.expand(batch, heads, *lists.shape[2:])


def copyable(numbers: Tensor) -> Tensor:
    """Numbers to be added as the copy engine takes them: each once, in rows of a multiple of 16 bytes.

    Args:
        numbers: (batch, heads, rows, columns), expanded; any others than such are copied.

    Returns:
        The same with a batch or heads of 1 where all have the same.
    """
    own = _own(numbers, 2)
    step = 16 // own.element_size()
    strides = [stride for size, stride in zip(own.shape[:3], own.stride(), strict=False) if size > 1]
    if own.stride(3) != 1 or own.data_ptr() % 16 or any(s < own.shape[3] or s % step for s in strides):
        room = own.new_zeros((*own.shape[:3], cdiv(own.shape[3], step) * step))
        own = room[..., : own.shape[3]].copy_(own)
    # Where there is one of them its stride says nothing, but must still be one.
    rows = own.stride(2) if own.shape[2] > 1 else cdiv(own.shape[3], step) * step
    heads = own.stride(1) if own.shape[1] > 1 else rows * own.shape[2]
    batches = own.stride(0) if own.shape[0] > 1 else heads * own.shape[1]
    return own.as_strided(own.shape, (batches, heads, rows, 1))


def is_dense(bias: Tensor) -> bool:
    """Whether a mask is a bias that differs by head and by query: nothing is left out for it, and a survey of
    it would be in vain."""
    per_head = bias.stride(1) != 0 and bias.shape[1] > 1
    return bias.dtype != torch.bool and per_head and bias.stride(2) != 0


def listed_for(
    bias: Tensor | None, rows: int, cols: int, low: int, high: int, limits: tuple[bool, bool],
    transposed: bool = False,
) -> tuple[Tensor | None, tuple[int, ...]]:  # fmt: skip
    """Lists for a kernel that reads the mask itself, and their strides; none where there is nothing to list.

    Args:
        bias: (batch, heads, queries, keys), expanded, or None.
        rows: queries of a block.
        cols: keys of a block.
        low: key j is seen by query i only if ``j - i >= low``, if the first of `limits` is set.
        high: and only if ``j - i <= high``, if the second is.
        limits: which of the two hold.
        transposed: whether blocks of keys are to have lists of blocks of queries.
    """
    if bias is None or is_dense(bias):
        return None, (0, 0, 0)
    cells = surveyed(bias, rows, cols)[1]
    if transposed:
        lists = listed(
            cells.transpose(2, 3), 1, 1, cols, rows, bias.shape[2], -high, -low, (limits[1], limits[0])
        )  # fmt: skip
    else:
        lists = listed(cells, 1, 1, rows, cols, bias.shape[3], low, high, limits)
    return lists, lists.stride()[:3]


@dataclass(frozen=True)
class Prepared:
    """A mask as the kernels with roles take it.

    Attributes:
        kind: NOTHING, PER_KEY, BITS, NUMBERS or DENSE.
        values: bits, or for a key, (batch, heads, keys) fp32 in base-2 units, expanded as the mask is.
        cells: what is seen of them, rows of cells along the rows of the bits.
        numbers: (batch, heads, rows, columns), what is added.
    """

    kind: int
    values: Tensor | None = None
    cells: Tensor | None = None
    numbers: Tensor | None = None

    def uneven(self, limits: tuple[bool, bool]) -> bool:
        """Whether the first blocks may have more work than the last, or less, as a causal mask has it."""
        return limits[0] != limits[1] or self.kind in (BITS, NUMBERS)

    def arguments(
        self, rows: int, block: int, length: int, low: int, high: int, limits: tuple[bool, bool],
        stand_in: Tensor,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, ...]]:  # fmt: skip
        """What a kernel is given of a mask, its lists and its numbers, then their strides.

        Args:
            rows: of the blocks that programs own.
            block: columns of those that they visit.
            length, low, high, limits: as `listed` takes them.
            stand_in: a tensor for what there is not.
        """
        lists = None
        if self.cells is not None:
            own, other = rows // CELL, block // CELL
            lists = listed(self.cells, own, other, rows, block, length, low, high, limits)
        found = (self.values, lists, self.numbers)
        strides = [
            (0,) * count if x is None else x.stride()[:count]
            for x, count in zip(found, (3, 3, 4), strict=True)
        ]
        tensors = [stand_in if x is None else x for x in found]
        return (tensors[0], tensors[1], tensors[2]), sum(strides, ())


def prepared(bias: Tensor | None, transposed: bool = False, cells: Tensor | None = None) -> Prepared:
    """A mask as the kernels with roles take it.

    Args:
        bias: (batch, heads, queries, keys), expanded; bool or added.
        transposed: whether rows are to be keys.
        cells: of what was prepared before, not transposed.
    """
    if bias is None:
        return Prepared(NOTHING)
    oriented = bias.transpose(2, 3) if transposed else bias
    added = bias.dtype != torch.bool
    if is_dense(bias):
        return Prepared(DENSE, numbers=oriented)
    if added and bias.stride(2) == 0:
        batch, heads, _, keys = bias.shape
        if cells is None:
            cells = surveyed(bias)[1]
        own = _own(bias, 2)[:, :, 0]
        values = (own.to(torch.float32) * math.log2(math.e)).contiguous().expand(batch, heads, keys)
        return Prepared(PER_KEY, values, cells.transpose(2, 3) if transposed else cells)
    words, found = surveyed(oriented, pack=True, survey=cells is None)
    if cells is not None:
        found = cells.transpose(2, 3)
    return Prepared(NUMBERS if added else BITS, words, found, oriented if added else None)
