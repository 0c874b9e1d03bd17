"""How long kernels take in practice: shares of the roof that good ones reach, measured on an H200.

Fitted to traces of GPT, Llama and ResNet loops and to the benchmarks in ``benchmarks/results`` (torch 2.11,
CUDA 13). A kernel's time is its time at the datasheet's roof over a share that large kernels reach, and a
start-up that does not shrink with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from advisor.advice.edits import Estimate, Number
from advisor.roofline.devices import Device


@dataclass(frozen=True, slots=True)
class _Speed:
    """Share of the roof of large kernels, and start-up, from pessimistic to optimistic."""

    share: tuple[float, float, float]
    start_ns: tuple[float, float, float]

    def time(self, roof_ns: Number) -> Estimate:
        return Estimate(
            *(roof_ns / share + start for share, start in zip(self.share, self.start_ns, strict=True))
        )


#: cuBLAS' aligned products: four in five of 141 sizes lie within 10 % of the middle. TF32 reaches 0.81 of its
#: peak in a layer's forward and 0.40 to 0.53 in its weight's gradient.
_MATMUL_16 = _Speed((0.62, 0.78, 0.95), (6_000, 4_000, 2_000))
_MATMUL_TF32 = _Speed((0.40, 0.66, 0.82), (8_000, 5_000, 3_000))
_CONVOLUTION = _Speed((0.30, 0.45, 0.65), (10_000, 6_000, 3_000))
#: Rows of no whole 16 bytes: cuBLAS falls back to kernels of two generations ago, 94 to 147 of 989 TFLOP/s.
_UNALIGNED_16 = _Speed((0.09, 0.12, 0.16), (6_000, 4_000, 3_000))
_UNALIGNED_TF32 = _Speed((0.12, 0.21, 0.33), (8_000, 5_000, 3_000))
#: One pass over memory: forward of bundled and compiled kernels takes 1.2 to 1.7 times the roof.
_PASS = _Speed((0.45, 0.62, 0.85), (5_000, 3_000, 1_500))


@dataclass(frozen=True, slots=True)
class _Attention:
    """Fused attention on one architecture, one way: share of the 16-bit matrix peak over long sequences.

    Over L tokens it is L / (L + `half`) of that, for each tile of queries has a fixed cost; under a causal
    mask, where tiles on the diagonal are computed whole, more so.
    """

    to_64: float
    above_64: float
    half: float
    half_causal: float
    start_ns: float


#: cuDNN's on Hopper, within 12 % of nine shapes of 512 to 8192 tokens; FlashAttention-2 elsewhere.
_FORWARD = {
    "sm_90": _Attention(0.46, 0.62, 256, 400, 6_000),
    "sm_80": _Attention(0.62, 0.73, 256, 400, 4_000),
}
_BACKWARD = {
    "sm_90": _Attention(0.42, 0.55, 256, 750, 12_000),
    "sm_80": _Attention(0.50, 0.58, 256, 400, 8_000),
}
#: FlashAttention-2 on Hopper over cuDNN there.
_SLOWER_BACKEND = 0.6
#: With any mask over without: cuDNN's on Hopper, 0.57 to 0.65; elsewhere the memory-efficient kernel.
_MASKED = {"sm_90": 0.6, "sm_80": 0.45}
#: In fp32 only the memory-efficient kernel runs, in several TF32 products or on plain units: its share of the
#: TF32 peak over that of the fast ones of theirs. Hopper: 19 TFLOP/s over 512 tokens, 28 over 1024; Ampere's
#: is Hopper's by multiprocessors and clock.
_FP32 = {"sm_90": 0.2, "sm_80": 0.3}
_WITHOUT_TF32 = 0.6


def is_16_bit(pipe: str) -> bool:
    """Whether a pipe multiplies 16-bit numbers."""
    return pipe in ("tensor_bf16", "tensor_fp16")


def roof_ns(device: Device, flops: Number, nbytes: Number, pipe: str) -> Number | None:
    """Time at the roof; None where the device has no such roof."""
    peak, bandwidth = device.peak(pipe), device.bandwidth_bytes_per_s
    if not peak or not bandwidth:
        return None
    return np.maximum(np.asarray(flops, float) / peak, np.asarray(nbytes, float) / bandwidth) * 1e9


def matmul_ns(
    device: Device, flops: Number, nbytes: Number, pipe: str, *, aligned: bool | np.ndarray = True
) -> Estimate | None:
    """Time of matrix products on tensor cores; None where the device has no such roof.

    Args:
        device: it runs on.
        flops, nbytes: numbers or (n,).
        pipe: ``tensor_bf16``, ``tensor_fp16`` or ``tensor_tf32``.
        aligned: whether all rows begin at multiples of 16 bytes; (n,) or one for all.
    """
    roof = roof_ns(device, flops, nbytes, pipe)
    peak = device.peak(pipe)
    if roof is None or not peak:
        return None
    well, badly = (_MATMUL_16, _UNALIGNED_16) if is_16_bit(pipe) else (_MATMUL_TF32, _UNALIGNED_TF32)
    good = well.time(roof)
    bad = badly.time(np.asarray(flops, float) / peak * 1e9)
    return pick(aligned, good, bad)


def convolution_ns(device: Device, flops: Number, nbytes: Number, pipe: str) -> Estimate | None:
    """Time of convolutions on tensor cores; None where the device has no such roof."""
    roof = roof_ns(device, flops, nbytes, pipe)
    return None if roof is None else _CONVOLUTION.time(roof)


def pass_ns(device: Device, nbytes: Number) -> Estimate | None:
    """Time of one fused pass that moves so many bytes; None where the bandwidth is not known."""
    if not device.bandwidth_bytes_per_s:
        return None
    return _PASS.time(np.asarray(nbytes, float) / device.bandwidth_bytes_per_s * 1e9)


def attention_ns(
    device: Device,
    *,
    entries: float,
    queries: int,
    dim: int,
    dim_v: int,
    batch_heads: int,
    causal: bool,
    dtype: str,
    masked: bool = False,
) -> tuple[Estimate, Estimate] | None:
    """Time of fused attention forward and backward; None where the device has no roof for it, or no query is.

    Args:
        device: it runs on.
        entries: score entries computed, over all batches and heads; half of them where causal.
        queries: tokens of a sequence.
        dim, dim_v: head dimensions.
        batch_heads: sequences times heads.
        causal: whether a triangular mask leaves half of the work.
        dtype: ``bf16``, ``fp16``, or ``fp32``, for which only a slower kernel exists.
        masked: whether a mask is read, which the fastest kernels do not take.
    """
    pipe = f"tensor_{dtype}" if dtype in ("bf16", "fp16") else "tensor_tf32"
    has_pipe, bandwidth = device.peak(pipe), device.bandwidth_bytes_per_s
    peak = has_pipe or device.peak("vector_fp32")
    if not peak or not bandwidth or queries < 1:
        return None
    arch = "sm_90" if device.arch >= "sm_90" or device.arch.startswith("sm_1") else "sm_80"
    # Before compute capability 8.0 there is the memory-efficient kernel alone.
    masked = masked or device.arch.startswith("sm_7")
    width = 2 if is_16_bit(pipe) else 4
    slowed = 1.0 if width == 2 else _FP32[arch] if has_pipe else _WITHOUT_TF32
    # Queries, keys, values and the result; backward those, their gradients and an fp32 copy of one.
    moved = batch_heads * queries * (2 * dim + 2 * dim_v) * width

    def time(flops: float, nbytes: float, of: _Attention) -> Estimate:
        share = of.to_64 if max(dim, dim_v) <= 64 else of.above_64
        share *= queries / (queries + (of.half_causal if causal else of.half))
        share *= slowed
        compute, memory = flops / peak * 1e9 / share, nbytes / bandwidth * 1e9 / 0.6
        fast = max(compute, memory) + of.start_ns
        likely = fast / _MASKED[arch] if masked and width == 2 else fast
        return Estimate(likely / _SLOWER_BACKEND, likely, fast * 0.75)

    forward = time(2.0 * entries * (dim + dim_v), moved, _FORWARD[arch])
    backward = time(2.0 * entries * (3 * dim + 2 * dim_v), 3 * moved, _BACKWARD[arch])
    return forward, backward


def pick(condition: bool | np.ndarray, where: Estimate, otherwise: Estimate) -> Estimate:
    """One estimate where a condition holds, another elsewhere."""
    return Estimate(
        np.where(condition, where.pessimistic, otherwise.pessimistic),
        np.where(condition, where.likely, otherwise.likely),
        np.where(condition, where.optimistic, otherwise.optimistic),
    )


def at_most(estimate: Estimate, now: Number, *, worse: float = 1.0) -> Estimate:
    """An estimate that does not exceed what is taken now (`worse` times that in the pessimistic case)."""
    return Estimate(
        np.minimum(estimate.pessimistic, np.asarray(now) * worse),
        np.minimum(estimate.likely, now),
        np.minimum(estimate.optimistic, now),
    )


def aligned(size: int, itemsize: float) -> bool:
    """Whether rows of so many elements begin at multiples of 16 bytes, as tensor-core kernels load them."""
    return math.isclose(size * itemsize % 16, 0.0)
