"""The device's side as it was captured: what each launch waited for, and how long after that it began."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from advisor.trace.events import Trace
from advisor.trace.link import Launches
from advisor.trace.names import named

_STREAM_WAIT = re.compile(r"StreamWaitEvent|StreamWaitValue", re.I)
_RECORD = re.compile(r"EventRecord", re.I)
#: Clocks of host and device, and the order of two streams' ends, are not known better than this.
_TOLERANCE_NS = 1_500
#: A launch that begins this long after all known reasons had another one.
_STALL_NS = 30_000
#: It waited for another stream if that stream's work ended this shortly before.
_HANDOVER_NS = 12_000
#: Where the trace holds no example: between kernels of a stream, and from a call to an idle stream's kernel.
_GAP_NS, _LATENCY_NS = 1_000.0, 5_000.0
#: A stream this far behind the host has its kernels wait for each other, not for their launch.
_QUEUED_NS = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """Order and delays on the device. All columns have one entry a launch, those of the trace's launches.

    Attributes:
        stream: int64, number of the (device, stream) that it runs on.
        count: how many of those there are.
        order: int64, launches in the order of their launching; those of one graph by their start.
        gap_ns: float, from the end of the work before it on its stream to its start, if that is what it
            waits for.
        latency_ns: float, from the launching call's start to its own, if it waits for nothing else.
        waits: int64 (m, 2), pairs of launches: the first begins after the second, on another stream, ended.
        typical_gap_ns, typical_latency_ns: of this trace.
    """

    stream: np.ndarray
    count: int
    order: np.ndarray
    gap_ns: np.ndarray
    latency_ns: np.ndarray
    waits: np.ndarray
    typical_gap_ns: float
    typical_latency_ns: float


def device_order(trace: Trace, rows: Launches, submit_ns: np.ndarray) -> Streams:
    """Find what each launch waited for.

    Args:
        trace: the trace.
        rows: its launches.
        submit_ns: int64 (launches,), when the host handed each over: the start of its call, or when the
            call ceased to wait. Orphans count as handed over before all else.
    """
    lanes = np.stack([rows.device, rows.stream], axis=1)
    unique, stream = np.unique(lanes, axis=0, return_inverse=True)
    stream = stream.reshape(-1).astype(np.int64)
    order = np.lexsort((rows.ts_ns, rows.launch_ts_ns))
    free = _free_from(rows, stream, order, len(unique))
    waits = _event_waits(trace, rows, stream, order)
    waits = np.concatenate([waits, _stalls(rows, stream, submit_ns, free, waits)])
    free = np.maximum(free, _wait_ends(rows, waits))

    gap = (rows.ts_ns - free).astype(float)
    latency = (rows.ts_ns - submit_ns).astype(float)
    linked = rows.launch_ts_ns >= 0
    behind = free - submit_ns
    typical_gap = _median(gap[linked & (behind > _QUEUED_NS)], _GAP_NS)
    # The first of a call alone: what a graph launches besides waits for the first.
    idle = linked & (behind < 0) & (latency < _STALL_NS) & _first_of_call(rows, order)
    typical_latency = _median(latency[idle], _LATENCY_NS)
    by_stream = free + typical_gap >= submit_ns + typical_latency
    return Streams(
        stream=stream,
        count=len(unique),
        order=order,
        gap_ns=np.where(by_stream, gap, np.minimum(gap, typical_gap)),
        latency_ns=np.where(by_stream, np.minimum(latency, typical_latency), latency),
        waits=waits,
        typical_gap_ns=typical_gap,
        typical_latency_ns=typical_latency,
    )


def _median(values: np.ndarray, otherwise: float) -> float:
    return max(float(np.median(values)), 0.0) if len(values) else otherwise


def _first_of_call(rows: Launches, order: np.ndarray) -> np.ndarray:
    first = np.ones(len(order), bool)
    ts, track = rows.launch_ts_ns[order], rows.track[order]
    same = (ts[1:] == ts[:-1]) & (track[1:] == track[:-1])
    first[order[1:]] = ~same
    return first


def _free_from(rows: Launches, stream: np.ndarray, order: np.ndarray, count: int) -> np.ndarray:
    """When each launch's stream was through with all before it; far in the past for a stream's first."""
    free = np.full(len(rows), np.iinfo(np.int64).min // 4)
    end = rows.end_ns
    for lane in range(count):
        own = order[stream[order] == lane]
        free[own[1:]] = np.maximum.accumulate(end[own])[:-1]
    return free


def _wait_ends(rows: Launches, waits: np.ndarray) -> np.ndarray:
    ends = np.full(len(rows), np.iinfo(np.int64).min // 4)
    if len(waits):
        np.maximum.at(ends, waits[:, 0], rows.end_ns[waits[:, 1]])
    return ends


def _event_waits(trace: Trace, rows: Launches, stream: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Waits of a stream for an event.

    A trace names neither the stream that waits nor the event. What the same thread launches next is on the
    stream that waits; it waits for the latest event recorded on another stream (the one of the launch just
    before the recording), or, where recordings are not in the trace, for the latest launch on another.
    """
    calls = trace.runtime
    waiting = np.flatnonzero(named(trace.names, calls.name, _STREAM_WAIT.search))
    recording = np.flatnonzero(named(trace.names, calls.name, _RECORD.search))
    found = []
    for track in np.unique(calls.track[waiting]).tolist():
        own = order[(rows.track[order] == track) & (rows.launch_ts_ns[order] >= 0)]
        launched = rows.launch_ts_ns[own]
        when = calls.ts_ns[waiting[calls.track[waiting] == track]]
        following = np.searchsorted(launched, when, side="right")
        when, following = when[following < len(own)], following[following < len(own)]
        target = own[following]
        recorded = calls.ts_ns[recording[calls.track[recording] == track]]
        if len(recorded):
            # The launch that each recording follows.
            marked = np.searchsorted(launched, recorded, side="right") - 1
            recorded, marked = recorded[marked >= 0], own[marked[marked >= 0]]
        else:
            recorded, marked = launched, own
        for lane in np.unique(stream[target]).tolist():
            here = stream[target] == lane
            others = stream[marked] != lane
            at = np.searchsorted(recorded[others], when[here], side="right") - 1
            source = marked[others][at[at >= 0]]
            found.append(np.stack([target[here][at >= 0], source], axis=1))
    if not found:
        return np.zeros((0, 2), np.int64)
    waits = np.unique(np.concatenate(found), axis=0)
    held = rows.end_ns[waits[:, 1]] <= rows.ts_ns[waits[:, 0]] + _TOLERANCE_NS
    return waits[held]


def _stalls(
    rows: Launches, stream: np.ndarray, submit_ns: np.ndarray, free: np.ndarray, waits: np.ndarray
) -> np.ndarray:
    """Waits that no call tells of: a launch began late, just when work on another stream had ended."""
    known = np.maximum(np.maximum(free, submit_ns), _wait_ends(rows, waits))
    late = np.flatnonzero((rows.launch_ts_ns >= 0) & (rows.ts_ns - known > _STALL_NS))
    if not len(late):
        return np.zeros((0, 2), np.int64)
    row_ends = rows.end_ns
    by_end = np.argsort(row_ends, kind="stable")
    ends, found = row_ends[by_end], []
    for row in late.tolist():
        at = int(np.searchsorted(ends, rows.ts_ns[row] + _TOLERANCE_NS, side="right")) - 1
        while at >= 0 and ends[at] >= rows.ts_ns[row] - _HANDOVER_NS:
            other = int(by_end[at])
            earlier = rows.launch_ts_ns[other] <= rows.launch_ts_ns[row]
            if stream[other] != stream[row] and rows.device[other] == rows.device[row] and earlier:
                found.append((row, other))
                break
            at -= 1
    return np.array(found, np.int64).reshape(-1, 2)
