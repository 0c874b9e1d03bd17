"""Norms as they stand in the graph, called or written out; what the patterns around a norm are built on.

RMSNorm:    w x / sqrt(mean(x^2) + eps), the weight perhaps (1 + w), casts anywhere
LayerNorm:  w (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) + b

Not one: eps outside the root or added to the standard deviation, a variance with Bessel's correction (the
default of ``x.var`` and ``x.std``), a mean over other dimensions than the last, a sum in place of the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from .facts import Facts, same_value, sole_user
from .ops import is_op, read
from .parts import (
    factors,
    is_float,
    is_last_dim,
    is_row_vector,
    is_square_of,
    plus_number,
    powered,
    row_mean,
    terms,
    uncast,
)


@dataclass(frozen=True)
class Norm:
    """A norm over the last dimension.

    Attributes:
        rms: RMSNorm; else LayerNorm.
        x: what is normalised, before any cast.
        out: the result, after the last cast that belongs to the norm.
        eps: within the root.
        weight, bias: of a row's length, or None.
        offset: added to the weight.
        casting: ``"llama"`` where the row is rounded to 16 bits before the weight, else ``"fp32"``.
        written_out: built from elementary operations rather than called.
    """

    rms: bool
    x: Node
    out: Node
    eps: float
    weight: Node | None = None
    bias: Node | None = None
    offset: float = 0.0
    casting: str = "fp32"
    written_out: bool = True

    @property
    def what(self) -> str:
        """The name of the formula."""
        name = "RMSNorm" if self.rms else "LayerNorm"
        return f"{name} written out" if self.written_out else name


def norms(facts: Facts) -> Iterator[Norm]:
    """Every norm of the graph, in order; near misses are noted."""
    for node in facts.nodes:
        found = _called(node, facts)
        if found is None:
            core = _core(node, facts)
            found = None if core is None else _extended(core, facts)
        if found is not None and is_float(found.x, found.out):
            yield found


def _called(node: Node, facts: Facts) -> Norm | None:
    call = read(node)
    if call is None or call.op not in ("layer_norm", "rms_norm"):
        return None
    shape = facts.shape(call.input)
    if not shape or list(call["normalized_shape"]) != [shape[-1]]:
        return None
    eps = call["eps"]
    if eps is None:
        dtype = facts.dtype(call.input)
        assert dtype is not None
        eps = torch.finfo(dtype).eps
    if not isinstance(eps, (int, float)):
        return None
    user, out = sole_user(node), node
    if user is not None and is_op(user, "cast") and _narrower(facts.dtype(user), facts.dtype(node)):
        out = user
    return Norm(
        call.op == "rms_norm", call.input, out, eps, call["weight"], call.args.get("bias"), written_out=False
    )


def _core(node: Node, facts: Facts) -> Norm | None:
    """``x / sqrt(mean(x^2) + eps)``, the whole of a norm without weight."""
    split = _over_root(node, facts)
    if split is None:
        return None
    top, moment = split
    inside = plus_number(moment, facts)
    base, eps = inside if inside is not None else (moment, 0.0)
    squared = row_mean(uncast(base), facts)
    if squared is not None:
        x = is_square_of(uncast(squared), facts)
        if x is not None:
            return _rms_or_layer(node, top, x, eps, facts)
    return _of_variance(node, top, base, eps, facts)


def _over_root(node: Node, facts: Facts) -> tuple[Node, Node] | None:
    """``a * b ** -0.5`` and ``a / b ** 0.5`` as (a, b)."""
    call = read(node)
    if (
        call is not None
        and call.op == "div"
        and isinstance(call.input, Node)
        and call["rounding_mode"] is None
    ):
        base, exponent = powered(uncast(call["other"]), facts)
        if exponent == 0.5 and isinstance(base, Node):
            return call.input, base
        _note_eps_outside(node, call["other"], facts)
        return None
    pair = factors(node)
    if pair is not None:
        for top, root in (pair, pair[::-1]):
            base, exponent = powered(uncast(root), facts)
            if exponent == -0.5 and isinstance(base, Node):
                return top, base
    return None


def _note_eps_outside(node: Node, below: Any, facts: Facts) -> None:
    outside = plus_number(uncast(below), facts)
    if outside is not None and powered(uncast(outside[0]), facts)[1] == 0.5:
        facts.refuse("norm", node, "eps is added to the root rather than under it: another formula")


def _rms_or_layer(node: Node, top: Node, x: Node, eps: float, facts: Facts) -> Norm | None:
    weight = None
    if not same_value(top, x):
        top, weight = _weighted(top, x, facts)
    if not same_value(top, x):
        facts.refuse("norm", node, "what is divided is not what the mean square is taken of")
        return None
    centred = _centred(uncast(x), facts)
    if centred is not None:
        return Norm(False, uncast(centred), node, eps, weight)
    return Norm(True, uncast(x), node, eps, weight)


def _weighted(top: Node, x: Node, facts: Facts) -> tuple[Node, Node | None]:
    """(x, w) of ``w * x``, where the weight multiplies before the division."""
    for row, weight in (pair, pair[::-1]) if (pair := factors(top)) is not None else ():
        if same_value(row, x) and is_row_vector(weight, row, facts):
            return row, uncast(weight)
    return top, None


def _centred(node: Any, facts: Facts) -> Any:
    """The x of ``x - mean(x)``, or None."""
    call = read(node)
    if call is None or call.op != "sub" or call["alpha"] != 1:
        return None
    mean_of = row_mean(uncast(call["other"]), facts)
    return call.input if mean_of is not None and same_value(mean_of, call.input) else None


def _of_variance(node: Node, top: Node, base: Node, eps: float, facts: Facts) -> Norm | None:
    """LayerNorm by way of ``x.var(-1, unbiased=False)``."""
    call = read(uncast(base))
    if call is None or call.op != "var" or call["keepdim"] is not True:
        return None
    shape = facts.shape(call.input)
    x = _centred(uncast(top), facts)
    if x is None or not same_value(x, call.input) or not shape or not is_last_dim(call["dim"], len(shape)):
        return None
    if call["correction"] != 0 and call["unbiased"] is not False:
        facts.refuse("norm", node, "the variance has Bessel's correction: another formula")
        return None
    return Norm(False, uncast(x), node, eps)


def _extended(core: Norm, facts: Facts) -> Norm:
    """The norm with the casts, the weight and the bias that follow it."""
    node, found, wide = core.out, core, facts.dtype(core.out)
    rounded = False
    while True:
        user = sole_user(node)
        if user is None:
            return found
        if is_op(user, "cast") and is_float(user):
            rounded = rounded or _narrower(facts.dtype(user), wide)
            # A cast belongs to the norm, but not one beyond what the norm's input was.
            found = replace(found, out=user)
        elif found.weight is None and found.bias is None and (scale := _weight(user, node, facts)):
            weight, offset = scale
            casting = "llama" if rounded else "fp32"
            found = replace(found, out=user, weight=weight, offset=offset, casting=casting)
        elif not found.rms and found.bias is None and (bias := _bias(user, node, facts)) is not None:
            found = replace(found, out=user, bias=bias)
        else:
            return found
        node = user


def _narrower(dtype: torch.dtype | None, wide: torch.dtype | None) -> bool:
    return dtype is not None and wide is not None and dtype.itemsize < wide.itemsize


def _weight(user: Node, node: Node, facts: Facts) -> tuple[Node, float] | None:
    """The weight, and its offset, by which the user multiplies."""
    pair = factors(user)
    if pair is None:
        return None
    other = pair[1] if pair[0] is node else pair[0]
    if other is node or not is_row_vector(other, node, facts):
        return None
    plain = uncast(other)
    offset = plus_number(plain, facts)
    if offset is not None and is_row_vector(offset[0], node, facts):
        return uncast(offset[0]), offset[1]
    return plain, 0.0


def _bias(user: Node, node: Node, facts: Facts) -> Node | None:
    pair = terms(user)
    if pair is None:
        return None
    other = pair[1] if pair[0] is node else pair[0]
    return uncast(other) if other is not node and is_row_vector(other, node, facts) else None
