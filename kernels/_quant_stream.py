"""One row of x times an int4 weight that goes from memory straight into registers, in Gluon.

Words are loaded 16 bytes a thread in the very places where the matrix units want them, a block of 128 columns
of a few rows of W to a warp, with more blocks under way; they pass through no shared memory and wait at no
barrier. That works because the order of columns in a sum is free. A thread that holds four neighbouring words
of a row, 8 columns from 8t on of each plane, gives them as the columns that an instruction expects of it, and
x is handed over in the same order.

A word's place in a row has bits (thread, word); of an operand's columns, two of 16 bits to a register, the
bits are (word, thread, half).
"""

# ruff: noqa: RUF005, Triton unpacks no tuples
from typing import Any

from ._quant_unpack import centred_element

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2

    # Its name before Triton 3.7, and since.
    _barrier: Any = getattr(gl, "thread_barrier", None) or getattr(gl, "barrier", None)
    AVAILABLE = bool(_barrier) and hasattr(gl, "DistributedLinearLayout")
    AVAILABLE = AVAILABLE and hasattr(gluon, "constexpr_function")
except ImportError:
    AVAILABLE = False


if AVAILABLE:

    @gluon.constexpr_function
    def _w_layout(rows, warps):
        """Words of W (warps, rows, 16) where the matrix units want them, four neighbours to a thread.

        Of an instruction's 16 rows a thread has two, eight apart.
        """
        return gl.DistributedLinearLayout(
            [[0, 0, 1], [0, 0, 2], *([0, 8 << i, 0] for i in range((rows // 16).bit_length()))],
            [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
            [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)],
            [],
            [warps, rows, 16],
        )

    @gluon.constexpr_function
    def _x_layout(warps):
        """A plane of x (1, warps, 16) as `_w_layout` has a row of W, the same for all rows."""
        return gl.DistributedLinearLayout(
            [[0, 0, 1], [0, 0, 2]],
            [[0, 0, 4], [0, 0, 8], [0, 0, 0], [0, 0, 0], [0, 0, 0]],
            [[0, 1 << i, 0] for i in range(warps.bit_length() - 1)],
            [],
            [1, warps, 16],
        )

    @gluon.constexpr_function
    def _copy_layout(warps):
        """A step of x (planes, warps, 16) as it is copied, 16 bytes a thread."""
        side = min(warps, 8)
        return gl.BlockedLayout([1, 1, 4], [8 // side, side, 4], [warps, 1, 1], [2, 1, 0])

    @gluon.jit
    def _halves(words):
        """The two 16-bit halves of each word, as a last dimension."""
        return gl.join(words.to(gl.int16), (words >> 16).to(gl.int16))

    @gluon.jit
    def _w_operand(words, LAYOUT: gl.constexpr):
        """Words of W (warps, rows, words) as halfwords in the order of the operand's columns."""
        WARPS: gl.constexpr = words.shape[0]
        ROWS: gl.constexpr = words.shape[1]
        WORDS: gl.constexpr = words.shape[2]
        halves = _halves(words).reshape([WARPS, ROWS, WORDS // 16, 4, 4, 2]).permute([0, 1, 2, 4, 3, 5])
        return gl.convert_layout(halves.reshape([WARPS, ROWS, 2 * WORDS]), LAYOUT)

    @gluon.jit
    def _x_operand(words, DTYPE: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
        """Words of x (1, warps, words), the same row in each of the operand's `COLUMNS`."""
        WARPS: gl.constexpr = words.shape[1]
        WORDS: gl.constexpr = words.shape[2]
        halves = _halves(words).reshape([WARPS, WORDS // 16, 4, 4, 2]).permute([0, 1, 3, 2, 4])
        row = gl.convert_layout(halves.reshape([WARPS, 2 * WORDS]), gl.SliceLayout(2, LAYOUT))
        row = row.to(DTYPE, bitcast=True)
        return gl.expand_dims(row, 2).broadcast_to([WARPS, 2 * WORDS, COLUMNS])

    @gluon.jit
    def _bits(at, mask):
        """Numbers at the pointers, in registers of 32 bits whatever their width; 0 where masked.

        Narrow ones that the compiler reads share registers, and are put together, that is waited for, before
        the loop goes on.
        """
        WIDTH: gl.constexpr = at.dtype.element_ty.primitive_bitwidth
        READ: gl.constexpr = "u8" if WIDTH == 8 else "u16" if WIDTH == 16 else "b32"
        return gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global." + READ + " $0, [$1]; }",
            "=r,l,r", [at, mask.to(gl.int32)], dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip

    @gluon.jit
    def _number(bits, dtype: gl.constexpr):
        """What `_bits` read of floating-point numbers, as fp32."""
        if dtype == gl.bfloat16:
            number = (bits << 16).to(gl.float32, bitcast=True)
        elif dtype == gl.float16:
            number = bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        else:
            number = bits.to(gl.float32, bitcast=True)
        return number

    @gluon.jit
    def _in_order(any_number):
        """Loads before this come before it: left alone, the compiler puts all of a step's at its end."""
        gl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;",
            "=r,r", [any_number], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    @gluon.jit
    def _groups(at, block, n_out, mask, GROUPS: gl.constexpr):
        """Scales or zero points of each group of a block."""
        found = ()
        for g in gl.static_range(GROUPS):
            found = found + (_bits(at + (block * GROUPS + g).to(gl.int64) * n_out, mask),)
        return found

    @gluon.jit
    def _stream_kernel(
        x_ptr, packed_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, n_out, n_blocks,
        GROUPS: gl.constexpr, ROWS: gl.constexpr, AHEAD: gl.constexpr, TOGETHER: gl.constexpr,
        STEPS: gl.constexpr, num_warps: gl.constexpr,
    ):  # fmt: skip
        """`ROWS` rows of W a program; a warp takes `AHEAD` neighbouring blocks of them in each step.

        The next step's are loaded `TOGETHER` at a time, when as many of this one's are used: two make a line
        of the cache.
        """
        WARPS: gl.constexpr = num_warps
        ELEMENTS: gl.constexpr = 4
        WORDS: gl.constexpr = 16
        A_GROUP: gl.constexpr = ELEMENTS // GROUPS
        DTYPE: gl.constexpr = x_ptr.dtype.element_ty
        W_WORDS: gl.constexpr = _w_layout(ROWS, WARPS)
        X_WORDS: gl.constexpr = _x_layout(WARPS)
        X_COPY: gl.constexpr = _copy_layout(WARPS)
        SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
        LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
        RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
        OF_ROW: gl.constexpr = gl.SliceLayout(2, SUMS)
        first = gl.program_id(0) * ROWS

        warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, W_WORDS)))[:, None, None]
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, W_WORDS)))[None, :, None]
        word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, W_WORDS)))[None, None, :]
        w_block = warp * AHEAD
        row = gl.minimum(first + row, n_out - 1).to(gl.int64)
        w_at = packed_ptr + (row * n_blocks + w_block) * WORDS + word
        s_block = gl.arange(0, WARPS, layout=gl.SliceLayout(1, OF_ROW))[:, None] * AHEAD
        s_row = gl.minimum(first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, OF_ROW)), n_out - 1)[None, :]
        s_at = (s_block * GROUPS).to(gl.int64) * n_out + s_row
        ws, ss, zs = (), (), ()
        for d in gl.static_range(AHEAD):
            ws = ws + (gl.load(w_at + d * WORDS, mask=w_block + d < n_blocks),)
            exists = s_block + d < n_blocks
            at = gl.to_tensor(d)
            ss = ss + (_groups(scale_ptr + s_at, at, n_out, exists, GROUPS),)
            if zero_ptr is not None:
                zs = zs + (_groups(zero_ptr + s_at, at, n_out, exists, GROUPS),)

        # All of x, for all warps, once.
        PLANES: gl.constexpr = AHEAD * ELEMENTS
        x_all = gl.allocate_shared_memory(
            gl.int32, [STEPS, PLANES, WARPS, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        )
        plane = gl.arange(0, PLANES, layout=gl.SliceLayout(1, gl.SliceLayout(2, X_COPY)))[:, None, None]
        x_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, X_COPY)))[None, :, None]
        x_word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, X_COPY)))[None, None, :]
        x_block = x_warp * AHEAD + plane // ELEMENTS
        x_at = x_ptr.to(gl.pointer_type(gl.int32)) + x_block * 64 + (plane % ELEMENTS) * WORDS + x_word
        xs = ()
        for step in gl.static_range(STEPS):
            xs = xs + (
                gl.load(
                    x_at + step * (WARPS * AHEAD * 64),
                    mask=step * (WARPS * AHEAD) + x_block < n_blocks,
                    other=0,
                ),
            )
        for step in gl.static_range(STEPS):
            x_all.index(step).store(xs[step])
        # Or the compiler puts one into the loop.
        _barrier()

        total = gl.zeros([WARPS, ROWS, 8], gl.float32, SUMS)
        for step in range(STEPS):
            x_step = x_all.index(step)
            w_next, s_next, z_next = (), (), ()
            for d in gl.static_range(AHEAD):
                w = _w_operand(ws[d], LEFT)
                part = gl.zeros([WARPS, ROWS, 8], gl.float32, SUMS)
                x_sum = gl.zeros([WARPS, ROWS, 8], gl.float32, SUMS)
                for i in gl.static_range(ELEMENTS):
                    words = x_step.slice(d * ELEMENTS + i, 1).load(X_WORDS)
                    x = _x_operand(words, DTYPE, 8, RIGHT)
                    q = centred_element(w, i, 4, DTYPE)
                    part = mma_v2(q, x, part)
                    if zero_ptr is not None:
                        x_sum = mma_v2(gl.full(q.shape, 1.0, DTYPE, LEFT), x, x_sum)
                    if i % A_GROUP == A_GROUP - 1:
                        if zero_ptr is not None:
                            z = zs[d][i // A_GROUP].to(gl.float32) - 8.0
                            part -= gl.expand_dims(z, 2) * x_sum
                        s = _number(ss[d][i // A_GROUP], scale_ptr.dtype.element_ty)
                        part *= gl.expand_dims(s, 2)
                        total += part
                        part = gl.zeros([WARPS, ROWS, 8], gl.float32, SUMS)
                        x_sum = gl.zeros([WARPS, ROWS, 8], gl.float32, SUMS)
                # After the last use, so that they go to the same registers.
                after = (step + 1) * (WARPS * AHEAD) + d
                w_next = w_next + (gl.load(w_at + after * WORDS, mask=w_block + after < n_blocks),)
                exists = s_block + after < n_blocks
                s_next = s_next + (_groups(scale_ptr + s_at, after, n_out, exists, GROUPS),)
                if zero_ptr is not None:
                    z_next = z_next + (_groups(zero_ptr + s_at, after, n_out, exists, GROUPS),)
                if d % TOGETHER == TOGETHER - 1 and d < AHEAD - 1:
                    _in_order(after)
            ws, ss, zs = w_next, s_next, z_next

        y = gl.sum(total, 0)
        ENDS: gl.constexpr = gl.SliceLayout(0, SUMS)
        y_row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ENDS))[:, None]
        exists = y_row < n_out
        if bias_ptr is not None:
            y += gl.load(bias_ptr + y_row, mask=exists, other=0.0).to(gl.float32)
        # Eight times the same row.
        column = gl.arange(0, 8, layout=gl.SliceLayout(0, ENDS))[None, :]
        gl.store(y_ptr + (y_row + column), y.to(y_ptr.dtype.element_ty), mask=exists & (column == 0))
