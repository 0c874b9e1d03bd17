"""The gradients of plain attention in warps with roles of their own, for Hopper, in Gluon.

As the kernels of the same names in Triton, block by block, but with one warp that loads tiles and two groups
of four warps, each of which owns 64 queries (or keys): while one takes exponentials, the other's products
run. Tiles pass through a ring of buffers: `ready` counts bytes that arrived, `empty` groups that are done.
"""

# Gluon takes some of Python: no enumerate, no starred lists, no chained conditions on constants.
# ruff: noqa: RUF005, SIM102, SIM113

from collections.abc import Mapping

import torch
from torch import Tensor

from ._attention_hopper_tiles import AVAILABLE, ROWS, described, items
from ._attention_masks import arguments

if AVAILABLE:
    from ._attention_hopper_tiles import (
        code_of,
        exponentials,
        gl,
        gluon,
        key_blocks,
        load_bits,
        masked_by,
        mbarrier,
        rows_of,
        seen_alone,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
        work_tile,
    )

    @gluon.jit
    def load_pair(first, second, tiles, more_tiles, at, ready, batch, head, row):
        """Ask for the tiles of two tensors at the same place."""
        mbarrier.expect(ready, first.block_type.nbytes + second.block_type.nbytes)
        tma.async_copy_global_to_shared(first, [batch, head, row, 0], ready, tiles.index(at))
        tma.async_copy_global_to_shared(second, [batch, head, row, 0], ready, more_tiles.index(at))

    @gluon.jit
    def load_for_queries(
        q_source, g_source, k_source, v_source, codes, q_tiles, g_tiles, k_tiles, v_tiles,
        own_ready, own_empty, ready, empty,
        heads, group, n_planes, n_blocks, together, n_items, n_k, low, high, c_b, c_h, c_m,
        BLOCK: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        STAGES: gl.constexpr,
    ):  # fmt: skip
        """Loads of `query_gradient_kernel`: q and its output's gradient once, then keys and values."""
        ROWS: gl.constexpr = q_source.block_type.shape[2]
        turn, count = 0, 0
        for item in range(gl.program_id(0), n_items, gl.num_programs(0)):
            block, plane = work_tile(item, n_blocks, n_planes, together, RIGHT)
            batch, head = plane // heads, plane % heads
            row = block * (2 * ROWS)
            start, _, _, stop = key_blocks(row, 2 * ROWS, low, high, n_k, BLOCK, LEFT, RIGHT)
            mbarrier.wait(own_empty, (turn & 1) ^ 1)
            load_pair(q_source, g_source, q_tiles, g_tiles, 0, own_ready, batch, head, row)
            load_pair(q_source, g_source, q_tiles, g_tiles, 1, own_ready, batch, head, row + ROWS)
            turn += 1
            of_blocks = codes + batch.to(gl.int64) * c_b + head.to(gl.int64) * c_h + block.to(gl.int64) * c_m
            for step in range(start, stop):
                if code_of(of_blocks, step, MASKED) != 0:
                    at = count % STAGES
                    mbarrier.wait(empty.index(at), ((count // STAGES) & 1) ^ 1)
                    load_pair(
                        k_source, v_source, k_tiles, v_tiles, at, ready.index(at), batch, head // group,
                        step * BLOCK,
                    )  # fmt: skip
                    count += 1

    @gluon.jit
    def query_step(
        queries, grads, k_tiles, v_tiles, ready, empty, acc, row_lse, row_delta, count, edge, code,
        words, row, col, n_q, n_k, low, high, factor,
        raw_layout: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        EXACT: gl.constexpr, STAGES: gl.constexpr,
    ):  # fmt: skip
        """dq with one more block of keys."""
        M: gl.constexpr = queries.shape[0]
        BLOCK: gl.constexpr = k_tiles.shape[3]
        at = count % STAGES
        bits = load_bits(words + col // 32, row, n_q, BLOCK, raw_layout) if MASKED else 0
        mbarrier.wait(ready.index(at), (count // STAGES) & 1)
        keys, values = rows_of(k_tiles, at), rows_of(v_tiles, at)
        raw = gl.zeros([M, BLOCK], gl.float32, raw_layout)
        raw = warpgroup_mma(queries, keys.permute((1, 0)), raw, use_acc=False, is_async=True)
        dp = gl.zeros([M, BLOCK], gl.float32, raw_layout)
        dp = warpgroup_mma(grads, values.permute((1, 0)), dp, use_acc=False, is_async=True)
        raw = warpgroup_mma_wait(num_outstanding=1, deps=(raw,))
        if MASKED:
            if code == 1:
                raw = masked_by(raw, bits)
        if edge:
            raw = seen_alone(raw, row, col, n_k, low, high, LEFT, RIGHT)
        p = exponentials(raw, row_lse[:, None], factor, EXACT)
        dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp,))
        slopes = (p * (dp - row_delta[:, None])).to(keys.dtype)
        slopes = gl.convert_layout(slopes, gl.DotOperandLayout(0, acc.type.layout, 2))
        acc = warpgroup_mma(slopes, keys, acc, is_async=True)
        acc, slopes = warpgroup_mma_wait(num_outstanding=0, deps=(acc, slopes))
        mbarrier.arrive(empty.index(at), count=1)
        return acc

    @gluon.jit
    def query_gradient(
        out, grad, dq, lse, delta, mask, codes, q_tiles, g_tiles, k_tiles, v_tiles, own_ready, own_empty,
        ready, empty,
        o_b, o_h, o_n, g_b, g_h, g_n, dq_b, dq_h, dq_n, m_b, m_h, m_m, c_b, c_h, c_m,
        heads, n_planes, n_blocks, together, n_items, n_q, n_k, low, high, scale,
        DIM: gl.constexpr, DIM_V: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        EXACT: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr,
    ):  # fmt: skip
        """One group of four warps: dq of 64 queries of each block, and their delta."""
        ROWS: gl.constexpr = q_tiles.shape[3]
        COLS: gl.constexpr = q_tiles.shape[4]
        COLS_V: gl.constexpr = g_tiles.shape[4]
        BLOCK: gl.constexpr = k_tiles.shape[3]
        LANES: gl.constexpr = COLS_V // 8
        raw_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
        acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
        load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
        factor = scale * 1.4426950408889634
        queries, grads = rows_of(q_tiles, PART), rows_of(g_tiles, PART)
        turn, count = 0, 0
        for item in range(gl.program_id(0), n_items, gl.num_programs(0)):
            block, plane = work_tile(item, n_blocks, n_planes, together, RIGHT)
            batch, head = plane // heads, plane % heads
            row = block * (2 * ROWS)
            start, whole, until, stop = key_blocks(row, 2 * ROWS, low, high, n_k, BLOCK, LEFT, RIGHT)
            row += PART * ROWS

            i = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, load_layout))
            cols = gl.arange(0, COLS_V, layout=gl.SliceLayout(0, load_layout))[None, :]
            inside = (i < n_q)[:, None] & (cols < DIM_V)
            at = out + batch.to(gl.int64) * o_b + head.to(gl.int64) * o_h
            o = gl.load(at + i.to(gl.int64)[:, None] * o_n + cols, mask=inside, other=0.0)
            at = grad + batch.to(gl.int64) * g_b + head.to(gl.int64) * g_h
            g = gl.load(at + i.to(gl.int64)[:, None] * g_n + cols, mask=inside, other=0.0)
            row_delta = gl.sum(o.to(gl.float32) * g.to(gl.float32), 1)
            gl.store(delta + plane.to(gl.int64) * n_q + i, row_delta, mask=i < n_q)
            row_delta = gl.convert_layout(row_delta, gl.SliceLayout(1, raw_layout))
            i = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, raw_layout))
            row_lse = gl.load(lse + plane.to(gl.int64) * n_q + i, mask=i < n_q, other=float("inf"))

            words = mask + batch.to(gl.int64) * m_b + head.to(gl.int64) * m_h + i.to(gl.int64) * m_m
            acc = gl.zeros([ROWS, COLS], gl.float32, acc_layout)
            mbarrier.wait(own_ready, turn & 1)
            of_blocks = codes + batch.to(gl.int64) * c_b + head.to(gl.int64) * c_h + block.to(gl.int64) * c_m
            for step in range(start, stop):
                code = code_of(of_blocks, step, MASKED)
                if code != 0:
                    acc = query_step(
                        queries, grads, k_tiles, v_tiles, ready, empty, acc, row_lse, row_delta, count,
                        (step < whole) | (step >= until), code, words, row, step * BLOCK, n_q, n_k, low, high,
                        factor, raw_layout, MASKED, LEFT, RIGHT, EXACT, STAGES,
                    )  # fmt: skip
                    count += 1
            mbarrier.arrive(own_empty, count=1)
            turn += 1
            store_tile(dq, acc * scale, batch, head, row, n_q, dq_b, dq_h, dq_n, DIM)

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
    def query_gradient_kernel(
        q, grad_source, k, v, out, grad, dq, lse, delta, mask, codes,
        o_b, o_h, o_n, g_b, g_h, g_n, dq_b, dq_h, dq_n, m_b, m_h, m_m, c_b, c_h, c_m,
        heads, group, n_planes, n_blocks, together, n_items, n_q, n_k, low, high, scale,
        DIM: gl.constexpr, DIM_V: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        EXACT: gl.constexpr, STAGES: gl.constexpr,
    ):  # fmt: skip
        """dq = scale dS k, and delta = rowsum(grad * out), which `key_gradient_kernel` reads."""
        dtype: gl.constexpr = q.dtype
        BLOCK: gl.constexpr = k.block_type.shape[2]
        q_tiles = gl.allocate_shared_memory(dtype, [2] + q.block_type.shape, q.layout)
        g_tiles = gl.allocate_shared_memory(dtype, [2] + grad_source.block_type.shape, grad_source.layout)
        k_tiles = gl.allocate_shared_memory(dtype, [STAGES] + k.block_type.shape, k.layout)
        v_tiles = gl.allocate_shared_memory(dtype, [STAGES] + v.block_type.shape, v.layout)
        own_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        own_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(own_ready, count=2)
        mbarrier.init(own_empty, count=2)
        for i in gl.static_range(STAGES):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(empty.index(i), count=2)
        # Tuples that are given a name lose their compile-time constants.
        gl.warp_specialize(
            [
                (query_gradient, (
                    out, grad, dq, lse, delta, mask, codes, q_tiles, g_tiles, k_tiles, v_tiles,
                    own_ready, own_empty, ready, empty, o_b, o_h, o_n, g_b, g_h, g_n, dq_b, dq_h, dq_n,
                    m_b, m_h, m_m, c_b, c_h, c_m,
                    heads, n_planes, n_blocks, together, n_items, n_q, n_k, low, high, scale,
                    DIM, DIM_V, MASKED, LEFT, RIGHT, EXACT, STAGES, 0,
                )),
                (query_gradient, (
                    out, grad, dq, lse, delta, mask, codes, q_tiles, g_tiles, k_tiles, v_tiles,
                    own_ready, own_empty, ready, empty, o_b, o_h, o_n, g_b, g_h, g_n, dq_b, dq_h, dq_n,
                    m_b, m_h, m_m, c_b, c_h, c_m,
                    heads, n_planes, n_blocks, together, n_items, n_q, n_k, low, high, scale,
                    DIM, DIM_V, MASKED, LEFT, RIGHT, EXACT, STAGES, 1,
                )),
                (load_for_queries, (
                    q, grad_source, k, v, codes, q_tiles, g_tiles, k_tiles, v_tiles,
                    own_ready, own_empty, ready, empty,
                    heads, group, n_planes, n_blocks, together, n_items, n_k, low, high,
                    c_b, c_h, c_m, BLOCK, MASKED, LEFT, RIGHT, STAGES,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip

    @gluon.jit
    def load_for_keys(
        q_source, g_source, k_source, v_source, codes, q_tiles, g_tiles, k_tiles, v_tiles,
        own_ready, own_empty, ready, empty,
        heads_k, members, splits, n_planes, n_blocks, together, n_items, n_q, low, high, c_b, c_h, c_m,
        BLOCK: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        STAGES: gl.constexpr,
    ):  # fmt: skip
        """Loads of `key_gradient_kernel`: keys and values once, then q and its output's gradient."""
        ROWS: gl.constexpr = k_source.block_type.shape[2]
        whole_q = gl.cdiv(n_q, BLOCK) * BLOCK
        turn, count = 0, 0
        for item in range(gl.program_id(0), n_items, gl.num_programs(0)):
            block, plane = work_tile(item, n_blocks, n_planes, together, False)
            batch, head_k = plane // splits // heads_k, plane // splits % heads_k
            col = block * (2 * ROWS)
            start, _, _, stop = key_blocks(col, 2 * ROWS, -high, -low, whole_q, BLOCK, RIGHT, LEFT)
            mbarrier.wait(own_empty, (turn & 1) ^ 1)
            load_pair(k_source, v_source, k_tiles, v_tiles, 0, own_ready, batch, head_k, col)
            load_pair(k_source, v_source, k_tiles, v_tiles, 1, own_ready, batch, head_k, col + ROWS)
            turn += 1
            of_planes = codes + batch.to(gl.int64) * c_b + block.to(gl.int64) * c_m
            # Query heads of a key head lie side by side, shared out among its splits.
            first = (head_k * splits + plane % splits) * members
            for head in range(first, first + members):
                of_blocks = of_planes + (batch * 0 + head).to(gl.int64) * c_h
                for step in range(start, stop):
                    if code_of(of_blocks, step, MASKED) != 0:
                        at = count % STAGES
                        mbarrier.wait(empty.index(at), ((count // STAGES) & 1) ^ 1)
                        load_pair(
                            q_source, g_source, q_tiles, g_tiles, at, ready.index(at), batch, head,
                            step * BLOCK,
                        )  # fmt: skip
                        count += 1

    @gluon.jit
    def key_step(
        keys, values, q_tiles, g_tiles, ready, empty, acc_k, acc_v, lse, delta, count, edge, code,
        words, row, col, n_q, n_k, low, high, factor,
        raw_layout: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        EXACT: gl.constexpr, STAGES: gl.constexpr,
    ):  # fmt: skip
        """dk and dv with one more block of queries; tiles of scores are transposed, [keys, queries]."""
        M: gl.constexpr = keys.shape[0]
        BLOCK: gl.constexpr = q_tiles.shape[3]
        at = count % STAGES
        i = row + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, raw_layout))
        row_lse = gl.load(lse + i, mask=i < n_q, other=float("inf"))
        row_delta = gl.load(delta + i, mask=i < n_q, other=0.0)
        bits = load_bits(words + row // 32, col, n_k, BLOCK, raw_layout) if MASKED else 0
        mbarrier.wait(ready.index(at), (count // STAGES) & 1)
        queries, grads = rows_of(q_tiles, at), rows_of(g_tiles, at)
        raw = gl.zeros([M, BLOCK], gl.float32, raw_layout)
        raw = warpgroup_mma(keys, queries.permute((1, 0)), raw, use_acc=False, is_async=True)
        # Sums start from -delta, which then takes no registers of its own.
        dp = gl.zeros([M, BLOCK], gl.float32, raw_layout) - row_delta[None, :]
        dp = warpgroup_mma(values, grads.permute((1, 0)), dp, is_async=True)
        raw = warpgroup_mma_wait(num_outstanding=1, deps=(raw,))
        if MASKED:
            if code == 1:
                raw = masked_by(raw, bits)
        if LEFT or RIGHT:
            if edge:
                j = col + gl.arange(0, M, layout=gl.SliceLayout(1, raw_layout))[:, None]
                if RIGHT:
                    raw = gl.where(i[None, :] >= j - high, raw, float("-inf"))
                if LEFT:
                    raw = gl.where(i[None, :] <= j - low, raw, float("-inf"))
        p = exponentials(raw, row_lse[None, :], factor, EXACT)
        weights = gl.convert_layout(p.to(queries.dtype), gl.DotOperandLayout(0, acc_v.type.layout, 2))
        acc_v = warpgroup_mma(weights, grads, acc_v, is_async=True)
        dp = warpgroup_mma_wait(num_outstanding=1, deps=(dp,))
        slopes = (p * dp).to(queries.dtype)
        slopes = gl.convert_layout(slopes, gl.DotOperandLayout(0, acc_k.type.layout, 2))
        acc_k = warpgroup_mma(slopes, queries, acc_k, is_async=True)
        acc_k, acc_v, weights, slopes = warpgroup_mma_wait(
            num_outstanding=0, deps=(acc_k, acc_v, weights, slopes)
        )
        mbarrier.arrive(empty.index(at), count=1)
        return acc_k, acc_v

    @gluon.jit
    def key_gradient(
        dk, dv, lse, delta, mask, codes, q_tiles, g_tiles, k_tiles, v_tiles,
        own_ready, own_empty, ready, empty,
        dk_s, dk_b, dk_h, dk_n, dv_s, dv_b, dv_h, dv_n, m_b, m_h, m_m, c_b, c_h, c_m,
        heads_k, members, splits, n_planes, n_blocks, together, n_items, n_q, n_k, low, high, scale,
        DIM: gl.constexpr, DIM_V: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        EXACT: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr,
    ):  # fmt: skip
        """One group of four warps: dk and dv of 64 keys of each block."""
        ROWS: gl.constexpr = k_tiles.shape[3]
        COLS: gl.constexpr = k_tiles.shape[4]
        COLS_V: gl.constexpr = v_tiles.shape[4]
        BLOCK: gl.constexpr = q_tiles.shape[3]
        raw_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
        k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
        v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS_V, 16])
        factor = scale * 1.4426950408889634
        keys, values = rows_of(k_tiles, PART), rows_of(v_tiles, PART)
        # Queries past the end need no mask: their lse is infinite. Keys past the end are not stored.
        whole_q = gl.cdiv(n_q, BLOCK) * BLOCK
        turn, count = 0, 0
        for item in range(gl.program_id(0), n_items, gl.num_programs(0)):
            block, plane = work_tile(item, n_blocks, n_planes, together, False)
            split = plane % splits
            batch, head_k = plane // splits // heads_k, plane // splits % heads_k
            col = block * (2 * ROWS)
            start, whole, until, stop = key_blocks(col, 2 * ROWS, -high, -low, whole_q, BLOCK, RIGHT, LEFT)
            col += PART * ROWS
            acc_k = gl.zeros([ROWS, COLS], gl.float32, k_layout)
            acc_v = gl.zeros([ROWS, COLS_V], gl.float32, v_layout)
            j = col + gl.arange(0, ROWS, layout=gl.SliceLayout(1, raw_layout))
            of_planes = codes + batch.to(gl.int64) * c_b + block.to(gl.int64) * c_m
            at_mask = mask + batch.to(gl.int64) * m_b + j.to(gl.int64) * m_m
            mbarrier.wait(own_ready, turn & 1)
            first = (head_k * splits + split) * members
            for head in range(first, first + members):
                words = at_mask + (batch * 0 + head).to(gl.int64) * m_h
                stat = (batch * (heads_k * splits * members) + head).to(gl.int64) * n_q
                of_blocks = of_planes + (batch * 0 + head).to(gl.int64) * c_h
                for step in range(start, stop):
                    code = code_of(of_blocks, step, MASKED)
                    if code != 0:
                        acc_k, acc_v = key_step(
                            keys, values, q_tiles, g_tiles, ready, empty, acc_k, acc_v, lse + stat,
                            delta + stat, count, (step < whole) | (step >= until), code, words, step * BLOCK,
                            col, n_q, n_k, low, high, factor, raw_layout, MASKED, LEFT, RIGHT, EXACT, STAGES,
                        )  # fmt: skip
                        count += 1
            mbarrier.arrive(own_empty, count=1)
            turn += 1
            at_k, at_v = dk + split.to(gl.int64) * dk_s, dv + split.to(gl.int64) * dv_s
            store_tile(at_k, acc_k * scale, batch, head_k, col, n_k, dk_b, dk_h, dk_n, DIM)
            store_tile(at_v, acc_v, batch, head_k, col, n_k, dv_b, dv_h, dv_n, DIM_V)

    @gluon.jit
    def key_gradient_kernel(
        q, grad, k, v, dk, dv, lse, delta, mask, codes, dk_s, dk_b, dk_h, dk_n, dv_s, dv_b, dv_h, dv_n,
        m_b, m_h, m_m, c_b, c_h, c_m,
        heads_k, members, splits, n_planes, n_blocks, together, n_items, n_q, n_k, low, high, scale,
        DIM: gl.constexpr, DIM_V: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        EXACT: gl.constexpr, STAGES: gl.constexpr,
    ):  # fmt: skip
        """dv = P^T grad and dk = scale dS^T q, summed over the query heads that share a key head."""
        dtype: gl.constexpr = q.dtype
        BLOCK: gl.constexpr = q.block_type.shape[2]
        k_tiles = gl.allocate_shared_memory(dtype, [2] + k.block_type.shape, k.layout)
        v_tiles = gl.allocate_shared_memory(dtype, [2] + v.block_type.shape, v.layout)
        q_tiles = gl.allocate_shared_memory(dtype, [STAGES] + q.block_type.shape, q.layout)
        g_tiles = gl.allocate_shared_memory(dtype, [STAGES] + grad.block_type.shape, grad.layout)
        own_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        own_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(own_ready, count=2)
        mbarrier.init(own_empty, count=2)
        for i in gl.static_range(STAGES):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(empty.index(i), count=2)
        gl.warp_specialize(
            [
                (key_gradient, (
                    dk, dv, lse, delta, mask, codes, q_tiles, g_tiles, k_tiles, v_tiles,
                    own_ready, own_empty, ready, empty, dk_s, dk_b, dk_h, dk_n, dv_s, dv_b, dv_h, dv_n,
                    m_b, m_h, m_m, c_b, c_h, c_m,
                    heads_k, members, splits, n_planes, n_blocks, together, n_items, n_q, n_k,
                    low, high, scale, DIM, DIM_V, MASKED, LEFT, RIGHT, EXACT, STAGES, 0,
                )),
                (key_gradient, (
                    dk, dv, lse, delta, mask, codes, q_tiles, g_tiles, k_tiles, v_tiles,
                    own_ready, own_empty, ready, empty, dk_s, dk_b, dk_h, dk_n, dv_s, dv_b, dv_h, dv_n,
                    m_b, m_h, m_m, c_b, c_h, c_m,
                    heads_k, members, splits, n_planes, n_blocks, together, n_items, n_q, n_k,
                    low, high, scale, DIM, DIM_V, MASKED, LEFT, RIGHT, EXACT, STAGES, 1,
                )),
                (load_for_keys, (
                    q, grad, k, v, codes, q_tiles, g_tiles, k_tiles, v_tiles,
                    own_ready, own_empty, ready, empty,
                    heads_k, members, splits, n_planes, n_blocks, together, n_items, n_q, low, high,
                    c_b, c_h, c_m, BLOCK, MASKED, LEFT, RIGHT, STAGES,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def launch_query_gradient(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, dq: Tensor, lse: Tensor, delta: Tensor,
    mask: Tensor | None, scale: float, low: int, high: int, limits: tuple[bool, bool], together: int,
    programs: int,
    params: Mapping[str, int],
) -> None:  # fmt: skip
    """Write dq and delta; arguments as `launch_forward` has them, `params` with BLOCK in keys."""
    blocks, planes = -(-q.shape[2] // (2 * ROWS)), q.shape[0] * q.shape[1]
    count, grid = items(blocks, planes, programs, params)
    bits, strides = arguments(mask, 2 * ROWS, params["BLOCK"], lse)
    query_gradient_kernel[(grid,)](
        described(q, ROWS), described(grad, ROWS), described(k, params["BLOCK"]),
        described(v, params["BLOCK"]), out, grad, dq, lse, delta,
        *bits, *out.stride()[:3], *grad.stride()[:3], *dq.stride()[:3], *strides,
        q.shape[1], q.shape[1] // k.shape[1], planes, blocks, together, count, q.shape[2], k.shape[2],
        low, high, scale, DIM=q.shape[3], DIM_V=v.shape[3], MASKED=mask is not None, LEFT=limits[0],
        RIGHT=limits[1],
        EXACT=q.dtype == torch.float16, STAGES=params["STAGES"], num_warps=4, maxnreg=168,
    )  # fmt: skip


def launch_key_gradient(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, dk: Tensor, dv: Tensor, lse: Tensor, delta: Tensor,
    mask: Tensor | None, scale: float, low: int, high: int, limits: tuple[bool, bool], together: int,
    programs: int,
    params: Mapping[str, int],
) -> None:  # fmt: skip
    """Write dk and dv, (splits, batch, heads, tokens, dim); mask transposed, BLOCK in queries."""
    splits, heads_k = dk.shape[0], k.shape[1]
    blocks, planes = -(-k.shape[2] // (2 * ROWS)), k.shape[0] * heads_k * splits
    count, grid = items(blocks, planes, programs, params)
    bits, strides = arguments(mask, 2 * ROWS, params["BLOCK"], lse)
    key_gradient_kernel[(grid,)](
        described(q, params["BLOCK"]), described(grad, params["BLOCK"]), described(k, ROWS),
        described(v, ROWS), dk, dv, lse, delta, *bits, *dk.stride()[:4], *dv.stride()[:4], *strides,
        heads_k, q.shape[1] // heads_k // splits, splits, planes, blocks, together, count,
        q.shape[2], k.shape[2], low, high, scale, DIM=q.shape[3], DIM_V=v.shape[3],
        MASKED=mask is not None, LEFT=limits[0], RIGHT=limits[1], EXACT=q.dtype == torch.float16,
        STAGES=params["STAGES"],
        num_warps=4, maxnreg=168,
    )  # fmt: skip
