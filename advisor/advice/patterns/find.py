"""Calls that belong together: explicit attention, hand-written norms, gates, RoPE, chains of pointwise work.

A trace tells shapes and order but not which result goes where; a pattern is a run of calls whose names,
order and sizes fit. Each call is in one pattern at most, the first of `FINDERS` that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from advisor.advice.calls import Unit
from advisor.advice.patterns.attention import attention
from advisor.advice.patterns.groups import Group
from advisor.advice.patterns.norms import norm, residual_norm
from advisor.advice.patterns.pointwise import chain, gate, rope, softmax

if TYPE_CHECKING:
    from advisor.advice.loop import Loop


class Patterns:
    """All groups of a loop, by kind."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = list(groups)

    def of(self, kind: str) -> list[Group]:
        """Those of a kind, in program order."""
        return [group for group in self.groups if group.kind == kind]

    def rows(self, *kinds: str) -> set[int]:
        """Rows of these kinds; of all where none is named."""
        return {row for group in self.groups if not kinds or group.kind in kinds for row in group.rows}


def find_patterns(loop: Loop) -> Patterns:
    """The groups of all steady steps."""
    found: list[Group] = []
    for sequence in loop.calls.sequences():
        free = list(sequence)
        for finder in FINDERS.values():
            groups = list(finder(free))
            found += groups
            taken = {id(unit) for group in groups for unit in group.units}
            free = [unit for unit in free if id(unit) not in taken]
    return Patterns(found)


#: In order of precedence.
FINDERS: dict[str, Callable[[Sequence[Unit]], Iterator[Group]]] = {
    "attention": attention,
    "norm": norm,
    "gate": gate,
    "rope": rope,
    "softmax": softmax,
    "residual_norm": residual_norm,
    "chain": chain,
}
