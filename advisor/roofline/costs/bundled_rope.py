"""The bundled rotary embedding: queries and keys read and written once, the tables read once."""

from __future__ import annotations

from advisor.roofline.costs.args import footprint, integer, itemsize, optional, tensor
from advisor.roofline.costs.conventions import FMA, MUL
from advisor.roofline.costs.model import Cost, OpCall
from advisor.roofline.costs.registry import cost

#: The family of operators that these count under.
FAMILY = "pointwise"


@cost("advisor_kernels::rope")
def rope(call: OpCall) -> Cost:
    """Two products and a sum for each rotated element, forward and backward alike."""
    q, k = tensor(call, 0), optional(call, 1)
    given = [q] if k is None else [q, k]
    rotated = sum(x.numel for x in given) * integer(call, 4) / q.shape[-1]
    read = sum(map(footprint, given)) + footprint(tensor(call, 2)) + footprint(tensor(call, 3))
    written = sum(x.numel * itemsize(x.dtype) for x in given)
    return Cost(float((MUL + FMA) * rotated), read, written, "vector_fp32")
