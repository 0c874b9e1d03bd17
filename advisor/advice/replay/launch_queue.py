"""The launch queue: a host too far ahead of the device waits inside its launch calls."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from advisor.trace.events import KERNEL, Trace
from advisor.trace.link import Launches

#: Launches in flight that a queue holds where the trace shows no limit. Source: CUDA drivers keep 1024.
DEPTH = 1024
#: No queue is shorter: with fewer in flight, a long call has another reason.
_LEAST_DEPTH = 400
#: Within this share of the most in flight the queue may have been full; it was if so many calls then took
#: longer than usual by this factor. (Room is made in portions: between two that wait some do not.)
_FULL, _CALLS, _LONGER = 0.95, 8, 4.0
#: A launching call that waits for nothing takes no longer, even under a profiler.
_PLAIN_NS = 15_000.0
#: Where more than this share of the calls finds the queue full, none shows what a call costs: this.
_ALWAYS, _BARE_NS = 0.5, 6_000.0


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
    # A copy may wait for itself; of a graph's kernels the first stands for the call.
    own = (call_of[order] >= 0) & (rows.kind[order] == KERNEL)
    call, first = np.unique(call_of[order[own]], return_index=True)
    if not len(call):
        return Queue(DEPTH, call, _PLAIN_NS)
    dur = calls.dur_ns[call].astype(float)
    started = np.searchsorted(np.sort(rows.ts_ns), calls.end_ns[call])
    in_flight = np.flatnonzero(own)[first] + 1 - started
    usual = min(float(np.percentile(dur, 25)), _PLAIN_NS)
    most = int(in_flight.max())
    full = in_flight >= _FULL * most
    if full.mean() > _ALWAYS:
        waited, usual = full & (dur > _BARE_NS), min(usual, _BARE_NS)
    else:
        waited = full & (dur > _LONGER * usual)
    if most < _LEAST_DEPTH or waited.sum() < _CALLS:
        return Queue(DEPTH, call[:0], usual)
    return Queue(int(np.median(in_flight[waited])), call[waited], usual)
