"""Play a captured step as a dependency graph, as it was and with edits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from advisor.advice.change import Change
from advisor.advice.debias import AS_PROFILED, Speed, likeliest_speed
from advisor.advice.edits import Edit
from advisor.advice.graph import Graph, build_graph
from advisor.advice.play import period_ns
from advisor.advice.tape import tape_of
from advisor.roofline.analysis import Analysis


class Replay:
    """The steps of one trace, to be played with or without edits.

    Args:
        analysis: the joined trace; its baseline, where known, is what an unedited replay returns.
    """

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis

    @cached_property
    def graph(self) -> Graph:
        """The played steps."""
        return build_graph(self._analysis)

    @property
    def observed_ns(self) -> float:
        """Step time as captured."""
        return self._analysis.profiled_step_ns or 0.0

    @cached_property
    def profiled_ns(self) -> float:
        """Step time of the unedited replay at the speed of the capture."""
        return self._play(Change(self.graph), AS_PROFILED)

    @property
    def fidelity(self) -> float:
        """The unedited replay over the observed step time; 1 is perfect."""
        return self.profiled_ns / self.observed_ns if self.observed_ns else float("nan")

    @property
    def baseline_ns(self) -> float:
        """Step time that savings are told against: without the profiler where that is known."""
        return self._analysis.baseline_ns or self.observed_ns

    @property
    def debiased(self) -> bool:
        """Whether the un-profiled step time is known. If not, savings on the host's side are upper bounds."""
        return self._analysis.baseline_ns is not None

    @cached_property
    def speed(self) -> Speed:
        """How the host really runs; as profiled without a baseline."""
        if not self.debiased:
            return AS_PROFILED
        unedited, fetches = Change(self.graph), bool(self.graph.fetching.any())
        return likeliest_speed(lambda speed: self._play(unedited, speed), self.baseline_ns, fetches=fetches)

    @property
    def host_scale(self) -> float:
        """Factor on host work that takes the profiler's cost out of it; 1 without a baseline."""
        return self.speed.host

    @cached_property
    def result_scale(self) -> float:
        """Factor on all that is played, so that the unedited step takes exactly what it should.

        It stands for what host work cannot explain: a device that ran faster or slower than in the capture.
        """
        played = self._play(Change(self.graph), self.speed)
        return self.baseline_ns / played if played else 1.0

    def step_ns(self, edits: Sequence[Edit] = (), case: str = "likely") -> float:
        """Step time, in ns, with these edits; in case of conflict the edit that removes more wins.

        Args:
            edits: in any order.
            case: ``"pessimistic"``, ``"likely"`` or ``"optimistic"``, for estimates.
        """
        if not edits:
            return self.baseline_ns
        return self._play(Change(self.graph, edits, case), self.speed) * self.result_scale

    def _play(self, change: Change, speed: Speed) -> float:
        return period_ns(tape_of(change, speed)) / len(self.graph.windows)
