"""Embeddings, gathers, scatters and masks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.counters.zoo import Maker, Run, case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@case(dtype=(BF16, FP32), rows=(50257, 512))
def embedding(m: Maker, dtype: torch.dtype, rows: int) -> Run:
    table, tokens = m.normal(rows, 1024, dtype=dtype), m.integers(rows, 12, 2048)
    return m.forward_backward(lambda w: F.embedding(tokens, w), table)


@case()
def embedding_of_few(m: Maker) -> Run:
    table, tokens = m.normal(30000, 768), m.integers(30000, 2000)
    return m.forward_backward(lambda w: F.embedding(tokens, w), table)


@case(mode=("sum", "mean"))
def embedding_bag(m: Maker, mode: str) -> Run:
    table, tokens = m.normal(1_000_000, 64), m.integers(1_000_000, 600_000)
    starts = torch.arange(0, tokens.numel(), 20 if not m.tiny else 4, device=m.device)
    return m.forward_backward(lambda w: F.embedding_bag(tokens, w, starts, mode=mode), table)


@case()
def gather(m: Maker) -> Run:
    x, index = m.normal(6000, 4000), m.integers(4000, 6000, 3000)
    return m.forward_backward(lambda x: x.gather(1, index), x)


@case()
def scatter_add(m: Maker) -> Run:
    x, index, source = m.normal(6000, 1000), m.integers(1000, 6000, 3000), m.normal(6000, 3000)
    return m.forward(lambda: x.scatter_add(1, index, source))


@case(dtype=(FP16, FP32))
def index_select(m: Maker, dtype: torch.dtype) -> Run:
    x, index = m.normal(60000, 512, dtype=dtype), m.integers(60000, 50000)
    return m.forward_backward(lambda x: x.index_select(0, index), x)


@case()
def index_add(m: Maker) -> Run:
    x, index, source = m.normal(20000, 512, grad=False), m.integers(20000, 60000), m.normal(60000, 512)
    return m.forward(lambda: x.index_add_(0, index, source))


@case()
def advanced_indexing(m: Maker) -> Run:
    x, rows = m.normal(20000, 1024, dtype=BF16), m.integers(20000, 30000)
    return m.forward_backward(lambda x: x[rows], x)


@case()
def index_put(m: Maker) -> Run:
    x, rows, values = m.normal(50000, 640, grad=False), m.integers(50000, 40000), m.normal(40000, 640)
    return m.forward(lambda: x.index_put_((rows,), values))


@case()
def masked_select(m: Maker) -> Run:
    x, keep = m.normal(24_000_000), m.mask(24_000_000, share=0.3)
    return m.forward(lambda: x[keep])


@case()
def masked_scatter(m: Maker) -> Run:
    x, keep, source = m.normal(16_000_000), m.mask(16_000_000), m.normal(16_000_000)
    return m.forward(lambda: x.masked_scatter(keep, source))


@case()
def one_hot(m: Maker) -> Run:
    x = m.integers(512, 30000)
    return m.forward(lambda: F.one_hot(x, 512))


@case()
def take_along_experts(m: Maker) -> Run:
    x, order = m.normal(16384, 2048, dtype=BF16), torch.randperm(m.size(16384), device=m.device)
    return m.forward(lambda: torch.index_select(x, 0, order).mul(0.5))
