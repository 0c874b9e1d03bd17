"""Rotary embedding of queries and keys.

    half         x cos + cat(-x2, x1) sin, with x1 and x2 the halves of x (GPT-NeoX, Llama)
    interleaved  x cos + stack(-x_odd, x_even) sin (GPT-J), or a product of complex numbers (Llama, as
    published)

Two rotations of one table, of queries and of keys, make one site; a single one is one too. Tables in fp32,
as autocast leaves them, turn 16-bit inputs into fp32, which the kernel then is given. Not taken: the other
sign, halves the other way round, tables whose sine and cosine differ in shape, tables that need gradients, a
rotation that is rounded to fewer bits than its input has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from advisor.kernels.rope import rope, unsupported_reasons
from advisor.swap.rewrite.candidates import bundled, in_dtype
from advisor.swap.rewrite.facts import Facts, fake, same_value, sole_user, through
from advisor.swap.rewrite.match import Match, pattern
from advisor.swap.rewrite.ops import is_op, read
from advisor.swap.rewrite.parts import factors, half, is_float, terms, uncast

NAME = "rope"


@dataclass(frozen=True)
class _Rotation:
    """One tensor rotated by tables: `form` is ``half``, ``interleaved`` or ``complex``."""

    x: Node
    tables: tuple[Node, ...]
    out: Node
    form: str


@pattern(NAME, rank=30)
def find(facts: Facts) -> Iterator[Match]:
    """Every rotation, in pairs where two have the same tables."""
    waiting: list[_Rotation] = []
    for node in facts.nodes:
        found = _real(node, facts) or _complex(node, facts)
        if found is not None and _keeps_precision(found, facts):
            waiting.append(found)
    while waiting:
        first = waiting.pop(0)
        partner = next((other for other in waiting if _pairs(first, other, facts)), None)
        if partner is not None:
            waiting.remove(partner)
        match = _match(first, partner, facts)
        if match is not None:
            yield match


def _pairs(a: _Rotation, b: _Rotation, facts: Facts) -> bool:
    """Whether one launch can take both: same tables, and b's input exists before a's result."""
    if a.form != b.form or any(not same_value(s, t) for s, t in zip(a.tables, b.tables, strict=True)):
        return False
    shapes = facts.shape(a.x), facts.shape(b.x)
    if not shapes[0] or not shapes[1] or len(shapes[0]) != 4 or len(shapes[1]) != 4:
        return False
    alike = facts.dtype(a.x) == facts.dtype(b.x) and facts.dtype(a.out) == facts.dtype(b.out)
    return alike and facts.order[b.x] < facts.order[a.out]


def _keeps_precision(found: _Rotation, facts: Facts) -> bool:
    if facts.dtype(found.out) in (facts.dtype(found.x), torch.float32):
        return True
    facts.refuse(NAME, found.out, f"the result has another dtype than its input: {facts.dtype(found.out)}")
    return False


def _real(node: Node, facts: Facts) -> _Rotation | None:
    """``x * cos + turned(x) * sin``."""
    pair = terms(node)
    if pair is None:
        return None
    left, right = factors(uncast(pair[0])), factors(uncast(pair[1]))
    if left is None or right is None:
        return None
    for straight, other in ((left, right), (right, left)):
        for turned, sin in (other, other[::-1]):
            found = _turned(uncast(turned), node, facts)
            if found is None:
                continue
            x, form = found
            for mine, cos in (straight, straight[::-1]):
                if same_value(mine, x) and facts.shape(cos) == facts.shape(sin):
                    return _Rotation(uncast(x), (cos, sin), _cast_back(node, uncast(x), facts), form)
    return None


def _cast_back(node: Node, x: Node, facts: Facts) -> Node:
    """The cast to the input's dtype that follows, or the node."""
    user = sole_user(node)
    if user is not None and is_op(user, "cast") and facts.dtype(user) == facts.dtype(x) != facts.dtype(node):
        return user
    return node


def _turned(node: Any, at: Node, facts: Facts) -> tuple[Node, str] | None:
    """(x, form) of ``cat(-x2, x1)`` and of ``stack(-x_odd, x_even)`` with its two last dimensions joined."""
    call = read(node)
    if call is None:
        return None
    if (
        call.op == "cat"
        and len(call["tensors"]) == 2
        and call["dim"] in (-1, len(facts.shape(node) or ()) - 1)
    ):
        (low, low_sign), (high, high_sign) = (_signed(t) for t in call["tensors"])
        parts = half(low, facts), half(high, facts)
        if parts[0] is None or parts[1] is None or not same_value(parts[0].of, parts[1].of):
            return None
        if (low_sign, high_sign, parts[0].first, parts[1].first) != (-1, 1, False, True):
            return facts.refuse(NAME, at, "halves are turned the other way round")
        return parts[0].of, "half"
    if call.op in ("flatten", "reshape"):
        return _neighbours(node, call.input, facts)
    return None


def _signed(node: Any) -> tuple[Any, int]:
    call = read(node)
    return (call.input, -1) if call is not None and call.op == "neg" else (node, 1)


def _neighbours(node: Node, stacked: Any, facts: Facts) -> tuple[Node, str] | None:
    call = read(stacked)
    rank = len(facts.shape(stacked) or ())
    if call is None or call.op != "stack" or len(call["tensors"]) != 2 or call["dim"] not in (-1, rank - 1):
        return None
    low, high = call["tensors"]
    negated = read(low)
    if negated is None or negated.op != "neg":
        return None
    odd, even = _every_second(negated.input, facts), _every_second(high, facts)
    if odd is None or even is None or odd[0] is not even[0] or (odd[1], even[1]) != (1, 0):
        return None
    return (odd[0], "interleaved") if facts.shape(node) == facts.shape(odd[0]) else None


