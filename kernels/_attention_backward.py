"""The backward kernels of attention: no atomics, so that a repeat is bit-equal.

Scores are computed again from q and k, twice: a program of `query_gradient_kernel` owns a block of queries
and sums dq over the keys, one of `key_gradient_kernel` owns a block of keys and sums dk and dv over the
queries. That is seven products a tile where a single pass with atomic sums of dq needs five.
"""

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
def query_gradient_kernel(
    q, k, v, out, residue, grad, grad_plain, dq, lse, delta, bias, lists, cu_q, cu_k, seed_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, g_b, g_h, g_n, dq_b, dq_h, dq_n,
    bias_b, bias_h, bias_m, bias_n, lists_b, lists_h, lists_m,
    heads, group, n_planes, n_blocks, together, n_q, n_k, lse_rows, scale, softcap, left, right,
    DIM: tl.constexpr, DIM_V: tl.constexpr, COLS: tl.constexpr, COLS_V: tl.constexpr,
    PACKED: tl.constexpr, LOWER_RIGHT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BIAS: tl.constexpr, LISTED: tl.constexpr, PER_KEY: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RESIDUE: tl.constexpr,
):  # fmt: skip
    """dq = scale dS k, and delta, which `key_gradient_kernel` reads.

    delta = rowsum(grad * out), with `RESIDUE` of the output before it was rounded.
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
    RAW: tl.constexpr = not SOFTCAP and BIAS != ADDED_BIAS
    factor = scale * 1.4426950408889634 if RAW else 1.0
    share = 65536.0 / KEEP if DROPOUT else 1.0
    seed = tl.load(seed_ptr) if DROPOUT else 0

    shift = len_k - len_q if LOWER_RIGHT else 0
    low, high = shift - left, shift + right
    start, whole, until, stop = spans(
        row, BLOCK_M, low, high, len_k, len_k // BLOCK_N * BLOCK_N, BLOCK_N, LEFT, RIGHT
    )

    stat = (at * heads + head).to(tl.int64) * lse_rows + first_q + i
    end = first_q + len_q
    g = load_rows(
        grad_plain, at, head, first_q + row, end, g_b, g_h, g_n, DIM_V, BLOCK_M, COLS_V, True, False
    )
    o = load_rows(out, at, head, first_q + row, end, o_b, o_h, o_n, DIM_V, BLOCK_M, COLS_V, True, False)
    o = o.to(tl.float32)
    if RESIDUE:
        o += load_rows(
            residue, at, head, first_q + row, end, o_b, o_h, o_n, DIM_V, BLOCK_M, COLS_V, True, False
        ).to(tl.float32)
    row_delta = tl.sum(o * g.to(tl.float32), 1)
    tl.store(delta + stat, row_delta, mask=i < len_q)
    row_lse = tl.load(lse + stat, mask=i < len_q, other=float("inf"))
    queries = load_rows(q, at, head, first_q + row, end, q_b, q_h, q_n, DIM, BLOCK_M, COLS, True, TMA)
    if TMA:
        g = load_rows(grad, at, head, first_q + row, end, g_b, g_h, g_n, DIM_V, BLOCK_M, COLS_V, True, TMA)
    acc = tl.zeros([BLOCK_M, COLS], tl.float32)
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
            values = load_rows(v, at, head // group, first_k + col, first_k + len_k, v_b, v_h, v_n,
                               DIM_V, BLOCK_N, COLS_V, part != 1, TMA)  # fmt: skip
            j = col + tl.arange(0, BLOCK_N)
            raw = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            dp = tl.dot(g, tl.trans(values), input_precision=PRECISION)
            scores, slope = cap(raw, scale, softcap, SOFTCAP)
            scores = masked(scores, i[:, None], j[None, :], len_q, len_k, low, high, bias, bias_m, bias_n,
                            code, scale, BIAS, PER_KEY, SOFTCAP, LEFT, RIGHT, part != 1)  # fmt: skip
            p = tl.exp2((scores - row_lse[:, None]) * factor)
            if DROPOUT:
                keep = kept(seed, plane, row, n_q, col, n_k, KEEP, BLOCK_M, BLOCK_N)
                dp = tl.where(keep, dp * share, 0.0)
            ds = p * (dp - row_delta[:, None]) * slope
            acc = tl.dot(ds.to(keys.dtype), keys, acc, input_precision=PRECISION)
    store_rows(dq, acc * scale, at, head, first_q + row, end, dq_b, dq_h, dq_n, DIM, BLOCK_M, COLS)


@triton.jit
def key_gradient_kernel(
    q, k, v, grad, dk, dv, lse, delta, bias, lists, cu_q, cu_k, seed_ptr,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n,
    dk_s, dk_b, dk_h, dk_n, dv_s, dv_b, dv_h, dv_n,
    bias_b, bias_h, bias_m, bias_n, lists_b, lists_h, lists_m,
    heads, group, n_planes, n_blocks, together, n_q, n_k, lse_rows, scale, softcap, left, right, splits,
    DIM: tl.constexpr, DIM_V: tl.constexpr, COLS: tl.constexpr, COLS_V: tl.constexpr,
    PACKED: tl.constexpr, LOWER_RIGHT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BIAS: tl.constexpr, LISTED: tl.constexpr, PER_KEY: tl.constexpr, SOFTCAP: tl.constexpr,
    DROPOUT: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dv = P^T grad and dk = scale dS^T q, summed over the query heads that share a key head.

    Tiles are of scores transposed, [keys, queries], so that P^T and dS^T are the left operands of their
    products and stay in registers. With `splits` the query heads are shared out, each part to its own output.
    """
    block, plane = work_item(n_blocks, n_planes, together, False)
    part_of_group, plane = plane % splits, plane // splits
    batch, head_k = plane // (heads // group), plane % (heads // group)
    first_q, len_q = sequence(cu_q, batch, n_q, PACKED)
    first_k, len_k = sequence(cu_k, batch, n_k, PACKED)
    col = block * BLOCK_N
    if PACKED:  # noqa: SIM102
        if col >= len_k:
            return
    at = batch * 0 if PACKED else batch
    j = col + tl.arange(0, BLOCK_N)
    RAW: tl.constexpr = not SOFTCAP and BIAS != ADDED_BIAS
    factor = scale * 1.4426950408889634 if RAW else 1.0
    share = 65536.0 / KEEP if DROPOUT else 1.0
    seed = tl.load(seed_ptr) if DROPOUT else 0

    shift = len_k - len_q if LOWER_RIGHT else 0
    low, high = shift - left, shift + right
    # Neither end needs a mask: rows past it have lse = +inf, thus p = 0, and keys past it are not stored.
    start, whole, until, stop = spans(col, BLOCK_N, -high, -low, len_q, len_q, BLOCK_M, RIGHT, LEFT)

    end_q, end_k = first_q + len_q, first_k + len_k
    keys = load_rows(k, at, head_k, first_k + col, end_k, k_b, k_h, k_n, DIM, BLOCK_N, COLS, True, TMA)
    values = load_rows(v, at, head_k, first_k + col, end_k, v_b, v_h, v_n, DIM_V, BLOCK_N, COLS_V, True, TMA)
    acc_k = tl.zeros([BLOCK_N, COLS], tl.float32)
    acc_v = tl.zeros([BLOCK_N, COLS_V], tl.float32)
    for member in range(part_of_group * (group // splits), (part_of_group + 1) * (group // splits)):
        head = head_k * group + member
        stat = (at * heads + head).to(tl.int64) * lse_rows + first_q
        head_bias = bias
        if BIAS != NO_BIAS:
            head_bias = bias + batch.to(tl.int64) * bias_b + head.to(tl.int64) * bias_h
        own_lists = lists
        if LISTED:
            own_lists = lists + batch.to(tl.int64) * lists_b + head.to(tl.int64) * lists_h
            own_lists += block.to(tl.int64) * lists_m
        for part in tl.static_range(2 if LISTED else 0 if RIGHT else 1, 3 if LEFT or LISTED else 2):
            if part == 0:
                lo, hi = start, whole
            elif part == 1:
                lo, hi = whole, until
            else:
                lo, hi = until, stop
            lo, hi = visits(own_lists, lo, hi, LISTED)
            for at_list in tl.range(lo, hi, 1 if LISTED else BLOCK_M):
                row, code = visited(own_lists, at_list, BLOCK_M, LISTED)
                i = row + tl.arange(0, BLOCK_M)
                queries = load_rows(q, at, head, first_q + row, end_q, q_b, q_h, q_n,
                                    DIM, BLOCK_M, COLS, True, TMA)  # fmt: skip
                row_lse = tl.load(lse + stat + i, mask=i < len_q, other=float("inf"))
                raw = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
                scores, slope = cap(raw, scale, softcap, SOFTCAP)
                scores = masked(scores, i[None, :], j[:, None], len_q, len_k, low, high, head_bias, bias_m,
                                bias_n, code, scale, BIAS, PER_KEY, SOFTCAP, LEFT, RIGHT,
                                part != 1)  # fmt: skip
                p = tl.exp2((scores - row_lse[None, :]) * factor)
                g = load_rows(grad, at, head, first_q + row, end_q, g_b, g_h, g_n,
                              DIM_V, BLOCK_M, COLS_V, True, TMA)  # fmt: skip
                row_delta = tl.load(delta + stat + i, mask=i < len_q, other=0.0)
                dp = tl.dot(values, tl.trans(g), input_precision=PRECISION)
                if DROPOUT:
                    keep = kept(seed, batch * heads + head, row, n_q, col, n_k, KEEP, BLOCK_M, BLOCK_N)
                    keep = tl.trans(keep)
                    dp = tl.where(keep, dp * share, 0.0)
                    acc_v = tl.dot(
                        tl.where(keep, p * share, 0.0).to(g.dtype), g, acc_v, input_precision=PRECISION
                    )
                else:
                    acc_v = tl.dot(p.to(g.dtype), g, acc_v, input_precision=PRECISION)
                ds = p * (dp - row_delta[None, :]) * slope
                acc_k = tl.dot(ds.to(queries.dtype), queries, acc_k, input_precision=PRECISION)
    dk += part_of_group.to(tl.int64) * dk_s
    dv += part_of_group.to(tl.int64) * dv_s
    store_rows(dk, acc_k * scale, at, head_k, first_k + col, end_k, dk_b, dk_h, dk_n, DIM, BLOCK_N, COLS)
    store_rows(dv, acc_v, at, head_k, first_k + col, end_k, dv_b, dv_h, dv_n, DIM_V, BLOCK_N, COLS_V)
