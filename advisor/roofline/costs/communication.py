"""Collectives: bytes of the payload that leave and enter device memory. Their roof is the link."""

from __future__ import annotations

import math

from advisor.roofline.costs import roles
from advisor.roofline.costs.args import Unknown, itemsize
from advisor.roofline.costs.model import Cost, OpCall, Tensor
from advisor.roofline.costs.registry import cost


@cost("nccl:*", "nccl*", "rccl*", "c10d::*", "_c10d_functional::*", "record_param_comms", "gloo:*")
def collective(call: OpCall) -> Cost:
    """The largest tensor (list) among the arguments, read and written once; additions are not counted."""
    names = [roles.element_dtype(launch.name) for launch in call.launches]
    named = next((name for name in names if name != "unknown"), "unknown")
    payloads = []
    for arg in call.inputs:
        items = arg if isinstance(arg, tuple) else (arg,) if isinstance(arg, Tensor) else ()
        if items:
            payloads.append(sum(_size(item, named) for item in items))
    payload = max(payloads, default=0.0)
    if not payload:
        raise Unknown("payload not recorded")
    return Cost(0.0, payload, payload, "none")


def _size(item: Tensor, named: str) -> float:
    if any(size < 0 for size in item.shape):
        raise Unknown("impossible shape")
    return math.prod(item.shape) * itemsize(item.dtype if item.dtype != "unknown" else named)
