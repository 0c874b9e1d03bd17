"""Attention written out: ``dropout(softmax(scale q k^T + masks)) v``.

Taken: any spelling of the two products (``@``, matmul, bmm, baddbmm, einsum), of the scale (before, after,
a multiplication or a division), of masks (filled with minus infinity, chosen by where, added), a soft-cap
inside them, softmax in fp32 with casts around it, dropout of the weights, keys and values repeated for
grouped heads.

Not taken: a softmax over another dimension; a mask after the softmax; weights that are used or returned
besides; a negative scale; a mask within the soft-cap; a finite number filled in where rows might see no
key. A mask counts as causal only where its value was computed and looked at (see `constants`); any other
stays a mask. A scale that is not 1 / sqrt(d), permuted keys and masks along any axis are carried as they
are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from advisor.swap.rewrite.attend import candidates
from advisor.swap.rewrite.facts import Facts, sole_user
from advisor.swap.rewrite.match import Match, dropped_share, pattern
from advisor.swap.rewrite.ops import is_op, read
from advisor.swap.rewrite.parts import is_float, is_last_dim, uncast
from advisor.swap.rewrite.scores import (
    Product,
    Scores,
    einsum_labels,
    product,
    scores,
    split_batch,
    unrepeated,
)

NAME = "attention"


@pattern(NAME, rank=10)
def find(facts: Facts) -> Iterator[Match]:
    """Every attention whose scores are there to be seen."""
    for node in facts.nodes:
        if is_op(node, "softmax"):
            match = _around(node, facts)
            if match is not None:
                yield match


def _around(softmax: Node, facts: Facts) -> Match | None:
    call = read(softmax)
    assert call is not None
    shape = facts.shape(softmax)
    weights, dropout_p, batch = _weights(softmax, facts)
    user = sole_user(weights)
    end = None if user is None else _times_values(user, weights, facts)
    if shape is None or end is None or user is None:
        _note_near_miss(softmax, weights, facts)
        return None
    if not is_last_dim(call["dim"], len(shape)):
        return facts.refuse(
            NAME, softmax, f"the softmax goes over dimension {call['dim']}, not over the keys"
        )
    under = scores(call.input, facts, NAME)
    if under is None:
        return None
    made = product(under.core, facts)
    if made is None or not is_float(made.q, made.k):
        return facts.refuse(NAME, softmax, "what stands under the softmax is no product of queries and keys")
    if made.bias is not None:
        return facts.refuse(NAME, softmax, "a bias is added by the product itself")
    if under.batch is None:
        under.batch = batch
    elif batch not in (None, under.batch):
        return None
    if under.batch is not None and under.flat_mask:
        return facts.refuse(NAME, softmax, "a mask in which batch and heads are one dimension")
    v, v_order, out_order = end
    return _match(under, made, v, v_order, out_order, user, dropout_p, facts)


def _weights(softmax: Node, facts: Facts) -> tuple[Node, float, tuple[int, int] | None]:
    """The weights after casts, dropout and a reshape, dropout's probability, and (batch, heads)."""
    node, p = softmax, 0.0
    batch: tuple[int, int] | None = None
    while True:
        user = sole_user(node)
        if user is not None and is_op(user, "cast") and is_float(user):
            node = user
        elif user is not None and not p and (share := dropped_share(user)) is not None:
            node, p = user, share
        elif user is not None and batch is None and (joined := _joined(user, facts)) is not None:
            node, batch = user, joined
        else:
            return node, p, batch


def _joined(node: Node, facts: Facts) -> tuple[int, int] | None:
    call = read(node)
    return None if call is None else split_batch(call, node, facts)


