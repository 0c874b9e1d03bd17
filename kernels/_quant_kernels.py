"""Kernels of the weight-only products; `_quant_format` says how the weights are packed.

A word is rotated left by 7 bits, so that each of its bytes comes to bits 15 to 22, the top of an fp32
mantissa, by at most one shift. One `(word & mask) | magic` then makes an fp32 number out of an unsigned
element u: 256 + u, or 16 + u for the upper half of a byte. No conversion instruction (which runs at an eighth
of the rate) takes part. What was added is taken off again from the sum, once for all rows of W that a thread
holds, or, for fp32 x, from each element, which is exact.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._device import sm_count
from ._launch import LaunchTable, cdiv
from ._quant_format import BLOCK, blocks_of
from ._triton import INTERPRETED, tl, triton

#: NVIDIA's assembly, which the interpreter and AMD's compiler do not take.
_HAS_PTX = tl.constexpr(not INTERPRETED and torch.version.hip is None)
#: Rows of x that a program of the plain path takes at most.
GEMV_X_ROWS = 4

#: Size: rows of W. A warp works on 512 bytes of each of ROWS rows while as much again is on its way: for
#: 40 KB of them a multiprocessor, few rows take several warps each. With 8 rows a thread has 168 registers,
#: so that 12 warps fit.
GEMV = LaunchTable(
    "quant_gemv",
    {
        "default": [
            (1024, {"ROWS": 2, "num_warps": 4}),
            (4096, {"ROWS": 4, "num_warps": 2}),
            (12288, {"ROWS": 8, "num_warps": 1}),
            (None, {"ROWS": 4, "num_warps": 1}),
        ],
        "interpreter": [(None, {"ROWS": 16, "num_warps": 1})],
    },
)
#: Size: rows of x.
TILE = LaunchTable(
    "quant_tile",
    {
        # 100 KiB of shared memory at most, which is what the smallest of these GPUs have.
        "default": [
            (16, {"X_ROWS": 16, "ROWS": 32, "BLOCKS": 4, "STAGES": 4, "num_warps": 2}),
            (32, {"X_ROWS": 32, "ROWS": 32, "BLOCKS": 2, "STAGES": 4, "num_warps": 2}),
            (None, {"X_ROWS": 64, "ROWS": 64, "BLOCKS": 2, "STAGES": 2, "num_warps": 4}),
        ],
        "sm_90": [
            (16, {"X_ROWS": 16, "ROWS": 32, "BLOCKS": 4, "STAGES": 4, "num_warps": 2}),
            (32, {"X_ROWS": 32, "ROWS": 32, "BLOCKS": 2, "STAGES": 4, "num_warps": 2}),
            (None, {"X_ROWS": 64, "ROWS": 64, "BLOCKS": 2, "STAGES": 3, "num_warps": 4}),
        ],
        "interpreter": [
            (16, {"X_ROWS": 16, "ROWS": 32, "BLOCKS": 2, "STAGES": 1, "num_warps": 1}),
            (None, {"X_ROWS": 64, "ROWS": 32, "BLOCKS": 2, "STAGES": 1, "num_warps": 1}),
        ],
    },
)
#: Size: words of W.
DEQUANTIZE = LaunchTable(
    "quant_dequantize",
    {
        "default": [(None, {"ROWS": 16, "WORDS": 64, "num_warps": 4})],
        "interpreter": [(None, {"ROWS": 32, "WORDS": 128, "num_warps": 1})],
    },
)


@triton.jit
def _element(w, INDEX: tl.constexpr, BITS: tl.constexpr):
    """Element INDEX of each word as fp32, greater by 256, or for an odd int4 by 16."""
    if INDEX * BITS // 8 == 0:
        v = w << 8
    elif INDEX * BITS // 8 == 1:
        v = w
    elif INDEX * BITS // 8 == 2:
        v = w >> 8
    else:
        v = (w << 16) | ((w >> 16) & 0xFFFF)
    # Left to itself, NVIDIA's compiler takes two instructions where mask and magic are both constants.
    if BITS == 8:
        if _HAS_PTX:
            bits = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x7F8000, 0x43800000, 0xEA;", "=r,r", [v], tl.int32, is_pure=True, pack=1
            )
        else:
            bits = (v & 0x7F8000) | 0x43800000
    elif INDEX % 2 == 0:
        if _HAS_PTX:
            bits = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x78000, 0x43800000, 0xEA;", "=r,r", [v], tl.int32, is_pure=True, pack=1
            )
        else:
            bits = (v & 0x78000) | 0x43800000
    else:
        if _HAS_PTX:
            bits = tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0x780000, 0x41800000, 0xEA;", "=r,r", [v], tl.int32, is_pure=True, pack=1
            )
        else:
            bits = (v & 0x780000) | 0x41800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _gemv_kernel(
    x_ptr, packed_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, n_rows, n_out, n_blocks, x_stride,
    BITS: tl.constexpr, GROUPS: tl.constexpr, EXACT: tl.constexpr, FULL: tl.constexpr, X_ROWS: tl.constexpr,
    ROWS: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    # Tiles are (rows of x, rows of W, quads, 4): 4 words are a thread's 16-byte load, and every tensor has
    # this shape from its load on, so that no layout is converted. Sums over a thread's words, its warp and
    # its program wait for the end of the row.
    ELEMENTS: tl.constexpr = 32 // BITS
    SPAN: tl.constexpr = 128 // ELEMENTS
    A_GROUP: tl.constexpr = ELEMENTS // GROUPS
    blocks = tl.cdiv(n_out, ROWS)
    x_row = (tl.program_id(0) // blocks) * X_ROWS + tl.arange(0, X_ROWS)
    w_row = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    x_safe = tl.minimum(x_row, n_rows - 1).to(tl.int64)
    w_safe = tl.minimum(w_row, n_out - 1).to(tl.int64)
    n_quads = n_blocks * (SPAN // 4)
    quad = tl.arange(0, QUADS)[None, None, :, None]
    word = quad * 4 + tl.arange(0, 4)[None, None, None, :]
    column = (word // SPAN) * 128 + word % SPAN
    x_at = x_ptr + x_safe[:, None, None, None] * x_stride
    w_at = packed_ptr + w_safe[None, :, None, None] * (n_quads * 4) + word
    group_at = w_safe[None, :, None, None] * (n_blocks * GROUPS)
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
                added = tl.zeros([X_ROWS, 1, QUADS, 4], tl.float32)
                x_sum = tl.zeros([X_ROWS, 1, QUADS, 4], tl.float32)
                if BITS == 4:
                    where = group_at + here // (SPAN // 4) * GROUPS + i // A_GROUP
                    s = tl.load(scale_ptr + where, mask=here < n_quads, other=0.0).to(tl.float32)
                    if zero_ptr is not None:
                        z = tl.load(zero_ptr + where, mask=here < n_quads, other=0).to(tl.float32)
            k = start * (4 * ELEMENTS) + column + i * SPAN
            if FULL:
                x = tl.load(x_at + k).to(tl.float32)
            else:
                x = tl.load(x_at + k, mask=here < n_quads, other=0.0).to(tl.float32)
            value = _element(w, i, BITS)
            offset = 16.0 if BITS == 4 and i % 2 == 1 else 256.0
            if zero_ptr is None:
                offset += 8.0 if BITS == 4 else 128.0
            if EXACT:
                value -= offset
                if zero_ptr is not None:
                    value -= z
            else:
                added += x * offset
                if zero_ptr is not None:
                    x_sum += x
            part += value * x
            if i % A_GROUP == A_GROUP - 1:
                if not EXACT:
                    part -= added
                    if zero_ptr is not None:
                        part -= x_sum * z
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
def _tile_kernel(
    x_ptr, packed_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, n_rows, n_out, n_blocks, x_stride,
    BITS: tl.constexpr, GROUPS: tl.constexpr, FULL: tl.constexpr, X_ROWS: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # The product is made transposed, W x^T: W is the operand that matrix units take from registers, where it
    # is unpacked; x is read from shared memory. The i-th elements of a block's words make a product of their
    # own. Nothing but constants meets the words before it, so that the compiler loads them in its layout.
    ELEMENTS: tl.constexpr = 32 // BITS
    SPAN: tl.constexpr = 128 // ELEMENTS
    A_GROUP: tl.constexpr = ELEMENTS // GROUPS
    x_blocks = tl.cdiv(n_rows, X_ROWS)
    x_row = (tl.program_id(0) % x_blocks) * X_ROWS + tl.arange(0, X_ROWS)
    w_row = (tl.program_id(0) // x_blocks) * ROWS + tl.arange(0, ROWS)
    w_safe = tl.minimum(w_row, n_out - 1).to(tl.int64)[:, None]
    word = tl.arange(0, SPAN)
    w_at = packed_ptr + w_safe * (n_blocks * SPAN) + word[None, :]
    x_at = x_ptr + tl.minimum(x_row, n_rows - 1).to(tl.int64)[None, :] * x_stride + word[:, None]
    total = tl.zeros([ROWS, X_ROWS], tl.float32)
    for start in tl.range(0, n_blocks, BLOCKS, num_stages=STAGES):
        for b in tl.static_range(BLOCKS):
            block = start + b
            exists = FULL or block < n_blocks
            w = tl.load(w_at + block * SPAN, mask=exists, other=0)
            for i in tl.static_range(ELEMENTS):
                x = tl.load(x_at + (block * 128 + i * SPAN), mask=exists, other=0.0)
                value = _element(w, i, BITS)
                if BITS == 8:
                    total = tl.dot((value - 384.0).to(x.dtype), x, total)
                else:
                    if i % A_GROUP == 0:
                        where = w_safe * (n_blocks * GROUPS) + (block * GROUPS + i // A_GROUP)
                        s = tl.load(scale_ptr + where, mask=exists, other=0.0).to(tl.float32)
                        if zero_ptr is not None:
                            z = tl.load(zero_ptr + where, mask=exists, other=0).to(tl.float32)
                        part = tl.zeros([ROWS, X_ROWS], tl.float32)
                    if zero_ptr is None:
                        value -= 24.0 if i % 2 == 1 else 264.0
                    else:
                        value -= z + (16.0 if i % 2 == 1 else 256.0)
                    part = tl.dot(value.to(x.dtype), x, part)
                    if i % A_GROUP == A_GROUP - 1:
                        total += part * s
    if BITS == 8:
        total *= tl.load(scale_ptr + w_safe).to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + w_safe).to(tl.float32)
    mask = (w_row < n_out)[:, None] & (x_row < n_rows)[None, :]
    tl.store(y_ptr + x_row.to(tl.int64)[None, :] * n_out + w_row[:, None], total, mask=mask)


@triton.jit
def _dequantize_kernel(
    packed_ptr, scale_ptr, zero_ptr, out_ptr, n_out, n_in, n_blocks, tiles,
    BITS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    ELEMENTS: tl.constexpr = 32 // BITS
    SPAN: tl.constexpr = 128 // ELEMENTS
    row = (tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS)
    word = (tl.program_id(0) % tiles) * WORDS + tl.arange(0, WORDS)[None, :]
    w_safe = tl.minimum(row, n_out - 1).to(tl.int64)[:, None]
    in_row = word < n_blocks * SPAN
    w = tl.load(packed_ptr + w_safe * (n_blocks * SPAN) + word, mask=in_row, other=0)
    group_at = w_safe * (n_blocks * GROUPS) + word // SPAN * GROUPS
    if BITS == 8:
        s = tl.load(scale_ptr + w_safe).to(tl.float32)
    for i in tl.static_range(ELEMENTS):
        k = (word // SPAN) * 128 + word % SPAN + i * SPAN
        value = _element(w, i, BITS) - (16.0 if BITS == 4 and i % 2 == 1 else 256.0)
        if BITS == 8:
            value = (value - 128.0) * s
        else:
            where = group_at + i // (ELEMENTS // GROUPS)
            z = 8.0
            if zero_ptr is not None:
                z = tl.load(zero_ptr + where, mask=in_row, other=0).to(tl.float32)
            value = (value - z) * tl.load(scale_ptr + where, mask=in_row, other=0.0).to(tl.float32)
        tl.store(out_ptr + w_safe * n_in + k, value, mask=(row < n_out)[:, None] & (k < n_in))


def _groups(scale: Tensor, bits: int, n_blocks: int) -> int:
    """Groups in a block of a row; 1 where the row is one."""
    return 1 if bits == 8 or not n_blocks else scale.shape[1] // n_blocks


def _whole_blocks(x: Tensor) -> Tensor:
    """`x` with columns of 0 up to whole blocks and rows that begin on 16 bytes: itself where it is so."""
    x = F.pad(x, (0, -x.shape[1] % BLOCK))
    return x if x.stride(1) == 1 and (x.shape[0] == 1 or x.stride(0) % 16 == 0) else x.contiguous()


def launch_gemv(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, y: Tensor, bits: int
) -> None:
    """Few rows of x (rows, in) on the plain units, into y (rows, out)."""
    x = _whole_blocks(x)
    n_rows, n_out, n_blocks = x.shape[0], packed.shape[0], x.shape[1] // BLOCK
    params = dict(GEMV.pick(n_out, x.device))
    quads = 32 * params["num_warps"]
    x_rows = min(1 << (n_rows - 1).bit_length(), GEMV_X_ROWS)
    # The accumulators of a thread: 8 for each row of x and of W.
    params["ROWS"] = max(params["ROWS"] // x_rows, 1)
    n_quads = packed.shape[1] // 4
    _gemv_kernel[(cdiv(n_rows, x_rows) * cdiv(n_out, params["ROWS"]),)](
        x, packed, scale, zero, bias, y, n_rows, n_out, n_blocks, x.stride(0),
        BITS=bits, GROUPS=_groups(scale, bits, n_blocks), EXACT=x.dtype == torch.float32,
        FULL=n_quads % quads == 0, X_ROWS=x_rows, QUADS=quads, **params,
    )  # fmt: skip


def launch_tile(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, y: Tensor, bits: int
) -> None:
    """Rows of 16-bit x (rows, in) on the matrix units, into y (rows, out)."""
    x = _whole_blocks(x)
    n_rows, n_out, n_blocks = x.shape[0], packed.shape[0], x.shape[1] // BLOCK
    params = dict(TILE.pick(n_rows, x.device))
    x_blocks = cdiv(n_rows, params["X_ROWS"])
    while params["num_warps"] > 1 and x_blocks * cdiv(n_out, params["ROWS"]) < sm_count(x.device):
        params["ROWS"], params["num_warps"] = params["ROWS"] // 2, params["num_warps"] // 2
    _tile_kernel[(x_blocks * cdiv(n_out, params["ROWS"]),)](
        x, packed, scale, zero, bias, y, n_rows, n_out, n_blocks, x.stride(0),
        BITS=bits, GROUPS=_groups(scale, bits, n_blocks),
        FULL=n_blocks % params["BLOCKS"] == 0, **params,
    )  # fmt: skip


def launch_dequantize(packed: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, bits: int) -> None:
    """The matrix itself, into out (out, in) of any floating-point dtype, contiguous."""
    (n_out, n_in), n_blocks = out.shape, blocks_of(out.shape[1])
    params = DEQUANTIZE.pick(packed.numel(), out.device)
    tiles = cdiv(packed.shape[1], params["WORDS"])
    _dequantize_kernel[(tiles * cdiv(n_out, params["ROWS"]),)](
        packed, scale, zero, out, n_out, n_in, n_blocks, tiles,
        BITS=bits, GROUPS=_groups(scale, bits, n_blocks), **params,
    )  # fmt: skip
