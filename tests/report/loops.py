"""Loops as built traces, and their analysis."""

from __future__ import annotations

from advisor.roofline.analysis import Analysis, analyse_timeline
from tests.trace.builder import Builder

SQUARE = [4096, 4096]
MM_FLOPS = 2 * 4096**3
MM_BYTES = 3 * 4096**2 * 2


def loop(
    builder: Builder | None = None, *, steps: int = 3, step_us: float = 1000, mm_us: float = 300
) -> Builder:
    """Steps of one bf16 product of 4096³ and one addition (40 µs), each kernel soon after its launch."""
    builder = builder or Builder()
    for i in range(steps):
        start = 10_000 + i * step_us
        builder.step(i, start, step_us)
        builder.op("aten::mm", start + 10, 30, dims=[SQUARE, SQUARE], dtype="c10::BFloat16")
        builder.launch("sm90_xmma_gemm_bf16bf16", start + 20, at=start + 50, dur=mm_us)
        builder.op("aten::add", start + 50, 30, dims=[SQUARE, SQUARE, []], dtype="c10::BFloat16")
        builder.launch("vectorized_elementwise_kernel", start + 60, at=start + 60 + mm_us, dur=40)
    return builder


def analyse(builder: Builder, **options) -> Analysis:
    return analyse_timeline(builder.join(), **options)