def _times_values(
    user: Node, weights: Node, facts: Facts
) -> tuple[Node, tuple[int, ...], tuple[int, ...]] | None:
    """(values, their order, the result's order) of ``weights @ v``."""
    call = read(user)
    rank = len(facts.shape(weights) or ())
    if call is None or rank not in (3, 4):
        return None
    straight = tuple(range(rank))
    if call.op == "matmul":
        v = call["other"]
        shapes = facts.shape(weights), facts.shape(v)
        fits = call.input is weights and v is not weights and shapes[1] and len(shapes[1]) == rank
        if not fits or shapes[0][:-2] != shapes[1][:-2]:  # type: ignore[index]
            return None
        return v, straight, straight
    if call.op == "einsum":
        labels = einsum_labels(call)
        if labels is None:
            return None
        first, second, out = labels
        operands = list(call["operands"])
        if operands[0] is not weights:
            first, second = second, first
            operands.reverse()
        if operands[0] is not weights or operands[1] is weights:
            return None
        *batch, query, key = list(first)
        dims = set(second) - {*batch, key}
        if len(dims) != 1 or query in second or set(second) != {*batch, key, *dims} or len(out) != rank:
            return None
        (dim,) = dims
        if set(out) != {*batch, query, dim}:
            return None
        made = [*batch, query, dim]
        return (
            operands[1],
            tuple(second.index(c) for c in (*batch, key, dim)),
            tuple(made.index(c) for c in out),
        )
    return None


def _note_near_miss(softmax: Node, weights: Node, facts: Facts) -> None:
    call = read(softmax)
    assert call is not None
    under = uncast(call.input)
    if not _hangs_on_product(under):
        return
    if len(weights.users) > 1:
        facts.refuse(NAME, softmax, "the weights are used elsewhere too")
        return
    user = sole_user(weights)
    after = read(user)
    if after is not None and after.op in ("masked_fill", "where", "mul", "add", "div"):
        facts.refuse(NAME, softmax, f"{after.op} stands between the softmax and the product with the values")


def _hangs_on_product(node: Any) -> bool:
    for _ in range(8):
        call = read(node)
        if call is None:
            return False
        if call.op in ("matmul", "einsum", "baddbmm"):
            return True
        node = call["input"] if "input" in call.args else call.input
    return False


def _match(
    under: Scores,
    made: Product,
    v: Node,
    v_order: tuple[int, ...],
    out_order: tuple[int, ...],
    out: Node,
    dropout_p: float,
    facts: Facts,
) -> Match | None:
    q, k = made.q, made.k
    if not is_float(q, k, v, out):
        return facts.refuse(NAME, out, "queries, keys and values are not all floating-point")
    q, q_scale = _prescaled(q, facts)
    k, k_scale = _prescaled(k, facts)
    grouped = 1
    keys, values = unrepeated(k, made.k_order, facts), unrepeated(v, v_order, facts)
    if keys is not None and values is not None and keys[1] == values[1]:
        (k, grouped), v = keys, values[0]
    dtype = facts.dtype(out)
    assert dtype is not None
    inner = facts.dtype(under.core)
    settings: dict[str, Any] = {
        "orders": (made.q_order, made.k_order, v_order, out_order),
        "batch": under.batch,
        "forms": under.forms,
        "causal": under.causal,
        "diagonal": under.diagonal,
        "scale": under.scale * made.scale * q_scale * k_scale,
        "softcap": under.softcap,
        "dropout_p": dropout_p,
        "compute": inner,
        "dtype": dtype,
    }
    if settings["scale"] <= 0.0:
        return facts.refuse(NAME, out, f"scores are scaled by {settings['scale']:g}")
    masks = tuple(mask.node for mask in under.masks)
    return Match(
        NAME,
        "attention",
        _what(under, dropout_p, grouped),
        (q, k, v, *masks),
        (out,),
        {**settings, "grouped": grouped},
        tuple(candidates(settings, grouped)),
        under.proofs,
        random=dropout_p > 0.0,
    )


def _prescaled(node: Node, facts: Facts) -> tuple[Node, float]:
    """Queries or keys before a scale of their own, if nothing else uses the scaled ones."""
    call = read(node)
    if call is None or call.op not in ("mul", "div") or len(node.users) != 1:
        return node, 1.0
    number = facts.number(call["other"])
    if not number or not isinstance(call.input, Node) or call.args.get("rounding_mode"):
        return node, 1.0
    return call.input, number if call.op == "mul" else 1.0 / number


def _what(under: Scores, dropout_p: float, grouped: int) -> str:
    inside = "scale * q @ k.T" + "".join(f", {m.form} mask" for m in under.masks)
    inside += ", causal" if under.causal else ""
    inside += ", soft-cap" if under.softcap else ""
    weights = f"softmax({inside})"
    weights = f"dropout({weights})" if dropout_p else weights
    return f"{weights} @ v" + (f", {grouped} queries a key head" if grouped > 1 else "")
