"""Triton's interpreter with the arithmetic of NVIDIA's fast instructions, so that their errors show on a CPU.

NumPy rounds each operation correctly; a GPU does not where Triton asks for its approximations. Here those
results are off by up to what NVIDIA's PTX reference gives as the largest ("Floating Point Instructions"): 2
ulp of ex2.approx and of div.full, 1 ulp of rcp.approx, sqrt.approx and rsqrt.approx; by how much is a hash
of the operands, so that a repeat gives the same. `expf` is CUDA's function of that name, ex2.approx of a
product with log2(e) that is not rounded: what PyTorch's own kernels call, and ours where they are to be as
exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter

_ULP = 2.0**-23


def install(monkeypatch: Any, seed: int = 0) -> None:
    """From here on, until the monkeypatch is undone, kernels under the interpreter compute so."""

    def divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        # A quotient of 1 is a reciprocal; powers of two divide exactly.
        return _off(np.divide, np.where(_is_power_of_2(y), 0, np.where(x == 1, 1, 2)), seed, x, y)

    builder = interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "create_exp2", lambda b, x: b.unary_op(x, lambda x: exp2(x, seed)))
    monkeypatch.setattr(builder, "create_exp", lambda b, x: b.unary_op(x, lambda x: expf(x, seed)))
    monkeypatch.setattr(
        builder, "create_sqrt", lambda b, x: b.unary_op(x, lambda x: _off(np.sqrt, 1, seed, x))
    )
    monkeypatch.setattr(
        builder, "create_rsqrt", lambda b, x: b.unary_op(x, lambda x: _off(_rsqrt, 1, seed, x))
    )
    fuse(monkeypatch)
    monkeypatch.setattr(builder, "create_fdiv", lambda b, x, y: b.binary_op(x, y, divide))


def fuse(monkeypatch: Any) -> None:
    """From here on a fused product and sum is rounded once, as on every GPU; the interpreter rounds twice."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", _fused)


def exp2(x: np.ndarray, seed: int = 0) -> np.ndarray:
    """ex2.approx, which is 1 of 0."""
    return _off(np.exp2, np.where(x == 0, 0, 2), seed, x)


def expf(x: np.ndarray, seed: int = 0) -> np.ndarray:
    """CUDA's exponential to base e."""
    return _off(np.exp, np.where(x == 0, 0, 2), seed, x)


def _rsqrt(x: np.ndarray) -> np.ndarray:
    return 1 / np.sqrt(x)


def _off(function: Any, ulps: Any, seed: int, *operands: np.ndarray) -> np.ndarray:
    """The function's exact value, off by a share of `ulps` that depends on the operands' bits."""
    assert all(operand.dtype == np.float32 for operand in operands), "only fp32 is approximated"
    with np.errstate(all="ignore"):
        exact = function(*(operand.astype(np.float64) for operand in operands))
        return (exact * (1 + ulps * _ULP * _noise(seed, *operands))).astype(np.float32)


def _noise(seed: int, *operands: np.ndarray) -> np.ndarray:
    """Evenly spread from -1 to 1; equal operands give equal values."""
    bits: Any = np.full((), seed, np.uint32)
    for operand in operands:
        own = np.ascontiguousarray(operand).view(np.uint32).reshape(operand.shape)
        bits = (bits ^ own) * np.uint32(0x9E3779B1)
        bits = bits ^ (bits >> np.uint32(15))
    return bits.astype(np.float64) / 2**31 - 1


def _fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """The product in full before the sum is rounded."""
    x64, y64, z64 = (operand.data.astype(np.float64) for operand in (x, y, z))
    with np.errstate(all="ignore"):
        return interpreter.TensorHandle((x64 * y64 + z64).astype(z.data.dtype), z.dtype.scalar)


def _is_power_of_2(x: np.ndarray) -> np.ndarray:
    return np.abs(np.frexp(x)[0]) == 0.5
