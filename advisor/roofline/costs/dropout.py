"""Dropout: one random number an element; an H200's kernel executes 1 FFMA and 2 FMUL an element."""

from __future__ import annotations

from advisor.roofline.costs.args import footprint, itemsize, tensor, text, vector_pipe
from advisor.roofline.costs.conventions import FMA, MUL
from advisor.roofline.costs.model import Cost, OpCall
from advisor.roofline.costs.registry import cost


@cost("aten::native_dropout", "aten::_fused_dropout")
def native_dropout(call: OpCall) -> Cost:
    """Reads x; writes y and, in training, a mask of one byte an element."""
    x = tensor(call, 0)
    mask = 0.0 if text(call, 2).lower() == "false" else float(x.numel)
    return Cost(
        float((FMA + 2 * MUL) * x.numel),
        footprint(x),
        x.numel * itemsize(x.dtype) + mask,
        vector_pipe(x.dtype),
    )


@cost("aten::native_dropout_backward", "aten::_masked_scale")
def native_dropout_backward(call: OpCall) -> Cost:
    """``dy * mask * scale``."""
    grad, mask = tensor(call, 0), tensor(call, 1)
    written = grad.numel * itemsize(grad.dtype)
    return Cost(
        float(2 * MUL * grad.numel), footprint(grad) + footprint(mask), written, vector_pipe(grad.dtype)
    )
