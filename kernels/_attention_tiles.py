"""What the attention kernels share: which tile a program owns, tiles of rows, scores, masks and dropout.

Index conventions: `i` counts queries and `j` keys within their sequence; blocks of them broadcast against
each other, so that the same code serves a tile of scores and its transpose.
"""

from ._math import tanh
from ._random import kept_halves
from ._triton import tl, triton

NO_BIAS = tl.constexpr(0)
BOOL_MASK = tl.constexpr(1)
ADDED_BIAS = tl.constexpr(2)


@triton.jit
def work_item(n_blocks, n_planes, together, DESCENDING: tl.constexpr):
    """The block and the plane (batch and head) of this program.

    `together` planes, whose keys and values fit in L2, take turns before the next ones start; within them the
    blocks with most work under a causal mask go first, so that the last programs to finish are short.
    """
    pid = tl.program_id(0)
    bundle = pid // (together * n_blocks)
    width = tl.minimum(together, n_planes - bundle * together)
    rest = pid - bundle * together * n_blocks
    block = rest // width
    if DESCENDING:
        block = n_blocks - 1 - block
    return block, bundle * together + rest % width


@triton.jit
def sequence(cumulative, batch, length, PACKED: tl.constexpr):
    """First row and length of a sequence; packed ones lie end to end in batch 0."""
    # Sums with a tensor, since a length of 1 comes as a compile-time constant.
    first, count = batch * 0, batch * 0 + length
    if PACKED:
        first = tl.load(cumulative + batch).to(tl.int32)
        count = tl.load(cumulative + batch + 1).to(tl.int32) - first
    return first, count


