"""Pieces that several patterns are made of: scaled values, activations, halves, added biases."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from .facts import Facts, fake, same_value, through
from .ops import Call, is_op, read


def scaled(node: Any, facts: Facts) -> tuple[Any, float]:
    """The node without multiplications and divisions by numbers, and the product of those."""
    factor = 1.0
    while True:
        call = read(node)
        if call is None or call.op not in ("mul", "div", "neg"):
            return node, factor
        step = _scale_step(call, facts)
        if step is None:
            return node, factor
        node, by = step
        factor *= by


def _scale_step(call: Call, facts: Facts) -> tuple[Node, float] | None:
    if call.op == "neg":
        return (call.input, -1.0) if isinstance(call.input, Node) else None
    left, right = call["input"], call["other"]
    number = facts.number(right)
    if call.op == "div":
        if number and call["rounding_mode"] is None and isinstance(left, Node):
            return left, 1.0 / number
        return None
    if number is None:
        left, right = right, left
        number = facts.number(right)
    return (left, number) if number is not None and isinstance(left, Node) else None


def plus_number(node: Any, facts: Facts) -> tuple[Any, float] | None:
    """``x + c`` as (x, c)."""
    call = read(node)
    if call is None or call.op != "add" or call["alpha"] != 1:
        return None
    for a, b in ((call["input"], call["other"]), (call["other"], call["input"])):
        number = facts.number(b)
        if number is not None and isinstance(a, Node):
            return a, number
    return None


def factors(node: Any) -> tuple[Node, Node] | None:
    """The two tensors of a product."""
    call = read(node)
    return _two_tensors(call) if call is not None and call.op == "mul" else None


def terms(node: Any) -> tuple[Node, Node] | None:
    """The two tensors of a sum."""
    call = read(node)
    return _two_tensors(call) if call is not None and call.op == "add" and call["alpha"] == 1 else None


def _two_tensors(call: Call) -> tuple[Node, Node] | None:
    a, b = call["input"], call["other"]
    return None if fake(a) is None or fake(b) is None else (a, b)


@dataclass(frozen=True)
class Activation:
    """``f(x)`` as it stands in the graph.

    Attributes:
        name: as the kernels call f.
        x: its argument.
        written_out: built from elementary operations rather than called by name.
    """

    name: str
    x: Node
    written_out: bool = False


def activation(node: Any, facts: Facts) -> Activation | None:
    """The activation whose result the node is, called or written out."""
    call = read(node)
    if call is None:
        return None
    if call.op in ("relu", "silu", "gelu"):
        tanh = call.op == "gelu" and call["approximate"] == "tanh"
        if call.op == "gelu" and call["approximate"] not in ("none", "tanh"):
            return None
        return Activation("gelu_tanh" if tanh else call.op, call.input)
    if call.op in ("pow", "square", "mul"):
        return _relu_squared(call, facts) or _written_out(node, facts)
    return _written_out(node, facts)


def _relu_squared(call: Call, facts: Facts) -> Activation | None:
    base = call.input
    if call.op == "pow" and facts.number(call["exponent"]) != 2.0:
        return None
    if call.op == "mul" and call["other"] is not base:
        return None
    inner = read(base)
    return Activation("relu_squared", inner.input, True) if inner is not None and inner.op == "relu" else None


def _product(node: Any, facts: Facts) -> tuple[list[Node], float]:
    """The tensors of a product of any shape, and the numbers in it multiplied."""
    node, factor = scaled(node, facts)
    pair = factors(node)
    if pair is None:
        return [node], factor
    out: list[Node] = []
    for part in pair:
        inner, by = _product(part, facts)
        out += inner
        factor *= by
    return out, factor


def _written_out(node: Any, facts: Facts) -> Activation | None:
    """GELU and SiLU from elementary operations: a product of x with a function of x."""
    found, factor = _product(node, facts)
    if len(found) != 2:
        return None
    for x, gate in (found, found[::-1]):
        if abs(factor - 1.0) < 1e-9 and is_op(gate, "sigmoid") and read(gate).input is x:  # type: ignore[union-attr]
            return Activation("silu", x, True)
        if abs(factor - 0.5) < 1e-9:
            one = plus_number(gate, facts)
            if one is not None and one[1] == 1.0:
                name = _gelu_of(one[0], x, facts)
                if name:
                    return Activation(name, x, True)
    return None


def _gelu_of(node: Any, x: Node, facts: Facts) -> str:
    """``gelu`` for erf(x / sqrt 2), ``gelu_tanh`` for tanh(sqrt(2 / pi) (x + 0.044715 x^3)), else nothing."""
    call = read(node)
    if call is None or call.op not in ("erf", "tanh"):
        return ""
    inner, factor = scaled(call.input, facts)
    if call.op == "erf":
        return "gelu" if inner is x and abs(factor - math.sqrt(0.5)) < 1e-6 else ""
    root = math.sqrt(2.0 / math.pi)
    if abs(factor - root) < 1e-5 and _cubic(inner, x, facts):
        return "gelu_tanh"
    # x (1 + 0.044715 x^2), factored
    parts, factor = _product(call.input, facts)
    if abs(factor - root) < 1e-5 and len(parts) == 2 and x in parts:
        other = parts[1] if parts[0] is x else parts[0]
        one = plus_number(other, facts)
        if one is not None and one[1] == 1.0 and _power(one[0], x, 2, facts):
            return "gelu_tanh"
    return ""


def _cubic(node: Any, x: Node, facts: Facts) -> bool:
    pair = terms(node)
    if pair is None or x not in pair:
        return False
    return _power(pair[1] if pair[0] is x else pair[0], x, 3, facts)


def _power(node: Any, x: Node, exponent: int, facts: Facts) -> bool:
    """Whether the node is 0.044715 times that power of x."""
    parts, factor = _product(node, facts)
    total = 0.0
    for part in parts:
        base, power = powered(part, facts)
        if base is not x:
            return False
        total += power
    return total == exponent and abs(factor - 0.044715) < 1e-7


def powered(node: Any, facts: Facts) -> tuple[Any, float]:
    """The node as a power with a constant exponent: (base, exponent), the exponent 1 for anything else."""
    call = read(node)
    if call is not None:
        if call.op == "square":
            return call.input, 2.0
        if call.op == "sqrt":
            return call.input, 0.5
        if call.op == "rsqrt":
            return call.input, -0.5
        if call.op == "pow":
            exponent = facts.number(call["exponent"])
            if exponent is not None and isinstance(call.input, Node):
                return call.input, exponent
        if call.op == "reciprocal" or (call.op == "div" and facts.number(call.input) == 1.0):
            base, exponent = powered(call.input if call.op == "reciprocal" else call["other"], facts)
            return base, -exponent
    return node, 1.0


def is_square_of(node: Any, facts: Facts) -> Any:
    """The x of ``x * x``, ``x ** 2`` and the like, or None."""
    pair = factors(node)
    if pair is not None:
        return pair[0] if same_value(*pair) and fake(pair[0]).dtype == fake(pair[1]).dtype else None  # type: ignore[union-attr]
    base, exponent = powered(node, facts)
    return base if exponent == 2.0 else None


def is_last_dim(dim: Any, rank: int) -> bool:
    """Whether a reduction goes over the last dimension alone."""
    if isinstance(dim, (tuple, list)):
        return len(dim) == 1 and is_last_dim(dim[0], rank)
    return isinstance(dim, int) and not isinstance(dim, bool) and dim % max(rank, 1) == rank - 1


def row_mean(node: Any, facts: Facts) -> Any:
    """The x of ``x.mean(-1, keepdim=True)`` or of the sum over a row by its length, or None."""
    call = read(node)
    if call is not None and call.op == "mean" and call["keepdim"] is True:
        x = call.input
        shape = facts.shape(x)
        if shape and is_last_dim(call["dim"], len(shape)):
            return x
        return None
    inner, factor = scaled(node, facts)
    call = read(inner)
    if call is None or call.op != "sum" or call["keepdim"] is not True:
        return None
    shape = facts.shape(call.input)
    if shape and is_last_dim(call["dim"], len(shape)) and isinstance(shape[-1], int):
        return call.input if abs(factor * shape[-1] - 1.0) < 1e-9 else None
    return None


@dataclass(frozen=True)
class Half:
    """One half of a tensor along its last dimension.

    Attributes:
        of: the whole.
        first: which one.
    """

    of: Node
    first: bool


def half(node: Any, facts: Facts) -> Half | None:
    """The node as one of two equal parts of a tensor along the last dimension: chunk, split or slice."""
    call = read(node)
    if call is None or call.op != "getitem":
        return None
    source, index = call.input, call["index"]
    inner = read(source)
    if inner is not None and inner.op in ("chunk", "split") and index in (0, 1, -1, -2):
        return _half_of_parts(inner, index, facts)
    shape = facts.shape(source)
    if not shape or not isinstance(shape[-1], int) or shape[-1] % 2 or not isinstance(index, tuple):
        return None
    *rest, last = index
    if any(i is not Ellipsis and i != slice(None) for i in rest) or not isinstance(last, slice):
        return None
    if Ellipsis not in rest and len(index) != len(shape):
        return None
    middle = shape[-1] // 2
    bounds = last.indices(shape[-1])
    if bounds == (0, middle, 1):
        return Half(source, True)
    return Half(source, False) if bounds == (middle, shape[-1], 1) else None


def _half_of_parts(call: Call, index: int, facts: Facts) -> Half | None:
    shape = facts.shape(call.input)
    if (
        not shape
        or not is_last_dim(call["dim"], len(shape))
        or not isinstance(shape[-1], int)
        or shape[-1] % 2
    ):
        return None
    middle = shape[-1] // 2
    if call.op == "chunk":
        halves = call["chunks"] == 2
    else:
        sizes = call["sizes"]
        halves = sizes == middle or (isinstance(sizes, (tuple, list)) and list(sizes) == [middle, middle])
    return Half(call.input, index in (0, -2)) if halves else None


def is_row_vector(node: Any, like: Any, facts: Facts) -> bool:
    """Whether the node has one dimension, as long as a row of `like`."""
    shape, full = facts.shape(node), facts.shape(like)
    return bool(shape and full) and len(shape) == 1 and isinstance(shape[0], int) and shape[0] == full[-1]  # type: ignore[arg-type,index]


def with_bias(node: Any, facts: Facts) -> tuple[Any, Node | None]:
    """``x + b`` with a bias for each column as (x, b), or (node, None)."""
    pair = terms(node)
    if pair is not None:
        for x, bias in (pair, pair[::-1]):
            if (
                is_row_vector(bias, x, facts)
                and facts.shape(x) == facts.shape(node)
                and len(facts.shape(x) or ()) > 1
            ):
                return x, bias
    return node, None


def is_float(*nodes: Any) -> bool:
    """Whether these are all floating-point tensors."""
    values = [fake(n) for n in nodes]
    return all(v is not None and v.is_floating_point() for v in values)


def uncast(node: Any) -> Any:
    """The node without casts around it."""
    return through(node, "cast")
