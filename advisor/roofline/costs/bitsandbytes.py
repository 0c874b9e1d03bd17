"""bitsandbytes' operators (``bitsandbytes/_ops.py``): 8-bit products, 4- and 8-bit storage."""

from __future__ import annotations

import math

from advisor.roofline.costs.args import (
    Unknown,
    footprint,
    integers,
    itemsize,
    named_dtype,
    tensor,
    vector_pipe,
)
from advisor.roofline.costs.conventions import MUL
from advisor.roofline.costs.matmul import product
from advisor.roofline.costs.model import Cost, OpCall
from advisor.roofline.costs.registry import Result, cost

#: The family of operators that these count under.
FAMILY = "matmul"


@cost("bitsandbytes::int8_linear_matmul")
def int8_product(call: OpCall) -> Result:
    """``(..., k)`` by ``(n, k)``, int8 in, int32 out."""
    x, weight = tensor(call, 0), tensor(call, 1)
    if len(weight.shape) != 2 or x.shape[-1] != weight.shape[1]:
        raise Unknown("inner sizes differ")
    n, k = weight.shape
    return product(call, x, weight, x.numel // k, n, k, out_dtype="int32")


@cost("bitsandbytes::dequantize_4bit")
def dequantise_4bit(call: OpCall) -> Cost:
    """Two numbers a byte, and a scale a block, to the listed shape and dtype."""
    packed, scales = tensor(call, 0), tensor(call, 1)
    elements, dtype = math.prod(integers(call, 4)), named_dtype(call, 5)
    if dtype is None or elements not in (2 * footprint(packed), 2 * footprint(packed) - 1):
        raise Unknown("shape or dtype not recorded")
    read = footprint(packed) + footprint(scales)
    return Cost(float(MUL * elements), read, elements * itemsize(dtype), "vector_fp32")


@cost("bitsandbytes::dequantize_blockwise")
def dequantise(call: OpCall) -> Cost:
    """A byte an element and a scale a block to the named dtype."""
    packed, scales, dtype = tensor(call, 0), tensor(call, 1), named_dtype(call, 4)
    if dtype is None:
        raise Unknown("dtype not recorded")
    read = footprint(packed) + footprint(scales)
    return Cost(float(MUL * packed.numel), read, packed.numel * itemsize(dtype), "vector_fp32")


@cost("bitsandbytes::quantize_4bit", "bitsandbytes::quantize_blockwise")
def quantise(call: OpCall) -> Cost:
    """Reads x; writes half a byte, or a byte, an element: the scales of blocks are few."""
    x = tensor(call, 0)
    written = x.numel * (0.5 if "4bit" in call.name else 1.0)
    return Cost(float(2 * MUL * x.numel), footprint(x), written, vector_pipe(x.dtype))
