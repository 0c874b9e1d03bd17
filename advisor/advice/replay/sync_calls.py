"""Calls in which the host waits for the device, and for how much of the device's work."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from advisor.roofline.launch_class import HOST_COPY, OTHER_COPY, PAGEABLE_COPY, goes_to_host, launch_classes
from advisor.trace.events import Trace
from advisor.trace.link import Launches
from advisor.trace.names import coded, named

#: By what they do, whatever the runtime: cudaStreamSynchronize, hipDeviceSynchronize, cuCtxSynchronize, ...
_SYNCHRONISE = re.compile(r"synchronize", re.I)
_OF_DEVICE = re.compile(r"(?:Device|Ctx|Context|Thread)Synchronize", re.I)
_OF_STREAM = re.compile(r"Stream\w*Synchronize", re.I)
_COPY = re.compile(r"memcpy", re.I)
_RETURNS_AT_ONCE = re.compile(r"async", re.I)
#: Freeing memory waits for the device where the driver must unmap it.
_FREE = re.compile(r"^(?:cuda|hip|cu|mu|xpu)?(?:Mem)?Free(?:Host)?(?:_v\d)?$", re.I)
_DEVICE, _STREAM, _EVENT, _OWN_COPY, _MAYBE_DEVICE = 1, 2, 3, 4, 5
#: A call that ends this shortly before what it waits for ended is an error of the clocks.
_TOLERANCE_NS = 3_000
#: Own cost of a waiting call, where no call of its name shows it.
_PLAIN_NS = 6_000
#: A smaller copy from pageable memory goes into a buffer at once (source: CUDA driver API, synchronisation),
#: unless its call takes so long that it must have waited.
_STAGED_BYTES, _STAGING_NS = 1 << 16, 50_000
#: A large one returns when its last piece lies in that buffer, not when it is through.
_LAST_PIECE_NS = 100_000
#: A call shorter than this, or that ends long after what it may have waited for, did not wait.
_RETURN_NS = 100_000

ALL_STREAMS = -1


@dataclass(frozen=True, slots=True, eq=False)
class SyncCalls:
    """Calls that wait, or would wait if the device were slower.

    Attributes:
        call: int64 (n,), in ``Trace.runtime``.
        until: int64 (n,), the launch whose end is waited for, where it is a single one (an event, a copy);
            else -1.
        stream: int64 (n,), the stream all of whose work is waited for, or `ALL_STREAMS`; of `until` if set.
        own_ns: float (n,), what the call costs the host without any waiting.
        lag_ns: float (n,), from the end of the device's work to the call's.
    """

    call: np.ndarray
    until: np.ndarray
    stream: np.ndarray
    own_ns: np.ndarray
    lag_ns: np.ndarray

    def __len__(self) -> int:
        return len(self.call)


def _kind(name: str) -> int:
    if _SYNCHRONISE.search(name):
        return _DEVICE if _OF_DEVICE.search(name) else _STREAM if _OF_STREAM.search(name) else _EVENT
    if _COPY.search(name):
        return _OWN_COPY
    return _MAYBE_DEVICE if _FREE.match(name) else 0


def find_sync_calls(
    trace: Trace,
    rows: Launches,
    call_of: np.ndarray,
    stream: np.ndarray,
    calls: np.ndarray,
    staging_waits: bool = True,
) -> SyncCalls:
    """Find the waiting calls among those of the played steps.

    Args:
        trace: the trace.
        rows: its launches.
        call_of: int64 (launches,), the runtime call of each, or -1.
        stream: int64 (launches,), numbered streams.
        calls: int64, positions in ``Trace.runtime`` to look at.
        staging_waits: whether a call that ends shortly before its copy from pageable memory does waited for
            it; else it is work.
    """
    table = trace.runtime
    kinds = coded(trace.names, table.name[calls], _kind, np.int8)
    look = _Look(trace, rows, call_of, stream, _LAST_PIECE_NS if staging_waits else 0)
    found = [one for call, kind in zip(calls[kinds > 0].tolist(), kinds[kinds > 0].tolist(), strict=True)
             if (one := look.at(call, kind))]  # fmt: skip
    columns = list(zip(*found, strict=True)) if found else [()] * 5
    call, until, lane = (np.array(column, np.int64) for column in columns[:3])
    awaited_ns = np.array(columns[3], np.int64)
    name = table.name[call] if len(call) else call
    waited = awaited_ns > table.ts_ns[call] + _PLAIN_NS
    own = table.dur_ns[call].astype(float)
    for one in np.unique(name).tolist():
        same = name == one
        plain = own[same & ~waited]
        usual = float(np.median(plain)) if len(plain) else _PLAIN_NS
        own[same & waited] = np.minimum(own[same & waited], min(usual, _PLAIN_NS))
    lag = np.maximum(table.end_ns[call] - awaited_ns, 0).astype(float)
    lag[~waited] = np.minimum(lag[~waited], _PLAIN_NS)
    return SyncCalls(call, until, lane, own, lag)


def _blocking_copies(trace: Trace, rows: Launches, call_of: np.ndarray) -> np.ndarray:
    """Copies whose call returns only when they are done, by what they copy; bool (launches,).

    An asynchronous one that is over before its call returns, because its stream was idle, waited for nothing.
    """
    classes = launch_classes(rows.kind, rows.name, trace.names)
    pageable = classes == PAGEABLE_COPY
    to_host = named(trace.names, rows.name, goes_to_host)
    pinned = named(trace.names, rows.name, lambda name: "pinned" in name.lower())
    linked = call_of >= 0
    at_once, long = np.zeros(len(rows), bool), np.ones(len(rows), bool)
    at_once[linked] = named(trace.names, trace.runtime.name[call_of[linked]], _RETURNS_AT_ONCE.search)
    long[linked] = trace.runtime.dur_ns[call_of[linked]] > _STAGING_NS
    staged = (rows.bytes >= 0) & (rows.bytes < _STAGED_BYTES) & ~to_host & ~long
    # Where the name does not tell the kind of memory, what the trace shows must do.
    by_itself = (pageable & ~staged) | (~pageable & ~pinned)
    return np.isin(classes, (HOST_COPY, PAGEABLE_COPY, OTHER_COPY)) & (by_itself | ~at_once)


class _Look:
    """What one call waits for."""

    def __init__(
        self, trace: Trace, rows: Launches, call_of: np.ndarray, stream: np.ndarray, last_piece_ns: int
    ) -> None:
        self._last_piece_ns = last_piece_ns
        self._calls, self._stream = trace.runtime, stream
        self._begins, self._ends, self._row_ends = trace.runtime.ts_ns, trace.runtime.end_ns, rows.end_ns
        order = np.lexsort((rows.ts_ns, rows.launch_ts_ns))
        self._order, self._launched, self._end = order, rows.launch_ts_ns[order], self._row_ends[order]
        self._lane, self._track = stream[order], rows.track[order]
        self._lanes = np.unique(stream).tolist()
        self._by_end, self._launch_ts = np.argsort(self._row_ends, kind="stable"), rows.launch_ts_ns
        self._sorted_ends = self._row_ends[self._by_end]
        self._of_track: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._blocking = _blocking_copies(trace, rows, call_of)
        self._pageable = launch_classes(rows.kind, rows.name, trace.names) == PAGEABLE_COPY
        self._row_of = dict(zip(call_of[::-1].tolist(), range(len(call_of) - 1, -1, -1), strict=True))
        self._by_lane = {lane: np.flatnonzero(self._lane == lane) for lane in self._lanes}
        self._lane_launched = {lane: self._launched[at] for lane, at in self._by_lane.items()}
        self._lane_end = {lane: np.maximum.accumulate(self._end[at]) for lane, at in self._by_lane.items()}

    def _last(self, lane: int, before: int) -> tuple[int, int]:
        """Last launch on a stream handed over before a time, and when the stream was through; (-1, -1)."""
        at = self._by_lane[lane]
        count = int(np.searchsorted(self._lane_launched[lane], before, side="left"))
        return (int(self._order[at[count - 1]]), int(self._lane_end[lane][count - 1])) if count else (-1, -1)

    def at(self, call: int, kind: int) -> tuple[int, int, int, int] | None:
        """(call, until, stream, end of the awaited work in ns), or None for a call that waits for nothing."""
        start, end = int(self._begins[call]), int(self._ends[call])
        late = end + _TOLERANCE_NS
        if kind == _OWN_COPY:
            row = self._row_of.get(call, -1)
            if row < 0 or not self._blocking[row]:
                return None
            if self._row_ends[row] > late + (self._last_piece_ns if self._pageable[row] else 0):
                return None
            return call, row, int(self._stream[row]), int(self._row_ends[row])
        if kind == _EVENT:
            return self._event(call, start, late)
        ends = {lane: self._last(lane, start) for lane in self._lanes}
        ends = {lane: last for lane, last in ends.items() if last[0] >= 0}
        if not ends:
            return None
        through = max(last[1] for last in ends.values())
        if kind in (_DEVICE, _MAYBE_DEVICE):
            if through > late or (kind == _MAYBE_DEVICE and end - through > _RETURN_NS):
                return None
            return call, -1, ALL_STREAMS, int(through)
        # Of the streams that were through in time, the one that was last explains the waiting best.
        able = {lane: last for lane, last in ends.items() if last[1] <= late}
        if not able:
            return None
        lane = self._own_lane(call, start, able)
        slowest = max(able, key=lambda lane: able[lane][1])
        if able[slowest][1] > start + _PLAIN_NS:
            lane = slowest
        return call, -1, lane, able[lane][1]

    def _event(self, call: int, start: int, late: int) -> tuple[int, int, int, int] | None:
        """What ended last before the call did; None if it did before the call: nothing tells which event."""
        place = int(np.searchsorted(self._sorted_ends, late, side="right")) - 1
        while place >= 0 and self._sorted_ends[place] > start + _PLAIN_NS:
            row = int(self._by_end[place])
            if self._launch_ts[row] < start:
                return call, row, int(self._stream[row]), int(self._row_ends[row])
            place -= 1
        return None

    def _own_lane(self, call: int, start: int, able: dict[int, tuple[int, int]]) -> int:
        """The stream of the thread's latest launch, among these streams."""
        track = int(self._calls.track[call])
        if track not in self._of_track:
            own = np.flatnonzero(self._track == track)
            self._of_track[track] = own, self._launched[own]
        mine, launched = self._of_track[track]
        count = int(np.searchsorted(launched, start, side="left"))
        last = int(self._lane[mine[count - 1]]) if count else -1
        return last if last in able else max(able, key=lambda lane: able[lane][1])
