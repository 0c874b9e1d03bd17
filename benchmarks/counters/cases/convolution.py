"""Convolutions in one to three dimensions: grouped, depthwise, dilated, transposed, both layouts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.counters.zoo import Maker, Run, case, with_tf32

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAST = torch.channels_last


def _layout(x: torch.Tensor, channels_last: bool) -> torch.Tensor:
    if not channels_last:
        return x
    layout = LAST if x.dim() == 4 else torch.channels_last_3d
    return x.detach().to(memory_format=layout).requires_grad_(x.requires_grad)


def _pass(
    m: Maker, function: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, last: bool
) -> Run:
    return m.forward_backward(function, _layout(x, last), _layout(w, last))


@case(dtype=(BF16, FP16))
def conv1d(m: Maker, dtype: torch.dtype) -> Run:
    x, w = m.normal(24, 512, 3000, dtype=dtype), m.normal(512, 512, 3, dtype=dtype)
    return m.forward_backward(lambda a, b: F.conv1d(a, b, stride=2, padding=1), x, w)


@case(dtype=(BF16, FP16), last=(False, True))
def conv2d_3x3(m: Maker, dtype: torch.dtype, last: bool) -> Run:
    x, w = m.normal(48, 96, 64, 64, dtype=dtype), m.normal(160, 96, 3, 3, dtype=dtype)
    return _pass(m, lambda a, b: F.conv2d(a, b, padding=1), x, w, last)


@case(on=(True, False), last=(False, True))
def conv2d_3x3_fp32(m: Maker, on: bool, last: bool) -> Run:
    x, w = m.normal(32, 96, 56, 56), m.normal(128, 96, 3, 3)
    return with_tf32(on, _pass(m, lambda a, b: F.conv2d(a, b, padding=1), x, w, last))


@case()
def conv2d_stem_channels_last(m: Maker) -> Run:
    x, w = m.normal(96, 3, 224, 224, dtype=FP16, grad=False), m.normal(64, 3, 7, 7, dtype=FP16)
    return _pass(m, lambda a, b: F.conv2d(a, b, stride=2, padding=3), x, w, True)


@case()
def conv2d_patches(m: Maker) -> Run:
    x, w = m.normal(192, 3, 224, 224, dtype=BF16, grad=False), m.normal(768, 3, 16, 16, dtype=BF16)
    return m.forward_backward(lambda a, b: F.conv2d(a, b, stride=16), x, w)


@case(last=(False, True))
def conv2d_1x1(m: Maker, last: bool) -> Run:
    x, w = m.normal(64, 256, 48, 48, dtype=FP16), m.normal(512, 256, 1, 1, dtype=FP16)
    return _pass(m, F.conv2d, x, w, last)


@case()
def conv2d_grouped_channels_last(m: Maker) -> Run:
    groups = 32 if not m.tiny else 4
    x, w = m.normal(64, 256, 40, 40, dtype=FP16), m.normal(256, 256, 3, 3, dtype=FP16)
    w = w.detach()[:, : x.shape[1] // groups].contiguous().requires_grad_()
    return _pass(m, lambda a, b: F.conv2d(a, b, padding=1, groups=groups), x, w, True)


@case(dtype=(FP32, BF16))
def conv2d_depthwise(m: Maker, dtype: torch.dtype) -> Run:
    x, w = m.normal(64, 192, 56, 56, dtype=dtype), m.normal(192, 1, 7, 7, dtype=dtype)
    return m.forward_backward(lambda a, b: F.conv2d(a, b, padding=3, groups=a.shape[1]), x, w)


@case()
def conv2d_depthwise_channels_last(m: Maker) -> Run:
    x, w = m.normal(64, 192, 56, 56, dtype=FP16), m.normal(192, 1, 3, 3, dtype=FP16)
    return _pass(m, lambda a, b: F.conv2d(a, b, padding=1, groups=a.shape[1]), x, w, True)


@case()
def conv2d_dilated_odd(m: Maker) -> Run:
    x, w = m.normal(20, 131, 65, 65, dtype=FP16), m.normal(99, 131, 3, 3, dtype=FP16)
    return m.forward_backward(lambda a, b: F.conv2d(a, b, padding=2, dilation=2), x, w)


@case(dtype=(FP16, FP32))
def conv_transpose2d(m: Maker, dtype: torch.dtype) -> Run:
    x, w = m.normal(24, 192, 48, 48, dtype=dtype), m.normal(192, 96, 4, 4, dtype=dtype)
    return with_tf32(
        True, m.forward_backward(lambda a, b: F.conv_transpose2d(a, b, stride=2, padding=1), x, w)
    )


@case(last=(False, True))
def conv3d(m: Maker, last: bool) -> Run:
    x, w = m.normal(4, 64, 16, 64, 64, dtype=BF16), m.normal(64, 64, 3, 3, 3, dtype=BF16)
    return _pass(m, lambda a, b: F.conv3d(a, b, padding=1), x, w, last)


@case()
def conv2d_bias(m: Maker) -> Run:
    x, w, b = (
        m.normal(48, 128, 48, 48, dtype=BF16),
        m.normal(128, 128, 3, 3, dtype=BF16),
        m.normal(128, dtype=BF16),
    )
    return m.forward_backward(lambda x, w, b: F.conv2d(x, w, b, padding=1), x, w, b)
