"""The launch queue: a host too far ahead of the device waits inside its launch calls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from advisor.trace.events import Trace
from advisor.trace.link import Launches

#: Launches in flight that a queue holds where the trace shows no limit. Source: CUDA drivers keep 1024.
DEPTH = 1024
#: No queue is shorter: with fewer in flight, a long call has another reason.
_LEAST_DEPTH = 400
#: A call this much longer than usual has waited.
_LONG_NS, _LONG_FACTOR = 100_000, 10
#: Within this share of the depth the queue counts as full.
_FULL = 0.95


@dataclass(frozen=True, slots=True, eq=False)
class Queue:
    """What the trace shows of the launch queue.

    Attributes:
        depth: launches in flight at which a launching call waits.
        blocked: int64 (n,), positions in ``Trace.runtime`` of calls that waited for room.
        own_ns: float, what a launching call costs without waiting.
    """

    depth: int
    blocked: np.ndarray
    own_ns: float


def find_queue(trace: Trace, rows: Launches, call_of: np.ndarray) -> Queue:
    """Find the launching calls that waited for room in the queue."""
    calls = trace.runtime
    order = np.lexsort((rows.ts_ns, rows.launch_ts_ns))
    linked = call_of[order] >= 0
    call = call_of[order[linked]]
    dur = calls.dur_ns[call]
    usual = float(np.median(dur)) if len(dur) else 0.0
    started = np.searchsorted(np.sort(rows.ts_ns), calls.end_ns[call])
    in_flight = np.flatnonzero(linked) + 1 - started
    long = (dur > max(_LONG_NS, _LONG_FACTOR * usual)) & (in_flight >= _LEAST_DEPTH)
    if not long.any():
        return Queue(DEPTH, np.zeros(0, np.int64), usual)
    depth = int(np.median(in_flight[long]))
    full = (in_flight >= _FULL * depth) & (dur > 2 * usual)
    return Queue(depth, np.unique(call[full]), usual)
