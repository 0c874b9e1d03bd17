"""The bundled cross-entropy, alone and behind a linear layer (whose matrix products are ``aten::mm`` calls).

Logits are counted once: the second sweep of a row finds it in the cache. Rows that ignore_index excludes are
not read, but which they are a trace does not say: all are counted.
"""

from __future__ import annotations

import math

from advisor.roofline.costs.args import (
    Unknown,
    flag,
    footprint,
    integer,
    itemsize,
    named_dtype,
    tensor,
)
from advisor.roofline.costs.conventions import ADD, EXP, FMA, MUL
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import Result, cost

#: The family of operators that these count under.
FAMILY = "loss"

#: An element's part in the log-sum-exp, and of the gradient.
_SUM, _GRADIENT = EXP + 2 * ADD, EXP + 2 * ADD + FMA + MUL
#: fp32 loss, and log-sum-exp in two parts, of a row.
_ROW_BYTES = 12
_CLASSES_MULTIPLE = 64


@cost("advisor_kernels::cross_entropy")
def forward(call: OpCall) -> Cost:
    """The loss, and where asked for the gradient, written once."""
    logits, target = tensor(call, 0), tensor(call, 1)
    gradient = flag(call, 6)
    flops = float((_SUM + (_GRADIENT if gradient else 0)) * logits.numel)
    written = target.numel * _ROW_BYTES + (logits.numel * itemsize(logits.dtype) if gradient else 0.0)
    return Cost(flops, footprint(logits) + footprint(target), written, "vector_fp32")


@cost("advisor_kernels::cross_entropy_backward")
def backward(call: OpCall) -> Cost:
    """The gradient from the logits and their log-sum-exp."""
    logits, target, lse = (tensor(call, i) for i in (1, 2, 3))
    read = footprint(logits) + footprint(target) + footprint(lse)
    written = logits.numel * itemsize(logits.dtype)
    return Cost(float(_GRADIENT * logits.numel), read, written, "vector_fp32")


def _chunks(
    call: OpCall, x: Tensor, weight: Tensor, chunk: int, width: float, swept: int, gradient: bool
) -> Result:
    """One cost a chunk of tokens: its logits read, and their gradient written over them with the padding."""
    if len(x.shape) != 2 or chunk <= 0:
        raise Unknown("chunks not recorded")
    tokens, classes = x.shape[0], weight.shape[0]
    padded = math.ceil(classes / _CLASSES_MULTIPLE) * _CLASSES_MULTIPLE
    sizes = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    costs = tuple(
        Cost(
            float(rows * classes * swept),
            rows * (classes * width + 8),
            rows * (_ROW_BYTES + (padded * width if gradient else 0.0)),
            "vector_fp32",
        )
        for rows in sizes
    )
    if len(costs) == len(call.launches):
        return costs
    return Cost(
        sum(c.flops for c in costs),
        sum(c.bytes_read for c in costs),
        sum(c.bytes_written for c in costs),
        "vector_fp32",
    )


@cost("advisor_kernels::linear_cross_entropy")
def linear_forward(call: OpCall) -> Result:
    """Loss, and the logits' gradient where any of the three gradients is wanted."""
    x, weight = tensor(call, 0), tensor(call, 1)
    gradient = any(flag(call, i) for i in (10, 11, 12))
    width = itemsize(named_dtype(call, 4) or x.dtype)
    swept = _SUM + (_GRADIENT if gradient else 0)
    return _chunks(call, x, weight, integer(call, 9), width, swept, gradient)


@cost("advisor_kernels::linear_cross_entropy_backward")
def linear_backward(call: OpCall) -> Result:
    """The logits' gradient for weights that differ by row."""
    x, weight = tensor(call, 1), tensor(call, 2)
    width = itemsize(named_dtype(call, 6) or x.dtype)
    return _chunks(call, x, weight, integer(call, 10), width, _GRADIENT, True)
