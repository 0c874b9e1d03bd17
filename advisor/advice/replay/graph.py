"""The played steps as a dependency graph: what the host does in order, and what the device does then."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from advisor.advice.host_calls import HostSide
from advisor.advice.replay.debias import swelling_ns
from advisor.advice.replay.host_work import HostWork, host_work
from advisor.advice.replay.launch_queue import find_queue
from advisor.advice.replay.loader import Loader, find_loader
from advisor.advice.replay.streams import Streams, device_order
from advisor.advice.replay.sync_calls import ALL_STREAMS, SyncCalls, find_sync_calls
from advisor.advice.replay.window import Windows, typical_steps
from advisor.roofline.analysis import Analysis
from advisor.trace.intervals import merged

#: Kinds of item. RECORD keeps the time at which a stream is through, WAIT lets a stream wait for one kept.
#: The host waits in SYNC_ALL for all streams, in SYNC_STREAM for one, in SYNC_SLOT for a time kept, and in
#: FETCH for the loader's workers.
LAUNCH, RECORD, WAIT, SYNC_ALL, SYNC_STREAM, SYNC_SLOT, FETCH = range(7)


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """What happens, in the host's order; all columns have one entry an item.

    Attributes:
        kind: int8, LAUNCH ... FETCH.
        order: float64, sorted; leaves room between items.
        position: int64, pieces of host work that come before it.
        row: int64, launch in the trace; -1 for other kinds.
        call: int64, runtime call of a launch or of a wait; -1 else.
        stream: int64, or -1.
        slot: int64, number of the time kept, or -1.
        lag_ns: float, of the SYNC kinds: from the end of what they wait for to the host going on.
    """

    kind: np.ndarray
    order: np.ndarray
    position: np.ndarray
    row: np.ndarray
    call: np.ndarray
    stream: np.ndarray
    slot: np.ndarray
    lag_ns: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """The played steps.

    Attributes:
        analysis: what it was made from.
        windows: one a step.
        host: pieces of host time.
        work_ns: float (pieces,), what of each piece is work, as profiled: without waiting.
        swelling_ns: float (pieces,), what of the work takes longer under the profiler.
        fetching: bool (pieces,), of making a batch in the training process itself.
        items: what happens.
        slots: how many times are kept.
        streams: of all launches of the trace.
        call_of: int64 (launches,), runtime call of each, or -1.
        played: bool (launches,), in a played step.
        launches_in_op: int64 (operators,), launches of each operator and all inside it.
        depth: launches in flight at which a launching call waits.
        loader: fetches of batches.
        events: operators and calls recorded in the played steps.
    """

    analysis: Analysis
    windows: Windows
    host: HostWork
    work_ns: np.ndarray
    swelling_ns: np.ndarray
    fetching: np.ndarray
    items: Items
    slots: int
    streams: Streams
    call_of: np.ndarray
    played: np.ndarray
    launches_in_op: np.ndarray
    depth: int
    loader: Loader
    events: int


def build_graph(analysis: Analysis, *, staging_waits: bool = True) -> Graph:
    """Make the graph of an analysed trace's typical steps.

    Args:
        analysis: the joined trace.
        staging_waits: as for `find_sync_calls`.
    """
    timeline = analysis.timeline
    trace, rows = timeline.trace, timeline.launches
    windows = typical_steps(analysis)
    side = HostSide(timeline)
    call_of = side.call_of
    queue = find_queue(trace, rows, call_of)
    loader = find_loader(side, windows)
    fetched = np.concatenate([loader.start_ns, loader.end_ns])
    host = host_work(trace, windows, timeline.op_parent, fetched)

    submit = rows.launch_ts_ns.copy()
    blocked = np.isin(call_of, queue.blocked) & (call_of >= 0)
    submit[blocked] = trace.runtime.end_ns[call_of[blocked]] - int(queue.own_ns)
    submit[rows.launch_ts_ns < 0] = np.iinfo(np.int64).min // 4
    streams = device_order(trace, rows, submit)

    inside = np.flatnonzero(windows.at(trace.runtime.ts_ns) >= 0)
    waits = find_sync_calls(trace, rows, call_of, streams.stream, inside, staging_waits)
    played = (rows.launch_ts_ns >= 0) & (windows.at(rows.launch_ts_ns) >= 0)
    work = _work(analysis, host, waits, queue.blocked, queue.own_ns, loader)
    items, slots = _items(analysis, host, streams, call_of, played, waits, loader)
    return Graph(
        analysis=analysis,
        windows=windows,
        host=host,
        work_ns=work,
        swelling_ns=swelling_ns(trace, host, work),
        fetching=_fetching(host, loader),
        items=items,
        slots=slots,
        streams=streams,
        call_of=call_of,
        played=played,
        launches_in_op=launches_in_ops(rows.op[rows.op >= 0], timeline.op_parent),
        depth=queue.depth,
        loader=loader,
        events=int((windows.at(trace.ops.ts_ns) >= 0).sum()) + len(inside),
    )


def launches_in_ops(op: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """How many of some launches lie in each operator and all inside it; int64 (operators,).

    Args:
        op: int (n,), innermost operator of each launch.
        parent: as in `Timeline.op_parent`.
    """
    total = np.zeros(len(parent), np.int64)
    while len(op):
        total += np.bincount(op, minlength=len(parent))
        op = parent[op]
        op = op[op >= 0]
    return total


def _fetching(host: HostWork, loader: Loader) -> np.ndarray:
    if not loader.in_process:
        return np.zeros(len(host), bool)
    return host.covered(*merged(loader.start_ns, loader.end_ns)) > 0


def _work(
    analysis: Analysis,
    host: HostWork,
    waits: SyncCalls,
    blocked: np.ndarray,
    blocked_own_ns: float,
    loader: Loader,
) -> np.ndarray:
    """Host time without what is spent waiting; float (pieces,)."""
    calls = analysis.timeline.trace.runtime
    work = host.dur_ns.astype(float)
    call = np.concatenate([waits.call, blocked])
    own = np.concatenate([waits.own_ns, np.full(len(blocked), blocked_own_ns)])
    start, end = calls.ts_ns[call], calls.end_ns[call]
    if loader.waits:
        start, end = np.concatenate([start, loader.start_ns]), np.concatenate([end, loader.end_ns])
        own = np.concatenate([own, np.minimum(loader.own_ns, loader.end_ns - loader.start_ns)])
    first, last = host.position(start), host.position(end)
    share = own / np.maximum(end - start, 1)
    for a, b, part in zip(first.tolist(), last.tolist(), share.tolist(), strict=True):
        work[a:b] = np.minimum(work[a:b], host.dur_ns[a:b] * part)
    return work


def _items(
    analysis: Analysis,
    host: HostWork,
    streams: Streams,
    call_of: np.ndarray,
    played: np.ndarray,
    waits: SyncCalls,
    loader: Loader,
) -> tuple[Items, int]:
    rows, calls = analysis.timeline.launches, analysis.timeline.trace.runtime
    own = streams.order[played[streams.order]]
    lane = streams.stream
    parts = [
        _part(rows.launch_ts_ns[own], np.arange(len(own)), LAUNCH, own, call_of[own], lane[own], -1, 0.0)
    ]
    place = np.full(len(rows), -1.0)
    place[own] = np.arange(len(own))
    last = float(len(own))

    both = streams.waits[played[streams.waits].all(axis=1)] if len(streams.waits) else streams.waits
    one = np.flatnonzero(waits.until >= 0)
    one = one[played[waits.until[one]]]
    kept, slot = np.unique(np.concatenate([both[:, 1], waits.until[one]]), return_inverse=True)
    slot = slot.reshape(-1)
    number = np.arange(len(kept))
    parts.append(_part(rows.launch_ts_ns[kept], place[kept] + 0.25, RECORD, -1, -1, lane[kept], number, 0.0))
    to = both[:, 0]
    parts.append(_part(rows.launch_ts_ns[to], place[to] - 0.25, WAIT, -1, -1, lane[to], slot[: len(to)], 0.0))
    call = waits.call[one]
    parts.append(
        _part(
            calls.end_ns[call],
            last,
            SYNC_SLOT,
            -1,
            call,
            lane[waits.until[one]],
            slot[len(to) :],
            waits.lag_ns[one],
        )
    )
    whole = np.flatnonzero(waits.until < 0)
    call, on = waits.call[whole], waits.stream[whole]
    kind = np.where(on == ALL_STREAMS, SYNC_ALL, SYNC_STREAM)
    parts.append(_part(calls.end_ns[call], last, kind, -1, call, on, -1, waits.lag_ns[whole]))
    parts.append(_part(loader.end_ns, last, FETCH, -1, -1, -1, -1, 0.0))

    time, place, kind, row, call, stream, slot, lag = (
        np.concatenate([part[i] for part in parts]) for i in range(8)
    )
    order = np.lexsort((place, time))
    integer = (kind, row, call, stream, slot)
    kind, row, call, stream, slot = (column[order].astype(np.int64) for column in integer)
    items = Items(
        kind=kind.astype(np.int8),
        order=np.arange(len(order), dtype=float),
        position=host.position(time[order].astype(np.int64)),
        row=row,
        call=call,
        stream=stream,
        slot=slot,
        lag_ns=lag[order].astype(float),
    )
    return items, len(kept)


def _part(time_ns: np.ndarray, *columns: np.ndarray | float) -> list[np.ndarray]:
    """Columns of some items: host time, place among those of one time, kind, row, call, stream, slot, lag."""
    return [np.broadcast_to(np.asarray(column), len(time_ns)) for column in (time_ns, *columns)]
