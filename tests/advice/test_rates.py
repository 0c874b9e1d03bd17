"""What kernels are promised to take, held against what they took on an H200 (torch 2.11, CUDA 13.0)."""

from __future__ import annotations

import pytest

from advisor.advice.rates import matmul_ns, pass_ns
from advisor.roofline.devices import find_device

H200 = find_device(override="H200")
#: m, n, k of aligned products, and µs.
BF16 = [
    (8192, 50304, 768, 889), (8192, 768, 50304, 789), (50304, 768, 8192, 783), (16384, 8192, 2048, 777),
    (8192, 50304, 1024, 1149), (8192, 8192, 8192, 1431),
]  # fmt: skip
TF32 = [
    (8192, 1024, 8192, 424), (8192, 8192, 1024, 359), (1024, 4096, 8192, 263), (8192, 4096, 1024, 176),
    (8192, 1024, 3072, 155), (8192, 8192, 8192, 2752),
]  # fmt: skip
UNALIGNED = [
    (8192, 50257, 768, 6678),
    (8192, 768, 50257, 4520),
    (50257, 768, 8192, 4282),
    (8192, 1024, 2731, 373),
]


def promised(m: int, n: int, k: int, pipe: str, *, aligned: bool = True):
    size = 4 if pipe == "tensor_tf32" else 2
    found = matmul_ns(H200, 2.0 * m * n * k, size * (m * k + k * n + m * n), pipe, aligned=aligned)
    assert found is not None
    return [float(ns) / 1e3 for ns in found.cases]


@pytest.mark.parametrize(("m", "n", "k", "us"), BF16)
def test_aligned_products_in_16_bits_take_what_is_likely(m, n, k, us):
    assert promised(m, n, k, "tensor_bf16")[1] == pytest.approx(us, rel=0.12)


@pytest.mark.parametrize(("m", "n", "k", "us"), TF32)
def test_products_in_tf32_take_what_is_possible(m, n, k, us):
    pessimistic, likely, optimistic = promised(m, n, k, "tensor_tf32")
    assert optimistic <= us <= pessimistic
    assert likely == pytest.approx(us, rel=0.3)


@pytest.mark.parametrize(("m", "n", "k", "us"), UNALIGNED)
def test_unaligned_products_take_what_is_possible(m, n, k, us):
    pessimistic, _, optimistic = promised(m, n, k, "tensor_bf16", aligned=False)
    assert optimistic * 0.9 <= us <= pessimistic * 1.1


def test_a_pass_takes_what_compiled_and_bundled_kernels_do():
    # GIVEN 268 MB, in which RMSNorm, its input as large as its result, takes 69 µs bundled and 83 µs eager
    found = pass_ns(H200, 2 * 16384 * 4096 * 2)
    assert found is not None
    assert float(found.optimistic) < 69e3 < 83e3 < float(found.pessimistic)
