"""What the ranks of a job say to each other about swaps: rank 0 orders, all say whether they could follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Order:
    """What rank 0 tells all ranks at a point where they meet.

    Attributes:
        go: whether to go on.
        wait: where not: ask again later, rather than end.
        why: where it ends, why.
        cycles: timed in each block of the comparison.
        choices: the first place of each site, and the name of its candidate or None.
        less: the keys of what is to be left out of another comparison; none if there is none.
    """

    go: bool
    wait: bool = False
    why: str = ""
    cycles: int = 0
    choices: tuple[tuple[str, str | None], ...] = ()
    less: tuple[str, ...] = ()


class Ranks:
    """The ranks of a job.

    Args:
        strategy: of the Trainer; it speaks to the other ranks.
        rank: this process' own.
        count: of ranks.
    """

    def __init__(self, strategy: Any, rank: int, count: int) -> None:
        self._strategy = strategy
        self.first = rank == 0
        self.alone = count == 1

    def let_go(self) -> None:
        """Nothing more is said."""
        self._strategy = None

    def hear(self, order: Order) -> Order:
        """Rank 0's order, on each rank."""
        return order if self.alone else self._strategy.broadcast(order)  # type: ignore[no-any-return]

    def all_agree(self, well: bool) -> bool:
        """Whether all ranks are well."""
        return well if self.alone else bool(self._strategy.reduce_boolean_decision(well, all=True))
