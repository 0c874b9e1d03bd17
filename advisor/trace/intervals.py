"""Lengths of unions of intervals: device work may overlap, even on one stream."""

from __future__ import annotations

import numpy as np


def merged(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The union of intervals as disjoint ones in order: starts and ends, int64."""
    if not len(start):
        return start.astype(np.int64), end.astype(np.int64)
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    opens = np.ones(len(start), bool)
    opens[1:] = start[1:] > end[:-1]
    closes = np.append(np.flatnonzero(opens)[1:] - 1, len(start) - 1)
    return start[opens], end[closes]


def covered_before(time_ns: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """What of disjoint intervals in order lies before each time, in ns; (m,) for (m,) times.

    Args:
        time_ns: in any order.
        start, end: as `merged` gives them.
    """
    if not len(start):
        return np.zeros(len(time_ns), np.int64)
    whole = np.concatenate([[0], np.cumsum(end - start)])
    last = np.searchsorted(start, time_ns, side="right") - 1
    at = np.maximum(last, 0)
    return np.where(last < 0, 0, whole[at] + np.minimum(time_ns, end[at]) - start[at])


def union_ns(start: np.ndarray, end: np.ndarray) -> int:
    """Total length of the union of intervals, in ns."""
    begins, ends = merged(start, end)
    return int((ends - begins).sum())
