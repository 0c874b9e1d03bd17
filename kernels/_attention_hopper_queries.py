"""The gradient for queries, in warps with roles of their own, for Hopper, in Gluon.

As Triton's kernel of the same name, block by block, but one warp loads tiles and two groups of four warps own
64 queries each: while one takes exponentials, the other's products run.
"""

# Gluon takes some of Python: no enumerate, no starred lists, no chained conditions on constants.
# ruff: noqa: RUF005

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ._attention_hopper_tiles import AVAILABLE, ROWS, aligned, described, items
from ._attention_masks import Prepared

if AVAILABLE:
    from ._attention_hopper_tiles import (
        bit_places,
        exponentials,
        gl,
        gluon,
        key_blocks,
        let_next_kernel_start,
        load_bias,
        load_bits,
        load_numbers,
        load_pair,
        mask_applied,
        mbarrier,
        rows_of,
        seen_alone,
        store_tile,
        tma,
        turns,
        visited,
        visits,
        warpgroup_mma,
        warpgroup_mma_wait,
        work_tile,
    )

    @gluon.jit
    def load_for_queries(
        q_source, g_source, k_source, v_source, out, residue, lists, q_tiles, g_tiles, k_tiles, v_tiles,
        o_tiles, r_tiles, own_ready, own_empty, ready, empty,
        heads, group, n_planes, n_blocks, together, n_items, n_k, low, high, c_b, c_h, c_m,
        BLOCK: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        STAGES: gl.constexpr, PAIRED: gl.constexpr, RESIDUE: gl.constexpr, AHEAD: gl.constexpr,
        COPY: gl.constexpr,
    ):  # fmt: skip
        """Loads of `query_gradient_kernel`: q and its output's gradient once, then keys and values."""
        ROWS: gl.constexpr = q_source.block_type.shape[2]
        OWN: gl.constexpr = 1 + AHEAD
        MORE: gl.constexpr = COPY * (1 + RESIDUE) * g_source.block_type.nbytes
        count = 0
        for turn in range(turns(n_items, PAIRED)):
            block, plane = work_tile(turn, n_blocks, n_planes, together, RIGHT | (MASKED > 0), PAIRED)
            batch, head = plane // heads, plane % heads
            row = block * (2 * ROWS)
            start, _, _, stop = key_blocks(row, 2 * ROWS, low, high, n_k, BLOCK, LEFT, RIGHT)
            at_own = turn % OWN
            mbarrier.wait(own_empty.index(at_own), ((turn // OWN) & 1) ^ 1)
            for part in gl.static_range(2):
                load_pair(
                    q_source, g_source, q_tiles, g_tiles, at_own * 2 + part, own_ready.index(at_own),
                    batch, head, row + part * ROWS, MORE,
                )  # fmt: skip
                if COPY:
                    tma.async_copy_global_to_shared(
                        out, [batch, head, row + part * ROWS, 0], own_ready.index(at_own),
                        o_tiles.index(at_own * 2 + part),
                    )  # fmt: skip
                    if RESIDUE:
                        tma.async_copy_global_to_shared(
                            residue, [batch, head, row + part * ROWS, 0], own_ready.index(at_own),
                            r_tiles.index(at_own * 2 + part),
                        )  # fmt: skip
            own = lists + batch.to(gl.int64) * c_b + head.to(gl.int64) * c_h + block.to(gl.int64) * c_m
            for step in range(visits(own, start, stop, MASKED)):
                block_n, _ = visited(own, step, start, MASKED)
                at = count % STAGES
                mbarrier.wait(empty.index(at), ((count // STAGES) & 1) ^ 1)
                load_pair(
                    k_source, v_source, k_tiles, v_tiles, at, ready.index(at), batch, head // group,
                    block_n * BLOCK,
                )  # fmt: skip
                count += 1

    @gluon.jit
    def weights_and_slopes(
        queries, grads, k_tiles, v_tiles, ready, row_lse, count, edge, code, words, added, x_m, x_n,
        row, col, n_q, n_k, low, high, factor, scale_2, raw_layout: gl.constexpr, MASKED: gl.constexpr,
        LEFT: gl.constexpr, RIGHT: gl.constexpr, EXACT: gl.constexpr, STAGES: gl.constexpr,
    ):  # fmt: skip
        """The weights of one block of keys, and the slopes of the output along them."""
        M: gl.constexpr = queries.shape[0]
        BLOCK: gl.constexpr = k_tiles.shape[3]
        at = count % STAGES
        bits = 0
        if (MASKED == 2) | (MASKED == 3):
            bits = load_bits(words, col, BLOCK)
        if MASKED == 1:
            bits = load_bias(words + col, col, n_k, 0, raw_layout)[None, :]
        numbers = load_numbers(
            added, row, col, n_q, n_k, x_m, x_n, code, M, BLOCK, raw_layout, MASKED
        )  # fmt: skip
        mbarrier.wait(ready.index(at), (count // STAGES) & 1)
        keys, values = rows_of(k_tiles, at), rows_of(v_tiles, at)
        raw = gl.zeros([M, BLOCK], gl.float32, raw_layout)
        raw = warpgroup_mma(queries, keys.permute((1, 0)), raw, use_acc=False, is_async=True)
        dp = gl.zeros([M, BLOCK], gl.float32, raw_layout)
        dp = warpgroup_mma(grads, values.permute((1, 0)), dp, use_acc=False, is_async=True)
        raw = warpgroup_mma_wait(num_outstanding=1, deps=(raw,))
        raw = mask_applied(raw, code, bits, numbers, scale_2, MASKED)
        if edge:
            raw = seen_alone(raw, row, col, n_k, low, high, LEFT, RIGHT)
        p = exponentials(raw, row_lse[:, None], factor, EXACT)
        dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
        return p, dp

    @gluon.jit
    def query_gradient(
        out, residue, grad, dq, lse, delta, mask, lists, added, q_tiles, g_tiles, k_tiles, v_tiles,
        o_tiles, r_tiles, own_ready, own_empty, ready, empty,
        o_b, o_h, o_n, g_b, g_h, g_n, dq_b, dq_h, dq_n, m_b, m_h, m_m, c_b, c_h, c_m, x_b, x_h, x_m, x_n,
        heads, n_planes, n_blocks, together, n_items, n_q, n_k, low, high, scale,
        DIM: gl.constexpr, DIM_V: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        EXACT: gl.constexpr, STAGES: gl.constexpr, PAIRED: gl.constexpr, RESIDUE: gl.constexpr,
        AHEAD: gl.constexpr, COPY: gl.constexpr, PART: gl.constexpr,
    ):  # fmt: skip
        """One group of four warps: dq of 64 queries of each block, and their delta."""
        ROWS: gl.constexpr = q_tiles.shape[3]
        COLS: gl.constexpr = q_tiles.shape[4]
        COLS_V: gl.constexpr = g_tiles.shape[4]
        BLOCK: gl.constexpr = k_tiles.shape[3]
        LANES: gl.constexpr = COLS_V // 8
        OWN: gl.constexpr = 1 + AHEAD
        raw_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
        acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
        load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
        # With a bias scores are scaled before it is added.
        scale_2 = scale * 1.4426950408889634
        factor = scale_2 if (MASKED == 0) | (MASKED == 2) else 1.0
        count = 0
        for turn in range(turns(n_items, PAIRED)):
            block, plane = work_tile(turn, n_blocks, n_planes, together, RIGHT | (MASKED > 0), PAIRED)
            batch, head = plane // heads, plane % heads
            row = block * (2 * ROWS)
            start, whole, until, stop = key_blocks(row, 2 * ROWS, low, high, n_k, BLOCK, LEFT, RIGHT)
            row += PART * ROWS

            at_own = turn % OWN
            own_at = at_own * 2 + PART
            queries, grads = rows_of(q_tiles, own_at), rows_of(g_tiles, own_at)
            i = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, load_layout))
            if COPY:
                mbarrier.wait(own_ready.index(at_own), (turn // OWN) & 1)
                o = rows_of(o_tiles, own_at).load(load_layout).to(gl.float32)
                if RESIDUE:
                    o += rows_of(r_tiles, own_at).load(load_layout).to(gl.float32)
                g = grads.load(load_layout)
            else:
                cols = gl.arange(0, COLS_V, layout=gl.SliceLayout(0, load_layout))[None, :]
                inside = (i < n_q)[:, None] & (cols < DIM_V)
                at = batch.to(gl.int64) * o_b + head.to(gl.int64) * o_h + i.to(gl.int64)[:, None] * o_n + cols
                o = gl.load(out + at, mask=inside, other=0.0).to(gl.float32)
                if RESIDUE:
                    o += gl.load(residue + at, mask=inside, other=0.0).to(gl.float32)
                at = grad + batch.to(gl.int64) * g_b + head.to(gl.int64) * g_h
                g = gl.load(at + i.to(gl.int64)[:, None] * g_n + cols, mask=inside, other=0.0)
            products = gl.sum(o * g.to(gl.float32), 1)
            gl.store(delta + plane.to(gl.int64) * n_q + i, products, mask=i < n_q)
            row_delta = gl.convert_layout(products, gl.SliceLayout(1, raw_layout))
            i = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, raw_layout))
            row_lse = gl.load(lse + plane.to(gl.int64) * n_q + i, mask=i < n_q, other=float("inf"))

            words = mask + batch.to(gl.int64) * m_b + head.to(gl.int64) * m_h
            addends = added + batch.to(gl.int64) * x_b + head.to(gl.int64) * x_h
            if (MASKED == 2) | (MASKED == 3):
                words = bit_places(words, row, n_q, m_m, ROWS, BLOCK, raw_layout)
            if MASKED == 1:
                words += gl.arange(0, BLOCK, layout=gl.SliceLayout(0, raw_layout))
            if not COPY:
                mbarrier.wait(own_ready.index(at_own), (turn // OWN) & 1)
            own = lists + batch.to(gl.int64) * c_b + head.to(gl.int64) * c_h + block.to(gl.int64) * c_m
            acc = gl.zeros([ROWS, COLS], gl.float32, acc_layout)
            for step in range(visits(own, start, stop, MASKED)):
                block_n, code = visited(own, step, start, MASKED)
                p, dp = weights_and_slopes(
                    queries, grads, k_tiles, v_tiles, ready, row_lse, count,
                    (block_n < whole) | (block_n >= until), code, words, addends, x_m, x_n, row,
                    block_n * BLOCK, n_q, n_k, low, high, factor, scale_2, raw_layout,
                    MASKED, LEFT, RIGHT, EXACT, STAGES,
                )  # fmt: skip
                keys = rows_of(k_tiles, count % STAGES)
                slopes = (p * (dp - row_delta[:, None])).to(keys.dtype)
                slopes = gl.convert_layout(slopes, gl.DotOperandLayout(0, acc_layout, 2))
                acc = warpgroup_mma(slopes, keys, acc, is_async=True)
                acc, slopes = warpgroup_mma_wait(num_outstanding=0, deps=(acc, slopes))
                mbarrier.arrive(empty.index(count % STAGES), count=1)
                count += 1
            mbarrier.arrive(own_empty.index(at_own), count=1)
            store_tile(dq, acc * scale, batch, head, row, n_q, dq_b, dq_h, dq_n, DIM, AHEAD)

    @gluon.jit
    def query_gradient_kernel(
        q, grad_source, k, v, out, residue, grad, dq, lse, delta, mask, lists, added,
        o_b, o_h, o_n, g_b, g_h, g_n, dq_b, dq_h, dq_n, m_b, m_h, m_m, c_b, c_h, c_m, x_b, x_h, x_m, x_n,
        heads, group, n_planes, n_blocks, together, n_items, n_q, n_k, low, high, scale,
        DIM: gl.constexpr, DIM_V: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        EXACT: gl.constexpr, STAGES: gl.constexpr, PAIRED: gl.constexpr, RESIDUE: gl.constexpr,
        AHEAD: gl.constexpr, COPY: gl.constexpr,
    ):  # fmt: skip
        """dq = scale dS k, and delta, which `key_gradient_kernel` reads.

        delta = rowsum(grad * out), with `RESIDUE` of the output before it was rounded.
        """
        dtype: gl.constexpr = q.dtype
        BLOCK: gl.constexpr = k.block_type.shape[2]
        OWN: gl.constexpr = 1 + AHEAD
        q_tiles = gl.allocate_shared_memory(dtype, [2 * OWN] + q.block_type.shape, q.layout)
        g_tiles = gl.allocate_shared_memory(
            dtype, [2 * OWN] + grad_source.block_type.shape, grad_source.layout
        )
        k_tiles = gl.allocate_shared_memory(dtype, [STAGES] + k.block_type.shape, k.layout)
        v_tiles = gl.allocate_shared_memory(dtype, [STAGES] + v.block_type.shape, v.layout)
        o_tiles, r_tiles = g_tiles, g_tiles
        if COPY:
            o_tiles = gl.allocate_shared_memory(out.dtype, [2 * OWN] + out.block_type.shape, out.layout)
            if RESIDUE:
                r_tiles = gl.allocate_shared_memory(
                    residue.dtype, [2 * OWN] + residue.block_type.shape, residue.layout
                )  # fmt: skip
        own_ready = gl.allocate_shared_memory(gl.int64, [OWN, 1], mbarrier.MBarrierLayout())
        own_empty = gl.allocate_shared_memory(gl.int64, [OWN, 1], mbarrier.MBarrierLayout())
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(OWN):
            mbarrier.init(own_ready.index(i), count=2)
            mbarrier.init(own_empty.index(i), count=2)
        for i in gl.static_range(STAGES):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(empty.index(i), count=2)
        if AHEAD:
            let_next_kernel_start()
        # Tuples that are given a name lose their compile-time constants.
        gl.warp_specialize(
            [
                (query_gradient, (
                    out, residue, grad, dq, lse, delta, mask, lists, added, q_tiles, g_tiles, k_tiles,
                    v_tiles, o_tiles, r_tiles, own_ready, own_empty, ready, empty, o_b, o_h, o_n,
                    g_b, g_h, g_n, dq_b, dq_h, dq_n, m_b, m_h, m_m, c_b, c_h, c_m, x_b, x_h, x_m, x_n,
                    heads, n_planes, n_blocks, together, n_items, n_q, n_k, low, high, scale,
                    DIM, DIM_V, MASKED, LEFT, RIGHT, EXACT, STAGES, PAIRED, RESIDUE, AHEAD, COPY, 0,
                )),
                (query_gradient, (
                    out, residue, grad, dq, lse, delta, mask, lists, added, q_tiles, g_tiles, k_tiles,
                    v_tiles, o_tiles, r_tiles, own_ready, own_empty, ready, empty, o_b, o_h, o_n,
                    g_b, g_h, g_n, dq_b, dq_h, dq_n, m_b, m_h, m_m, c_b, c_h, c_m, x_b, x_h, x_m, x_n,
                    heads, n_planes, n_blocks, together, n_items, n_q, n_k, low, high, scale,
                    DIM, DIM_V, MASKED, LEFT, RIGHT, EXACT, STAGES, PAIRED, RESIDUE, AHEAD, COPY, 1,
                )),
                (load_for_queries, (
                    q, grad_source, k, v, out, residue, lists, q_tiles, g_tiles, k_tiles,
                    v_tiles, o_tiles, r_tiles, own_ready, own_empty, ready, empty,
                    heads, group, n_planes, n_blocks, together, n_items, n_k, low, high,
                    c_b, c_h, c_m, BLOCK, MASKED, LEFT, RIGHT, STAGES, PAIRED, RESIDUE, AHEAD, COPY,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def launch_query_gradient(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, residue: Tensor, grad: Tensor, dq: Tensor, lse: Tensor,
    delta: Tensor, mask: Prepared, scale: float, low: int, high: int, limits: tuple[bool, bool],
    together: int, programs: int, params: Mapping[str, int],
) -> None:  # fmt: skip
    """Write dq and delta; arguments as `launch_forward` has them, `params` with BLOCK in keys."""
    blocks, planes = -(-q.shape[2] // (2 * ROWS)), q.shape[0] * q.shape[1]
    count, grid, paired = items(blocks, planes, programs, mask.uneven(limits), params)
    values, strides = mask.arguments(2 * ROWS, params["BLOCK"], k.shape[2], low, high, limits, lse)
    results: list[Any] = [out, residue]
    by_copy = bool(params["AHEAD"]) and all(aligned(x) for x in results if x.numel())
    if by_copy:
        results = [described(x, ROWS) if x.numel() else x for x in results]
    query_gradient_kernel[(grid,)](
        described(q, ROWS), described(grad, ROWS), described(k, params["BLOCK"]),
        described(v, params["BLOCK"]), *results, grad, dq, lse, delta,
        *values, *out.stride()[:3], *grad.stride()[:3], *dq.stride()[:3], *strides,
        q.shape[1], q.shape[1] // k.shape[1], planes, blocks, together, count, q.shape[2], k.shape[2],
        low, high, scale, DIM=q.shape[3], DIM_V=v.shape[3], MASKED=mask.kind, LEFT=limits[0],
        RIGHT=limits[1],
        EXACT=q.dtype == torch.float16, STAGES=params["STAGES"], PAIRED=paired,
        RESIDUE=residue.numel() > 0, AHEAD=params["AHEAD"], COPY=by_copy,
        num_warps=4, maxnreg=168,
    )  # fmt: skip
