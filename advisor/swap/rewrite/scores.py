"""What stands under a softmax: products of queries and keys, scale, soft-cap, masks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .facts import Facts, through
from .ops import Call, is_op, read
from .parts import is_float, scaled, terms, uncast

#: A score lower than the others by this or more has weight 0 in fp32, as if it were minus infinity.
_AS_MINUS_INFINITY = -9e3


@dataclass(frozen=True)
class Mask:
    """A mask on scores.

    Attributes:
        node: the tensor.
        form: ``"seen"``, ``"hidden"`` (both bool) or ``"added"``.
    """

    node: Node
    form: str


@dataclass
class Scores:
    """Scores before the softmax: ``softcap(scale * core) + masks``.

    Attributes:
        core: what is left when the rest is peeled off.
        scale: of the core.
        softcap: 0 for none.
        masks: those that stay inputs.
        causal: whether a mask was proven to show query i the keys up to i + `diagonal`.
        diagonal: see `causal`.
        proofs: modules' tensors that the proof rests on.
        finite: whether the causal mask hides with a finite number.
        batch: batch and heads, where they are one dimension in the product.
        flat_mask: whether a mask has that one dimension.
    """

    core: Any
    scale: float = 1.0
    softcap: float = 0.0
    masks: list[Mask] = field(default_factory=list)
    causal: bool = False
    diagonal: int = 0
    proofs: frozenset[Node] = frozenset()
    finite: bool = False
    batch: tuple[int, int] | None = None
    flat_mask: bool = False

    @property
    def forms(self) -> tuple[str, ...]:
        """How each mask of `masks` is meant."""
        return tuple(mask.form for mask in self.masks)


def scores(node: Any, facts: Facts, name: str) -> Scores | None:
    """The expression under a softmax over the last dimension; None, with a note, where it cannot be taken.

    Args:
        node: the softmax's argument.
        facts: of the graph.
        name: of the pattern that asks.
    """
    found, at = Scores(node), node
    while True:
        node = uncast(found.core)
        call = read(node)
        if call is None or not isinstance(node, Node):
            break
        inner, factor = scaled(node, facts)
        if inner is not node:
            if not _take_scale(found, node, inner, factor, facts, name):
                return None
            continue
        joined = split_batch(call, node, facts)
        if joined is not None:
            if found.batch not in (None, joined):
                return None
            found.batch, found.core = joined, call.input
            continue
        masked = _masked(call, facts)
        if masked is not None:
            if not _take_mask(found, node, *masked, facts, name):
                return None
            continue
        capped = _capped(found, node, facts)
        if capped:
            continue
        pair = terms(node)
        if pair is None or is_op(node, "baddbmm"):
            break
        added = _added(pair, facts)
        if added is None:
            break
        if not _take_added(found, node, *added, facts, name):
            return None
    found.core = uncast(found.core)
    if found.batch is not None and found.flat_mask:
        facts.refuse(name, at, "a mask in which batch and heads are one dimension")
        return None
    if found.finite and found.masks:
        facts.refuse(name, at, "a finite causal mask beside another: rows that both hide would differ")
        return None
    return found


def _take_scale(found: Scores, node: Node, inner: Any, factor: float, facts: Facts, name: str) -> bool:
    found.scale *= factor
    found.core = inner
    if found.scale <= 0.0 or not math.isfinite(found.scale):
        facts.refuse(name, node, f"scores are scaled by {found.scale:g}")
        return False
    return True


def split_batch(call: Call, node: Node, facts: Facts) -> tuple[int, int] | None:
    """(batch, heads) of a reshape of scores or weights that joins the two into one, or parts them."""
    inner, outer = facts.shape(call.input), facts.shape(node)
    if call.op not in ("reshape", "flatten", "unflatten") or not inner or not outer:
        return None
    if {len(inner), len(outer)} != {3, 4} or inner[-2:] != outer[-2:]:
        return None
    four, three = (inner, outer) if len(inner) == 4 else (outer, inner)
    if not isinstance(four[0], int) or not isinstance(four[1], int) or four[0] * four[1] != three[0]:
        return None
    return four[0], four[1]


def _is_flat(mask: Node, facts: Facts) -> bool:
    shape = facts.shape(mask) or ()
    return len(shape) == 3 and shape[0] != 1


def _capped(found: Scores, node: Node, facts: Facts) -> bool:
    """``c * tanh(x / c)``, whose outer factor has been taken as the scale."""
    if not is_op(node, "tanh") or found.softcap:
        return False
    call = read(node)
    assert call is not None
    inner, factor = scaled(uncast(call.input), facts)
    # scale * tanh(factor * x) with c = scale: the scores are c * factor * x before the cap.
    found.softcap, found.scale = found.scale, found.scale * factor
    found.core = inner
    return found.scale > 0.0


def _masked(call: Call, facts: Facts) -> tuple[Node, Mask, float] | None:
    """``masked_fill(x, hidden, value)`` and ``where(seen, x, value)`` as (x, mask, value)."""
    if call.op == "masked_fill":
        value = facts.number(call["value"])
        if value is None or facts.dtype(call["mask"]) != torch.bool:
            return None
        return call.input, Mask(call["mask"], "hidden"), value
    if call.op != "where" or facts.dtype(call["condition"]) != torch.bool:
        return None
    for x, other, form in ((call["input"], call["other"], "seen"), (call["other"], call["input"], "hidden")):
        value = facts.number(other)
        if value is None and isinstance(other, Node):
            value = _filled(other, facts)
        if value is not None and isinstance(x, Node) and is_float(x):
            return x, Mask(call["condition"], form), value
    return None


def _filled(node: Node, facts: Facts) -> float | None:
    """The number of which a constant tensor is full."""
    constant = facts.constants.of(node)
    if constant is None or not constant.numel() or facts.constants.sources(node):
        return None
    first = constant.reshape(-1)[0]
    return float(first) if bool((constant == first).all()) else None


def _take_mask(
    found: Scores, node: Node, core: Node, mask: Mask, value: float, facts: Facts, name: str
) -> bool:
    # What is filled in is scaled by what stands outside; later caps and additions would change it.
    value = value * found.scale if math.isfinite(value) else value
    if value > _AS_MINUS_INFINITY or math.isnan(value):
        facts.refuse(name, node, f"scores are filled with {value:g}, which leaves weight to hidden keys")
        return False
    if found.softcap:
        facts.refuse(name, node, "scores are masked before they are capped")
        return False
    shape = facts.shape(node)
    if shape != facts.shape(core):
        facts.refuse(name, node, "the mask widens the scores")
        return False
    seen = facts.constants.of(mask.node)
    diagonal = None if seen is None else causal_diagonal(seen if mask.form == "seen" else ~seen, shape)
    found.core = core
    if diagonal is not None and not found.causal:
        found.causal, found.diagonal, found.finite = True, diagonal, math.isfinite(value)
        found.proofs |= facts.constants.sources(mask.node)
        return True
    if math.isfinite(value):
        facts.refuse(name, node, "a finite number is filled in: a row that sees no key would not be empty")
        return False
    found.masks.append(mask)
    found.flat_mask |= len(shape or ()) == 3 and _is_flat(mask.node, facts)
    return True


def _added(pair: tuple[Node, Node], facts: Facts) -> tuple[Node, Node] | None:
    """(scores, mask) of a sum: the scores are what hangs on a product of matrices."""
    for base, other in (pair, pair[::-1]):
        if is_float(base) and is_float(other) and _is_product(base, facts) and not _is_product(other, facts):
            return base, other
    for base, other in (pair, pair[::-1]):
        shapes = facts.shape(base), facts.shape(other)
        if (
            is_float(base)
            and is_float(other)
            and shapes[0] != shapes[1]
            and _broadcasts(shapes[1], shapes[0])
        ):
            return base, other
    return None


def _broadcasts(small: Any, full: Any) -> bool:
    return len(small) <= len(full) and all(
        a in (1, b) for a, b in zip(reversed(small), reversed(full), strict=False)
    )


def _is_product(node: Any, facts: Facts, depth: int = 12) -> bool:
    """Whether a matrix product stands below, through scale, masks and casts."""
    for _ in range(depth):
        node, _ = scaled(uncast(node), facts)
        call = read(node)
        if call is None:
            return False
        if call.op in ("matmul", "einsum", "baddbmm"):
            return True
        if call.op in ("add", "masked_fill", "where", "tanh", "reshape"):
            parts = [a for a in call.args.values() if isinstance(a, Node) and is_float(a)]
            if call.op == "add" and len(parts) == 2:
                return _is_product(parts[0], facts, depth // 2) or _is_product(parts[1], facts, depth // 2)
            if not parts:
                return False
            node = parts[0]
            continue
        return False
    return False


def _take_added(found: Scores, node: Node, base: Node, bias: Node, facts: Facts, name: str) -> bool:
    if found.softcap:
        facts.refuse(name, node, "a mask is added before the scores are capped")
        return False
    shape = facts.shape(node)
    if shape != facts.shape(base):
        facts.refuse(name, node, "the mask widens the scores")
        return False
    constant = facts.constants.of(bias)
    seen = None if constant is None else _seen_of_added(constant * found.scale)
    diagonal = None if seen is None else causal_diagonal(seen, shape)
    if diagonal is not None and not found.causal:
        assert constant is not None
        found.causal, found.diagonal = True, diagonal
        found.finite = bool(constant.isfinite().all())
        found.proofs |= facts.constants.sources(bias)
        found.core = base
        return True
    if abs(found.scale - 1.0) > 1e-12:
        facts.refuse(name, node, "the mask is added before the scores are scaled")
        return False
    found.masks.append(Mask(bias, "added"))
    found.flat_mask |= len(shape or ()) == 3 and _is_flat(bias, facts)
    found.core = base
    return True


def _seen_of_added(mask: Tensor) -> Tensor | None:
    """Where an added mask is 0, if it hides everywhere else."""
    seen = mask == 0
    return seen if bool((seen | (mask <= _AS_MINUS_INFINITY)).all()) else None


def causal_diagonal(seen: Tensor, shape: tuple[Any, ...] | None) -> int | None:
    """The d for which `seen` shows query i exactly the keys j <= i + d, for scores of this shape.

    d is 0, or keys minus queries; with other values, or rows that see nothing, there is none.
    """
    if shape is None or len(shape) < 2 or not all(isinstance(n, int) for n in shape[-2:]):
        return None
    queries, keys = shape[-2:]
    if seen.dtype != torch.bool or seen.dim() < 2 or tuple(seen.shape[-2:]) != (queries, keys) or queries < 2:
        return None
    flat = seen.reshape(-1, queries, keys)
    if flat.shape[0] > 1 and not bool((flat == flat[0]).all()):
        return None
    for diagonal in dict.fromkeys((0, keys - queries)):
        # With fewer keys than queries at the lower right, the first rows would see nothing.
        if diagonal >= 0 and torch.equal(flat[0], torch.ones(queries, keys, dtype=torch.bool).tril(diagonal)):
            return diagonal
    return None


@dataclass(frozen=True)
class Product:
    """Queries times keys, as tensors to be brought into (batch, heads, tokens, dim).

    Attributes:
        q, k: nodes.
        q_order, k_order: permutations to (batch..., tokens, dim).
        scale: a factor that the product itself carries.
        bias: added to it, of the scores' shape, or None.
    """

    q: Node
    k: Node
    q_order: tuple[int, ...]
    k_order: tuple[int, ...]
    scale: float = 1.0
    bias: Node | None = None


def product(node: Any, facts: Facts) -> Product | None:
    """The node as a batch of ``q @ k^T``."""
    call = read(node)
    if call is None:
        return None
    if call.op == "einsum":
        return _einsum_product(call, facts)
    if call.op not in ("matmul", "baddbmm"):
        return None
    q, k = call["input"], call["other"]
    scale, bias = 1.0, None
    if call.op == "baddbmm":
        alpha, beta = facts.number(call["alpha"]), facts.number(call["beta"])
        if alpha is None or beta is None or beta not in (0.0, 1.0):
            return None
        scale, bias = alpha, call["bias"] if beta else None
    q_shape, k_shape = facts.shape(q), facts.shape(k)
    if not q_shape or not k_shape or len(q_shape) != len(k_shape) or len(q_shape) not in (3, 4):
        return None
    if q_shape[:-2] != k_shape[:-2]:
        return None
    rank = len(q_shape)
    straight = tuple(range(rank))
    turned = (*range(rank - 2), rank - 1, rank - 2)
    source = _transposed(k, rank)
    if source is not None:
        return Product(q, source, straight, straight, scale, bias)
    return Product(q, k, straight, turned, scale, bias)


def _transposed(node: Any, rank: int) -> Node | None:
    """The x of ``x.transpose(-2, -1)``, or None."""
    call = read(node)
    if call is None:
        return None
    if call.op == "mT" or (call.op == "t" and rank == 2):
        return call.input
    if call.op == "transpose":
        dims = {call["dim0"] % rank, call["dim1"] % rank}
        return call.input if dims == {rank - 2, rank - 1} else None
    if call.op == "permute" and tuple(d % rank for d in call["dims"]) == (
        *range(rank - 2),
        rank - 1,
        rank - 2,
    ):
        return call.input
    return None


def einsum_labels(call: Call) -> tuple[str, str, str] | None:
    """The labels of two operands and of the result."""
    equation = call["equation"]
    if not isinstance(equation, str) or len(call["operands"]) != 2 or "." in equation:
        return None
    left, arrow, out = equation.replace(" ", "").partition("->")
    first, comma, second = left.partition(",")
    if not arrow or not comma or any(len(set(s)) != len(s) for s in (first, second, out)):
        return None
    return first, second, out


def _einsum_product(call: Call, facts: Facts) -> Product | None:
    labels = einsum_labels(call)
    if labels is None:
        return None
    first, second, out = labels
    if len(out) not in (3, 4):
        return None
    q, k = call["operands"]
    query, key = out[-2], out[-1]
    if query in second:
        # The operands stand the other way round.
        first, second, q, k = second, first, k, q
    summed = (set(first) & set(second)) - set(out)
    if len(summed) != 1 or query not in first or query in second or key not in second or key in first:
        return None
    (dim,) = summed
    batch = out[:-2]
    if set(first) != {*batch, query, dim} or set(second) != {*batch, key, dim}:
        return None
    return Product(
        q,
        k,
        tuple(first.index(c) for c in (*batch, query, dim)),
        tuple(second.index(c) for c in (*batch, key, dim)),
    )


def unrepeated(node: Node, order: tuple[int, ...], facts: Facts) -> tuple[Node, int] | None:
    """(x, n) where the node is x with each head n times in a row, as grouped attention expands keys."""
    if order != (0, 1, 2, 3):
        return None
    node = through(node, "contiguous", "clone")
    call = read(node)
    shape = facts.shape(node)
    if call is None or shape is None or len(shape) != 4:
        return None
    if call.op == "repeat_interleave" and call["dim"] in (1, -3) and isinstance(call["repeats"], int):
        return call.input, call["repeats"]
    if call.op not in ("reshape", "flatten"):
        return None
    wide = read(through(call.input, "contiguous", "clone"))
    if wide is None or wide.op not in ("expand", "repeat"):
        return None
    five = facts.shape(wide.input)
    out = facts.shape(call.input)
    if not five or not out or len(five) != 5 or five[2] != 1 or out[:2] + out[3:] != five[:2] + five[3:]:
        return None
    added = read(wide.input)
    if added is None or added.op not in ("unsqueeze", "getitem", "reshape"):
        return None
    source: Any = added.input
    plain = facts.shape(source)
    if plain is None or plain != five[:2] + five[3:] or not isinstance(out[2], int):
        return None
    if shape != (five[0], five[1] * out[2], five[3], five[4]):
        return None
    return source, out[2]
