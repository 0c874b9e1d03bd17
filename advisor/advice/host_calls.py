"""The host's side of a loop: runtime calls with their operators and steps, batch fetches, Python frames."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from advisor.advice.edits import HostRemove
from advisor.trace.events import Events
from advisor.trace.intervals import merged
from advisor.trace.link import Timeline, host_calls
from advisor.trace.names import named
from advisor.trace.nesting import Nesting
from advisor.trace.phases import PHASE_PREFIX

_FETCH = re.compile(r"^enumerate\(DataLoader\)#(\w+)\.")
#: Frames of libraries say less of where a call comes from than the user's own.
_LIBRARY = re.compile(
    r"^<|^nn\.Module: "
    r"|(?:^|/)(?:torch|lightning|pytorch_lightning|lightning_fabric|lightning_utilities|lib/python\d)[/(.]"
)


@dataclass(frozen=True, eq=False)
class Fetches:
    """Fetches of a batch in steady steps.

    Attributes:
        start_ns, end_ns: int64 (n,).
        track: int32 (n,), host threads.
        iterator: class of the iterator, e.g. ``_SingleProcessDataLoaderIter``; empty for an iterable that
            is no DataLoader.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    track: np.ndarray
    iterator: str

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def typical_ns(self) -> float:
        """Duration of a fetch, as profiled: the mean, since workers make every n-th fetch wait for them
        all."""
        return float((self.end_ns - self.start_ns).mean()) if len(self) else 0.0

    @property
    def in_process(self) -> bool:
        """Whether the training process itself makes the batches."""
        return "SingleProcess" in self.iterator

    def around(self, ts_ns: np.ndarray, track: np.ndarray) -> np.ndarray:
        """bool (m,): within a fetch on its thread."""
        nesting = Nesting(self.track, self.start_ns, self.end_ns - self.start_ns)
        return nesting.innermost(track, ts_ns) >= 0


class HostSide:
    """Runtime calls and ranges of a timeline, joined up.

    Args:
        timeline: the joined trace.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    @cached_property
    def call_of(self) -> np.ndarray:
        """int64 (launches,): position in ``Trace.runtime`` of the call that launched each, or -1."""
        return host_calls(self._timeline.trace)

    @cached_property
    def op(self) -> np.ndarray:
        """int32 (runtime calls,): the innermost operator around each call, or -1."""
        ops, calls = self._timeline.trace.ops, self._timeline.trace.runtime
        return Nesting(ops.track, ops.ts_ns, ops.dur_ns).innermost(calls.track, calls.ts_ns)

    @cached_property
    def row(self) -> np.ndarray:
        """int64 (runtime calls,): the first launch of each call, or -1."""
        found = np.full(len(self._timeline.trace.runtime), -1, np.int64)
        rows = np.flatnonzero(self.call_of >= 0)[::-1]
        found[self.call_of[rows]] = rows
        return found

    @cached_property
    def counted(self) -> np.ndarray:
        """bool (runtime calls,): in a steady step."""
        return self.in_steady_step(self._timeline.trace.runtime.ts_ns)

    def in_steady_step(self, ts_ns: np.ndarray) -> np.ndarray:
        """bool (m,): these times lie in a steady step."""
        step = self._timeline.steps.at(ts_ns)
        return (step >= 0) & self._timeline.steady[np.maximum(step, 0)]

    def calls_named(self, pattern: str) -> np.ndarray:
        """bool (runtime calls,): the call's name matches."""
        trace = self._timeline.trace
        return named(trace.names, trace.runtime.name, re.compile(pattern).search)

    def ranges(self, pattern: str) -> Events:
        """Ranges of steady steps whose name matches."""
        trace = self._timeline.trace
        found = named(trace.names, trace.annotations.name, re.compile(pattern).search)
        return trace.annotations.take(found & self.in_steady_step(trace.annotations.ts_ns))

    def chain(self, op: int) -> list[str]:
        """Names of an operator and those around it, innermost first."""
        found = []
        while op >= 0:
            found.append(self._timeline.op_name(op) or "")
            op = int(self._timeline.op_parent[op])
        return found

    @cached_property
    def fetches(self) -> Fetches:
        """Batch fetches: the DataLoader's own ranges, else input phases in which nothing goes to the
        device."""
        marks, names = self.ranges(_FETCH.pattern), self._timeline.trace.names
        if len(marks):
            # Of several loaders in one step, the one that takes longest stands for all.
            slowest = _FETCH.match(names[int(marks.name[marks.dur_ns.argmax()])])
            if slowest and "SingleProcess" in slowest.group(1):
                # What takes next to no time has found the loader exhausted.
                marks = marks.take(marks.dur_ns > 0.1 * marks.dur_ns.max())
            return Fetches(marks.ts_ns, marks.end_ns, marks.track, slowest.group(1) if slowest else "")
        marks = self.ranges(f"^{PHASE_PREFIX}input$")
        rows = self._timeline.launches
        launching = np.unique(
            Nesting(marks.track, marks.ts_ns, marks.dur_ns).innermost(rows.track, rows.launch_ts_ns)
        )
        marks = marks.take(~np.isin(np.arange(len(marks)), launching))
        return Fetches(marks.ts_ns, marks.end_ns, marks.track, "")

    @cached_property
    def _frames(self) -> tuple[Events, Nesting]:
        trace = self._timeline.trace
        own = named(trace.names, trace.python.name, lambda name: "(" in name and not _LIBRARY.search(name))
        frames = trace.python.take(own)
        return frames, Nesting(frames.track, frames.ts_ns, frames.dur_ns)

    def frame(self, ts_ns: int, track: int) -> str | None:
        """The innermost Python frame of the user's own code at a time; None without stacks in the trace."""
        frames, nesting = self._frames
        if not len(frames):
            return None
        at = int(nesting.innermost(np.array([track]), np.array([ts_ns]))[0])
        return self._timeline.trace.names[frames.name[at]] if at >= 0 else None

    @cached_property
    def _busy(self) -> tuple[np.ndarray, np.ndarray]:
        """Disjoint stretches in which an operator or a call runs on some thread, in order."""
        tables = (self._timeline.trace.ops, self._timeline.trace.runtime)
        return merged(
            np.concatenate([table.ts_ns for table in tables]),
            np.concatenate([table.end_ns for table in tables]),
        )

    @cached_property
    def _busy_or_fetching(self) -> tuple[np.ndarray, np.ndarray]:
        """The same with batch fetches: while no thread does anything else, all of them wait for one."""
        begin, end = self._busy
        fetches = self.fetches
        return merged(np.concatenate([begin, fetches.start_ns]), np.concatenate([end, fetches.end_ns]))

    def gaps(self, start_ns: int, end_ns: int) -> tuple[np.ndarray, np.ndarray]:
        """Stretches of an interval in which no operator and no call runs on any thread; int64 each."""
        return _free(*self._busy, start_ns, end_ns)

    def plain_python(self, at_least_ns: float) -> Stretches:
        """Long stretches of steady steps with no operator and no call on any thread, outside fetches.

        They are the loop's own thread's, as far as that can be told.
        """
        timeline = self._timeline
        tracks = timeline.launches.track[(timeline.launches.step >= 0) & (timeline.launches.track >= 0)]
        loop = timeline.trace.annotations
        marks = loop.track[named(timeline.trace.names, loop.name, re.compile("^ProfilerStep#").match)]
        own = marks if len(marks) else tracks
        if not len(own):
            return Stretches.none()
        track, found = int(np.bincount(own).argmax()), []
        for step in np.flatnonzero(timeline.steady).tolist():
            bounds = int(timeline.steps.start_ns[step]), int(timeline.steps.end_ns[step])
            begins, ends = _free(*self._busy_or_fetching, *bounds)
            long = ends - begins >= at_least_ns
            found.append(Stretches(begins[long], ends[long], np.full(int(long.sum()), track, np.int32)))
        return Stretches.join(found)

    def between(self, start_ns: int, end_ns: int, track: int) -> str:
        """The operators before and after a stretch, in words."""
        ops, name = self._timeline.trace.ops, self._timeline.op_name
        before = np.flatnonzero((ops.track == track) & (ops.end_ns <= start_ns))
        after = np.flatnonzero((ops.track == track) & (ops.ts_ns >= end_ns))
        return (
            f"between {name(int(before[-1])) if len(before) else 'the start'} "
            f"and {name(int(after[0])) if len(after) else 'the end'}"
        )


