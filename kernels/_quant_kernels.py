"""Kernels of the weight-only products; `_quant_format` says how weights are packed.

Packed words are read as halfwords. SPAN of them hold a block of 128 columns, and the i-th elements of a
block's halfwords are its columns from i SPAN on. Scales and zero points are (groups, out), so that those of
neighbouring rows are fetched together.
"""

from ._quant_unpack import centred_element, fp32_element
from ._triton import tl, triton


@triton.jit
def _gemv_kernel(
    x_ptr, packed_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, n_rows, n_out, n_blocks, x_stride,
    BITS: tl.constexpr, GROUPS: tl.constexpr, FULL: tl.constexpr, X_ROWS: tl.constexpr, ROWS: tl.constexpr,
    QUADS: tl.constexpr,
):  # fmt: skip
    # Tiles are (rows of x, rows of W, quads, 4): 4 halfwords, and 4 columns of x, are a thread's load. Sums
    # over a thread's halfwords, its warp and its program wait for the end of the row.
    ELEMENTS: tl.constexpr = 16 // BITS
    SPAN: tl.constexpr = 128 // ELEMENTS
    A_GROUP: tl.constexpr = ELEMENTS // GROUPS
    blocks = tl.cdiv(n_out, ROWS)
    x_row = (tl.program_id(0) // blocks) * X_ROWS + tl.arange(0, X_ROWS)
    w_row = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    x_safe = tl.minimum(x_row, n_rows - 1).to(tl.int64)
    w_safe = tl.minimum(w_row, n_out - 1).to(tl.int64)
    n_quads = n_blocks * (SPAN // 4)
    quad = tl.arange(0, QUADS)[None, None, :, None]
    half = quad * 4 + tl.arange(0, 4)[None, None, None, :]
    column = (half // SPAN) * 128 + half % SPAN
    x_at = x_ptr + x_safe[:, None, None, None] * x_stride
    w_at = packed_ptr.to(tl.pointer_type(tl.int16)) + w_safe[None, :, None, None] * (n_quads * 4) + half
    total = tl.zeros([X_ROWS, ROWS, QUADS, 4], tl.float32)
    ahead = tl.load(w_at, mask=quad < n_quads, other=0, eviction_policy="evict_first")
    for start in range(0, n_quads, QUADS):
        w = ahead
        here = start + quad
        ahead = tl.load(
            w_at + (start + QUADS) * 4, mask=here + QUADS < n_quads, other=0, eviction_policy="evict_first"
        )
        for i in tl.static_range(ELEMENTS):
            if i % A_GROUP == 0:
                part = tl.zeros([X_ROWS, ROWS, QUADS, 4], tl.float32)
                z = 8.0 if BITS == 4 else 128.0
                if BITS == 4:
                    group = here // (SPAN // 4) * GROUPS + i // A_GROUP
                    where = group.to(tl.int64) * n_out + w_safe[None, :, None, None]
                    s = tl.load(scale_ptr + where, mask=here < n_quads, other=0.0).to(tl.float32)
                    if zero_ptr is not None:
                        z = tl.load(zero_ptr + where, mask=here < n_quads, other=0).to(tl.float32)
            k = start * (4 * ELEMENTS) + column + i * SPAN
            if FULL:
                x = tl.load(x_at + k).to(tl.float32)
            else:
                x = tl.load(x_at + k, mask=here < n_quads, other=0.0).to(tl.float32)
            part += (fp32_element(w, i, BITS) - z) * x
            if i % A_GROUP == A_GROUP - 1:
                if BITS == 4:
                    total += part * s
                else:
                    total += part
    y = tl.sum(tl.sum(total, 3), 2)
    if BITS == 8:
        y *= tl.load(scale_ptr + w_safe).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + w_safe).to(tl.float32)[None, :]
    mask = (x_row < n_rows)[:, None] & (w_row < n_out)[None, :]
    tl.store(y_ptr + x_row.to(tl.int64)[:, None] * n_out + w_row[None, :], y, mask=mask)


@triton.jit
def _of_group(at, group, n_out, exists):
    """As fp32, scales or zero points a number of groups after those at the pointers."""
    return tl.load(at + tl.cast(group, tl.int64) * n_out, mask=exists, other=0).to(tl.float32)


@triton.jit
def _of_block(at, block, n_out, exists, GROUPS: tl.constexpr):
    """Scales or zero points of each group in a block, as many blocks after those at the pointers."""
    at += tl.cast(block * GROUPS, tl.int64) * n_out
    found = (tl.load(at, mask=exists, other=0),)
    for _ in tl.static_range(GROUPS - 1):
        at += n_out
        found = found + (tl.load(at, mask=exists, other=0),)  # noqa: RUF005, Triton unpacks no tuples
    return found


@triton.jit
def _split_kernel(
    x_ptr, packed_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, n_rows, n_out, n_blocks, x_stride,
    BITS: tl.constexpr, GROUPS: tl.constexpr, X_ROWS: tl.constexpr, ROWS: tl.constexpr,
    WARPS: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # The first dimension of tiles is the warp: warps take turns in the blocks of the same rows of W, and what
    # they sum is added at the end. The product is made transposed, W x^T: matrix units take W, which is
    # unpacked there, from registers, and an x as narrow as 8.
    ELEMENTS: tl.constexpr = 16 // BITS
    SPAN: tl.constexpr = 128 // ELEMENTS
    A_GROUP: tl.constexpr = ELEMENTS // GROUPS
    x_blocks = tl.cdiv(n_rows, X_ROWS)
    x_row = (tl.program_id(0) % x_blocks) * X_ROWS + tl.arange(0, X_ROWS)
    w_row = (tl.program_id(0) // x_blocks) * ROWS + tl.arange(0, ROWS)
    w_safe = tl.minimum(w_row, n_out - 1).to(tl.int64)[None, :, None]
    half = tl.arange(0, SPAN)
    warp = tl.arange(0, WARPS)[:, None]
    own = warp[:, :, None]
    w_at = packed_ptr.to(tl.pointer_type(tl.int16)) + (w_safe * n_blocks + own) * SPAN + half
    x_at = x_ptr + x_row.to(tl.int64) * x_stride + (own * 128 + half[None, :, None])
    total = tl.zeros([WARPS, ROWS, X_ROWS], tl.float32)
    group_at = (warp * GROUPS).to(tl.int64) * n_out + w_row[None, :]
    w_exists = (w_row < n_out)[None, :]
    if BITS == 4:
        s_ahead = _of_block(scale_ptr + group_at, 0, n_out, w_exists & (warp < n_blocks), GROUPS)
        if zero_ptr is not None:
            z_ahead = _of_block(zero_ptr + group_at, 0, n_out, w_exists & (warp < n_blocks), GROUPS)
    for start in tl.range(0, n_blocks, WARPS * BLOCKS, num_stages=STAGES):
        for b in tl.static_range(BLOCKS):
            block = start + b * WARPS
            w = tl.load(w_at + block * SPAN, mask=block + own < n_blocks, other=0)
            for i in tl.static_range(ELEMENTS):
                x_exists = (x_row < n_rows)[None, None, :] & (block + own < n_blocks)
                x = tl.load(x_at + (block * 128 + i * SPAN), mask=x_exists, other=0.0)
                q = centred_element(w, i, BITS, x.dtype)
                if BITS == 8:
                    total = tl.dot(q, x, total)
                else:
                    if i % A_GROUP == 0:
                        part = tl.zeros([WARPS, ROWS, X_ROWS], tl.float32)
                        x_sum = tl.zeros([WARPS, ROWS, X_ROWS], tl.float32)
                    part = tl.dot(q, x, part)
                    if zero_ptr is not None:
                        x_sum = tl.dot(tl.full(q.shape, 1.0, x.dtype), x, x_sum)
                    if i % A_GROUP == A_GROUP - 1:
                        if zero_ptr is not None:
                            z = z_ahead[i // A_GROUP].to(tl.float32)
                            part -= (z - 8.0)[:, :, None] * x_sum
                        total += part * s_ahead[i // A_GROUP].to(tl.float32)[:, :, None]
            if BITS == 4:
                # After their last use, so that they go to the same registers and are waited for a block
                # later: few rows' scales are too narrow for asynchronous copies.
                after = block + WARPS
                exists = w_exists & (after + warp < n_blocks)
                s_ahead = _of_block(scale_ptr + group_at, after, n_out, exists, GROUPS)
                if zero_ptr is not None:
                    z_ahead = _of_block(zero_ptr + group_at, after, n_out, exists, GROUPS)
    _finish(tl.sum(total, 0), x_row, w_row, scale_ptr, bias_ptr, y_ptr, n_rows, n_out, BITS)


@triton.jit
def _tile_kernel(
    x_ptr, packed_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, n_rows, n_out, n_blocks, x_stride,
    BITS: tl.constexpr, GROUPS: tl.constexpr, X_ROWS: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # As above, but the warps of a program share out its rows of W: x, which weighs more than W here, is then
    # fetched once for all of them.
    ELEMENTS: tl.constexpr = 16 // BITS
    SPAN: tl.constexpr = 128 // ELEMENTS
    A_GROUP: tl.constexpr = ELEMENTS // GROUPS
    x_blocks = tl.cdiv(n_rows, X_ROWS)
    x_row = (tl.program_id(0) % x_blocks) * X_ROWS + tl.arange(0, X_ROWS)
    w_row = (tl.program_id(0) // x_blocks) * ROWS + tl.arange(0, ROWS)
    w_safe = tl.minimum(w_row, n_out - 1).to(tl.int64)[:, None]
    half = tl.arange(0, SPAN)
    w_at = packed_ptr.to(tl.pointer_type(tl.int16)) + w_safe * (n_blocks * SPAN) + half[None, :]
    x_at = x_ptr + x_row.to(tl.int64)[None, :] * x_stride + half[:, None]
    total = tl.zeros([ROWS, X_ROWS], tl.float32)
    w_exists = w_row < n_out
    if BITS == 4 and GROUPS == 1:
        s_ahead = _of_group(scale_ptr + w_row, 0, n_out, w_exists)
    for start in tl.range(0, n_blocks, BLOCKS, num_stages=STAGES):
        for b in tl.static_range(BLOCKS):
            block = start + b
            exists = block < n_blocks
            w = tl.load(w_at + block * SPAN, mask=exists, other=0)
            for i in tl.static_range(ELEMENTS):
                x_exists = (x_row < n_rows)[None, :] & exists
                x = tl.load(x_at + (block * 128 + i * SPAN), mask=x_exists, other=0.0)
                q = centred_element(w, i, BITS, x.dtype)
                if BITS == 8:
                    total = tl.dot(q, x, total)
                else:
                    if i % A_GROUP == 0:
                        part = tl.zeros([ROWS, X_ROWS], tl.float32)
                        x_sum = tl.zeros([ROWS, X_ROWS], tl.float32)
                        group = block * GROUPS + i // A_GROUP
                        if GROUPS > 1:
                            s = _of_group(scale_ptr + w_row, group, n_out, w_exists & exists)
                        else:
                            s = s_ahead
                        if zero_ptr is not None:
                            z = _of_group(zero_ptr + w_row, group, n_out, w_exists & exists)
                    part = tl.dot(q, x, part)
                    if zero_ptr is not None:
                        x_sum = tl.dot(tl.full(q.shape, 1.0, x.dtype), x, x_sum)
                    if i % A_GROUP == A_GROUP - 1:
                        if zero_ptr is not None:
                            part -= (z - 8.0)[:, None] * x_sum
                        total += part * s[:, None]
            if BITS == 4 and GROUPS == 1:
                s_ahead = _of_group(scale_ptr + w_row, block + 1, n_out, w_exists & (block + 1 < n_blocks))
    _finish(total, x_row, w_row, scale_ptr, bias_ptr, y_ptr, n_rows, n_out, BITS)


@triton.jit
def _finish(total, x_row, w_row, scale_ptr, bias_ptr, y_ptr, n_rows, n_out, BITS: tl.constexpr):
    """What is left for sums (rows of W, rows of x): int8's scale, the bias, and the store, transposed."""
    exists = w_row < n_out
    if BITS == 8:
        total *= tl.load(scale_ptr + w_row, mask=exists, other=0.0).to(tl.float32)[:, None]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + w_row, mask=exists, other=0.0).to(tl.float32)[:, None]
    y_at = y_ptr + x_row.to(tl.int64)[None, :] * n_out + w_row[:, None]
    tl.store(y_at, total, mask=exists[:, None] & (x_row < n_rows)[None, :])


@triton.jit
def _dequantize_kernel(
    packed_ptr, scale_ptr, zero_ptr, out_ptr, n_out, n_in, n_blocks, tiles,
    BITS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, HALFS: tl.constexpr,
):  # fmt: skip
    ELEMENTS: tl.constexpr = 16 // BITS
    SPAN: tl.constexpr = 128 // ELEMENTS
    row = (tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS)
    half = (tl.program_id(0) % tiles) * HALFS + tl.arange(0, HALFS)[None, :]
    w_safe = tl.minimum(row, n_out - 1).to(tl.int64)[:, None]
    in_row = half < n_blocks * SPAN
    w_at = packed_ptr.to(tl.pointer_type(tl.int16)) + w_safe * (n_blocks * SPAN) + half
    w = tl.load(w_at, mask=in_row, other=0)
    if BITS == 8:
        s = tl.load(scale_ptr + w_safe).to(tl.float32)
    for i in tl.static_range(ELEMENTS):
        k = (half // SPAN) * 128 + half % SPAN + i * SPAN
        z = 8.0 if BITS == 4 else 128.0
        if BITS == 4:
            group = half // SPAN * GROUPS + i // (ELEMENTS // GROUPS)
            where = group.to(tl.int64) * n_out + w_safe
            s = tl.load(scale_ptr + where, mask=in_row, other=0.0).to(tl.float32)
            if zero_ptr is not None:
                z = tl.load(zero_ptr + where, mask=in_row, other=0).to(tl.float32)
        value = (fp32_element(w, i, BITS) - z) * s
        tl.store(out_ptr + w_safe * n_in + k, value, mask=(row < n_out)[:, None] & (k < n_in))
