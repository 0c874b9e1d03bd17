"""Recurrent layers and Fourier transforms."""

from __future__ import annotations

import torch

from benchmarks.counters.zoo import Maker, Run, case, with_tf32

FP16 = torch.float16


@case(kind=("LSTM", "GRU"))
def layer(m: Maker, kind: str) -> Run:
    width = m.size(1024)
    module = getattr(torch.nn, kind)(width, width).to(m.device, FP16)
    return m.module_forward_backward(module, m.normal(6, 256, 1024, dtype=FP16))


@case()
def lstm_fp32(m: Maker) -> Run:
    width = m.size(768)
    module = torch.nn.LSTM(width, width, batch_first=True).to(m.device)
    x = m.normal(192, 5, 768, grad=False)
    return with_tf32(True, m.forward(module, x))


@case(length=(4096, 3000))
def fft(m: Maker, length: int) -> Run:
    x = m.normal(4000, length, dtype=torch.complex64, grad=False)
    return m.forward(torch.fft.fft, x)


@case()
def rfft2(m: Maker) -> Run:
    x = m.normal(48, 512, 512, grad=False)
    return m.forward(lambda: torch.fft.irfft2(torch.fft.rfft2(x)))
