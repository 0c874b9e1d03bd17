"""What to leave out where whole steps do not gain, or grow, by all that is faster by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from advisor.capture.swapping.steps import saving_of
from advisor.report.model import SwapSteps

#: Further comparisons, at most.
MOST = 2


@dataclass(frozen=True)
class Part:
    """One of the things that are in force.

    Attributes:
        key: that it is known by on every rank.
        mechanism: see `advisor.swap.site.Site`.
        what, where: stands there, and where that is.
        saved_ns: of a step, by itself.
        more_bytes: of device memory, by itself; less where it is negative.
    """

    key: str
    mechanism: str
    what: str
    where: tuple[str, ...]
    saved_ns: float
    more_bytes: int


def less(parts: Sequence[Part], steps: SwapSteps) -> list[Part]:
    """Which parts to leave out next; none where no smaller choice is worth a comparison.

    Args:
        parts: in force.
        steps: without and with all of them, which are not kept.
    """
    apart = saving_of(steps.eager_ms, steps.eager_ms)
    if steps.saving_ms is None or apart is None:
        return []
    ranked = sorted(parts, key=lambda part: -part.saved_ns)
    choices = [
        [part for part in parts if part.mechanism == "pattern"],
        ranked[(len(ranked) + 1) // 2 :],
    ]
    if steps.saving_ms.low > 0:  # what stands against them is memory
        choices.insert(0, [part for part in parts if part.more_bytes > 0])
    for out in choices:
        # What the others save must be more than what the loop's own steps differ by.
        saved_ns = sum(part.saved_ns for part in parts if part not in out)
        if out and saved_ns > apart.high * 1e6:
            return out
    return []
