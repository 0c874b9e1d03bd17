"""Copies, casts, joins, padding, resizing, pooling, fills, and transfers to and from the host."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.counters.zoo import Maker, Run, case

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


@case(dim=(0, 1))
def cat(m: Maker, dim: int) -> Run:
    parts = [m.normal(6000, n, dtype=BF16) for n in ((1536, 1536) if dim == 0 else (1536, 777, 2049))]
    return m.forward(lambda: torch.cat(parts, dim))


@case()
def stack(m: Maker) -> Run:
    parts = [m.normal(12_000_000) for _ in range(3)]
    return m.forward(lambda: torch.stack(parts, 1))


@case(pair=((FP32, BF16), (BF16, FP32), (FP32, FP16), (BF16, FP8), (torch.int64, torch.int32)))
def cast(m: Maker, pair: tuple[torch.dtype, torch.dtype]) -> Run:
    x = m.normal(30_000_000, dtype=pair[0], grad=False)
    return m.forward(lambda: x.to(pair[1]))


@case(dtype=(BF16, FP32))
def transposed_copy(m: Maker, dtype: torch.dtype) -> Run:
    x = m.normal(6001, 5000, dtype=dtype, grad=False)
    return m.forward(lambda: x.t().contiguous())


@case()
def heads_first(m: Maker) -> Run:
    x = m.normal(16, 1536, 16, 96, dtype=BF16, grad=False)
    return m.forward(lambda: x.transpose(1, 2).contiguous())


@case()
def to_channels_last(m: Maker) -> Run:
    x = m.normal(64, 96, 80, 80, dtype=FP16, grad=False)
    return m.forward(lambda: x.contiguous(memory_format=torch.channels_last))


@case()
def slice_copy(m: Maker) -> Run:
    x = m.normal(12000, 6000, grad=False)
    return m.forward(lambda: x[:, 100:-99].contiguous())


@case()
def repeat(m: Maker) -> Run:
    x = m.normal(1000, 1, 4096, dtype=BF16)
    return m.forward_backward(lambda x: x.repeat(1, 8, 1), x)


@case()
def repeat_interleave_heads(m: Maker) -> Run:
    x = m.normal(8, 8, 1024, 128, dtype=BF16, grad=False)
    return m.forward(lambda: x.repeat_interleave(4, 1))


@case(mode=("constant", "reflect"))
def pad(m: Maker, mode: str) -> Run:
    x = m.normal(24, 64, 120, 120)
    return m.forward_backward(lambda x: F.pad(x, (3, 3, 3, 3), mode), x)


@case(kind=("roll", "flip", "tril"))
def rearrange(m: Maker, kind: str) -> Run:
    x = m.normal(64, 720, 720, grad=False)
    runs = {"roll": lambda: x.roll((3, 3), (1, 2)), "flip": lambda: x.flip(-1), "tril": lambda: x.tril()}
    return m.forward(runs[kind])


@case(mode=("nearest", "bilinear", "bicubic"))
def interpolate(m: Maker, mode: str) -> Run:
    return m.forward_backward(
        lambda x: F.interpolate(x, scale_factor=2, mode=mode), m.normal(12, 64, 96, 96, dtype=FP16)
    )


@case(last=(False, True))
def max_pool(m: Maker, last: bool) -> Run:
    x = m.normal(64, 64, 112, 112, dtype=FP16)
    if last:
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    return m.forward_backward(lambda x: F.max_pool2d(x, 3, 2, 1), x)


@case()
def average_pool(m: Maker) -> Run:
    return m.forward_backward(lambda x: F.avg_pool2d(x, 2), m.normal(32, 96, 112, 112))


@case()
def global_pool(m: Maker) -> Run:
    return m.forward_backward(lambda x: F.adaptive_avg_pool2d(x, 1), m.normal(256, 1024, 12, 12, dtype=FP16))


@case()
def pool_to_7(m: Maker) -> Run:
    return m.forward_backward(lambda x: F.adaptive_avg_pool2d(x, 7), m.normal(64, 256, 40, 40))


@case()
def pixel_shuffle(m: Maker) -> Run:
    return m.forward(F.pixel_shuffle, m.normal(16, 256, 96, 96, dtype=FP16), 2)


@case()
def unfold(m: Maker) -> Run:
    return m.forward_backward(lambda x: F.unfold(x, 3, padding=1), m.normal(8, 64, 96, 96))


@case(dtype=(BF16, FP32))
def fill(m: Maker, dtype: torch.dtype) -> Run:
    x = torch.empty(m.size(48_000_000), device=m.device, dtype=dtype)
    return m.forward(lambda: x.fill_(1.5))


@case()
def zero(m: Maker) -> Run:
    x = torch.empty(m.size(48_000_000), device=m.device)
    return m.forward(x.zero_)


@case()
def copy_on_device(m: Maker) -> Run:
    x, y = m.normal(32_000_000, grad=False), m.normal(32_000_000, grad=False)
    return m.forward(lambda: y.copy_(x))


@case(cuda_only=True, pinned=(True, False))
def to_device(m: Maker, pinned: bool) -> Run:
    x = torch.randn(m.size(8_000_000))
    x = x.pin_memory() if pinned else x
    return m.forward(lambda: x.to(m.device, non_blocking=True))


@case()
def to_host(m: Maker) -> Run:
    return m.forward(m.normal(8_000_000).cpu)


@case()
def arange(m: Maker) -> Run:
    return m.forward(lambda: torch.arange(m.size(16_000_000), device=m.device))
