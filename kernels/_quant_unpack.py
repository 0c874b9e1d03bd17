"""Packed elements of `_quant_format` as floating-point numbers, for use inside kernels.

No conversion instruction takes part, which would run at a quarter of the rate and on one element at a time.
The bits of u, set into the mantissa of 2^k where the lowest of them is worth 1, are the number 2^k + u: one
instruction, that masks and sets. In 16-bit types it makes two elements, those of both halfwords in a
register, and one more takes off 2^k and the middle of u's range, which is exact.

bf16's mantissa has 7 bits, so that each int4 of a halfword needs a shift of its own, and int8 two numbers:
128 + (u & 127), and 128 or, where u < 128, 256. fp16's has 10: int4 needs one shift, for the upper byte.
"""

import torch

from ._triton import INTERPRETED, tl, triton

#: NVIDIA's assembly, which the interpreter and AMD's compiler do not take.
_HAS_PTX = tl.constexpr(not INTERPRETED and torch.version.hip is None)

# $1: two halfwords. The rest are constants of 32 bits, which Triton gives once for each halfword: $2 shift,
# $4 mask, $6 magic number, $8 the number that comes off, or for int8 in bf16 the other mask.
# Lookup table 0xEA of lop3 is (a & b) | c, and 0xAE (~a & b) | c.
_FP16 = tl.constexpr("""{
    .reg .b32 t;
    shr.u32 t, $1, $2;
    lop3.b32 t, t, $4, $6, 0xEA;
    sub.rn.f16x2 $0, t, $8;
}""")
_BF16 = tl.constexpr("""{
    .reg .b32 t, minus_one;
    mov.b32 minus_one, 0xBF80BF80;
    shr.u32 t, $1, $2;
    lop3.b32 t, t, $4, $6, 0xEA;
    fma.rn.bf16x2 $0, $8, minus_one, t;
}""")
_BF16_INT8 = tl.constexpr("""{
    .reg .b32 t, v, c, minus_one;
    mov.b32 minus_one, 0xBF80BF80;
    shr.u32 t, $1, $2;
    lop3.b32 v, t, $4, $6, 0xEA;
    lop3.b32 c, t, $8, $6, 0xAE;
    fma.rn.bf16x2 $0, c, minus_one, v;
}""")


@triton.jit
def fp32_element(half, INDEX: tl.constexpr, BITS: tl.constexpr):
    """u: element INDEX of each halfword, as fp32."""
    u = (half.to(tl.int32) >> (BITS * INDEX)) & ((1 << BITS) - 1)
    return (u | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def centred_element(half, INDEX: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """u - 8 (int4) or u - 128 (int8): element INDEX of each halfword, exact in fp16 or bf16.

    Args:
        half: int16; neighbours along the last dimension, whose size is even, are in one thread.
    """
    if not _HAS_PTX:
        # Through fp32, since the interpreter's bf16 arithmetic is wrong.
        q = (fp32_element(half, INDEX, BITS) - (8.0 if BITS == 4 else 128.0)).to(dtype)
    elif INDEX * BITS % 8 == 0 and dtype != tl.bfloat16:
        # 1024 + u less 1024 + 128 or 1024 + 8.
        q = tl.inline_asm_elementwise(
            _FP16, "=r,r,r,r,r,r,r,r,r,r",
            [half, INDEX * BITS, 0x00FF00FF if BITS == 8 else 0x000F000F, 0x64006400,
             0x64806480 if BITS == 8 else 0x64086408],
            tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    elif dtype != tl.bfloat16:
        # Left at the upper half of a byte: 64 + u less 64 + 8.
        q = tl.inline_asm_elementwise(
            _FP16, "=r,r,r,r,r,r,r,r,r,r",
            [half, 4 * INDEX - 4, 0x00F000F0, 0x54005400, 0x54805480],
            tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    elif BITS == 8:
        q = tl.inline_asm_elementwise(
            _BF16_INT8, "=r,r,r,r,r,r,r,r,r,r",
            [half, 8 * INDEX, 0x007F007F, 0x43004300, 0x00800080],
            tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif INDEX % 2 == 0:
        # 128 + u less 128 + 8.
        q = tl.inline_asm_elementwise(
            _BF16, "=r,r,r,r,r,r,r,r,r,r",
            [half, 4 * INDEX, 0x000F000F, 0x43004300, 0x43084308],
            tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        # The lowest of these needs no more than a shift by 1: 16 + u less 16 + 8, three bits up.
        q = tl.inline_asm_elementwise(
            _BF16, "=r,r,r,r,r,r,r,r,r,r",
            [half, 4 * INDEX - 3, 0x00780078, 0x41804180, 0x41C041C0],
            tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    return q
