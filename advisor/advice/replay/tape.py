"""One round of steps as plain columns, ready to play."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from advisor.advice.replay.change import Change
from advisor.advice.replay.debias import Speed
from advisor.advice.replay.graph import LAUNCH, Graph


@dataclass(frozen=True, slots=True, eq=False)
class Tape:
    """One round of steps, ready to play. Columns have one entry an item, in the host's order.

    Attributes:
        kind: see `advisor.advice.replay.graph`.
        at_ns: host work before the item.
        stream: number of the stream, or -1.
        delay_ns: of a LAUNCH its latency; of a SYNC the time from the end of what it waits for.
        gap_ns: of a LAUNCH, after the work before it on its stream.
        dur_ns: of a LAUNCH, on the device.
        slot: of RECORD, WAIT and SYNC_SLOT.
        row: the launch in the trace; -1 for other kinds, and for launches that are not in the trace.
        host_ns: host work of the round.
        stream_count, slot_count: how many there are.
        depth: launches in flight at which a launch waits.
        loader_ns: time between batches of the loader's workers; 0 where they keep up.
    """

    kind: np.ndarray
    at_ns: np.ndarray
    stream: np.ndarray
    delay_ns: np.ndarray
    gap_ns: np.ndarray
    dur_ns: np.ndarray
    slot: np.ndarray
    row: np.ndarray
    host_ns: float
    stream_count: int
    slot_count: int
    depth: int
    loader_ns: float


def _loader_ns(change: Change, speed: Speed) -> float:
    """An edit's pace, else the real one where it is known, else the captured one."""
    given = (change.loader_ns, speed.loader_ns, change.graph.loader.period_ns)
    return next(pace for pace in given if pace is not None)


def real_work_ns(graph: Graph, speed: Speed) -> np.ndarray:
    """Each piece of host work at this speed; float (pieces,)."""
    real = graph.work_ns - graph.swelling_ns * (1.0 - speed.host)
    if speed.long != 1.0:
        real -= np.where(graph.fetching, 0.0, graph.work_ns - graph.swelling_ns) * (1.0 - speed.long)
    real[graph.fetching] *= speed.fetch
    return real


def tape_of(change: Change, speed: Speed) -> Tape:
    """A changed graph as a tape.

    Args:
        change: of the graph.
        speed: of the host.
    """
    graph, items = change.graph, change.graph.items
    work = np.concatenate([[0.0], np.cumsum(real_work_ns(graph, speed) * change.host)])
    launch, row = items.kind == LAUNCH, items.row
    kept = change.waits.copy()
    kept[launch] = change.alive[row[launch]]

    def of_launch(values: np.ndarray, otherwise: np.ndarray | float) -> np.ndarray:
        found = np.broadcast_to(np.asarray(otherwise, values.dtype), len(row)).copy()
        found[launch] = values[row[launch]]
        return found

    columns = [
        items.kind,
        work[change.position],
        of_launch(change.stream, items.stream),
        of_launch(change.latency_ns, items.lag_ns),
        of_launch(change.gap_ns, 0.0),
        of_launch(change.dur_ns, 0.0),
        items.slot,
        items.row,
    ]
    order, extra = change.order, change.extra_host_ns
    if change.inserted:
        at, stream, dur, host = (np.array(column) for column in zip(*change.inserted, strict=True))
        new = len(at)
        latency, gap = graph.streams.typical_latency_ns, graph.streams.typical_gap_ns
        more = [LAUNCH, columns[1][at], stream, latency, gap, dur, -1, -1]
        columns = [
            np.concatenate([column, np.broadcast_to(values, new)])
            for column, values in zip(columns, more, strict=True)
        ]
        order = np.concatenate([order, order[at] + 0.6])
        extra = np.concatenate([extra, host])
        kept = np.concatenate([kept, np.ones(new, bool)])
    place = np.argsort(order, kind="stable")
    place = place[kept[place]]
    columns[1] = columns[1].astype(float)
    kind, at, stream, delay, gap, dur, slot, row = (column[place] for column in columns)
    at = at + np.cumsum(extra[place])
    return Tape(
        kind=kind,
        at_ns=at,
        stream=stream,
        delay_ns=delay,
        gap_ns=gap,
        dur_ns=dur,
        slot=slot,
        row=row,
        host_ns=float(work[-1] + extra[place].sum()),
        stream_count=change.stream_count,
        slot_count=graph.slots,
        depth=graph.depth,
        loader_ns=_loader_ns(change, speed),
    )
