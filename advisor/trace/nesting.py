"""Which interval contains which: nested ranges on host threads."""

from __future__ import annotations

import numpy as np

#: Start and duration are rounded apart, so a child may seem to outlast its parent by this much.
_ROUNDING_NS = 2
#: Levels climbed one by one; loops nest no deeper, and what does is climbed in strides.
_PLAIN_CLIMB = 64


class Nesting:
    """Nested intervals on tracks, with the question "which is the innermost at this time?".

    An interval contains its start but not its end. Where two overlap without one holding the other
    (broken clocks, a cut-off trace), the one that started later counts as the inner one while both run.

    Args:
        track: int (n,), the thread of each interval; only intervals of one track nest.
        ts_ns: int64 (n,), starts.
        dur_ns: int64 (n,), durations.

    Attributes:
        parent: int32 (n,), position of the interval that directly encloses each one, or -1.
    """

    def __init__(self, track: np.ndarray, ts_ns: np.ndarray, dur_ns: np.ndarray) -> None:
        n = len(ts_ns)
        self._order = np.lexsort((-dur_ns, ts_ns, track))
        self._track = track[self._order].astype(np.int64)
        self._end = (ts_ns + dur_ns)[self._order]
        # Track and start in one sortable number; starts by rank, since tracks times ns may overflow.
        self._starts, rank = np.unique(ts_ns, return_inverse=True)
        self._key = self._track * n + rank.reshape(-1)[self._order]
        self._parent = _parents(self._track, ts_ns[self._order], self._end)
        self.parent = np.full(n, -1, np.int32)
        inside = self._parent >= 0
        self.parent[self._order[inside]] = self._order[self._parent[inside]]

    def innermost(self, track: np.ndarray, ts_ns: np.ndarray) -> np.ndarray:
        """Position of the innermost interval that contains each time on its track, or -1; int32 (m,)."""
        found = np.full(len(ts_ns), -1, np.int32)
        rank = np.searchsorted(self._starts, ts_ns, side="right") - 1
        asked = np.flatnonzero((rank >= 0) & (track >= 0))
        if not len(asked):
            return found
        key = track[asked].astype(np.int64) * len(self._key) + rank[asked]
        at = np.searchsorted(self._key, key, side="right") - 1
        at[(at >= 0) & (self._track[at] != track[asked])] = -1
        time = ts_ns[asked]
        left = np.flatnonzero((at >= 0) & (self._end[at] <= time))
        for _ in range(_PLAIN_CLIMB):
            at[left] = self._parent[at[left]]
            left = left[at[left] >= 0]
            left = left[self._end[at[left]] <= time[left]]
            if not len(left):
                break
        if len(left):
            at[left] = _still_running(at[left], time[left], self._parent, self._end)
        inside = at >= 0
        found[asked[inside]] = self._order[at[inside]]
        return found


def nearest(start: np.ndarray, parent: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The closest of self and ancestors for which `wanted` holds, or -1; int32 (m,).

    Args:
        start: int (m,), positions to start from; -1 stays -1.
        parent: int32 (n,), as in `Nesting.parent`.
        wanted: bool (n,).
    """
    at = start.astype(np.int32)
    climbing = np.flatnonzero(at >= 0)
    climbing = climbing[~wanted[at[climbing]]]
    for _ in range(_PLAIN_CLIMB):
        at[climbing] = parent[at[climbing]]
        climbing = climbing[at[climbing] >= 0]
        climbing = climbing[~wanted[at[climbing]]]
        if not len(climbing):
            break
    if len(climbing):
        n = len(parent)
        # Each round doubles the stride; n stands for the root above all.
        goal = np.append(np.where(wanted, np.arange(n), np.where(parent >= 0, parent, n)), n)
        while not np.array_equal(further := goal[goal], goal):
            goal = further
        found = goal[at[climbing]]
        at[climbing] = np.where(found < n, found, -1)
    return at


def _still_running(at: np.ndarray, time: np.ndarray, parent: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The first of self and ancestors that ends after each time, or -1; int64 (m,).

    By strides of powers of two: one is taken where nothing that it passes over ends late enough.
    """
    n = len(parent)
    never = np.iinfo(np.int64).min
    jump = np.append(np.where(parent >= 0, parent, n), n)
    latest = np.append(end, never)
    strides = [(jump, latest)]
    while (jump < n).any():
        latest = np.maximum(latest, latest[jump])
        jump = jump[jump]
        strides.append((jump, latest))
    at = at.copy()
    for jump, latest in reversed(strides):
        at = np.where(latest[at] <= time, jump[at], at)
    return np.where(at < n, at, -1)


def _parents(track: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Parents of intervals sorted by track, then start, longer first; int64 (n,)."""
    parents = [-1] * len(start)
    ends = end.tolist()
    stack: list[int] = []
    current = None
    for i, (lane, begin) in enumerate(zip(track.tolist(), start.tolist(), strict=True)):
        if lane != current:
            stack.clear()
            current = lane
        # One that ends before this does can be inner to nothing from here on.
        while stack and (ends[stack[-1]] <= begin or ends[stack[-1]] + _ROUNDING_NS < ends[i]):
            stack.pop()
        if stack:
            parents[i] = stack[-1]
        stack.append(i)
    return np.array(parents, np.int64)
