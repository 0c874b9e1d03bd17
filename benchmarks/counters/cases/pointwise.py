"""Pointwise operators: activations, arithmetic, broadcasting, mixed dtypes, awkward strides, dropout, RNG."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.counters.zoo import Maker, Run, case

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@case(
    kind=("relu", "silu", "sigmoid", "tanh", "gelu", "mish", "softplus", "hardswish", "elu", "leaky_relu"),
)
def activation(m: Maker, kind: str) -> Run:
    return m.forward_backward(getattr(F, kind), m.normal(40_000_000, dtype=BF16))


@case(dtype=(FP16, FP32))
def gelu_tanh(m: Maker, dtype: torch.dtype) -> Run:
    return m.forward_backward(lambda x: F.gelu(x, approximate="tanh"), m.normal(4001, 8192, dtype=dtype))


@case()
def glu(m: Maker) -> Run:
    return m.forward_backward(F.glu, m.normal(6000, 2, 5504, dtype=BF16).detach().flatten(1).requires_grad_())


@case()
def swiglu_of_one_product(m: Maker) -> Run:
    """Both halves lie in one tensor, as after a fused gate-and-up projection."""
    both = m.normal(6000, 11008, dtype=BF16)
    return m.forward_backward(lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], both)


@case()
def prelu(m: Maker) -> Run:
    return m.forward_backward(F.prelu, m.normal(32, 96, 96, 96), m.normal(96))


@case(kind=("exp", "log", "sqrt", "rsqrt", "sin", "erf", "reciprocal", "log1p"))
def unary(m: Maker, kind: str) -> Run:
    return m.forward(getattr(torch, kind), m.uniform(30_000_001))


@case(dtype=(BF16, FP32, FP64, torch.int64))
def add(m: Maker, dtype: torch.dtype) -> Run:
    x, y = m.normal(20_000_000, dtype=dtype, grad=False), m.normal(20_000_000, dtype=dtype, grad=False)
    return m.forward(torch.add, x, y)


@case(kind=("mul", "div", "maximum", "pow", "atan2", "eq", "lt"))
def binary(m: Maker, kind: str) -> Run:
    return m.forward(getattr(torch, kind), m.uniform(24_000_000), m.uniform(24_000_000))


@case(shape=((1, 3001), (12000, 1), (1, 1)))
def mul_broadcast(m: Maker, shape: tuple[int, int]) -> Run:
    return m.forward_backward(torch.mul, m.normal(12000, 3001, dtype=BF16), m.normal(*shape, dtype=BF16))


@case()
def add_middle_broadcast(m: Maker) -> Run:
    x, y = m.normal(64, 12, 512, 80, dtype=FP16), m.normal(64, 1, 512, 1, dtype=FP16)
    return m.forward(torch.add, x, y)


@case()
def add_expanded_both(m: Maker) -> Run:
    x, y = m.normal(9000, 1), m.normal(1, 5000)
    return m.forward(lambda: x.expand(-1, y.shape[1]) + y.expand(x.shape[0], -1))


@case()
def add_transposed(m: Maker) -> Run:
    x, y = m.normal(6000, 5003), m.normal(5003, 6000)
    return m.forward(lambda: x + y.t())


@case()
def add_strided(m: Maker) -> Run:
    x = m.normal(48_000_000)
    y = torch.randn_like(x[::2])
    return m.forward(lambda: x[::2] + y)


@case()
def mul_mixed_dtypes(m: Maker) -> Run:
    return m.forward(torch.mul, m.normal(30_000_000, dtype=BF16), m.normal(30_000_000))


@case()
def where(m: Maker) -> Run:
    keep = m.mask(30_000_000)
    return m.forward_backward(lambda x, y: torch.where(keep, x, y), *(m.normal(30_000_000) for _ in "xy"))


@case()
def masked_fill_broadcast(m: Maker) -> Run:
    x, above = m.normal(48, 12, 256, 256, dtype=FP16), m.mask(256, 256)
    return m.forward_backward(lambda x: x.masked_fill(above, -1e4), x)


@case()
def addcmul(m: Maker) -> Run:
    return m.forward(torch.addcmul, *(m.normal(20_000_000, dtype=BF16) for _ in range(3)))


@case()
def lerp_in_place(m: Maker) -> Run:
    x, y = m.normal(24_000_000, grad=False), m.normal(24_000_000, grad=False)
    return m.forward(lambda: x.lerp_(y, 0.1))


@case()
def clamp_in_place(m: Maker) -> Run:
    x = m.normal(40_000_000, dtype=FP16, grad=False)
    return m.forward(lambda: x.clamp_(-1, 1))


@case()
def rotary_by_hand(m: Maker) -> Run:
    x, cos, sin = (
        m.normal(8, 16, 1536, 128, dtype=BF16),
        *(m.normal(1536, 128, dtype=BF16, grad=False) for _ in "cs"),
    )

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    return m.forward_backward(rotate, x)


@case(dtype=(BF16, FP32))
def dropout(m: Maker, dtype: torch.dtype) -> Run:
    return m.forward_backward(lambda x: F.dropout(x, 0.1), m.normal(6001, 5000, dtype=dtype))


@case()
def dropout2d(m: Maker) -> Run:
    return m.forward_backward(lambda x: F.dropout2d(x, 0.2), m.normal(64, 128, 56, 56, dtype=FP16))


@case(kind=("normal_", "uniform_", "bernoulli_", "exponential_"))
def random_fill(m: Maker, kind: str) -> Run:
    x = torch.empty(m.size(32_000_000), device=m.device)
    return m.forward(getattr(x, kind))


@case()
def random_integers(m: Maker) -> Run:
    return m.forward(lambda: torch.randint(50257, (m.size(16_000_000),), device=m.device))


@case()
def random_half(m: Maker) -> Run:
    return m.forward(lambda: torch.randn(m.size(40_000_000), device=m.device, dtype=BF16))
