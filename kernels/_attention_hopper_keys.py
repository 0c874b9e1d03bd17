"""The gradients for keys and values, in warps with roles of their own, for Hopper, in Gluon.

As Triton's kernel of the same name, block by block, but one warp loads tiles and two groups of four warps own
64 keys each: while one takes exponentials, the other's products run.
"""

# Gluon takes some of Python: no enumerate, no starred lists, no chained conditions on constants.
# ruff: noqa: RUF005, SIM102

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ._attention_hopper_tiles import AVAILABLE, ROWS, aligned, described, items
from ._attention_masks import Prepared, copyable

if AVAILABLE:
    from ._attention_hopper_tiles import (
        bit_places,
        exponentials,
        gl,
        gluon,
        key_blocks,
        load_bias,
        load_bits,
        load_pair,
        mask_applied,
        mbarrier,
        rows_of,
        store_tile,
        tma,
        turns,
        visited,
        visits,
        wait_for_kernel_before,
        warpgroup_mma,
        warpgroup_mma_wait,
        work_tile,
    )

    @gluon.jit
    def load_for_keys(
        q_source, g_source, k_source, v_source, lse, delta, lists, added, q_tiles, g_tiles, k_tiles, v_tiles,
        x_tiles, l_tiles, d_tiles,
        own_ready, own_empty, ready, empty,
        heads_k, members, splits, n_planes, n_blocks, together, n_items, n_q, low, high, c_b, c_h, c_m,
        x_b, x_h,
        BLOCK: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        STAGES: gl.constexpr, PAIRED: gl.constexpr, AHEAD: gl.constexpr, STATS: gl.constexpr,
    ):  # fmt: skip
        """Loads of `key_gradient_kernel`: keys and values once, then q and its output's gradient.

        Numbers to be added come with them, for each group's keys a tile of their own.
        """
        ROWS: gl.constexpr = k_source.block_type.shape[2]
        OWN: gl.constexpr = 1 + AHEAD
        MORE: gl.constexpr = 8 * BLOCK * STATS
        whole_q = gl.cdiv(n_q, BLOCK) * BLOCK
        count = 0
        for turn in range(turns(n_items, PAIRED)):
            block, plane = work_tile(turn, n_blocks, n_planes, together, False, PAIRED)
            batch, head_k = plane // splits // heads_k, plane // splits % heads_k
            col = block * (2 * ROWS)
            start, _, _, stop = key_blocks(col, 2 * ROWS, -high, -low, whole_q, BLOCK, RIGHT, LEFT)
            at_own = turn % OWN
            mbarrier.wait(own_empty.index(at_own), ((turn // OWN) & 1) ^ 1)
            for part in gl.static_range(2):
                load_pair(
                    k_source, v_source, k_tiles, v_tiles, at_own * 2 + part, own_ready.index(at_own),
                    batch, head_k, col + part * ROWS,
                )  # fmt: skip
            of_planes = lists + batch.to(gl.int64) * c_b + block.to(gl.int64) * c_m
            # Query heads of a key head lie side by side, shared out among its splits.
            first = (head_k * splits + plane % splits) * members
            for head in range(first, first + members):
                own = of_planes + (batch * 0 + head).to(gl.int64) * c_h
                for step in range(visits(own, start, stop, MASKED)):
                    block_m, code = visited(own, step, start, MASKED)
                    at = count % STAGES
                    row = block_m * BLOCK
                    mbarrier.wait(empty.index(at), ((count // STAGES) & 1) ^ 1)
                    if MASKED > 2:
                        if code == 3:
                            load_pair(
                                q_source, g_source, q_tiles, g_tiles, at, ready.index(at), batch, head, row,
                                2 * added.block_type.nbytes + MORE,
                            )  # fmt: skip
                            for part in gl.static_range(2):
                                tma.async_copy_global_to_shared(
                                    added, [batch * x_b, head * x_h, row, col + part * ROWS],
                                    ready.index(at), x_tiles.index(at * 2 + part),
                                )  # fmt: skip
                        else:
                            load_pair(
                                q_source, g_source, q_tiles, g_tiles, at, ready.index(at), batch, head, row,
                                MORE,
                            )  # fmt: skip
                    else:
                        load_pair(
                            q_source, g_source, q_tiles, g_tiles, at, ready.index(at), batch, head, row, MORE
                        )  # fmt: skip
                    if STATS:
                        tma.async_copy_global_to_shared(
                            lse, [batch, head, 0, row], ready.index(at), l_tiles.index(at)
                        )
                        tma.async_copy_global_to_shared(
                            delta, [batch, head, 0, row], ready.index(at), d_tiles.index(at)
                        )
                    count += 1

    @gluon.jit
    def key_step(
        keys, values, q_tiles, g_tiles, ready, empty, acc_k, acc_v, lse, delta, count, edge, code,
        words, x_tiles, l_tiles, d_tiles, row, col, n_q, n_k, low, high, factor, scale_2,
        raw_layout: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        EXACT: gl.constexpr, STAGES: gl.constexpr, STATS: gl.constexpr, PART: gl.constexpr,
    ):  # fmt: skip
        """dk and dv with one more block of queries; tiles of scores are transposed, [keys, queries]."""
        M: gl.constexpr = keys.shape[0]
        BLOCK: gl.constexpr = q_tiles.shape[3]
        at = count % STAGES
        i = row + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, raw_layout))
        if not STATS:
            row_lse = gl.load(lse + i, mask=i < n_q, other=float("inf"))[None, :]
            row_delta = gl.load(delta + i, mask=i < n_q, other=0.0)[None, :]
        bits = 0
        if (MASKED == 2) | (MASKED == 3):
            bits = load_bits(words, row, BLOCK)
        if MASKED == 1:
            bits = load_bias(words, col, n_k, 1, raw_layout)[:, None]
        mbarrier.wait(ready.index(at), (count // STAGES) & 1)
        queries, grads = rows_of(q_tiles, at), rows_of(g_tiles, at)
        if STATS:
            row_delta = rows_of(d_tiles, at).load(raw_layout)
        # Sums start from -delta, which then takes no registers of its own. The compiler would move a plain
        # difference behind the first product, and then have the second wait for its end.
        dp = gl.inline_asm_elementwise(
            "sub.f32 $0, $1, $2;", "=f,f,f",
            [gl.zeros([M, BLOCK], gl.float32, raw_layout), row_delta],
            dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
        raw = gl.zeros([M, BLOCK], gl.float32, raw_layout)
        raw = warpgroup_mma(keys, queries.permute((1, 0)), raw, use_acc=False, is_async=True)
        dp = warpgroup_mma(values, grads.permute((1, 0)), dp, is_async=True)
        raw = warpgroup_mma_wait(num_outstanding=1, deps=(raw,))
        numbers = bits
        if MASKED > 2:
            numbers = gl.zeros([M, BLOCK], x_tiles.dtype, raw_layout)
            if code == 3:
                # Read this late, since registers are short.
                numbers = rows_of(x_tiles, at * 2 + PART).permute((1, 0)).load(raw_layout)
        raw = mask_applied(raw, code, bits, numbers, scale_2, MASKED)
        if LEFT or RIGHT:
            if edge:
                j = col + gl.arange(0, M, layout=gl.SliceLayout(1, raw_layout))[:, None]
                if RIGHT:
                    raw = gl.where(i[None, :] >= j - high, raw, float("-inf"))
                if LEFT:
                    raw = gl.where(i[None, :] <= j - low, raw, float("-inf"))
        if STATS:
            # Queries past the end have 0 in all: nothing comes of them.
            row_lse = rows_of(l_tiles, at).load(raw_layout)
        p = exponentials(raw, row_lse, factor, EXACT)
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
        dk, dv, lse, delta, mask, lists, q_tiles, g_tiles, k_tiles, v_tiles, x_tiles, l_tiles, d_tiles,
        own_ready, own_empty, ready, empty,
        dk_s, dk_b, dk_h, dk_n, dv_s, dv_b, dv_h, dv_n, m_b, m_h, m_m, c_b, c_h, c_m,
        heads_k, members, splits, n_planes, n_blocks, together, n_items, n_q, n_k, low, high, scale,
        DIM: gl.constexpr, DIM_V: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        EXACT: gl.constexpr, STAGES: gl.constexpr, PAIRED: gl.constexpr, AHEAD: gl.constexpr,
        STATS: gl.constexpr, PART: gl.constexpr,
    ):  # fmt: skip
        """One group of four warps: dk and dv of 64 keys of each block."""
        ROWS: gl.constexpr = k_tiles.shape[3]
        COLS: gl.constexpr = k_tiles.shape[4]
        COLS_V: gl.constexpr = v_tiles.shape[4]
        BLOCK: gl.constexpr = q_tiles.shape[3]
        OWN: gl.constexpr = 1 + AHEAD
        raw_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
        k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
        v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS_V, 16])
        # With a bias scores are scaled before it is added.
        scale_2 = scale * 1.4426950408889634
        factor = scale_2 if (MASKED == 0) | (MASKED == 2) else 1.0
        # Queries past the end need no mask: their lse is infinite, or all of theirs is 0. Keys past the end
        # are not stored.
        whole_q = gl.cdiv(n_q, BLOCK) * BLOCK
        count = 0
        for turn in range(turns(n_items, PAIRED)):
            block, plane = work_tile(turn, n_blocks, n_planes, together, False, PAIRED)
            split = plane % splits
            batch, head_k = plane // splits // heads_k, plane // splits % heads_k
            col = block * (2 * ROWS)
            start, whole, until, stop = key_blocks(col, 2 * ROWS, -high, -low, whole_q, BLOCK, RIGHT, LEFT)
            col += PART * ROWS
            acc_k = gl.zeros([ROWS, COLS], gl.float32, k_layout)
            acc_v = gl.zeros([ROWS, COLS_V], gl.float32, v_layout)
            j = col + gl.arange(0, ROWS, layout=gl.SliceLayout(1, raw_layout))
            of_planes = lists + batch.to(gl.int64) * c_b + block.to(gl.int64) * c_m
            at_mask = mask + batch.to(gl.int64) * m_b
            if (MASKED == 2) | (MASKED == 3):
                at_mask = bit_places(at_mask, col, n_k, m_m, ROWS, BLOCK, raw_layout)
            if MASKED == 1:
                at_mask += j.to(gl.int64) * m_m
            at_own = turn % OWN
            mbarrier.wait(own_ready.index(at_own), (turn // OWN) & 1)
            keys, values = rows_of(k_tiles, at_own * 2 + PART), rows_of(v_tiles, at_own * 2 + PART)
            first = (head_k * splits + split) * members
            for head in range(first, first + members):
                words = at_mask + (batch * 0 + head).to(gl.int64) * m_h
                stat = (batch * (heads_k * splits * members) + head).to(gl.int64) * n_q
                own = of_planes + (batch * 0 + head).to(gl.int64) * c_h
                for step in range(visits(own, start, stop, MASKED)):
                    block_m, code = visited(own, step, start, MASKED)
                    at_lse, at_delta = lse, delta
                    if not STATS:
                        at_lse, at_delta = lse + stat, delta + stat
                    acc_k, acc_v = key_step(
                        keys, values, q_tiles, g_tiles, ready, empty, acc_k, acc_v, at_lse, at_delta,
                        count, (block_m < whole) | (block_m >= until), code, words, x_tiles, l_tiles, d_tiles,
                        block_m * BLOCK, col, n_q, n_k, low, high, factor, scale_2, raw_layout,
                        MASKED, LEFT, RIGHT, EXACT, STAGES, STATS, PART,
                    )  # fmt: skip
                    count += 1
            mbarrier.arrive(own_empty.index(at_own), count=1)
            at_k, at_v = dk + split.to(gl.int64) * dk_s, dv + split.to(gl.int64) * dv_s
            store_tile(at_k, acc_k * scale, batch, head_k, col, n_k, dk_b, dk_h, dk_n, DIM, AHEAD)
            store_tile(at_v, acc_v, batch, head_k, col, n_k, dv_b, dv_h, dv_n, DIM_V, AHEAD)

    @gluon.jit
    def key_gradient_kernel(
        q, grad, k, v, dk, dv, lse, delta, mask, lists, added, dk_s, dk_b, dk_h, dk_n, dv_s, dv_b, dv_h, dv_n,
        m_b, m_h, m_m, c_b, c_h, c_m, x_b, x_h,
        heads_k, members, splits, n_planes, n_blocks, together, n_items, n_q, n_k, low, high, scale,
        DIM: gl.constexpr, DIM_V: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        EXACT: gl.constexpr, STAGES: gl.constexpr, PAIRED: gl.constexpr, AHEAD: gl.constexpr,
        STATS: gl.constexpr,
    ):  # fmt: skip
        """dv = P^T grad and dk = scale dS^T q, summed over the query heads that share a key head."""
        dtype: gl.constexpr = q.dtype
        BLOCK: gl.constexpr = q.block_type.shape[2]
        OWN: gl.constexpr = 1 + AHEAD
        k_tiles = gl.allocate_shared_memory(dtype, [2 * OWN] + k.block_type.shape, k.layout)
        v_tiles = gl.allocate_shared_memory(dtype, [2 * OWN] + v.block_type.shape, v.layout)
        q_tiles = gl.allocate_shared_memory(dtype, [STAGES] + q.block_type.shape, q.layout)
        g_tiles = gl.allocate_shared_memory(dtype, [STAGES] + grad.block_type.shape, grad.layout)
        x_tiles = k_tiles
        if MASKED > 2:
            x_tiles = gl.allocate_shared_memory(
                added.dtype, [2 * STAGES] + added.block_type.shape, added.layout
            )  # fmt: skip
        l_tiles, d_tiles = k_tiles, k_tiles
        if STATS:
            l_tiles = gl.allocate_shared_memory(gl.float32, [STAGES] + lse.block_type.shape, lse.layout)
            d_tiles = gl.allocate_shared_memory(gl.float32, [STAGES] + delta.block_type.shape, delta.layout)
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
        # What comes before this runs while query gradients, and with them delta, are still worked out.
        if AHEAD:
            wait_for_kernel_before()
        gl.warp_specialize(
            [
                (key_gradient, (
                    dk, dv, lse, delta, mask, lists, q_tiles, g_tiles, k_tiles, v_tiles, x_tiles,
                    l_tiles, d_tiles, own_ready, own_empty, ready, empty, dk_s, dk_b, dk_h, dk_n,
                    dv_s, dv_b, dv_h, dv_n, m_b, m_h, m_m, c_b, c_h, c_m,
                    heads_k, members, splits, n_planes, n_blocks, together, n_items, n_q, n_k,
                    low, high, scale, DIM, DIM_V, MASKED, LEFT, RIGHT, EXACT, STAGES, PAIRED, AHEAD, STATS, 0,
                )),
                (key_gradient, (
                    dk, dv, lse, delta, mask, lists, q_tiles, g_tiles, k_tiles, v_tiles, x_tiles,
                    l_tiles, d_tiles, own_ready, own_empty, ready, empty, dk_s, dk_b, dk_h, dk_n,
                    dv_s, dv_b, dv_h, dv_n, m_b, m_h, m_m, c_b, c_h, c_m,
                    heads_k, members, splits, n_planes, n_blocks, together, n_items, n_q, n_k,
                    low, high, scale, DIM, DIM_V, MASKED, LEFT, RIGHT, EXACT, STAGES, PAIRED, AHEAD, STATS, 1,
                )),
                (load_for_keys, (
                    q, grad, k, v, lse, delta, lists, added, q_tiles, g_tiles, k_tiles, v_tiles, x_tiles,
                    l_tiles, d_tiles, own_ready, own_empty, ready, empty,
                    heads_k, members, splits, n_planes, n_blocks, together, n_items, n_q, low, high,
                    c_b, c_h, c_m, x_b, x_h, BLOCK, MASKED, LEFT, RIGHT, STAGES, PAIRED, AHEAD, STATS,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


def launch_key_gradient(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, dk: Tensor, dv: Tensor, lse: Tensor, delta: Tensor,
    mask: Prepared, scale: float, low: int, high: int, limits: tuple[bool, bool], together: int,
    programs: int,
    params: Mapping[str, int],
) -> None:  # fmt: skip
    """Write dk and dv, (splits, batch, heads, tokens, dim); mask transposed, BLOCK in queries."""
    splits, heads_k = dk.shape[0], k.shape[1]
    block, stages = params["BLOCK"], params["STAGES"]
    numbers = None if mask.numbers is None else copyable(mask.numbers.transpose(2, 3))
    if numbers is not None:
        # For a block of 128 they do not fit in registers, nor with every stage in shared memory.
        block, stages = min(block, 64), min(stages, 3 if numbers.element_size() == 2 else 2)
    blocks, planes = -(-k.shape[2] // (2 * ROWS)), k.shape[0] * heads_k * splits
    count, grid, paired = items(blocks, planes, programs, mask.uneven(limits), params)
    values, strides = mask.arguments(
        2 * ROWS, block, q.shape[2], -high, -low, (limits[1], limits[0]), lse
    )  # fmt: skip
    added, per_plane = lse, (0, 0)
    if numbers is not None:
        added = described(numbers, block, ROWS)
        per_plane = int(numbers.shape[0] > 1), int(numbers.shape[1] > 1)
    stats: tuple[Any, ...] = (lse, delta)
    by_copy = bool(params["AHEAD"]) and all(aligned(x[:, :, None]) for x in stats)
    if by_copy:
        stats = tuple(described(x[:, :, None], 1, block) for x in stats)
    key_gradient_kernel[(grid,)](
        described(q, block), described(grad, block), described(k, ROWS), described(v, ROWS),
        dk, dv, *stats, *values[:2], added, *dk.stride()[:4], *dv.stride()[:4], *strides[:6],
        *per_plane, heads_k, q.shape[1] // heads_k // splits, splits, planes, blocks, together, count,
        q.shape[2], k.shape[2], low, high, scale, DIM=q.shape[3], DIM_V=v.shape[3],
        MASKED=mask.kind, LEFT=limits[0], RIGHT=limits[1], EXACT=q.dtype == torch.float16,
        STAGES=stages, PAIRED=paired, AHEAD=params["AHEAD"], STATS=by_copy,
        num_warps=4, maxnreg=168, launch_pdl=bool(params["AHEAD"]),
    )  # fmt: skip
