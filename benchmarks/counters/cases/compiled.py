"""What Inductor makes of common pieces: pointwise, reduction and persistent-reduction kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.counters.zoo import Maker, Run, case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


@case(cuda_only=True)
def bias_gelu_layer_norm(m: Maker) -> Run:
    def block(x, bias, w, b):
        return F.layer_norm(F.gelu(x + bias), w.shape, w, b)

    width = 3072
    return m.forward_backward(
        _compiled(block), m.normal(10000, width, dtype=BF16), *(m.normal(width, dtype=BF16) for _ in range(3))
    )


@case(cuda_only=True)
def residual_rms_norm(m: Maker) -> Run:
    def block(x, residual, w):
        return F.rms_norm(x + residual, w.shape, w, 1e-6)

    x, residual, w = (
        m.normal(8000, 4096, dtype=BF16),
        m.normal(8000, 4096, dtype=BF16),
        m.normal(4096, dtype=BF16),
    )
    return m.forward_backward(_compiled(block), x, residual, w)


@case(cuda_only=True)
def swiglu(m: Maker) -> Run:
    gate, up = m.normal(5000, 5504, dtype=BF16), m.normal(5000, 5504, dtype=BF16)
    return m.forward_backward(_compiled(lambda g, u: F.silu(g) * u), gate, up)


@case(cuda_only=True)
def masked_softmax(m: Maker) -> Run:
    x, keep = m.normal(16, 8, 512, 512, dtype=FP16), m.mask(512, 512)
    return m.forward_backward(_compiled(lambda s: F.softmax(s.masked_fill(keep, -1e4), -1)), x)


@case(cuda_only=True)
def cross_entropy(m: Maker) -> Run:
    logits, target = m.normal(1200, 32003, dtype=BF16), m.integers(32003, 1200)
    return m.forward_backward(_compiled(lambda x: F.cross_entropy(x.float(), target)), logits)


@case(cuda_only=True)
def transposed_sum(m: Maker) -> Run:
    x, y = m.normal(5000, 6000, grad=False), m.normal(6000, 5000, grad=False)
    return m.forward(_compiled(lambda x, y: (x + y.t()).relu()), x, y)


@case(cuda_only=True)
def column_statistics(m: Maker) -> Run:
    x = m.normal(40000, 640, grad=False)
    return m.forward(_compiled(lambda x: (x.mean(0), x.std(0))), x)


@case(cuda_only=True)
def dropout_residual(m: Maker) -> Run:
    x, y = m.normal(8000, 4096, dtype=BF16), m.normal(8000, 4096, dtype=BF16)
    return m.forward_backward(_compiled(lambda x, y: y + F.dropout(x, 0.1)), x, y)
