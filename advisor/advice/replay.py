"""Play a captured step as a dependency graph, as it was and with edits."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.advice.edits import Edit
from advisor.roofline.analysis import Analysis


class Replay:
    """The steps of one trace, to be played with or without edits.

    Args:
        analysis: the joined trace; its baseline, where known, is what an unedited replay returns.
    """

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis

    def step_ns(self, edits: Sequence[Edit] = (), case: str = "likely") -> float:
        """Step time, in ns, with these edits; in case of conflict the edit that removes more wins.

        Args:
            edits: in any order.
            case: ``"pessimistic"``, ``"likely"`` or ``"optimistic"``, for estimates.
        """
        raise NotImplementedError
