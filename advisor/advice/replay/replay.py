"""Play a captured step as a dependency graph, as it was and with edits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from advisor.advice.edits import Edit
from advisor.advice.replay.change import Change
from advisor.advice.replay.critical import CriticalPath, critical_path
from advisor.advice.replay.debias import (
    AS_PROFILED,
    DRIFT,
    FETCH_DRIFT,
    NINE_IN_TEN,
    UNKNOWN,
    Speed,
    Speeds,
    likeliest_speeds,
)
from advisor.advice.replay.graph import Graph, build_graph
from advisor.advice.replay.play import period_ns
from advisor.advice.replay.tape import tape_of
from advisor.roofline.analysis import Analysis


@dataclass(frozen=True, slots=True)
class Outcome:
    """Step time after edits.

    Attributes:
        likely_ns: the best guess.
        shortest_ns, longest_ns: as the estimates and the host's real speed may have it.
        noise_ns: what a measurement will differ by from what it would be without any noise.
    """

    likely_ns: float
    shortest_ns: float
    longest_ns: float
    noise_ns: float


class Replay:
    """The steps of one trace, to be played with or without edits.

    Args:
        analysis: the joined trace; its baseline, where known, is what an unedited replay returns.
    """

    def __init__(self, analysis: Analysis) -> None:
        self._analysis = analysis
        self._unedited: dict[Speed, float] = {}

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
    def speeds(self) -> Speeds:
        """How fast the host may really be; as profiled at worst without a baseline."""
        if not self.debiased:
            return UNKNOWN
        unedited, fetches = Change(self.graph), bool(self.graph.fetching.any())
        return likeliest_speeds(lambda speed: self._play(unedited, speed), self.baseline_ns, fetches=fetches)

    @property
    def host_scale(self) -> float:
        """Factor on host work that takes the profiler's cost out of it; 1 without a baseline."""
        return self.speeds.likely.host

    @property
    def result_scale(self) -> float:
        """Factor on all that is played, so that the unedited step takes exactly what it should.

        It stands for what host work cannot explain: a device that ran faster or slower than in the capture.
        """
        return self._result_scale(self.speeds.likely)

    def _result_scale(self, speed: Speed) -> float:
        if speed not in self._unedited:
            self._unedited[speed] = self._play(Change(self.graph), speed)
        return self.baseline_ns / self._unedited[speed] if self._unedited[speed] else 1.0

    def step_ns(self, edits: Sequence[Edit] = (), case: str = "likely") -> float:
        """Step time, in ns, with these edits; in case of conflict the edit that removes more wins.

        Args:
            edits: in any order.
            case: ``"pessimistic"``, ``"likely"`` or ``"optimistic"``, for estimates.
        """
        if not edits:
            return self.baseline_ns
        return self._step_ns(Change(self.graph, edits, case), self.speeds.likely)

    def outcome(self, edits: Sequence[Edit]) -> Outcome:
        """Step time with these edits, and between what bounds it will be measured.

        The bounds are those of the estimates, of the host's real speed, and of what two measurements of one
        loop differ by: nine in ten times each is kept on either side.

        Args:
            edits: in any order.
        """
        before, speeds = self.baseline_ns, self.speeds
        changes = {case: Change(self.graph, edits, case) for case in ("pessimistic", "likely", "optimistic")}
        likely = self._step_ns(changes["likely"], speeds.likely)
        every = {speeds.likely, speeds.fast, speeds.slow}
        tried = [self._step_ns(changes["pessimistic"], speed) for speed in every]
        tried += [self._step_ns(changes["optimistic"], speed) for speed in every]
        noise = DRIFT * math.hypot(before, likely)
        if self.graph.fetching.any():
            drifted = replace(speeds.likely, fetch=speeds.likely.fetch + FETCH_DRIFT)
            scale = self._result_scale(speeds.likely)
            slower = self._play(changes["likely"], drifted) * scale - likely
            noise = math.hypot(noise, slower)
        return Outcome(likely, min(*tried, likely), max(*tried, likely), NINE_IN_TEN * noise)

    def critical_path(self, edits: Sequence[Edit] = (), *, profiled: bool = False) -> CriticalPath:
        """What the step's time is made of along its critical path.

        Args:
            edits: as in `step_ns`.
            profiled: at the speed of the capture, as other tools see it, instead of the real one.
        """
        speed = AS_PROFILED if profiled else self.speeds.likely
        found = critical_path(Change(self.graph, edits), speed)
        return found if profiled else found.scaled(self._result_scale(speed))

    def _step_ns(self, change: Change, speed: Speed) -> float:
        return self._play(change, speed) * self._result_scale(speed)

    def _play(self, change: Change, speed: Speed) -> float:
        return period_ns(tape_of(change, speed)) / len(self.graph.windows)
