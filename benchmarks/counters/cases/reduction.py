"""Reductions, scans and everything that sorts."""

from __future__ import annotations

import torch

from benchmarks.counters.zoo import Maker, Run, case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@case(dtype=(BF16, FP32), dim=((0,), (1,), (0, 1), (2,)))
def total(m: Maker, dtype: torch.dtype, dim: tuple[int, ...]) -> Run:
    x = m.normal(120, 503, 640, dtype=dtype, grad=False)
    return m.forward(lambda: x.sum(dim))


@case()
def mean_of_all(m: Maker) -> Run:
    return m.forward_backward(torch.mean, m.normal(37_000_003))


@case()
def bias_gradient(m: Maker) -> Run:
    x = m.normal(24000, 1280, dtype=BF16, grad=False)
    return m.forward(lambda: x.sum(0))


@case(kind=("amax", "argmax", "std", "logsumexp", "prod"))
def along_rows(m: Maker, kind: str) -> Run:
    x = m.normal(9000, 3500, grad=False)
    return m.forward(lambda: getattr(torch, kind)(x, 1))


@case()
def max_with_indices(m: Maker) -> Run:
    x = m.normal(64, 128, 3000, dtype=FP16, grad=False)
    return m.forward(lambda: torch.max(x, 1))


@case()
def var_mean(m: Maker) -> Run:
    x = m.normal(30000, 1024, grad=False)
    return m.forward(lambda: torch.var_mean(x, 1))


@case()
def vector_norm(m: Maker) -> Run:
    return m.forward(torch.linalg.vector_norm, m.normal(50_000_000, dtype=BF16))


@case()
def any_nan(m: Maker) -> Run:
    x = m.normal(30_000_000)
    return m.forward(lambda: torch.isfinite(x).all())


@case(dim=(0, 1))
def cumsum(m: Maker, dim: int) -> Run:
    x = m.normal(6000, 4000, grad=False)
    return m.forward(lambda: x.cumsum(dim))


@case()
def cumsum_flat_integers(m: Maker) -> Run:
    x = m.integers(10, 16_000_000)
    return m.forward(lambda: x.cumsum(0))


@case()
def sort_flat(m: Maker) -> Run:
    x = m.normal(20_000_000, grad=False)
    return m.forward(lambda: x.sort())


@case()
def sort_rows(m: Maker) -> Run:
    x = m.normal(20000, 1000, grad=False)
    return m.forward(lambda: x.sort(-1))


@case(k=(8, 50))
def topk(m: Maker, k: int) -> Run:
    x = m.normal(1200, 32000, dtype=BF16, grad=False)
    return m.forward(lambda: x.topk(min(k, x.shape[1]), -1))


@case()
def topk_experts(m: Maker) -> Run:
    x = m.normal(300000, 64, grad=False)
    return m.forward(lambda: x.topk(2, -1))


@case()
def unique(m: Maker) -> Run:
    x = m.integers(100000, 8_000_000)
    return m.forward(lambda: torch.unique(x))


@case()
def nonzero(m: Maker) -> Run:
    x = m.mask(96_000_000, share=0.1)
    return m.forward(lambda: x.nonzero())


@case()
def bincount(m: Maker) -> Run:
    x = m.integers(1000, 12_000_000)
    return m.forward(lambda: torch.bincount(x, minlength=1000))


@case()
def searchsorted(m: Maker) -> Run:
    edges, x = torch.linspace(0, 1, 1001, device=m.device), m.uniform(20_000_000)
    return m.forward(lambda: torch.searchsorted(edges, x))


@case()
def multinomial(m: Maker) -> Run:
    x = m.uniform(1000, 32000)
    return m.forward(lambda: torch.multinomial(x, 1))


@case()
def randperm(m: Maker) -> Run:
    return m.forward(lambda: torch.randperm(m.size(4_000_000), device=m.device))
