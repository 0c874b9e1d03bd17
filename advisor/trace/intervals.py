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


def union_ns(start: np.ndarray, end: np.ndarray) -> int:
    """Total length of the union of intervals, in ns."""
    begins, ends = merged(start, end)
    return int((ends - begins).sum())
