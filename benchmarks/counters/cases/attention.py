"""Scaled dot-product attention by each backend, and the eager pieces that people write by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.counters.zoo import Maker, Run, case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FLASH, EFFICIENT, CUDNN, MATH = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)


def _sdpa(backend: SDPBackend, **options):
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return attend


def _qkv(m: Maker, batch: int, heads: int, length: int, width: int, dtype: torch.dtype):
    return (m.normal(batch, heads, length, width, dtype=dtype) for _ in range(3))


@case(cuda_only=True, causal=(True, False))
def flash(m: Maker, causal: bool) -> Run:
    return m.forward_backward(_sdpa(FLASH, is_causal=causal), *_qkv(m, 6, 12, 3072, 64, BF16))


@case(cuda_only=True)
def flash_wide_fp16(m: Maker) -> Run:
    return m.forward_backward(_sdpa(FLASH, is_causal=True), *_qkv(m, 2, 16, 3072, 128, FP16))


@case(cuda_only=True)
def flash_odd_with_dropout(m: Maker) -> Run:
    return m.forward_backward(_sdpa(FLASH, dropout_p=0.1), *_qkv(m, 5, 12, 1501, 96, BF16))


@case(cuda_only=True)
def flash_grouped_queries(m: Maker) -> Run:
    q = m.normal(4, 32, 2048, 128, dtype=BF16)
    k, v = (m.normal(4, 8, 2048, 128, dtype=BF16) for _ in range(2))
    return m.forward_backward(_sdpa(FLASH, is_causal=True, enable_gqa=True), q, k, v)


@case(cuda_only=True)
def flash_cross(m: Maker) -> Run:
    q = m.normal(8, 16, 4096, 64, dtype=BF16)
    k, v = (m.normal(8, 16, 512, 64, dtype=BF16) for _ in range(2))
    return m.forward_backward(_sdpa(FLASH), q, k, v)


@case(cuda_only=True, dtype=(FP16, FP32))
def efficient(m: Maker, dtype: torch.dtype) -> Run:
    return m.forward_backward(_sdpa(EFFICIENT, is_causal=True), *_qkv(m, 3, 12, 2048, 64, dtype))


@case(cuda_only=True)
def efficient_with_bias(m: Maker) -> Run:
    q, k, v = _qkv(m, 4, 12, 1024, 64, BF16)
    bias = m.normal(1, 12, 1024, 1024, dtype=BF16, grad=False)
    return m.forward_backward(_sdpa(EFFICIENT, attn_mask=bias), q, k, v)


@case(cuda_only=True, causal=(True, False))
def cudnn(m: Maker, causal: bool) -> Run:
    return m.forward_backward(_sdpa(CUDNN, is_causal=causal), *_qkv(m, 3, 16, 3072, 128, BF16))


@case(cuda_only=True)
def cudnn_grouped_queries_fp16(m: Maker) -> Run:
    q = m.normal(4, 24, 2048, 64, dtype=FP16)
    k, v = (m.normal(4, 8, 2048, 64, dtype=FP16) for _ in range(2))
    return m.forward_backward(_sdpa(CUDNN, is_causal=True, enable_gqa=True), q, k, v)


@case(cuda_only=True)
def cudnn_decode(m: Maker) -> Run:
    q = m.normal(64, 16, 1, 128, dtype=BF16, grad=False)
    k, v = (m.normal(64, 16, 2048, 128, dtype=BF16, grad=False) for _ in range(2))
    return m.forward(_sdpa(FLASH), q, k, v)


@case()
def math_masked(m: Maker) -> Run:
    q, k, v = _qkv(m, 2, 12, 1024, 64, BF16)
    keep = m.mask(2, 1, 1024, 1024, share=0.8)
    return m.forward_backward(_sdpa(MATH, attn_mask=keep), q, k, v)


@case()
def by_hand_causal(m: Maker) -> Run:
    q, k, v = _qkv(m, 3, 12, 1280, 80, FP16)
    above = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=m.device).triu(1)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.transpose(-2, -1)) * 0.111
        return F.softmax(scores.masked_fill(above, float("-inf")), dim=-1) @ v

    return m.forward_backward(attend, q, k, v)
