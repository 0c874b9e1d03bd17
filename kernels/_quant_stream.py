"""One row of x times a weight that goes from memory straight into registers, in Gluon.

Words are loaded 16 bytes a thread in the very places where the matrix units want them, a block of 128 columns
of a few rows of W to a warp, with more blocks under way; they pass through no shared memory and wait at no
barrier. That works because the order of columns in a sum is free. A thread that holds four neighbouring words
of a row, 8 columns from 8t on of each plane, gives them as the columns that an instruction expects of it, and
x is handed over in the same order.

A word's place in a row has bits (chunk, thread, word); of an operand's columns, two of 16 bits to a register,
the bits are (chunk, word, thread, half).
"""

# ruff: noqa: RUF005, Triton unpacks no tuples
from typing import Any

from ._quant_unpack import centred_element

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

    # Its name before Triton 3.7, and since.
    _barrier: Any = getattr(gl, "thread_barrier", None) or getattr(gl, "barrier", None)
    AVAILABLE = bool(_barrier) and hasattr(gl, "DistributedLinearLayout")
    AVAILABLE = AVAILABLE and hasattr(gluon, "constexpr_function")
except ImportError:
    AVAILABLE = False


if AVAILABLE:

    @gluon.constexpr_function
    def _w_layout(rows, warps, words):
        """Words of W (warps, rows, words) where the matrix units want them, four neighbours to a thread.

        Of an instruction's 16 rows a thread has two, eight apart; `words` of a block's row are 16 or 32.
        """
        chunk = [16] if words == 32 else []
        return gl.DistributedLinearLayout(
            [
                *([0, 0, n] for n in (1, 2, *chunk)),
                *([0, 8 << i, 0] for i in range((rows // 16).bit_length())),
            ],
            [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
            [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)],
            [],
            [warps, rows, words],
        )

    @gluon.constexpr_function
    def _x_layout(warps, words):
        """A plane of x (1, warps, words) as `_w_layout` has a row of W, the same for all rows."""
        chunk = [16] if words == 32 else []
        return gl.DistributedLinearLayout(
            [[0, 0, n] for n in (1, 2, *chunk)],
            [[0, 0, 4], [0, 0, 8], [0, 0, 0], [0, 0, 0], [0, 0, 0]],
            [[0, 1 << i, 0] for i in range(warps.bit_length() - 1)],
            [],
            [1, warps, words],
        )

    @gluon.constexpr_function
    def _copy_layout(warps, words):
        """A step of x (planes, warps, words) as it is copied, 16 bytes a thread."""
        across = words // 4
        side = min(warps, 32 // across)
        return gl.BlockedLayout([1, 1, 4], [32 // across // side, side, across], [warps, 1, 1], [2, 1, 0])

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
    def _words(at, mask, PAST_L1: gl.constexpr):
        """Words of W, four neighbours a thread; undefined where masked.

        Past the first cache, which no word is read from twice, and with 256 bytes asked of memory at a time.
        """
        if PAST_L1:
            words = gl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.b32 p, $8, 0;"
                " @p ld.global.L1::no_allocate.L2::256B.v4.b32 {$0, $1, $2, $3}, [$4]; }",
                "=r,=r,=r,=r,l,l,l,l,r,r,r,r", [at, mask.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=4,
            )  # fmt: skip
        else:
            words = gl.load(at, mask=mask)
        return words

    @gluon.jit
    def _fetch(at, mask, TOGETHER: gl.constexpr):
        """Ask for what lies at the pointers as far as the L2 cache: a hint, no read.

        `TOGETHER`, 1 or 4, neighbours of a thread lie within the 16 bytes that are asked for at once.
        """
        if TOGETHER == 4:
            gl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.b32 p, $8, 0; @p prefetch.global.L2 [$4]; mov.b32 $0, 0; }",
                "=r,=r,=r,=r,l,l,l,l,r,r,r,r", [at, mask.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=4,
            )  # fmt: skip
        else:
            gl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
                "=r,l,r", [at, mask.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip

    @gluon.jit
    def _fetch_bulk(at, size, mask):
        """Ask for so many bytes from each pointer on, multiples of 16, as far as the L2 cache."""
        gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2;"
            " mov.b32 $0, 0; }",
            "=r,l,r,r", [at, size, mask.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    @gluon.jit
    def _ask(
        packed_ptr, first, n_out, row_words, step,
        ROWS: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr, PIECE: gl.constexpr,
    ):  # fmt: skip
        """Ask for a step's words, `STEP` of each row, as far as the L2 cache: `PIECE` bytes a thread."""
        A_ROW: gl.constexpr = STEP * 4 // PIECE
        i = gl.arange(0, ROWS * A_ROW, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        row, word = first + i // A_ROW, step * STEP + i % A_ROW * (PIECE // 4)
        at = packed_ptr + (row.to(gl.int64) * row_words + word)
        _fetch(at, (row < n_out) & (word < row_words), 1)

    @gluon.jit
    def _ask_in_bulk(
        packed_ptr, first, n_out, row_words, step, warp, end,
        ROWS: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr,
    ):  # fmt: skip
        """The same by a thread a row, of the warp `warp`; and the steps up to `end` by the warps after it."""
        i = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        row, step = first + i % 32, step + i // 32 - warp
        word = step * STEP
        wanted = (i % 32 < ROWS) & (row < n_out) & (i // 32 >= warp) & (step < end) & (word < row_words)
        size = gl.minimum(row_words - word, STEP) * 4
        _fetch_bulk(packed_ptr + (row.to(gl.int64) * row_words + word), size, wanted)

    @gluon.jit
    def _ask_for_scales(at, first, n_out, n_groups, WARPS: gl.constexpr, GROUPS: gl.constexpr):
        """Ask for the scales or zero points of these rows, all `n_groups`, `GROUPS` at the most."""
        i = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        for begin in gl.static_range(0, GROUPS, 32 * WARPS):
            _fetch(at + ((begin + i).to(gl.int64) * n_out + first), begin + i < n_groups, 1)

    @gluon.jit
    def _ask_ahead(
        packed_ptr, scale_ptr, zero_ptr, first, n_out, n_blocks,
        BITS: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr,
        MOST: gl.constexpr, BEGIN: gl.constexpr, END: gl.constexpr, PIECE: gl.constexpr,
    ):  # fmt: skip
        """Ask for the words of the steps from `BEGIN` up to `END`, and for all scales and zero points."""
        if BITS == 4:
            _ask_for_scales(scale_ptr, first, n_out, n_blocks * GROUPS, WARPS, MOST)
            if zero_ptr is not None:
                _ask_for_scales(zero_ptr, first, n_out, n_blocks * GROUPS, WARPS, MOST)
        row_words = n_blocks * (BITS * 4)
        if PIECE:
            for step in gl.static_range(BEGIN, END):
                _ask(packed_ptr, first, n_out, row_words, step, ROWS, STEP, WARPS, PIECE)
        else:
            for step in gl.static_range(BEGIN, END, WARPS):
                _ask_in_bulk(packed_ptr, first, n_out, row_words, step, 0, END, ROWS, STEP, WARPS)

    @gluon.jit
    def _let_next_begin():
        """The next kernel of the stream, if launched so, may take places that are free."""
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;",
            "=r",
            [],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )

    @gluon.jit
    def _await_previous():
        """What the kernels before this one wrote is there."""
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )

    @gluon.jit
    def _copy_step(
        ring, slot, w_at, w_block, begin, n_blocks, AHEAD: gl.constexpr, WORDS: gl.constexpr
    ):  # fmt: skip
        """Copy blocks from `begin` on, `AHEAD` a warp, to as many places of shared memory from `slot` on."""
        for d in gl.static_range(AHEAD):
            async_copy.async_copy_global_to_shared(
                ring.index(slot + d), w_at + (begin + d) * WORDS, mask=w_block + (begin + d) < n_blocks
            )
        async_copy.commit_group()

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
        BITS: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr, AHEAD: gl.constexpr,
        TOGETHER: gl.constexpr, STEPS: gl.constexpr, num_warps: gl.constexpr,
        PAST_L1: gl.constexpr = 0, OVERLAP: gl.constexpr = 0, FETCH: gl.constexpr = 0,
        PIECE: gl.constexpr = 0, STAGES: gl.constexpr = 0,
    ):  # fmt: skip
        """`ROWS` rows of W a program; a warp takes `AHEAD` neighbouring blocks of them in each step.

        The next step's are loaded `TOGETHER` at a time, when as many of this one's are used: two of int4 make
        a line of the cache. With `OVERLAP` the kernel is launched as a programmatic dependent: it begins
        while the one before it ends, asks for its first words meanwhile, and reads nothing until then; with 1
        the next one may begin at once, with 2 when all programs of this one are in their last step. `FETCH`
        steps beyond the first one are asked for as far as the L2 cache, `PIECE` bytes a thread and
        instruction or, where it is 0, a row's at once: memory works on more than registers can wait for. Or
        `STAGES` steps are under way to shared memory, from which a thread reads what it copied.
        """
        WARPS: gl.constexpr = num_warps
        ELEMENTS: gl.constexpr = 16 // BITS
        WORDS: gl.constexpr = 64 // ELEMENTS
        A_GROUP: gl.constexpr = ELEMENTS // GROUPS
        STEP: gl.constexpr = WARPS * AHEAD * WORDS
        DTYPE: gl.constexpr = x_ptr.dtype.element_ty
        W_WORDS: gl.constexpr = _w_layout(ROWS, WARPS, WORDS)
        X_WORDS: gl.constexpr = _x_layout(WARPS, WORDS)
        X_COPY: gl.constexpr = _copy_layout(WARPS, WORDS)
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
        if OVERLAP == 1:
            _let_next_begin()
        if OVERLAP:
            if FETCH:
                _ask_ahead(
                    packed_ptr, scale_ptr, zero_ptr, first, n_out, n_blocks,
                    BITS, GROUPS, ROWS, STEP, WARPS, STEPS * WARPS * AHEAD * GROUPS, 0, FETCH + 1, PIECE,
                )  # fmt: skip
            else:
                for d in gl.static_range(AHEAD):
                    _fetch(w_at + d * WORDS, w_block + d < n_blocks, 4)
                    if BITS == 4:
                        _fetch(scale_ptr + (s_at + d * GROUPS * n_out), s_block + d < n_blocks, 1)
            _await_previous()
        ws, ss, zs = (), (), ()
        if STAGES:
            ring = gl.allocate_shared_memory(
                gl.int32, [STAGES * AHEAD, WARPS, ROWS, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
            )
            for n in gl.static_range(STAGES):
                _copy_step(ring, n * AHEAD, w_at, w_block, n * (WARPS * AHEAD), n_blocks, AHEAD, WORDS)
        for d in gl.static_range(AHEAD):
            if STAGES == 0:
                ws = ws + (_words(w_at + d * WORDS, w_block + d < n_blocks, PAST_L1),)
            if BITS == 4:
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
        if FETCH > 0 and not OVERLAP:
            _ask_ahead(
                packed_ptr, scale_ptr, zero_ptr, first, n_out, n_blocks,
                BITS, GROUPS, ROWS, STEP, WARPS, STEPS * WARPS * AHEAD * GROUPS, 1, FETCH + 1, PIECE,
            )  # fmt: skip
        for step in gl.static_range(STEPS):
            x_all.index(step).store(xs[step])
        # Or the compiler puts one into the loop.
        _barrier()

        total = gl.zeros([WARPS, ROWS, 8], gl.float32, SUMS)
        for step in range(STEPS):
            x_step = x_all.index(step)
            if OVERLAP == 2:  # noqa: SIM102, known to the compiler
                if step == STEPS - 1:
                    _let_next_begin()
            if FETCH > 0 and FETCH < STEPS - 1:
                far = step + (FETCH + 1)
                words = n_blocks * WORDS
                if PIECE:
                    _ask(packed_ptr, first, n_out, words, far, ROWS, STEP, WARPS, PIECE)
                else:
                    warp_of = step % WARPS
                    _ask_in_bulk(packed_ptr, first, n_out, words, far, warp_of, far + 1, ROWS, STEP, WARPS)
            w_next, s_next, z_next = (), (), ()
            if STAGES:
                async_copy.wait_group(STAGES - 1)
                here = ()
                slot = step % STAGES * AHEAD
                for d in gl.static_range(AHEAD):
                    here = here + (ring.index(slot + d).load(W_WORDS),)
                far = (step + STAGES) * (WARPS * AHEAD)
                _copy_step(ring, slot, w_at, w_block, far, n_blocks, AHEAD, WORDS)
            else:
                here = ws
            for d in gl.static_range(AHEAD):
                w = _w_operand(here[d], LEFT)
                part = gl.zeros([WARPS, ROWS, 8], gl.float32, SUMS)
                x_sum = gl.zeros([WARPS, ROWS, 8], gl.float32, SUMS)
                for i in gl.static_range(ELEMENTS):
                    words = x_step.slice(d * ELEMENTS + i, 1).load(X_WORDS)
                    x = _x_operand(words, DTYPE, 8, RIGHT)
                    q = centred_element(w, i, BITS, DTYPE)
                    part = mma_v2(q, x, part)
                    if zero_ptr is not None:
                        x_sum = mma_v2(gl.full(q.shape, 1.0, DTYPE, LEFT), x, x_sum)
                    if i % A_GROUP == A_GROUP - 1:
                        if BITS == 4:
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
                if STAGES == 0:
                    w_next = w_next + (_words(w_at + after * WORDS, w_block + after < n_blocks, PAST_L1),)
                if BITS == 4:
                    exists = s_block + after < n_blocks
                    s_next = s_next + (_groups(scale_ptr + s_at, after, n_out, exists, GROUPS),)
                    if zero_ptr is not None:
                        z_next = z_next + (_groups(zero_ptr + s_at, after, n_out, exists, GROUPS),)
                if STAGES == 0 and d % TOGETHER == TOGETHER - 1 and d < AHEAD - 1:
                    _in_order(after)
            if STAGES == 0:
                ws = w_next
            ss, zs = s_next, z_next

        y = gl.sum(total, 0)
        ENDS: gl.constexpr = gl.SliceLayout(0, SUMS)
        y_row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ENDS))[:, None]
        exists = y_row < n_out
        if BITS == 8:
            y *= gl.load(scale_ptr + y_row, mask=exists, other=0.0).to(gl.float32)
        if bias_ptr is not None:
            y += gl.load(bias_ptr + y_row, mask=exists, other=0.0).to(gl.float32)
        # Eight times the same row.
        column = gl.arange(0, 8, layout=gl.SliceLayout(0, ENDS))[None, :]
        gl.store(y_ptr + (y_row + column), y.to(y_ptr.dtype.element_ty), mask=exists & (column == 0))
