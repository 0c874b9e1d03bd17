"""Host time of the played steps, cut at every start and end of an operator or runtime call.

Threads of one training process take turns: while backward's thread works, the main one waits for it. So all
of them make one line of work, and each piece of it belongs to whatever began last and still runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from advisor.advice.replay.window import Windows
from advisor.trace.events import Trace
from advisor.trace.intervals import covered_before
from advisor.trace.nesting import Nesting

#: A gap longer than this many typical ones is more than the Python around the operator that follows.
_GAPS_OF_AN_OP = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class HostWork:
    """Pieces of host time.

    Attributes:
        start_ns, dur_ns: int64 (pieces,), on the trace's clock, in order, within the windows.
        window: int64 (pieces,), which window.
        op: int64 (pieces,), innermost operator in ``Trace.ops``, or -1.
        call: int64 (pieces,), runtime call in ``Trace.runtime``, or -1.
        next_op: int64 (pieces,), in a gap the outermost operator that ends it, else -1.
        next_share: float (pieces,), share of the gap that is the Python around that operator.
        track: int32 (pieces,), thread of what runs; in a gap, of what ran before.
        next_track: int32 (pieces,), the same but in a gap, where it is that of what runs next.
        call_op: int64 (runtime calls,), the innermost operator around each call of the windows, or -1.
    """

    start_ns: np.ndarray
    dur_ns: np.ndarray
    window: np.ndarray
    op: np.ndarray
    call: np.ndarray
    next_op: np.ndarray
    next_share: np.ndarray
    track: np.ndarray
    next_track: np.ndarray
    call_op: np.ndarray

    def __len__(self) -> int:
        return len(self.start_ns)

    def position(self, ts_ns: np.ndarray) -> np.ndarray:
        """How many pieces begin before each time; int64 (m,)."""
        return np.searchsorted(self.start_ns, ts_ns, side="left")

    def covered(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """Share of each piece that disjoint sorted intervals cover; float (pieces,)."""
        ends = self.start_ns + self.dur_ns
        share = covered_before(ends, start_ns, end_ns) - covered_before(self.start_ns, start_ns, end_ns)
        return share / np.maximum(self.dur_ns, 1)


def host_work(
    trace: Trace, windows: Windows, op_parent: np.ndarray, cuts_ns: np.ndarray | None = None
) -> HostWork:
    """Cut the host time of these windows into pieces.

    Args:
        trace: the trace.
        windows: of the steps to play.
        op_parent: as in `Timeline.op_parent`.
        cuts_ns: further times to cut at, such as the ends of batch fetches, which no operator marks.
    """
    ops, calls = trace.ops, trace.runtime
    in_op = np.flatnonzero(windows.overlapping(ops.ts_ns, ops.end_ns))
    in_call = np.flatnonzero(windows.overlapping(calls.ts_ns, calls.end_ns + 1))
    # Threads without operators (NCCL's watchdog, a pinning thread) work beside the loop, not in it.
    loop = np.unique(ops.track[in_op])
    if len(loop):
        beside = ~np.isin(calls.track[in_call], loop)
        alone = in_call[beside]
        in_call = in_call[~beside]
    else:
        alone = in_call[:0]
        loop = np.unique(calls.track[in_call])
    n = len(in_op)
    track = np.concatenate([ops.track[in_op], calls.track[in_call]])
    start = np.concatenate([ops.ts_ns[in_op], calls.ts_ns[in_call]])
    dur = np.concatenate([ops.dur_ns[in_op], calls.dur_ns[in_call]])
    nesting = Nesting(track, start, dur)

    marks = np.concatenate([start, start + dur, windows.start_ns, windows.end_ns, calls.ts_ns[alone]])
    marks = np.unique(marks if cuts_ns is None else np.concatenate([marks, cuts_ns]))
    at = windows.at(marks)
    begin, end = marks[:-1], marks[1:]
    kept = at[:-1] >= 0
    begin, end, window = begin[kept], end[kept], at[:-1][kept]

    owner = np.full(len(begin), -1, np.int64)
    since = np.full(len(begin), np.iinfo(np.int64).min)
    for lane in loop.tolist():
        inner = nesting.innermost(np.full(len(begin), lane, np.int32), begin)
        inner_start = np.where(inner >= 0, start[np.maximum(inner, 0)], np.iinfo(np.int64).min)
        later = (inner >= 0) & (inner_start >= since)
        owner[later], since[later] = inner[later], inner_start[later]

    parent = nesting.parent.astype(np.int64)
    is_op, is_call = (owner >= 0) & (owner < n), owner >= n
    call = np.full(len(begin), -1, np.int64)
    call[is_call] = in_call[owner[is_call] - n]
    op = np.full(len(begin), -1, np.int64)
    op[is_op] = in_op[owner[is_op]]
    call_parent = parent[n:]
    # Calls nest (a driver call in a runtime call); the operator is around them all.
    while (nested := call_parent >= n).any():
        call_parent = np.where(nested, parent[np.where(nested, call_parent, 0)], call_parent)
    call_op = np.full(len(calls), -1, np.int64)
    call_op[in_call] = np.where(call_parent >= 0, in_op[np.maximum(call_parent, 0)] if n else -1, -1)
    op[is_call] = call_op[call[is_call]]

    next_op, next_share = _after_gaps(begin, end, window, owner, op, op_parent)
    lane, next_lane = _threads(owner, track)
    return HostWork(begin, end - begin, window, op, call, next_op, next_share, lane, next_lane, call_op)


def _threads(owner: np.ndarray, track: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Thread of each piece, and of the next that is no gap; int32."""
    owned = np.flatnonzero(owner >= 0)
    if not len(owned):
        return np.full(len(owner), -1, np.int32), np.full(len(owner), -1, np.int32)
    lane = track[owner[owned]].astype(np.int32)
    place = np.arange(len(owner))
    before = np.searchsorted(owned, place, side="right") - 1
    after = np.minimum(np.searchsorted(owned, place), len(owned) - 1)
    return lane[np.maximum(before, 0)], lane[after]


def _after_gaps(
    begin: np.ndarray,
    end: np.ndarray,
    window: np.ndarray,
    owner: np.ndarray,
    op: np.ndarray,
    op_parent: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """For each gap the operator that ends it, and the share of the gap that goes with it."""
    next_op, share = np.full(len(begin), -1, np.int64), np.zeros(len(begin))
    gap = np.flatnonzero(owner < 0)
    gap = gap[gap + 1 < len(begin)]
    gap = gap[(op[gap + 1] >= 0) & (window[gap + 1] == window[gap])]
    gap = gap[op_parent[op[gap + 1]] < 0]
    if len(gap):
        length = (end - begin)[gap]
        next_op[gap] = op[gap + 1]
        share[gap] = np.minimum(1.0, _GAPS_OF_AN_OP * np.median(length) / np.maximum(length, 1))
    return next_op, share