def _every_second(node: Any, facts: Facts) -> tuple[Node, int] | None:
    """(x, start) of ``x[..., start::2]``."""
    call = read(node)
    if call is None or call.op != "getitem" or not isinstance(call["index"], tuple):
        return None
    *rest, last = call["index"]
    shape = facts.shape(call.input)
    if not shape or not isinstance(last, slice) or any(i is not Ellipsis and i != slice(None) for i in rest):
        return None
    if Ellipsis not in rest and len(call["index"]) != len(shape):
        return None
    if last.step != 2 or last.start not in (None, 0, 1) or last.stop not in (None, shape[-1]):
        return None
    return call.input, last.start or 0


def _complex(node: Node, facts: Facts) -> _Rotation | None:
    """``view_as_real(view_as_complex(x by pairs) * table)`` with its pairs joined again."""
    call = read(node)
    if call is None or call.op not in ("flatten", "reshape"):
        return None
    real = read(call.input)
    pair = factors(real.input) if real is not None and real.op == "view_as_real" else None
    if pair is None:
        return None
    for turned, table in (pair, pair[::-1]):
        inner = read(turned)
        if inner is None or inner.op != "view_as_complex" or fake(table) is None:
            continue
        paired = read(through(inner.input, "contiguous", "cast"))
        x = None if paired is None else uncast(paired.input)
        shapes = facts.shape(x), facts.shape(node), facts.shape(inner.input)
        joins = (
            shapes[0] is not None
            and shapes[0] == shapes[1]
            and shapes[2] == (*shapes[0][:-1], shapes[0][-1] // 2, 2)
        )
        if joins and paired is not None and paired.op in ("reshape", "unflatten") and x is not None:
            return _Rotation(x, (table,), _cast_back(node, x, facts), "complex")
    return None


def _match(a: _Rotation, b: _Rotation | None, facts: Facts) -> Match | None:
    shape = facts.shape(a.x)
    if shape is None or len(shape) != 4 or not is_float(a.x):
        return facts.refuse(NAME, a.out, "what is rotated has not four dimensions")
    tables = [fake(t) for t in a.tables]
    if any(t is None or t.requires_grad for t in tables):
        return facts.refuse(NAME, a.out, "the tables need a gradient")
    layout = _layout(facts.shape(a.tables[0]) or (), shape)
    if layout is None:
        return facts.refuse(NAME, a.out, "the tables do not go along the tokens")
    settings: dict[str, Any] = {
        "layout": layout, "form": a.form, "both": b is not None, "dtype": facts.dtype(a.out),
    }  # fmt: skip
    inputs = (a.x, *((b.x,) if b is not None else ()), *a.tables)
    theirs = b.tables if b is not None else ()
    same = tuple((t, mine) for t, mine in zip(theirs, a.tables, strict=False) if t is not mine)
    outputs = (a.out, *((b.out,) if b is not None else ()))
    call = f'from advisor.kernels.rope import rope\nq, k = rope(q, k, cos, sin, layout="{layout}"' + (
        ", interleaved=True)" if a.form != "half" else ")"
    )
    what = f"rotary embedding of {'queries and keys' if b else 'one tensor'}, {a.form}"
    return Match(
        NAME, "rope", what, inputs, outputs, settings,
        (bundled("rope", _rope, _reasons, call, **settings),), same=same,
    )  # fmt: skip


def _layout(table: tuple[Any, ...], x: tuple[Any, ...]) -> str | None:
    """Where the tokens lie, ``bhsd`` or ``bshd``: where the table does not repeat itself."""
    full = (1,) * (4 - len(table)) + tuple(table)
    if len(full) != 4 or full[0] not in (1, x[0]):
        return None
    if full[1] == 1 and full[2] == x[2]:
        return "bhsd"
    return "bshd" if full[2] == 1 and full[1] == x[1] else None


def _arguments(
    tensors: tuple[Tensor, ...], layout: str, form: str, both: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, int]:
    q, k = in_dtype(tensors[0], dtype), in_dtype(tensors[1], dtype) if both else None
    width = 1 if form == "complex" else 2
    tables = [_table(t, layout) for t in tensors[1 + both : 1 + both + width]]
    if form == "complex":
        tables = [tables[0].real, tables[0].imag]
    return q, k, tables[0], tables[1], q.shape[-1]


def _table(table: Tensor, layout: str) -> Tensor:
    """(batch or 1, tokens, width)."""
    if table.dim() < 4:
        table = table.view((1,) * (4 - table.dim()) + tuple(table.shape))
    return table.squeeze(2 if layout == "bshd" else 1)


def _rope(
    *tensors: Tensor, layout: str, form: str, both: bool, dtype: torch.dtype
) -> Tensor | tuple[Tensor, Tensor]:
    q, k, cos, sin, width = _arguments(tensors, layout, form, both, dtype)
    turned, other = rope(q, k, cos, sin, rotary_dim=width, layout=layout, interleaved=form != "half")
    return turned if other is None else (turned, other)


def _reasons(*tensors: Tensor, layout: str, form: str, both: bool, dtype: torch.dtype) -> Sequence[str]:
    q, k, cos, sin, width = _arguments(tensors, layout, form, both, dtype)
    return unsupported_reasons(q, k, cos, sin, rotary_dim=width, layout=layout)
