"""The forward of plain attention in warps with roles of their own, for Hopper, in Gluon.

Triton's compiler keeps the warps of a program in step: while they take exponentials, the matrix units wait.
Here one warp does nothing but ask the copy engine for tiles, and each of two groups of four warps owns 64
queries and goes at its own pace, so that one group's exponentials run beside the other's products; within a
group the product of the last block's probabilities runs beside the exponentials of the next.

Tiles pass through rings of buffers: `ready` barriers count bytes that arrived, `empty` barriers count the
groups that are done with a buffer. Use n of a ring finds buffer n % stages, in phase (n / stages) % 2.
"""

# Gluon takes some of Python: no enumerate, no starred lists, no chained conditions on constants.
# ruff: noqa: RUF005, SIM108

from collections.abc import Mapping

import torch
from torch import Tensor

from ._attention_hopper_tiles import AVAILABLE, ROWS, described, items
from ._attention_masks import PER_KEY, Prepared

if AVAILABLE:
    from ._attention_hopper_tiles import (
        bit_places,
        exponentials,
        fence_async_shared,
        gl,
        gluon,
        key_blocks,
        load_bias,
        load_bits,
        load_numbers,
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
    def load_tiles(
        q_source, k_source, v_source, lists, q_tiles, k_tiles, v_tiles,
        q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
        heads, group, n_planes, n_blocks, together, n_items, n_k, low, high, c_b, c_h, c_m,
        BLOCK_N: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        GROUPS: gl.constexpr, STAGES: gl.constexpr, PAIRED: gl.constexpr, AHEAD: gl.constexpr,
    ):  # fmt: skip
        """The one warp that loads: a block's queries, then its keys and values from right to left."""
        ROWS: gl.constexpr = q_source.block_type.shape[2]
        OWN: gl.constexpr = 1 + AHEAD
        count = 0
        for turn in range(turns(n_items, PAIRED)):
            block, plane = work_tile(turn, n_blocks, n_planes, together, RIGHT | (MASKED > 0), PAIRED)
            batch, head = plane // heads, plane % heads
            row = block * (ROWS * GROUPS)
            start, _, _, stop = key_blocks(row, ROWS * GROUPS, low, high, n_k, BLOCK_N, LEFT, RIGHT)
            at_q = turn % OWN
            mbarrier.wait(q_empty.index(at_q), ((turn // OWN) & 1) ^ 1)
            for part in gl.static_range(GROUPS):
                mbarrier.expect(q_ready.index(at_q), q_source.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    q_source, [batch, head, row + part * ROWS, 0], q_ready.index(at_q),
                    q_tiles.index(at_q * GROUPS + part),
                )  # fmt: skip
            own = lists + batch.to(gl.int64) * c_b + head.to(gl.int64) * c_h + block.to(gl.int64) * c_m
            steps = visits(own, start, stop, MASKED)
            for step in range(steps):
                block_n, _ = visited(own, steps - 1 - step, start, MASKED)
                col = block_n * BLOCK_N
                at, phase = count % STAGES, (count // STAGES) & 1
                mbarrier.wait(k_empty.index(at), phase ^ 1)
                mbarrier.expect(k_ready.index(at), k_source.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k_source, [batch, head // group, col, 0], k_ready.index(at), k_tiles.index(at)
                )
                mbarrier.wait(v_empty.index(at), phase ^ 1)
                mbarrier.expect(v_ready.index(at), v_source.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    v_source, [batch, head // group, col, 0], v_ready.index(at), v_tiles.index(at)
                )
                count += 1

    @gluon.jit
    def probabilities(
        raw, top, total, edge, code, bits, numbers, row, col, n_k, low, high, factor, scale_2,
        dtype: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        EXACT: gl.constexpr, RESIDUE: gl.constexpr,
    ):  # fmt: skip
        """Of a block of scores, with what joins it to the blocks before: maximum, sum, shrinkage of both.

        A row's maximum, scaled, is rounded alike in all that is made of it, so that the rounding cancels.
        With `RESIDUE` the sum is `sums_added`'s, so that what all values have in common is weighed by 1.
        """
        raw = mask_applied(raw, code, bits, numbers, scale_2, MASKED)
        if edge:
            raw = seen_alone(raw, row, col, n_k, low, high, LEFT, RIGHT)
        new_top = gl.maximum(top, gl.max(raw, 1))
        # Where a row has seen nothing yet, -inf less -inf would be no number.
        anchor = gl.where(new_top == float("-inf"), 0.0, new_top)
        p = exponentials(raw, anchor[:, None], factor, EXACT)
        weights = p.to(dtype)
        if EXACT:
            shrink = gl.exp2((top - anchor) * factor)
        else:
            shrink = gl.exp2(top * factor - anchor * factor)
        if not RESIDUE:
            total = total * shrink + gl.sum(p, 1)
        return weights, new_top, total, shrink

    @gluon.jit
    def sums_added(sums, weights, ones):
        """The rows' sums of weights as they are rounded, by the matrix units, which have time to spare."""
        same = gl.convert_layout(weights, gl.DotOperandLayout(0, sums.type.layout, 2))
        return warpgroup_mma(same, ones.permute((1, 0)), sums, is_async=True), same

    @gluon.jit
    def block_step(
        raw_layout: gl.constexpr, queries, k_tiles, v_tiles, ones, k_ready, k_empty, v_ready, v_empty,
        acc, sums, weights, top, total, count, edge, code, words, added, x_m, x_n, row, col, n_q, n_k,
        low, high, factor, scale_2, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        EXACT: gl.constexpr, RESIDUE: gl.constexpr, STAGES: gl.constexpr,
    ):  # fmt: skip
        """Scores of one more block; beside their softmax runs the product of the weights before them."""
        at, phase = count % STAGES, (count // STAGES) & 1
        before, phase_before = (count - 1) % STAGES, ((count - 1) // STAGES) & 1
        ROWS: gl.constexpr = queries.shape[0]
        BLOCK_N: gl.constexpr = k_tiles.shape[3]
        # Asked for early: they come while the scores are worked out.
        bits = 0
        if (MASKED == 2) | (MASKED == 3):
            bits = load_bits(words, col, BLOCK_N)
        if MASKED == 1:
            bits = load_bias(words + col, col, n_k, 0, raw_layout)[None, :]
        numbers = load_numbers(
            added, row, col, n_q, n_k, x_m, x_n, code, ROWS, BLOCK_N, raw_layout, MASKED
        )  # fmt: skip
        raw = gl.zeros([ROWS, BLOCK_N], gl.float32, raw_layout)
        mbarrier.wait(k_ready.index(at), phase)
        raw = warpgroup_mma(queries, rows_of(k_tiles, at).permute((1, 0)), raw, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(before), phase_before)
        acc = warpgroup_mma(weights, rows_of(v_tiles, before), acc, is_async=True)
        if RESIDUE:
            sums, same = sums_added(sums, weights, ones)
            raw = warpgroup_mma_wait(num_outstanding=2, deps=(raw,))
        else:
            raw = warpgroup_mma_wait(num_outstanding=1, deps=(raw,))
        mbarrier.arrive(k_empty.index(at), count=1)
        p, top, total, shrink = probabilities(
            raw, top, total, edge, code, bits, numbers, row, col, n_k, low, high, factor, scale_2,
            weights.dtype, MASKED, LEFT, RIGHT, EXACT, RESIDUE,
        )  # fmt: skip
        if RESIDUE:
            acc, sums, weights, same = warpgroup_mma_wait(num_outstanding=0, deps=(acc, sums, weights, same))
            sums *= gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None]
        else:
            acc, weights = warpgroup_mma_wait(num_outstanding=0, deps=(acc, weights))
        mbarrier.arrive(v_empty.index(before), count=1)
        shrink = gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))
        weights = gl.convert_layout(p, weights.type.layout)
        return acc * shrink[:, None], sums, weights, top, total

    @gluon.jit
    def attend(
        out, residue, lse, mask, lists, added, q_tiles, k_tiles, v_tiles, ones, q_ready, q_empty, k_ready,
        k_empty, v_ready, v_empty, o_b, o_h, o_n, m_b, m_h, m_m, c_b, c_h, c_m, x_b, x_h, x_m, x_n,
        heads, n_planes, n_blocks, together, n_items, n_q, n_k, low, high, scale,
        DIM_V: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        EXACT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, PAIRED: gl.constexpr,
        RESIDUE: gl.constexpr, AHEAD: gl.constexpr, PART: gl.constexpr,
    ):  # fmt: skip
        """One group of four warps, which owns queries `PART` * 64 to 64 further of each block."""
        dtype: gl.constexpr = q_tiles.dtype
        ROWS: gl.constexpr = q_tiles.shape[3]
        BLOCK_N: gl.constexpr = k_tiles.shape[3]
        OWN: gl.constexpr = 1 + AHEAD
        COLS_V: gl.constexpr = v_tiles.shape[4]
        raw_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
        acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS_V, 16])
        sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
        weight_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
        # With a bias scores are scaled before it is added.
        scale_2 = scale * 1.4426950408889634
        factor = scale_2 if (MASKED == 0) | (MASKED == 2) else 1.0
        count = 0
        for turn in range(turns(n_items, PAIRED)):
            block, plane = work_tile(turn, n_blocks, n_planes, together, RIGHT | (MASKED > 0), PAIRED)
            batch, head = plane // heads, plane % heads
            row = block * (ROWS * GROUPS)
            start, whole, until, stop = key_blocks(row, ROWS * GROUPS, low, high, n_k, BLOCK_N, LEFT, RIGHT)
            row += PART * ROWS
            at_q = turn % OWN
            mbarrier.wait(q_ready.index(at_q), (turn // OWN) & 1)
            queries = rows_of(q_tiles, at_q * GROUPS + PART)

            # From right to left, where masks are needed first and the rows' maxima soon stand.
            at, phase = count % STAGES, (count // STAGES) & 1
            raw = gl.zeros([ROWS, BLOCK_N], gl.float32, raw_layout)
            mbarrier.wait(k_ready.index(at), phase)
            raw = warpgroup_mma(
                queries, rows_of(k_tiles, at).permute((1, 0)), raw, use_acc=False, is_async=True
            )
            raw = warpgroup_mma_wait(num_outstanding=0, deps=(raw,))
            mbarrier.arrive(k_empty.index(at), count=1)
            count += 1
            top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, raw_layout))
            total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, raw_layout))
            words = mask + batch.to(gl.int64) * m_b + head.to(gl.int64) * m_h
            own = lists + batch.to(gl.int64) * c_b + head.to(gl.int64) * c_h + block.to(gl.int64) * c_m
            steps = visits(own, start, stop, MASKED)
            block_n, code = visited(own, steps - 1, start, MASKED)
            col = block_n * BLOCK_N
            bits = 0
            if (MASKED == 2) | (MASKED == 3):
                words = bit_places(words, row, n_q, m_m, ROWS, BLOCK_N, raw_layout)
                bits = load_bits(words, col, BLOCK_N)
            if MASKED == 1:
                words += gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, raw_layout))
                bits = load_bias(words + col, col, n_k, 0, raw_layout)[None, :]
            addends = added + batch.to(gl.int64) * x_b + head.to(gl.int64) * x_h
            numbers = load_numbers(
                addends, row, col, n_q, n_k, x_m, x_n, code, ROWS, BLOCK_N, raw_layout, MASKED
            )  # fmt: skip
            p, top, total, _ = probabilities(
                raw, top, total, (block_n < whole) | (block_n >= until), code, bits, numbers, row, col, n_k,
                low, high, factor, scale_2, dtype, MASKED, LEFT, RIGHT, EXACT, RESIDUE,
            )  # fmt: skip
            weights = gl.convert_layout(p, weight_layout)
            acc = gl.zeros([ROWS, COLS_V], gl.float32, acc_layout)
            sums = 0
            if RESIDUE:
                sums = gl.zeros([ROWS, 8], gl.float32, sums_layout)

            for step in range(1, steps):
                block_n, code = visited(own, steps - 1 - step, start, MASKED)
                acc, sums, weights, top, total = block_step(
                    raw_layout, queries, k_tiles, v_tiles, ones, k_ready, k_empty, v_ready, v_empty,
                    acc, sums, weights, top, total, count, (block_n < whole) | (block_n >= until), code,
                    words, addends, x_m, x_n, row, block_n * BLOCK_N, n_q, n_k, low, high, factor, scale_2,
                    MASKED, LEFT, RIGHT, EXACT, RESIDUE, STAGES,
                )  # fmt: skip
                count += 1
            # No scores of this block of queries are to come: the next block's may.
            mbarrier.arrive(q_empty.index(at_q), count=1)

            before, phase_before = (count - 1) % STAGES, ((count - 1) // STAGES) & 1
            mbarrier.wait(v_ready.index(before), phase_before)
            acc = warpgroup_mma(weights, rows_of(v_tiles, before), acc, is_async=True)
            if RESIDUE:
                sums, same = sums_added(sums, weights, ones)
                acc, sums, weights, same = warpgroup_mma_wait(
                    num_outstanding=0, deps=(acc, sums, weights, same)
                )  # fmt: skip
                # All columns are the same.
                total = gl.convert_layout(gl.max(sums, 1), gl.SliceLayout(1, raw_layout))
            else:
                acc, weights = warpgroup_mma_wait(num_outstanding=0, deps=(acc, weights))
            mbarrier.arrive(v_empty.index(before), count=1)

            empty = total == 0.0
            total = gl.where(empty, 1.0, total)
            log_sum = gl.where(empty, float("inf"), top + gl.log2(total) / factor)
            i = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, raw_layout))
            gl.store(lse + plane.to(gl.int64) * n_q + i, log_sum, mask=i < n_q)
            result = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, acc_layout))[:, None]
            store_tile(out, result, batch, head, row, n_q, o_b, o_h, o_n, DIM_V, AHEAD)
            if RESIDUE:
                result -= result.to(dtype).to(gl.float32)
                store_tile(residue, result, batch, head, row, n_q, o_b, o_h, o_n, DIM_V, AHEAD)

    @gluon.jit
    def forward_kernel(
        q, k, v, out, residue, lse, mask, lists, added, o_b, o_h, o_n, m_b, m_h, m_m, c_b, c_h, c_m,
        x_b, x_h, x_m, x_n, heads, group, n_planes, n_blocks, together, n_items, n_q, n_k, low, high, scale,
        DIM_V: gl.constexpr, MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
        EXACT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, PAIRED: gl.constexpr,
        RESIDUE: gl.constexpr, AHEAD: gl.constexpr,
    ):  # fmt: skip
        """out = softmax(scores) v and the rows' log-sum-exp, as Triton's kernel of that name."""
        dtype: gl.constexpr = q.dtype
        BLOCK_N: gl.constexpr = k.block_type.shape[2]
        OWN: gl.constexpr = 1 + AHEAD
        q_tiles = gl.allocate_shared_memory(dtype, [OWN * GROUPS] + q.block_type.shape, q.layout)
        k_tiles = gl.allocate_shared_memory(dtype, [STAGES] + k.block_type.shape, k.layout)
        v_tiles = gl.allocate_shared_memory(dtype, [STAGES] + v.block_type.shape, v.layout)
        ones = gl.allocate_shared_memory(dtype, [8, BLOCK_N], gl.NVMMASharedLayout(128, 16, 2))
        if RESIDUE:
            ones.store(gl.full([8, BLOCK_N], 1.0, dtype, gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])))
            fence_async_shared()
        q_ready = gl.allocate_shared_memory(gl.int64, [OWN, 1], mbarrier.MBarrierLayout())
        q_empty = gl.allocate_shared_memory(gl.int64, [OWN, 1], mbarrier.MBarrierLayout())
        k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(OWN):
            mbarrier.init(q_ready.index(i), count=GROUPS)
            mbarrier.init(q_empty.index(i), count=GROUPS)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_ready.index(i), count=1)
            mbarrier.init(v_ready.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=GROUPS)
            mbarrier.init(v_empty.index(i), count=GROUPS)
        if GROUPS == 2:
            gl.warp_specialize(
                [
                    (attend, (
                        out, residue, lse, mask, lists, added, q_tiles, k_tiles, v_tiles, ones, q_ready,
                        q_empty, k_ready, k_empty, v_ready, v_empty, o_b, o_h, o_n, m_b, m_h, m_m,
                        c_b, c_h, c_m, x_b, x_h, x_m, x_n, heads, n_planes, n_blocks, together, n_items,
                        n_q, n_k, low, high, scale, DIM_V, MASKED, LEFT, RIGHT, EXACT, GROUPS, STAGES, PAIRED,
                        RESIDUE, AHEAD, 0,
                    )),
                    (attend, (
                        out, residue, lse, mask, lists, added, q_tiles, k_tiles, v_tiles, ones, q_ready,
                        q_empty, k_ready, k_empty, v_ready, v_empty, o_b, o_h, o_n, m_b, m_h, m_m,
                        c_b, c_h, c_m, x_b, x_h, x_m, x_n, heads, n_planes, n_blocks, together, n_items,
                        n_q, n_k, low, high, scale, DIM_V, MASKED, LEFT, RIGHT, EXACT, GROUPS, STAGES, PAIRED,
                        RESIDUE, AHEAD, 1,
                    )),
                    (load_tiles, (
                        q, k, v, lists, q_tiles, k_tiles, v_tiles,
                        q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
                        heads, group, n_planes, n_blocks, together, n_items, n_k, low, high, c_b, c_h, c_m,
                        BLOCK_N, MASKED, LEFT, RIGHT, GROUPS, STAGES, PAIRED, AHEAD,
                    )),
                ], [4, 1], [240, 24],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [
                    (attend, (
                        out, residue, lse, mask, lists, added, q_tiles, k_tiles, v_tiles, ones, q_ready,
                        q_empty, k_ready, k_empty, v_ready, v_empty, o_b, o_h, o_n, m_b, m_h, m_m,
                        c_b, c_h, c_m, x_b, x_h, x_m, x_n, heads, n_planes, n_blocks, together, n_items,
                        n_q, n_k, low, high, scale, DIM_V, MASKED, LEFT, RIGHT, EXACT, GROUPS, STAGES, PAIRED,
                        RESIDUE, AHEAD, 0,
                    )),
                    (attend, (
                        out, residue, lse, mask, lists, added, q_tiles, k_tiles, v_tiles, ones, q_ready,
                        q_empty, k_ready, k_empty, v_ready, v_empty, o_b, o_h, o_n, m_b, m_h, m_m,
                        c_b, c_h, c_m, x_b, x_h, x_m, x_n, heads, n_planes, n_blocks, together, n_items,
                        n_q, n_k, low, high, scale, DIM_V, MASKED, LEFT, RIGHT, EXACT, GROUPS, STAGES, PAIRED,
                        RESIDUE, AHEAD, 1,
                    )),
                    (attend, (
                        out, residue, lse, mask, lists, added, q_tiles, k_tiles, v_tiles, ones, q_ready,
                        q_empty, k_ready, k_empty, v_ready, v_empty, o_b, o_h, o_n, m_b, m_h, m_m,
                        c_b, c_h, c_m, x_b, x_h, x_m, x_n, heads, n_planes, n_blocks, together, n_items,
                        n_q, n_k, low, high, scale, DIM_V, MASKED, LEFT, RIGHT, EXACT, GROUPS, STAGES, PAIRED,
                        RESIDUE, AHEAD, 2,
                    )),
                    (load_tiles, (
                        q, k, v, lists, q_tiles, k_tiles, v_tiles,
                        q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
                        heads, group, n_planes, n_blocks, together, n_items, n_k, low, high, c_b, c_h, c_m,
                        BLOCK_N, MASKED, LEFT, RIGHT, GROUPS, STAGES, PAIRED, AHEAD,
                    )),
                ], [4, 4, 1], [160, 160, 24],
            )  # fmt: skip


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, residue: Tensor, lse: Tensor, mask: Prepared,
    scale: float, low: int, high: int,
    limits: tuple[bool, bool], together: int, programs: int, params: Mapping[str, int],
) -> None:  # fmt: skip
    """Run the forward.

    Args:
        q, k, v: (batch, heads, tokens, dim), 16 bits an element, rows aligned as the copy engine needs them.
        out, lse: where the results go.
        residue: where to leave what rounding takes from `out`, laid out as that is; empty for nowhere.
        mask: as `prepared` gives it.
        scale: of the scores.
        low: key j is seen by query i only if ``j - i >= low``, if the first of `limits` is set.
        high: and only if ``j - i <= high``, if the second is.
        together: planes that are worked on at a time.
        programs: how many the device holds at a time.
        params: BLOCK (keys a tile), GROUPS, STAGES, PERSISTENT.
    """
    block_n = params["BLOCK"]
    # Three groups have 160 registers a thread, into which a bias does not fit.
    groups = 2 if mask.kind == PER_KEY else params["GROUPS"]
    blocks, planes = -(-q.shape[2] // (ROWS * groups)), q.shape[0] * q.shape[1]
    count, grid, paired = items(blocks, planes, programs, mask.uneven(limits), params)
    values, strides = mask.arguments(ROWS * groups, block_n, k.shape[2], low, high, limits, lse)
    forward_kernel[(grid,)](
        described(q, ROWS), described(k, block_n), described(v, block_n), out, residue, lse, *values,
        *out.stride()[:3], *strides,
        q.shape[1], q.shape[1] // k.shape[1], planes, blocks, together, count, q.shape[2], k.shape[2],
        low, high, scale, DIM_V=v.shape[3], MASKED=mask.kind, LEFT=limits[0], RIGHT=limits[1],
        EXACT=q.dtype == torch.float16, GROUPS=groups, STAGES=params["STAGES"], PAIRED=paired,
        RESIDUE=residue.numel() > 0, AHEAD=params["AHEAD"], num_warps=4,
        # What is not fused by name rounds once more: the maximum must do so everywhere alike.
        maxnreg=168 if groups == 2 else 128, enable_fp_fusion=False,
    )  # fmt: skip
