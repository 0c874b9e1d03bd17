"""Which interval contains which: nested ranges on host threads."""

from __future__ import annotations

import numpy as np


class Nesting:
    """Nested intervals on tracks, with the question "which is the innermost at this time?".

    Args:
        track: int (n,), the thread of each interval; intervals of one track nest.
        ts_ns: int64 (n,), starts.
        dur_ns: int64 (n,), durations.

    Attributes:
        parent: int32 (n,), position of the interval that directly encloses each one, or -1.
    """

    def __init__(self, track: np.ndarray, ts_ns: np.ndarray, dur_ns: np.ndarray) -> None:
        n = len(ts_ns)
        self._t0 = int(ts_ns.min()) if n else 0
        last = int((ts_ns + dur_ns).max()) if n else 0
        # One number line for all tracks: each gets a stretch of its own.
        self._span = last - self._t0 + 1
        key = track.astype(np.int64) * self._span + (ts_ns - self._t0)
        self._order = np.lexsort((-dur_ns, key))
        self._start = key[self._order]
        self._end = self._start + dur_ns[self._order]
        self._parent = _parents(self._start, self._end)
        self.parent = np.full(n, -1, np.int32)
        inside = self._parent >= 0
        self.parent[self._order[inside]] = self._order[self._parent[inside]]

    def innermost(self, track: np.ndarray, ts_ns: np.ndarray) -> np.ndarray:
        """Position of the innermost interval that contains each time on its track, or -1; int32 (m,)."""
        found = np.full(len(ts_ns), -1, np.int32)
        if not len(self._start):
            return found
        offset = ts_ns - self._t0
        askable = np.flatnonzero((offset >= 0) & (offset < self._span) & (track >= 0))
        key = track[askable].astype(np.int64) * self._span + offset[askable]
        at = np.searchsorted(self._start, key, side="right") - 1
        outside = (at >= 0) & (self._end[at] <= key)
        while outside.any():
            at[outside] = self._parent[at[outside]]
            outside = (at >= 0) & (self._end[at] <= key)
        # The key of an earlier track may be reached when this one has nothing before the time.
        inside = at >= 0
        found[askable[inside]] = self._order[at[inside]]
        return found


def nearest(start: np.ndarray, parent: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The closest of self and ancestors for which `wanted` holds, or -1.

    Args:
        start: int (m,), positions to start from; -1 stays -1.
        parent: int32 (n,), as in `Nesting.parent`.
        wanted: bool (n,).
    """
    at = start.astype(np.int32).copy()
    climbing = np.flatnonzero(at >= 0)
    climbing = climbing[~wanted[at[climbing]]]
    while len(climbing):
        at[climbing] = parent[at[climbing]]
        climbing = climbing[at[climbing] >= 0]
        climbing = climbing[~wanted[at[climbing]]]
    return at


def _parents(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Parents of intervals sorted by start, longer first."""
    parents = [-1] * len(start)
    ends = end.tolist()
    stack: list[int] = []
    for i, begin in enumerate(start.tolist()):
        while stack and ends[stack[-1]] <= begin:
            stack.pop()
        if stack:
            parents[i] = stack[-1]
        stack.append(i)
    return np.array(parents, np.int64)