def _free(begin: np.ndarray, end: np.ndarray, start_ns: int, end_ns: int) -> tuple[np.ndarray, np.ndarray]:
    """What disjoint sorted intervals leave of one."""
    own = slice(np.searchsorted(end, start_ns, "right"), np.searchsorted(begin, end_ns, "left"))
    free_from = np.maximum(np.concatenate([[start_ns], end[own]]), start_ns)
    free_to = np.minimum(np.concatenate([begin[own], [end_ns]]), end_ns)
    free = free_to > free_from
    return free_from[free], free_to[free]


@dataclass(frozen=True, eq=False)
class Stretches:
    """Stretches of host threads.

    Attributes:
        start_ns, end_ns: int64 (n,).
        track: int32 (n,).
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    track: np.ndarray

    def __len__(self) -> int:
        return len(self.start_ns)

    @classmethod
    def none(cls) -> Stretches:
        """Not one."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32))

    @classmethod
    def of(cls, events: Events) -> Stretches:
        """The outermost of these events."""
        outermost = Nesting(events.track, events.ts_ns, events.dur_ns).parent < 0
        return cls(events.ts_ns[outermost], events.end_ns[outermost], events.track[outermost])

    @classmethod
    def join(cls, parts: Sequence[Stretches]) -> Stretches:
        """All of several; those inside others go."""
        if not parts:
            return cls.none()
        start, end, track = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("start_ns", "end_ns", "track")
        )
        outermost = Nesting(track, start, end - start).parent < 0
        return cls(start[outermost], end[outermost], track[outermost])

    def take(self, chosen: np.ndarray) -> Stretches:
        """Those of a mask, or at these positions."""
        return Stretches(self.start_ns[chosen], self.end_ns[chosen], self.track[chosen])

    @property
    def total_ns(self) -> float:
        """Their lengths together."""
        return float((self.end_ns - self.start_ns).sum())

    @property
    def removed(self) -> HostRemove:
        """The edit that takes them away."""
        return HostRemove(self.start_ns, self.end_ns, self.track)
