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
    HOST_DRIFT,
    NINE_IN_TEN,
    UNKNOWN,
    FetchTime,
    Speed,
    Speeds,
    falls_short,
    likeliest_speeds,
    seen_drift,
    with_cheapest_profiler,
)
from advisor.advice.replay.graph import Graph, build_graph
from advisor.advice.replay.play import period_ns
from advisor.advice.replay.tape import real_work_ns, tape_of
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


#: A replay further off the observed step is made with another reading of the trace, if that is nearer.
_FAITHFUL = 0.03


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
        """The played steps.

        Whether the host waited in a large copy from pageable memory or worked at it the trace does not tell
        by itself, but by which of the two returns the step time.
        """
        waiting = build_graph(self._analysis)
        if abs(self._played_ns(waiting) - self.observed_ns) <= _FAITHFUL * self.observed_ns:
            return waiting
        working = build_graph(self._analysis, staging_waits=False)
        off = [abs(self._played_ns(graph) - self.observed_ns) for graph in (waiting, working)]
        return working if off[1] < off[0] else waiting

    @staticmethod
    def _played_ns(graph: Graph) -> float:
        return period_ns(tape_of(Change(graph), AS_PROFILED)) / max(len(graph.windows), 1)

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
        graph = self.graph
        unedited = Change(graph)
        fetch = FetchTime(graph.loader.usual, max(FETCH_DRIFT, graph.loader.spread))
        pace = self._real_pace_of_workers(unedited)
        found = likeliest_speeds(
            lambda speed: self._play(unedited, replace(speed, loader_ns=pace)),
            self.baseline_ns,
            fetch=fetch if graph.fetching.any() else None,
        )
        return found if pace is None else found.behind(pace)

    def _real_pace_of_workers(self, unedited: Change) -> float | None:
        """Time between the workers' batches without the profiler where they hold the loop up; else None.

        Workers that are late for a host that the profiler slows are late for the real one. And they run ahead
        while the profiler starts, so that a short capture lives from their queue and no fetch in it waits;
        then the host is faster than the loop by more than any profiler leaves open.
        """
        graph = self.graph
        loader, fetched = graph.loader, len(graph.loader.start_ns)
        if loader.in_process or not fetched:
            return None
        slowest = with_cheapest_profiler(float(graph.swelling_ns.sum()), graph.events)
        if not loader.waits and not falls_short(
            lambda speed: self._play(unedited, speed), slowest, self.baseline_ns
        ):
            return None
        return self.baseline_ns * len(graph.windows) / fetched

    @property
    def fetch_ns(self) -> float:
        """What making a batch takes the training process, without the profiler; 0 where it makes none."""
        graph = self.graph
        if not graph.fetching.any():
            return 0.0
        made_ns = float(real_work_ns(graph, self.speeds.likely)[graph.fetching].sum())
        return made_ns * self.result_scale / len(graph.loader.start_ns)

    @property
    def loader_ns(self) -> float:
        """Time between the batches of the loader's workers; 0 where they keep up, or there are none."""
        pace = self.speeds.likely.loader_ns
        return self.graph.loader.period_ns if pace is None else pace

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
        seen = seen_drift(self._analysis.timeline.trace.context, before) if self.debiased else 0.0
        noise = max(DRIFT, seen) * math.hypot(before, likely)
        noise = math.hypot(noise, self._unedited_drift_ns, self._host_drift_ns(changes["likely"], likely))
        if self.graph.fetching.any():
            drifted = replace(speeds.likely, fetch=speeds.likely.fetch + FETCH_DRIFT)
            scale = self._result_scale(speeds.likely)
            slower = self._play(changes["likely"], drifted) * scale - likely
            noise = math.hypot(noise, slower)
        return Outcome(likely, min(*tried, likely), max(*tried, likely), NINE_IN_TEN * noise)

    @cached_property
    def _unedited_drift_ns(self) -> float:
        return self._host_drift_ns(Change(self.graph), self.baseline_ns)

    def _host_drift_ns(self, change: Change, step_ns: float) -> float:
        """What a step takes longer than usual if the host happens to be slower."""
        speed = self.speeds.likely
        slower = replace(speed, host=speed.host * (1 + HOST_DRIFT), long=speed.long * (1 + HOST_DRIFT))
        return max(self._play(change, slower) * self._result_scale(speed) - step_ns, 0.0)

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
        return period_ns(tape_of(change, speed)) / len(change.graph.windows)
