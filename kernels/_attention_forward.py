"""The forward kernel of attention: a program owns a block of queries and passes over the keys once."""

from ._attention_tiles import (
    ADDED_BIAS,
    NO_BIAS,
    cap,
    kept,
    load_rows,
    masked,
    sequence,
    spans,
    store_rows,
    visited,
    visits,
    work_item,
)
from ._triton import tl, triton


@triton.jit
def forward_kernel(
    q, k, v, out, residue, lse, bias, lists, cu_q, cu_k, seed_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, bias_b, bias_h, bias_m, bias_n,
    lists_b, lists_h, lists_m,
    heads, group, n_planes, n_blocks, together, n_q, n_k, lse_rows, scale, softcap, left, right,
    DIM: tl.constexpr, DIM_V: tl.constexpr, COLS: tl.constexpr, COLS_V: tl.constexpr,
    PACKED: tl.constexpr, LOWER_RIGHT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BIAS: tl.constexpr, LISTED: tl.constexpr, PER_KEY: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RESIDUE: tl.constexpr,
):  # fmt: skip
    """out = dropout(softmax(scores)) v, and `lse`, the scores' log-sum-exp in the units of `scores`.

    Rows that see no key give 0, and lse = +inf, so that the backward's probabilities come out as 0. With
    `RESIDUE` what rounding takes from the output is kept, and probabilities are summed as they are
    multiplied, so that what all values have in common is weighed by 1.
    """
    block, plane = work_item(n_blocks, n_planes, together, RIGHT)
    batch, head = plane // heads, plane % heads
    first_q, len_q = sequence(cu_q, batch, n_q, PACKED)
    first_k, len_k = sequence(cu_k, batch, n_k, PACKED)
    row = block * BLOCK_M
    if PACKED:  # noqa: SIM102
        if row >= len_q:
            return
    at = batch * 0 if PACKED else batch
    i = row + tl.arange(0, BLOCK_M)
    if BIAS != NO_BIAS:
        bias += batch.to(tl.int64) * bias_b + head.to(tl.int64) * bias_h
    if LISTED:
        lists += batch.to(tl.int64) * lists_b + head.to(tl.int64) * lists_h + block.to(tl.int64) * lists_m
    # Raw scores are scaled after the maximum is subtracted, which is exact however large they are.
    RAW: tl.constexpr = not SOFTCAP and BIAS != ADDED_BIAS
    factor = scale * 1.4426950408889634 if RAW else 1.0
    seed = tl.load(seed_ptr) if DROPOUT else 0

    shift = len_k - len_q if LOWER_RIGHT else 0
    low, high = shift - left, shift + right
    start, whole, until, stop = spans(
        row, BLOCK_M, low, high, len_k, len_k // BLOCK_N * BLOCK_N, BLOCK_N, LEFT, RIGHT
    )

    queries = load_rows(q, at, head, first_q + row, first_q + len_q, q_b, q_h, q_n,
                        DIM, BLOCK_M, COLS, True, TMA)  # fmt: skip
    acc = tl.zeros([BLOCK_M, COLS_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for part in tl.static_range(2 if LISTED else 0 if LEFT else 1, 3):
        if part == 0:
            lo, hi = start, whole
        elif part == 1:
            lo, hi = whole, until
        else:
            lo, hi = until, stop
        lo, hi = visits(lists, lo, hi, LISTED)
        for at_list in tl.range(lo, hi, 1 if LISTED else BLOCK_N):
            col, code = visited(lists, at_list, BLOCK_N, LISTED)
            keys = load_rows(k, at, head // group, first_k + col, first_k + len_k, k_b, k_h, k_n,
                             DIM, BLOCK_N, COLS, part != 1, TMA)  # fmt: skip
            j = col + tl.arange(0, BLOCK_N)
            raw = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            scores, _ = cap(raw, scale, softcap, SOFTCAP)
            scores = masked(scores, i[:, None], j[None, :], len_q, len_k, low, high, bias, bias_m, bias_n,
                            code, scale, BIAS, PER_KEY, SOFTCAP, LEFT, RIGHT, part != 1)  # fmt: skip
            new_top = tl.maximum(top, tl.max(scores, 1))
            if BIAS != NO_BIAS or part != 1:
                anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
            else:
                anchor = new_top
            p = tl.exp2((scores - anchor[:, None]) * factor)
            shrink = tl.exp2((top - anchor) * factor)
            weights = p.to(out.dtype.element_ty)
            total = total * shrink + tl.sum(weights.to(tl.float32) if RESIDUE else p, 1)
            acc = acc * shrink[:, None]
            if DROPOUT:
                keep = kept(seed, plane, row, n_q, col, n_k, KEEP, BLOCK_M, BLOCK_N)
                weights = tl.where(keep, weights, 0.0)
            values = load_rows(v, at, head // group, first_k + col, first_k + len_k, v_b, v_h, v_n,
                               DIM_V, BLOCK_N, COLS_V, part != 1, TMA)  # fmt: skip
            acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
            top = new_top

    empty = total == 0.0
    share = 65536.0 / KEEP if DROPOUT else 1.0
    acc = acc * (share / tl.where(empty, 1.0, total))[:, None]
    log_sum = tl.where(empty, float("inf"), top + tl.log2(tl.where(empty, 1.0, total)) / factor)
    rows = lse + (at * heads + head).to(tl.int64) * lse_rows + first_q + i
    tl.store(rows, log_sum, mask=i < len_q)
    end = first_q + len_q
    store_rows(out, acc, at, head, first_q + row, end, o_b, o_h, o_n, DIM_V, BLOCK_M, COLS_V)
    if RESIDUE:
        acc -= acc.to(out.dtype.element_ty).to(tl.float32)
        store_rows(residue, acc, at, head, first_q + row, end, o_b, o_h, o_n, DIM_V, BLOCK_M, COLS_V)
