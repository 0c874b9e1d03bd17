"""Losses, forward and backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.counters.zoo import Maker, Run, case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@case(dtype=(BF16, FP32))
def cross_entropy(m: Maker, dtype: torch.dtype) -> Run:
    logits, target = m.normal(2500, 32001, dtype=dtype), m.integers(32001, 2500)
    return m.forward_backward(F.cross_entropy, logits, target)


@case()
def cross_entropy_smoothed(m: Maker) -> Run:
    logits, target = m.normal(30000, 1000), m.integers(1000, 30000)
    return m.forward_backward(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), logits, target)


@case()
def cross_entropy_of_images(m: Maker) -> Run:
    logits, target = m.normal(16, 21, 320, 320), m.integers(21, 16, 320, 320)
    return m.forward_backward(F.cross_entropy, logits, target)


@case()
def bce_with_logits(m: Maker) -> Run:
    return m.forward_backward(F.binary_cross_entropy_with_logits, m.normal(25_000_000), m.uniform(25_000_000))


@case()
def bce(m: Maker) -> Run:
    x = m.uniform(25_000_000).mul_(0.99).requires_grad_()
    return m.forward_backward(F.binary_cross_entropy, x, m.uniform(25_000_000))


@case(dtype=(FP16, FP32))
def mse(m: Maker, dtype: torch.dtype) -> Run:
    return m.forward_backward(
        F.mse_loss, m.normal(4096, 8191, dtype=dtype), m.normal(4096, 8191, dtype=dtype)
    )


@case(kind=("l1_loss", "smooth_l1_loss", "huber_loss"))
def regression(m: Maker, kind: str) -> Run:
    return m.forward_backward(getattr(F, kind), m.normal(24_000_000), m.normal(24_000_000, grad=False))


@case()
def kl_div(m: Maker) -> Run:
    x, y = m.normal(3000, 8000), m.uniform(3000, 8000)
    return m.forward_backward(lambda x, y: F.kl_div(x, y, reduction="batchmean"), x, y)


@case()
def ctc(m: Maker) -> Run:
    steps, batch, classes, symbols = m.size(800), m.size(64), m.size(500), 10 if m.tiny else 60
    x = torch.randn(steps, batch, classes, device=m.device).log_softmax(-1).detach().requires_grad_()
    target = torch.randint(1, classes, (batch, symbols), device=m.device)
    lengths = torch.full((batch,), steps, dtype=torch.long), torch.full((batch,), symbols, dtype=torch.long)
    return m.forward_backward(lambda x: F.ctc_loss(x, target, *lengths), x)


@case()
def cosine_similarity(m: Maker) -> Run:
    return m.forward_backward(F.cosine_similarity, m.normal(30000, 768), m.normal(30000, 768))