@triton.jit
def spans(own, size, low, high, length, free, BLOCK: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """What the indices `own` to `own + size` see along the other axis, in blocks.

    Index a sees b from `a + low` (if `LOW`) to `a + high` (if `HIGH`), below `length`.

    Returns:
        start, whole, until, stop: some index sees the blocks from start to stop; each sees those from whole
        to until, which lies below `free` and needs no mask.
    """
    start, whole, until, stop = 0, 0, free, length
    if LOW:
        start = tl.maximum(own + low, 0) // BLOCK * BLOCK
        whole = tl.maximum(tl.cdiv(own + size - 1 + low, BLOCK) * BLOCK, start)
    if HIGH:
        stop = tl.maximum(tl.minimum(length, own + size + high), 0)
        until = tl.minimum(tl.maximum(own + high + 1, 0) // BLOCK * BLOCK, free)
    if LOW:
        whole = tl.minimum(whole, stop)
        until = tl.maximum(until, whole)
    return start, whole, until, stop


@triton.jit
def load_rows(
    source, batch, head, row, end, stride_b, stride_h, stride_n,
    DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CHECK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one head, [ROWS, COLS]: zeros from column `DIM` and, if `CHECK`, from row `end` on.

    `source` is a pointer, or with `TMA` a descriptor of the whole tensor, which always checks.
    """
    if TMA:
        values = source.load([batch, head, row, 0]).reshape(ROWS, COLS)
    else:
        rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
        base = source + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
        tile = base + row.to(tl.int64) * stride_n + (rows[:, None] * stride_n + cols[None, :])
        if CHECK and DIM < COLS:
            values = tl.load(tile, mask=(row + rows < end)[:, None] & (cols < DIM)[None, :], other=0.0)
        elif CHECK:
            values = tl.load(tile, mask=(row + rows < end)[:, None], other=0.0)
        elif DIM < COLS:
            values = tl.load(tile, mask=(cols < DIM)[None, :], other=0.0)
        else:
            values = tl.load(tile)
    return values


@triton.jit
def store_rows(
    target, tile, batch, head, row, end, stride_b, stride_h, stride_n,
    DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_rows`, in the target's dtype."""
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    base = target + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    where = base + row.to(tl.int64) * stride_n + (rows[:, None] * stride_n + cols[None, :])
    inside = (row + rows < end)[:, None] & (cols < DIM)[None, :]
    tl.store(where, tile.to(target.dtype.element_ty), mask=inside)


@triton.jit
def cap(raw, scale, softcap, SOFTCAP: tl.constexpr):
    """`softcap * tanh(scale * raw / softcap)` in base-2 units, and its derivative by `scale * raw`.

    Without a cap the scores stay raw: the caller multiplies by the scale once it has subtracted.
    """
    scores, slope = raw, 1.0
    if SOFTCAP:
        t = tanh(raw * (scale / softcap))
        scores, slope = t * (softcap * 1.4426950408889634), 1.0 - t * t
    return scores, slope


@triton.jit
def masked(
    scores, i, j, len_q, len_k, low, high, bias, stride_m, stride_n, code, scale,
    BIAS: tl.constexpr, PER_KEY: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Scores with the bias added and -inf where a key is not to be seen.

    Args:
        scores: as `cap` gives them.
        low: key j is seen by query i only if `j - i >= low`, where `LEFT`.
        high: and only if `j - i <= high`, where `RIGHT`.
        bias: of this batch and head: bool (True is seen) or additive, by `BIAS`.
        code: 2 where the bias hides and adds nothing, so that it need not be read.
        PER_KEY: whether all queries have the same, which is loaded once for all of them.
        EDGE: whether the tile may hold keys past the end or outside of the window.
    """
    if BIAS != NO_BIAS:
        where, inside = bias + j.to(tl.int64) * stride_n, j < len_k
        if not PER_KEY:
            where, inside = where + i.to(tl.int64) * stride_m, inside & (i < len_q)
        inside = inside & (code != 2)
        if BIAS == BOOL_MASK:
            seen = tl.load(where, mask=inside, other=1) != 0
            scores = tl.where(seen, scores, float("-inf"))
        else:
            if not SOFTCAP:
                scores = scores * (scale * 1.4426950408889634)
            scores += tl.load(where, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
    if EDGE:
        seen = j < len_k
        if RIGHT:
            seen = seen & (j - i <= high)
        if LEFT:
            seen = seen & (j - i >= low)
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def visits(lists, lo, hi, LISTED: tl.constexpr):
    """Where to begin and end: among the blocks that a mask's list has, or among indices."""
    if LISTED:
        lo, hi = 0, tl.load(lists)
    return lo, hi


@triton.jit
def visited(lists, at, SIZE: tl.constexpr, LISTED: tl.constexpr):
    """The first index of the block at `at`, and how the mask is there, as `list_kernel` writes it."""
    first, code = at, 1
    if LISTED:
        entry = tl.load(lists + 1 + at)
        first, code = entry // 4 * SIZE, entry % 4
    return first, code


@triton.jit
def kept(seed, plane, row, rows_total, col, cols_total, THRESHOLD: tl.constexpr, ROWS: tl.constexpr,
         COLS: tl.constexpr):  # fmt: skip
    """Which probabilities of the tile [ROWS, COLS] at (row, col), both multiples of 16, dropout keeps.

    A draw serves 8 elements: 2 rows, 8 apart, of 4 columns, 8 apart. These are some that one thread has where
    a tensor core gives scores: so none is drawn twice there, and where scores are transposed, twice at most.
    """
    EIGHTS: tl.constexpr = min(COLS // 8, 4)
    blocks = (cols_total + 31) // 32
    block = (plane.to(tl.int64) * ((rows_total + 15) // 16) + row // 16 + tl.arange(0, ROWS // 16)) * blocks
    eight = tl.arange(0, 8)
    # Dimensions: 16 rows, half of them, row; 32 columns, eight of them, column.
    first = (block + col // 32)[:, None, None, None, None, None]
    draw = first + tl.arange(0, COLS // (8 * EIGHTS))[None, None, None, :, None, None]
    draw = draw * 64 + eight[None, None, :, None, None, None] * 8 + eight[None, None, None, None, None, :]
    word = (col // 8 % 4 * (EIGHTS < 4) + tl.arange(0, EIGHTS))[None, None, None, None, :, None]
    half = tl.arange(0, 2)[None, :, None, None, None, None]
    return kept_halves(seed, draw, word, half, THRESHOLD).reshape(ROWS, COLS)
