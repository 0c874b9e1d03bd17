"""Normalisations and softmax, training and evaluation, both layouts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.counters.zoo import Maker, Run, case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@case(dtype=(BF16, FP32), width=(768, 5120, 1001))
def layer_norm(m: Maker, dtype: torch.dtype, width: int) -> Run:
    rows = 33_554_432 // width
    x, w, b = m.normal(rows, width, dtype=dtype), m.normal(width, dtype=dtype), m.normal(width, dtype=dtype)
    return m.forward_backward(lambda x, w, b: F.layer_norm(x, w.shape, w, b), x, w, b)


@case()
def layer_norm_without_weight(m: Maker) -> Run:
    return m.forward_backward(lambda x: F.layer_norm(x, x.shape[-1:]), m.normal(20000, 1536, dtype=FP16))


@case(dtype=(BF16, FP32), width=(2048, 8192))
def rms_norm(m: Maker, dtype: torch.dtype, width: int) -> Run:
    x, w = m.normal(33_554_432 // width, width, dtype=dtype), m.normal(width, dtype=dtype)
    return m.forward_backward(lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), x, w)


@case()
def rms_norm_by_hand(m: Maker) -> Run:
    x, w = m.normal(8192, 3072, dtype=BF16), m.normal(3072, dtype=BF16)

    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w

    return m.forward_backward(norm, x, w)


@case(dtype=(FP16, FP32))
def group_norm(m: Maker, dtype: torch.dtype) -> Run:
    x, w, b = m.normal(16, 320, 96, 96, dtype=dtype), m.normal(320, dtype=dtype), m.normal(320, dtype=dtype)
    return m.forward_backward(lambda x, w, b: F.group_norm(x, 16 if m.tiny else 32, w, b), x, w, b)


@case(dtype=(FP16, FP32), last=(False, True))
def batch_norm(m: Maker, dtype: torch.dtype, last: bool) -> Run:
    x, w, b = m.normal(96, 192, 48, 48, dtype=dtype), m.normal(192), m.normal(192)
    if last:
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    mean, var = torch.zeros_like(w), torch.ones_like(w)
    return m.forward_backward(
        lambda x, w, b: F.batch_norm(x, mean.detach(), var.detach(), w, b, training=True), x, w, b
    )


@case()
def batch_norm_evaluation(m: Maker) -> Run:
    x, w, b = m.normal(96, 192, 48, 48), m.normal(192), m.normal(192)
    mean, var = torch.zeros_like(w).detach(), torch.ones_like(w).detach()
    return m.forward(lambda: F.batch_norm(x, mean, var, w, b, training=False))


@case()
def instance_norm(m: Maker) -> Run:
    return m.forward_backward(F.instance_norm, m.normal(16, 96, 160, 160))


@case()
def weight_norm(m: Maker) -> Run:
    v, g = m.normal(8192, 4096), m.normal(8192, 1)
    return m.forward_backward(lambda v, g: torch._weight_norm(v, g, 0), v, g)


@case()
def normalize(m: Maker) -> Run:
    return m.forward_backward(lambda x: F.normalize(x, dim=-1), m.normal(40000, 640, dtype=FP16))


@case(dtype=(BF16, FP32), width=(384, 3000, 40000))
def softmax(m: Maker, dtype: torch.dtype, width: int) -> Run:
    return m.forward_backward(lambda x: F.softmax(x, -1), m.normal(33_554_432 // width, width, dtype=dtype))


@case()
def softmax_over_channels(m: Maker) -> Run:
    return m.forward_backward(lambda x: F.softmax(x, 1), m.normal(32, 80, 120, 120))


@case(dtype=(FP16, FP32))
def log_softmax(m: Maker, dtype: torch.dtype) -> Run:
    return m.forward_backward(lambda x: F.log_softmax(x, -1), m.normal(1500, 32000, dtype=dtype))
