"""Cost formulas: FLOPs and bytes of an operator's launches from its shapes, dtypes, strides and values.

One module a family; a formula registers itself with `cost`. See ``docs/costs.md``.
"""

from advisor.roofline.costs.model import DTYPE_BYTES, Arg, Cost, Launch, OpCall, Tensor
from advisor.roofline.costs.parse import parse_dtype, parse_inputs
from advisor.roofline.costs.registry import (
    cost,
    family,
    knows,
    launch_costs,
    op_cost,
    partner_of,
)
from advisor.roofline.costs.roles import bare_operator

__all__ = [
    "DTYPE_BYTES",
    "Arg",
    "Cost",
    "Launch",
    "OpCall",
    "Tensor",
    "bare_operator",
    "cost",
    "family",
    "knows",
    "launch_costs",
    "op_cost",
    "parse_dtype",
    "parse_inputs",
    "partner_of",
]
