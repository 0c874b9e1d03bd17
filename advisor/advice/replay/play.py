"""Play a tape: work out when everything happens, round upon round, until the rounds take the same time.

Times are whole multiples of 1/1024 ns, so that sums do not depend on their order: what is worked out for many
launches at once is what comes of one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from advisor.advice.replay.graph import FETCH, LAUNCH, RECORD, SYNC_ALL, SYNC_SLOT, SYNC_STREAM, WAIT
from advisor.advice.replay.tape import Tape

#: Rounds whose times differ by less than this share have settled.
_SETTLED = 1e-6
_MOST_ROUNDS = 12
#: Times are exact in a float up to 2**53 of these.
_UNITS_A_NS = 1024.0
_PAST = -(2.0**52)
#: So many launches in a row are worked out at once.
_MANY = 48

#: kind, at, stream, delay, gap, dur, slot.
Item: TypeAlias = "tuple[int, float, int, float, float, float, int]"


@dataclass(frozen=True, eq=False)
class _Columns:
    """A tape's columns in units, each (n,)."""

    kind: np.ndarray
    at: np.ndarray
    stream: np.ndarray
    delay: np.ndarray
    gap: np.ndarray
    dur: np.ndarray
    slot: np.ndarray

    @classmethod
    def of(cls, tape: Tape) -> _Columns:
        at, delay, gap, dur = (
            np.rint(np.asarray(times) * _UNITS_A_NS)
            for times in (tape.at_ns, tape.delay_ns, tape.gap_ns, tape.dur_ns)
        )
        return cls(np.asarray(tape.kind), at, np.asarray(tape.stream), delay, gap, dur, np.asarray(tape.slot))

    def items(self, part: slice) -> list[Item]:
        """Items one by one."""
        columns = (self.kind, self.at, self.stream, self.delay, self.gap, self.dur, self.slot)
        return list(zip(*(column[part].tolist() for column in columns), strict=True))


