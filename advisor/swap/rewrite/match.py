"""A place in the graph that a pattern fits, and the check that it may be taken out there."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch.fx import Node

from advisor.swap.site import Candidate

from .facts import VIEWS, Facts, fake, where
from .ops import is_op, read


@dataclass(frozen=True, eq=False)
class Match:
    """What a pattern found.

    Attributes:
        pattern: its name.
        kind: of `advisor.swap.site.KINDS`.
        what: the formula there, for a reader.
        inputs: nodes that the candidates take, in order.
        outputs: nodes that the candidates give, in order; several come as a tuple.
        attributes: all that tells two matches apart besides shapes and dtypes.
        candidates: what can stand in; each takes one value for each of `inputs`.
        proofs: placeholders whose present value the match rests on.
        random: whether it draws random numbers.
        same: further nodes with the value of an input, each with that input.
    """

    pattern: str
    kind: str
    what: str
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    attributes: dict[str, Any]
    candidates: tuple[Candidate, ...]
    proofs: frozenset[Node] = frozenset()
    random: bool = False
    same: tuple[tuple[Node, Node], ...] = ()


@dataclass(frozen=True, eq=False)
class Found:
    """A match that may be taken out.

    Attributes:
        match: which.
        interior: the nodes that it replaces.
        data: those of them that hang on the inputs; the others are constants, which matches may share.
        extra: further inputs of `interior` that the candidates do without: a mask that was proven causal.
        where: ``file.py:12 (blocks.0.attn)``.
    """

    match: Match
    interior: frozenset[Node]
    data: frozenset[Node]
    extra: tuple[Node, ...]
    where: str

    def overlaps(self, other: Found) -> bool:
        """Whether only one of the two can be taken."""
        return bool(self.data & other.data)


Finder = Callable[[Facts], Iterator[Match]]


@dataclass(frozen=True)
class Pattern:
    """A registered pattern.

    Attributes:
        name: as told.
        find: all its matches in a graph.
        rank: who goes first where matches overlap: the lower.
    """

    name: str
    find: Finder
    rank: int


_PATTERNS: dict[str, Pattern] = {}


def pattern(name: str, *, rank: int) -> Callable[[Finder], Finder]:
    """Register the decorated function as what finds `name`.

    Raises:
        ValueError: the name is taken.
    """

    def register(find: Finder) -> Finder:
        if name in _PATTERNS:
            raise ValueError(f"pattern {name!r} is registered twice")
        _PATTERNS[name] = Pattern(name, find, rank)
        return find

    return register


@cache
def _load() -> None:
    from . import patterns

    for module in pkgutil.iter_modules(patterns.__path__):
        importlib.import_module(f"{patterns.__name__}.{module.name}")


def registered() -> list[Pattern]:
    """All patterns, in the order in which they may claim nodes."""
    _load()
    return sorted(_PATTERNS.values(), key=lambda p: (p.rank, p.name))


def find(facts: Facts) -> list[Found]:
    """Every match that may be taken out, the larger patterns first; matches may overlap."""
    found = []
    for one in registered():
        for match in one.find(facts):
            closed = _close(match, facts)
            if isinstance(closed, str):
                facts.refuse(match.pattern, match.outputs[0], closed)
            else:
                found.append(closed)
    return found


def _close(match: Match, facts: Facts) -> Found | str:
    """The nodes between inputs and outputs, or why they cannot be taken out."""
    inputs = {*match.inputs, *(node for node, _ in match.same)}
    interior: set[Node] = set()
    extra: list[Node] = []
    queue = list(match.outputs)
    while queue:
        node = queue.pop()
        if node in inputs or node in interior or node in extra:
            continue
        if node.op in ("placeholder", "get_attr"):
            if node not in match.proofs and fake(node) is not None:
                return f"it reads {node.name} besides what the pattern takes"
            extra.append(node)
            continue
        interior.add(node)
        queue += node.all_input_nodes
    frozen = frozenset(interior)
    reason = (
        _leak(match, frozen, facts)
        or _modes_differ(match, frozen, facts)
        or _written(match, frozen, facts)
        or _late_input(match, facts)
    )
    if reason:
        return reason
    extra.sort(key=lambda n: facts.order[n])
    data = frozenset(_data(match, frozen, facts))
    return Found(match, frozen, data, tuple(extra), where(match.outputs[0]))


def _data(match: Match, interior: frozenset[Node], facts: Facts) -> list[Node]:
    """Interior nodes that hang on the inputs; the others are constants, which may be used elsewhere too."""
    hangs: set[Node] = {*match.inputs, *(node for node, _ in match.same)}
    for node in sorted(interior, key=lambda n: facts.order[n]):
        if any(n in hangs for n in node.all_input_nodes):
            hangs.add(node)
    return [n for n in interior if n in hangs]


def _leak(match: Match, interior: frozenset[Node], facts: Facts) -> str:
    views = {*match.inputs, *(node for node, _ in match.same)}
    for node in sorted(_data(match, interior, facts), key=lambda n: facts.order[n]):
        call = read(node)
        if call is not None and call.op in VIEWS and call.op != "cast" and call.input in views:
            views.add(node)
        elif node not in match.outputs and any(u not in interior for u in node.users):
            return f"an intermediate result is used elsewhere too ({node.name}, {where(node)})"
    return ""


def _modes_differ(match: Match, interior: frozenset[Node], facts: Facts) -> str:
    mode = facts.mode(match.outputs[0])
    if any(facts.mode(n) != mode for n in _data(match, interior, facts)):
        return "parts of it lie under different autocast or gradient modes"
    return ""


def _written(match: Match, interior: frozenset[Node], facts: Facts) -> str:
    for node in interior & facts.opaque:
        return f"it writes in place into memory that others see ({where(node)})"
    for node in match.proofs:
        if facts.written(node):
            return f"{node.name} is written to within the step"
    for node in (*match.inputs, *match.outputs):
        if facts.written_after(node, interior):
            return f"{node.name} is changed in place later"
    return ""


def _late_input(match: Match, facts: Facts) -> str:
    first = min(facts.order[n] for n in match.outputs)
    for node in match.inputs:
        if facts.order[node] >= first:
            return f"{node.name} is computed only after {match.outputs[0].name}"
    return ""


def dropped_share(node: Node) -> float | None:
    """The probability with which a dropout drops: 0 outside training; None where it is none, or unknown."""
    if not is_op(node, "dropout"):
        return None
    call = read(node)
    assert call is not None
    if call["training"] is False or call["p"] in (0, 0.0):
        return 0.0
    known = call["training"] is True and isinstance(call["p"], (int, float))
    return float(call["p"]) if known else None
