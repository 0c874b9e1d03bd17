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


#: cuBLAS' aligned products: most of a GPT's and a Llama's lie within 15 % of the middle. TF32: 0.71 at 8192³.
_MATMUL_16 = _Speed((0.62, 0.78, 0.95), (6_000, 4_000, 2_000))
_MATMUL_TF32 = _Speed((0.45, 0.62, 0.74), (8_000, 5_000, 3_000))
_CONVOLUTION = _Speed((0.30, 0.45, 0.65), (10_000, 6_000, 3_000))
#: Rows of no whole 16 bytes: cuBLAS falls back to kernels of two generations ago, 94 to 147 of 989 TFLOP/s.
_UNALIGNED_16 = _Speed((0.09, 0.12, 0.16), (6_000, 4_000, 3_000))
_UNALIGNED_TF32 = _Speed((0.12, 0.21, 0.33), (8_000, 5_000, 3_000))
#: One pass over memory: forward of bundled and compiled kernels takes 1.2 to 1.7 times the roof.
_PASS = _Speed((0.45, 0.62, 0.85), (5_000, 3_000, 1_500))

#: Share of the 16-bit matrix peak that fused attention reaches over 1024 and more tokens: by head dimension
#: up to 64 and above, without and with a causal mask. cuDNN's on Hopper, FlashAttention-2 elsewhere.
_ATTENTION = {"sm_90": ((0.38, 0.27), (0.61, 0.53)), "sm_80": ((0.50, 0.40), (0.58, 0.50))}
_ATTENTION_BACKWARD = {"sm_90": ((0.34, 0.22), (0.53, 0.45)), "sm_80": ((0.40, 0.30), (0.46, 0.40))}
#: FlashAttention-2 on Hopper over cuDNN there, and what shorter sequences cost.
_SLOWER_BACKEND = 0.6
#: The memory-efficient kernel, which takes any mask, over the fast ones.
_MASKED = 0.45
_SHORT = 256.0


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
    """Time of fused attention forward and backward; None where the device has no roof for it.

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
    peak, bandwidth = device.peak(pipe) or device.peak("vector_fp32"), device.bandwidth_bytes_per_s
    if not peak or not bandwidth:
        return None
    arch = "sm_90" if device.arch >= "sm_90" or device.arch.startswith("sm_1") else "sm_80"
    row = 0 if max(dim, dim_v) <= 64 else 1
    # Before compute capability 8.0 there is the memory-efficient kernel alone.
    masked = masked or device.arch.startswith("sm_7")
    short = (queries / (queries + _SHORT)) / (1024 / (1024 + _SHORT))
    width = 2 if is_16_bit(pipe) else 4
    # Queries, keys, values and the result; backward those, their gradients and an fp32 copy of one.
    moved = batch_heads * queries * (2 * dim + 2 * dim_v) * width

    def time(flops: float, nbytes: float, share: float) -> Estimate:
        share *= min(1.0, short) * (1.0 if width == 2 else 0.6)
        compute, memory = flops / peak * 1e9 / share, nbytes / bandwidth * 1e9 / 0.6
        fast = max(compute, memory) + 4_000
        likely = fast / _MASKED if masked else fast
        return Estimate(likely / _SLOWER_BACKEND, likely, fast * 0.75)

    forward = time(2.0 * entries * (dim + dim_v), moved, _ATTENTION[arch][row][causal])
    backward = time(2.0 * entries * (3 * dim + 2 * dim_v), 3 * moved, _ATTENTION_BACKWARD[arch][row][causal])
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
