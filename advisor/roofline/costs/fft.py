"""Fast Fourier transforms: ``5 n log2 n`` FLOPs if complex, half of it if real (FFTW's benchFFT)."""

from __future__ import annotations

import math

from advisor.roofline.costs.args import Unknown, footprint, integer, integers, itemsize, tensor
from advisor.roofline.costs.model import Cost, OpCall
from advisor.roofline.costs.registry import Result, cost

_COMPLEX = {"fp16": "complex32", "fp32": "complex64", "fp64": "complex128"}
_REAL = {value: key for key, value in _COMPLEX.items()}


@cost("aten::_fft_c2c", "aten::_fft_r2c", "aten::_fft_c2r")
def fft(call: OpCall) -> Result:
    """Transforms over the listed dimensions; ``n`` real elements become ``n / 2 + 1`` complex ones.

    Where it takes several kernels, each of them reads what the one before has written: all of it.
    """
    x, dims = tensor(call, 0), integers(call, 1)
    shape = list(x.shape)
    if not dims or any(not -len(shape) <= dim < len(shape) for dim in dims):
        raise Unknown("no such dimension")
    last = dims[-1]
    if call.name == "aten::_fft_c2r":
        shape[last] = integer(call, 3)
    points = math.prod(shape[dim] for dim in dims)
    count = math.prod(shape) / points
    flops = 5.0 * points * math.log2(max(2, points)) * count
    dtype = x.dtype
    if call.name == "aten::_fft_r2c":
        flops, dtype = flops / 2, _COMPLEX[x.dtype]
        shape[last] = shape[last] // 2 + 1
    elif call.name == "aten::_fft_c2r":
        flops, dtype = flops / 2, _REAL[x.dtype]
    pipe = "vector_fp64" if "128" in dtype or ("64" in dtype and dtype.startswith("fp")) else "vector_fp32"
    written = math.prod(shape) * itemsize(dtype)
    passes = len(call.launches)
    if passes < 2:
        return Cost(flops, footprint(x), written, pipe)
    between = max(written, footprint(x))
    return tuple(
        Cost(
            flops / passes,
            between if at else footprint(x),
            between if at < passes - 1 else written,
            pipe,
        )
        for at in range(passes)
    )
