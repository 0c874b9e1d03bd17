"""The kernels of paged attention: the pass over the cache, in splits, and what puts splits together.

A program of `paged_attention_kernel` has the query heads that share a key head as its rows, so that a key and
a value are fetched once for all of them and the products run on the matrix units, rows padded to 16. The
tokens that a sequence sees are cut into `splits` parts of whole tiles on the device, by the sequence's own
length, which the host never learns. Parts without tokens end at once.
"""

from ._attention_tiles import cap
from ._triton import tl, triton


@triton.jit
def seen_span(
    lengths, batch, n_queries, capacity, left, splits,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """What a sequence's queries see, and how it is cut.

    Returns:
        length, first, start, share: tokens of the sequence; the first one that a query sees, and the same
        rounded down to a tile; tokens a split has, whole tiles and at least `LEAST` of them.
    """
    # A length below 0 has no tiles, like 0.
    length = tl.minimum(tl.load(lengths + batch), capacity).to(tl.int32)
    first, start = length * 0, length * 0
    if WINDOW:
        first = tl.maximum(length - n_queries - left, 0)
        start = first // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(length - start, BLOCK_N)
    share = tl.maximum(tl.cdiv(tiles, splits), LEAST) * BLOCK_N
    return length, first, start, share


@triton.jit
def locate(table, tile, j, held, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block and place in it of the tokens `j` of a tile; the table is read for those in `held` alone."""
    if BLOCK_SIZE % BLOCK_N == 0:
        # The tile lies within one block, and one of its tokens is held.
        block = tl.load(table + tile // BLOCK_SIZE).to(tl.int64) + tl.zeros([BLOCK_N], tl.int64)
    else:
        block = tl.load(table + j // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
    return block, (j % BLOCK_SIZE).to(tl.int64)


@triton.jit
def let_next_begin():
    """The next kernel of the stream, if launched so, may take places that are free."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def await_previous():
    """What the kernels before this one wrote is there."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


# What changes while sequences grow: no value of these may call for another compilation.
@triton.jit(do_not_specialize=["table_b", "splits", "capacity", "left"])
def paged_attention_kernel(
    q, k, v, table, lengths, slopes, k_scale, v_scale, out, stats,
    q_b, q_n, q_h, k_b, k_n, k_h, v_b, v_n, v_h, table_b, o_b, o_n, o_h, o_s,
    group, kv_heads, n_queries, row_blocks, splits, capacity, scale, softcap, left, PARTS: tl.constexpr,
    DIM: tl.constexpr, COLS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """Softmax-weighted values of a whole sequence, with the scores' log-sum-exp; or (`PARTS`) of a split.

    A split gives what `paged_combine_kernel` takes: the weighted sum, the largest score in units of log2 and
    the sum of weights. The two stay apart, since added up a large score would swallow the sum's logarithm. A
    split without tokens writes nothing. Rows that see no key give 0, and -inf for log-sum-exp or score.
    With `OVERLAP` the kernel that puts splits together begins while this one runs, and waits for its end.
    """
    if OVERLAP:
        let_next_begin()
    pid = tl.program_id(0)
    # Heads of one split run side by side: their keys are neighbours in memory.
    row_block, pid = pid % row_blocks, pid // row_blocks
    head, pid = pid % kv_heads, pid // kv_heads
    split, batch = pid % splits, pid // splits
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, COLS)
    query, q_head = rows // group, head * group + rows % group
    inside = query < n_queries
    at = q + batch.to(tl.int64) * q_b + query.to(tl.int64) * q_n + q_head.to(tl.int64) * q_h
    filled = inside[:, None] & (cols < DIM)[None, :]
    # Read whether or not the split has tokens, so that it does not wait for the length.
    queries = tl.load(at[:, None] + cols[None, :], mask=filled, other=0.0)
    length, first, start, share = seen_span(
        lengths, batch, n_queries, capacity, left, splits, WINDOW, BLOCK_N, LEAST
    )
    low = start + split * share
    high = tl.minimum(low + share, length)
    if not PARTS or low < high:
        position = length - n_queries + query
        if SCALED:
            scale *= tl.load(k_scale + head)
        if ALIBI:
            slope = tl.load(slopes + q_head, mask=inside, other=0.0) * 1.4426950408889634
        # Raw scores are scaled after the maximum is subtracted, which is exact however large they are.
        RAW: tl.constexpr = not SOFTCAP and not ALIBI
        factor = scale * 1.4426950408889634 if RAW else 1.0

        table += batch.to(tl.int64) * table_b
        k += head.to(tl.int64) * k_h
        v += head.to(tl.int64) * v_h
        acc = tl.zeros([BLOCK_M, COLS], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        for tile in tl.range(low, high, BLOCK_N):
            j = tile + tl.arange(0, BLOCK_N)
            held = j < high
            if WINDOW:
                held = held & (j >= first)
            wanted = held[:, None] & (cols < DIM)[None, :]
            block, place = locate(table, tile, j, held, BLOCK_SIZE, BLOCK_N)
            row = k + (block * k_b + place * k_n)
            keys = tl.load(row[:, None] + cols[None, :], mask=wanted, other=0.0)
            scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision=PRECISION)
            scores, _ = cap(scores, scale, softcap, SOFTCAP)
            if ALIBI:
                if not SOFTCAP:
                    scores = scores * (scale * 1.4426950408889634)
                scores += slope[:, None] * (j[None, :] - position[:, None]).to(tl.float32)
            seen = held[None, :] & (j[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (j[None, :] >= position[:, None] - left)
            scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2((scores - anchor[:, None]) * factor)
            shrink = tl.exp2((top - anchor) * factor)
            total = total * shrink + tl.sum(p, 1)
            row = v + (block * v_b + place * v_n)
            values = tl.load(row[:, None] + cols[None, :], mask=wanted, other=0.0)
            acc = tl.dot(
                p.to(queries.dtype),
                values.to(queries.dtype),
                acc * shrink[:, None],
                input_precision=PRECISION,
            )
            top = new_top

        q_row = (batch.to(tl.int64) * n_queries + query) * (group * kv_heads) + q_head
        top = top * factor
        if SCALED:
            acc = acc * tl.load(v_scale + head)
        if PARTS:
            tl.store(stats + (q_row * splits + split) * 2, top, mask=inside)
            tl.store(stats + (q_row * splits + split) * 2 + 1, total, mask=inside)
        else:
            safe = tl.where(total == 0.0, 1.0, total)
            acc = acc * (1.0 / safe)[:, None]
            tl.store(stats + q_row, (top + tl.log2(safe)) * 0.6931471805599453, mask=inside)
        to = out + batch.to(tl.int64) * o_b + query.to(tl.int64) * o_n + q_head.to(tl.int64) * o_h
        to += split.to(tl.int64) * o_s
        tl.store(to[:, None] + cols[None, :], acc.to(out.dtype.element_ty), mask=filled)


@triton.jit(do_not_specialize=["splits", "capacity", "left"])
def paged_combine_kernel(
    parts, stats, lengths, out, lse, o_b, o_n, o_h,
    heads, n_queries, splits, capacity, left,
    DIM: tl.constexpr, COLS: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr,
    BLOCK_S: tl.constexpr, OVERLAP: tl.constexpr = False,
):  # fmt: skip
    """One row of the output: the splits' weighted sums over their sums of weights, by the same maximum."""
    row = tl.program_id(0)
    head, query, batch = row % heads, row // heads % n_queries, row // heads // n_queries
    length, _, start, share = seen_span(
        lengths, batch, n_queries, capacity, left, splits, WINDOW, BLOCK_N, LEAST
    )
    used = tl.cdiv(length - start, share)
    if OVERLAP:
        await_previous()
    cols = tl.arange(0, COLS)
    parts += row.to(tl.int64) * splits * DIM
    stats += row.to(tl.int64) * splits * 2
    acc = tl.zeros([COLS], tl.float32)
    total, top = 0.0, float("-inf")
    for begin in range(0, used, BLOCK_S):
        split = begin + tl.arange(0, BLOCK_S)
        given = split < used
        part_top = tl.load(stats + split * 2, mask=given, other=float("-inf"))
        part_total = tl.load(stats + split * 2 + 1, mask=given, other=0.0)
        wanted = given[:, None] & (cols < DIM)[None, :]
        part = tl.load(parts + (split[:, None] * DIM + cols[None, :]), mask=wanted, other=0.0)
        new_top = tl.maximum(top, tl.max(part_top, 0))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(part_top - anchor)
        shrink = tl.exp2(top - anchor)
        total = total * shrink + tl.sum(weight * part_total, 0)
        acc = acc * shrink + tl.sum(weight[:, None] * part, 0)
        top = new_top
    safe = tl.where(total == 0.0, 1.0, total)
    tl.store(lse + row, (top + tl.log2(safe)) * 0.6931471805599453)
    to = out + batch.to(tl.int64) * o_b + query.to(tl.int64) * o_n + head.to(tl.int64) * o_h
    tl.store(to + cols, (acc / safe).to(out.dtype.element_ty), mask=cols < DIM)


@triton.jit
def cache_write_kernel(
    key, value, k_cache, v_cache, slots, k_scale, v_scale,
    key_t, key_h, value_t, value_h, k_b, k_n, k_h, v_b, v_n, v_h, slot_count, heads,
    DIM: tl.constexpr, COLS: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr,
    LIMIT: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Copies one token's keys and values, `HEADS` heads at a time, to its slot, if that is in the cache."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    here = (slot >= 0) & (slot < slot_count)
    for begin in range(0, heads, HEADS):
        head = begin + tl.arange(0, HEADS)
        cols = tl.arange(0, COLS)[None, :]
        inside = (head < heads)[:, None] & (cols < DIM)
        of_head = head.to(tl.int64)[:, None]
        # Read whether or not the slot is in the cache, so that no load waits for the slot's.
        k_row = tl.load(key + token * key_t + of_head * key_h + cols, mask=inside)
        v_row = tl.load(value + token * value_t + of_head * value_h + cols, mask=inside)
        if SCALED:
            k_row = quantized(k_row, tl.load(k_scale + head, mask=head < heads, other=1.0), LIMIT)
            v_row = quantized(v_row, tl.load(v_scale + head, mask=head < heads, other=1.0), LIMIT)
        to = k_cache + block * k_b + place * k_n + of_head * k_h + cols
        tl.store(to, k_row.to(k_cache.dtype.element_ty), mask=inside & here)
        to = v_cache + block * v_b + place * v_n + of_head * v_h + cols
        tl.store(to, v_row.to(v_cache.dtype.element_ty), mask=inside & here)


@triton.jit
def quantized(x, scale, LIMIT: tl.constexpr):
    """x / scale within +-LIMIT, rounded to a whole number where the cache holds int8 (LIMIT 127)."""
    y = x.to(tl.float32) / scale[:, None]
    y = tl.minimum(tl.maximum(y, -LIMIT), LIMIT)
    if LIMIT == 127:
        y = tl.floor(y + 0.5)
    return y