class _Run:
    """Launches in a row, with nothing between them that couples streams or holds the host but a full queue.

    Each stream is free at ``max(free + max(gap + dur, 0), call + delay + dur)`` after a launch, so that with
    the sums of the first all of them come from a running maximum.
    """

    def __init__(self, columns: _Columns, part: slice) -> None:
        self.at = columns.at[part]
        stream, gap, dur = columns.stream[part], columns.gap[part], columns.dur[part]
        reached = self.at + columns.delay[part]
        #: Of each stream: its number, its launches, sums, ends of launches that wait for nothing less those
        #: sums, gaps, and earliest starts.
        self.lanes: list[tuple[int, np.ndarray | slice, np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        numbers = [int(stream[0])] if (stream == stream[0]).all() else np.unique(stream).tolist()
        for number in numbers:
            own = slice(None) if len(numbers) == 1 else np.flatnonzero(stream == number)
            sums = np.cumsum(np.maximum(gap[own] + dur[own], 0.0))
            self.lanes.append((number, own, sums, reached[own] + dur[own] - sums, gap[own], reached[own]))

    def play(self, base: np.ndarray, free: list[float]) -> np.ndarray:
        """When each launch begins, (n,); streams are free later on.

        Args:
            base: (n,), when the host would have begun the round, with its waits up to each launch.
            free: when each stream is through; changed.
        """
        began = np.empty(len(self.at))
        for number, own, sums, alone, gap, reached in self.lanes:
            before, since = free[number], base[own]
            ends = sums + np.maximum(before, np.maximum.accumulate(since + alone))
            began[own] = np.maximum(since + reached, np.concatenate([[before], ends[:-1]]) + gap)
            free[number] = float(ends[-1])
        return began


def _segments(columns: _Columns, depth: int) -> list[_Run | list[Item]]:
    """The items in order: long rows of launches, none longer than the queue, and the rest one by one."""
    found: list[_Run | list[Item]] = []
    others = np.flatnonzero(columns.kind != LAUNCH)
    edges = np.concatenate([[-1], others, [len(columns.kind)]])
    begins, ends = edges[:-1] + 1, edges[1:]
    long = np.flatnonzero(ends - begins >= _MANY)
    done = 0
    for begin, end in zip(begins[long].tolist(), ends[long].tolist(), strict=True):
        if begin > done:
            found.append(columns.items(slice(done, begin)))
        cuts = [*range(begin, end, depth), end]
        found += [_Run(columns, slice(*pair)) for pair in pairwise(cuts)]
        done = end
    if done < len(columns.kind):
        found.append(columns.items(slice(done, None)))
    return found


@dataclass(eq=False)
class _Clock:
    """How far everything is.

    Attributes:
        base: when the host began the round, waits in it included.
        free: when each stream is through.
        kept: times kept.
        ready: when the workers' last batch was.
        began: beginnings of the latest launches, in order.
    """

    base: float
    free: list[float]
    kept: list[float]
    ready: float = _PAST
    began: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def run(self, run: _Run, depth: int) -> None:
        """Play launches at once, no more of them than the queue holds."""
        at, base = run.at, np.full(len(run.at), self.base)
        # The launches before which so many are in flight already; the host waits for the first of those.
        first = depth - len(self.began)
        if first < len(at):
            held = self.began[: len(at) - first] - at[first:]
            base[first:] = np.maximum(self.base, np.maximum.accumulate(held))
        began = run.play(base, self.free)
        self.began = np.concatenate([self.began, began])[-depth:]
        self.base = float(base[-1])

    def one_by_one(self, items: Sequence[Item], depth: int, loader: float) -> None:
        """Play items in order."""
        base, free, kept, ready = self.base, self.free, self.kept, self.ready
        began: list[float] = self.began.tolist()
        count = len(began)
        for kind, at, stream, delay, gap, dur, slot in items:
            now = base + at
            if kind == LAUNCH:
                if count >= depth and began[count - depth] > now:
                    base += began[count - depth] - now
                    now = began[count - depth]
                start = free[stream] + gap
                if now + delay > start:
                    start = now + delay
                began.append(start)
                count += 1
                if start + dur > free[stream]:
                    free[stream] = start + dur
                continue
            if kind == RECORD:
                kept[slot] = free[stream]
                continue
            if kind == WAIT:
                if kept[slot] > free[stream]:
                    free[stream] = kept[slot]
                continue
            if kind == SYNC_STREAM:
                until = free[stream] + delay
            elif kind == SYNC_ALL:
                until = max(free) + delay
            elif kind == SYNC_SLOT:
                until = kept[slot] + delay
            elif kind == FETCH and loader:
                ready = ready + loader if ready > _PAST else now
                until = ready
            else:
                continue
            if until > now:
                base += until - now
        self.base, self.ready = base, ready
        self.began = np.array(began[-depth:])


def period_ns(tape: Tape) -> float:
    """Time of a round in the steady state: that of the slowest of host, streams and loader."""
    segments = _segments(_Columns.of(tape), tape.depth)
    host, loader = round(tape.host_ns * _UNITS_A_NS), round(tape.loader_ns * _UNITS_A_NS)
    clock = _Clock(0.0, [_PAST] * tape.stream_count, [_PAST] * tape.slot_count)
    ends: list[tuple[float, ...]] = []
    last = 0.0
    for _ in range(_MOST_ROUNDS):
        for part in segments:
            if isinstance(part, _Run):
                clock.run(part, tape.depth)
            else:
                clock.one_by_one(part, tape.depth, loader)
        clock.base += host
        # A stream that nothing ran on, or a loader without workers, stays where it is.
        ends.append((clock.base, clock.ready, *clock.free))
        if len(ends) > 1:
            round_units = _slowest(ends[-2], ends[-1])
            if len(ends) > 2 and abs(round_units - last) <= _SETTLED * round_units:
                return round_units / _UNITS_A_NS
            last = round_units
    # Rounds may alternate for ever.
    half = _MOST_ROUNDS // 2
    return _slowest(ends[-1 - half], ends[-1]) / half / _UNITS_A_NS


def _slowest(before: tuple[float, ...], after: tuple[float, ...]) -> float:
    return max(b - a for a, b in zip(before, after, strict=True))
