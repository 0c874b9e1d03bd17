"""Matrix products: every dtype that a training step may use, square, tall, skinny, odd, batched, strided."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.counters.zoo import Maker, Run, case, with_tf32

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@case(dtype=(BF16, FP16))
def mm(m: Maker, dtype: torch.dtype) -> Run:
    return m.forward_backward(torch.mm, m.normal(12288, 1536, dtype=dtype), m.normal(1536, 6144, dtype=dtype))


@case(on=(True, False))
def mm_fp32_tf32(m: Maker, on: bool) -> Run:
    return with_tf32(on, m.forward_backward(torch.mm, m.normal(6144, 1024), m.normal(1024, 3072)))


@case()
def mm_fp64(m: Maker) -> Run:
    return m.forward(torch.mm, m.normal(2048, 4096, dtype=FP64), m.normal(4096, 2048, dtype=FP64))


@case()
def mm_complex64(m: Maker) -> Run:
    a = m.normal(1536, 2048, dtype=torch.complex64, grad=False)
    return with_tf32(False, m.forward(torch.mm, a, m.normal(2048, 1536, dtype=torch.complex64, grad=False)))


@case(dtype=(BF16, FP16))
def mm_odd(m: Maker, dtype: torch.dtype) -> Run:
    return m.forward_backward(torch.mm, m.normal(6001, 1023, dtype=dtype), m.normal(1023, 4099, dtype=dtype))


@case()
def mm_tall_skinny(m: Maker) -> Run:
    return m.forward_backward(torch.mm, m.normal(393216, 96, dtype=BF16), m.normal(96, 384, dtype=BF16))


@case()
def mm_split_k(m: Maker) -> Run:
    """Few outputs, a long sum: libraries split it over blocks."""
    return m.forward(torch.mm, m.normal(256, 262144, dtype=BF16), m.normal(262144, 256, dtype=BF16))


@case()
def mm_transposed(m: Maker) -> Run:
    a, b = m.normal(2048, 8192, dtype=BF16, grad=False), m.normal(3072, 2048, dtype=BF16, grad=False)
    return m.forward(lambda: torch.mm(a.t(), b.t()))


@case()
def mm_strided(m: Maker) -> Run:
    a, b = m.normal(8192, 8192, dtype=BF16, grad=False), m.normal(4096, 2048, dtype=BF16, grad=False)
    return m.forward(lambda: torch.mm(a[:, : b.shape[0]], b))


@case(dtype=(BF16, FP32))
def mv(m: Maker, dtype: torch.dtype) -> Run:
    return m.forward(torch.mv, m.normal(16384, 12288, dtype=dtype), m.normal(12288, dtype=dtype))


@case()
def mm_one_row(m: Maker) -> Run:
    return m.forward(torch.mm, m.normal(1, 12288, dtype=BF16), m.normal(12288, 16384, dtype=BF16))


@case()
def dot(m: Maker) -> Run:
    return m.forward(torch.dot, m.normal(48_000_001), m.normal(48_000_001))


@case(dtype=(BF16, FP16))
def linear_bias(m: Maker, dtype: torch.dtype) -> Run:
    x, w, b = (
        m.normal(16, 1024, 2560, dtype=dtype),
        m.normal(5120, 2560, dtype=dtype),
        m.normal(5120, dtype=dtype),
    )
    return m.forward_backward(F.linear, x, w, b)


@case()
def linear_small_batch(m: Maker) -> Run:
    x, w, b = m.normal(48, 8192, dtype=FP16), m.normal(28672, 8192, dtype=FP16), m.normal(28672, dtype=FP16)
    return m.forward(F.linear, x, w, b)


@case()
def linear_big_odd_vocabulary(m: Maker) -> Run:
    return m.forward_backward(F.linear, m.normal(3000, 1024, dtype=BF16), m.normal(65537, 1024, dtype=BF16))


@case()
def addmm_scaled(m: Maker) -> Run:
    c, a, b = (
        m.normal(8192, 6144, dtype=FP16),
        m.normal(8192, 2048, dtype=FP16),
        m.normal(2048, 6144, dtype=FP16),
    )
    return m.forward(lambda: torch.addmm(c, a, b, beta=0.5, alpha=2.0))


@case(dtype=(BF16, FP16))
def bmm(m: Maker, dtype: torch.dtype) -> Run:
    return m.forward_backward(
        torch.bmm, m.normal(96, 1024, 96, dtype=dtype), m.normal(96, 96, 768, dtype=dtype)
    )


@case(on=(True, False))
def bmm_fp32_tf32(m: Maker, on: bool) -> Run:
    return with_tf32(on, m.forward(torch.bmm, m.normal(48, 768, 512), m.normal(48, 512, 768)))


@case()
def baddbmm(m: Maker) -> Run:
    c, a, b = (m.normal(64, 1024, n, dtype=BF16, grad=False) for n in (1024, 64, 64))
    return m.forward(lambda: torch.baddbmm(c, a, b.transpose(1, 2), alpha=0.125))


@case()
def matmul_broadcast(m: Maker) -> Run:
    """A batch of products that share one expanded operand."""
    x, w = m.normal(4, 16, 1024, 192, dtype=BF16), m.normal(1, 16, 192, 640, dtype=BF16)
    return m.forward(torch.matmul, x, w)


@case()
def einsum_scores(m: Maker) -> Run:
    q, k = m.normal(6, 1024, 16, 72, dtype=FP16), m.normal(6, 1024, 16, 72, dtype=FP16)
    return m.forward_backward(lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b), q, k)


@case()
def int8_mm(m: Maker) -> Run:
    a, b = (m.integers(127, n, 4096, dtype=torch.int8, low=-127) for n in (8192, 6144))
    return m.forward(lambda: torch._int_mm(a, b.t()))


def _fp8(m: Maker, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return m.normal(rows, columns, grad=False).to(dtype)


@case(cuda_only=True, fast=(True, False))
def scaled_mm_fp8(m: Maker, fast: bool) -> Run:
    a, b = (_fp8(m, n, 6144, torch.float8_e4m3fn) for n in (8192, 5120))
    one = torch.ones((), device=m.device)
    return m.forward(
        lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=BF16, use_fast_accum=fast)
    )


@case(cuda_only=True)
def scaled_mm_fp8_rowwise(m: Maker) -> Run:
    a, b = _fp8(m, 4096, 4096, torch.float8_e4m3fn), _fp8(m, 8192, 4096, torch.float8_e4m3fn)
    rows, columns = torch.ones(a.shape[0], 1, device=m.device), torch.ones(1, b.shape[0], device=m.device)
    return m.forward(lambda: torch._scaled_mm(a, b.t(), scale_a=rows, scale_b=columns, out_dtype=BF16))


@case(cuda_only=True)
def scaled_mm_fp8_gradient(m: Maker) -> Run:
    """As in fp8 training's backward pass: one operand in e5m2."""
    a, b = _fp8(m, 8192, 4096, torch.float8_e5m2), _fp8(m, 4096, 4096, torch.float8_e4m3fn)
    one = torch.ones((), device=m.device)
    return m.forward(lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=BF16))


@case(cuda_only=True)
def grouped_mm(m: Maker) -> Run:
    """Experts of a mixture, each with its own share of the tokens."""
    x, w = m.normal(8192, 2048, dtype=BF16, grad=False), m.normal(8, 3072, 2048, dtype=BF16, grad=False)
    ends = torch.tensor([512, 2048, 2560, 4096, 5120, 6144, 7680, 8192], device=m.device, dtype=torch.int32)
    return m.forward(lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends))


@case(cuda_only=True)
def weight_int4_mm(m: Maker) -> Run:
    n, k, group = 8192, 8192, 128
    packed = torch._convert_weight_to_int4pack(
        torch.randint(0, 255, (n, k // 2), device=m.device, dtype=torch.uint8), 8
    )
    scales = torch.randn(k // group, n, 2, device=m.device).to(BF16)
    x = m.normal(16, k, dtype=BF16, grad=False)
    return m.forward(lambda: torch._weight_int4pack_mm(x, packed, group, scales))
