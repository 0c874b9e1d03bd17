"""What edits do to a graph: launches and host work go or take another time, waits are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, singledispatchmethod

import numpy as np

from advisor.advice import edits
from advisor.advice.edits import Edit
from advisor.advice.replay.graph import FETCH, LAUNCH, Graph, launches_in_ops
from advisor.trace.intervals import merged
from advisor.trace.nesting import nearest

#: No launch takes so long to follow another on its stream.
_STALL_NS = 100_000.0


class Change:
    """A graph's figures with some edits in them. Rows, ops and calls are those of the trace.

    Where edits meet on a launch, `Remove` beats `Fuse`, which beats `Retime`, of which the shortest holds;
    of two groups to fuse that share a launch the one that saves more holds, and of two ways to fetch a batch
    the faster. Host work that several edits take away goes once.

    Args:
        graph: of the steps.
        made: edits in any order.
        case: which figure of each estimate.

    Attributes:
        dur_ns, gap_ns, latency_ns: float (launches,), as in `Streams`.
        stream: int64 (launches,).
        alive: bool (launches,).
        host: float (pieces,), share of each piece of host work that stays.
        waits: bool (items,), items other than launches that stay.
        order, position: of the items, as in `Items`.
        extra_host_ns: float (items,), host work right before an item that was not there.
        inserted: (item that it comes after, stream, duration in ns, host time in ns) of new launches.
        stream_count: how many streams there are.
        loader_ns: time between the workers' batches; None where no edit changes it.
    """

    def __init__(self, graph: Graph, made: Sequence[Edit] = (), case: str = "likely") -> None:
        rows, self.graph, self.case = graph.analysis.timeline.launches, graph, case
        self.dur_ns = rows.dur_ns.astype(float)
        self.gap_ns, self.latency_ns = graph.streams.gap_ns.copy(), graph.streams.latency_ns.copy()
        self.stream = graph.streams.stream
        self.alive = np.ones(len(rows), bool)
        self.host = np.ones(len(graph.host))
        self.waits = np.ones(len(graph.items.kind), bool)
        self.inserted: list[tuple[int, int, float, float]] = []
        self.extra_host_ns = np.zeros(len(graph.items.kind))
        self.order, self.position = graph.items.order.copy(), graph.items.position.copy()
        self.stream_count = graph.streams.count
        self.loader_ns: float | None = None
        #: Item of each launch, or -1.
        self._item = np.full(len(rows), -1, np.int64)
        launches = np.flatnonzero(graph.items.kind == LAUNCH)
        self._item[graph.items.row[launches]] = launches
        self._without_host = np.zeros(len(rows), bool)
        self._fused = np.zeros(len(rows), bool)
        self._retimed = np.full(len(rows), np.inf)
        self._fetch_ns = np.inf
        for kind in _ORDER:
            chosen = [edit for edit in made if isinstance(edit, kind)]
            for edit in self._fuses(chosen) if kind is edits.Fuse else chosen:
                self._apply(edit)
        if self._without_host.any():
            self._drop_host(self._without_host)

    def _of(self, estimate: edits.Estimate, n: int) -> np.ndarray:
        return np.broadcast_to(np.asarray(estimate.of(self.case), float), n)

    @singledispatchmethod
    def _apply(self, edit: object) -> None:
        raise TypeError(f"no replay of {type(edit).__name__}")

    @_apply.register
    def _(self, edit: edits.Retime) -> None:
        self._retime(_rows(edit.rows), edit.dur_ns)

    def _retime(self, rows: np.ndarray, dur_ns: edits.Estimate) -> None:
        """Give launches another duration; of several the shortest."""
        np.minimum.at(self._retimed, rows, self._of(dur_ns, len(rows)))
        self.dur_ns[rows] = self._retimed[rows]

    @_apply.register
    def _(self, edit: edits.Remove) -> None:
        rows = _rows(edit.rows)
        self.alive[rows] = False
        if edit.with_host:
            self._without_host[rows] = True

    @_apply.register
    def _(self, edit: edits.Fuse) -> None:
        place = self._place
        for group, dur_ns in self._groups(edit):
            if self._fused[group].any():
                continue
            self._fused[group] = True
            # What another edit removes is not there to be fused.
            left = group[self.alive[group]]
            if not len(left):
                continue
            last = left[place[left].argmax()]
            others = left[left != last]
            self.alive[others] = False
            self.dur_ns[last] = dur_ns
            if edit.host_ns and self._item[last] >= 0:
                self.extra_host_ns[self._item[last]] += edit.host_ns
            if edit.with_host:
                self._without_host[others] = True

    def _groups(self, edit: edits.Fuse) -> list[tuple[np.ndarray, float]]:
        durations = self._of(edit.dur_ns, len(edit.groups)).tolist()
        return [(_rows(group), dur) for group, dur in zip(edit.groups, durations, strict=True) if len(group)]

    @cached_property
    def _place(self) -> np.ndarray:
        """int64 (launches,): position in the order of launching."""
        order = self.graph.streams.order
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        return place

    def _fuses(self, made: Sequence[Edit]) -> list[edits.Fuse]:
        """Each group of the played steps as an edit of its own, the one that saves most device time first."""
        single: list[tuple[float, edits.Fuse]] = []
        for one in made:
            if not isinstance(one, edits.Fuse):
                continue
            groups = self._groups(one)
            for (group, dur), now_ns in zip(groups, self._played_ns([g for g, _ in groups]), strict=True):
                if now_ns is not None:
                    alone = edits.Fuse([group], edits.Estimate.exactly(dur), one.with_host, one.host_ns)
                    single.append((now_ns - dur, alone))
        return [edit for _, edit in sorted(single, key=lambda pair: -pair[0])]

    def _played_ns(self, groups: list[np.ndarray]) -> list[float | None]:
        """Device time of each group; None for one that no played step launches."""
        if not groups:
            return []
        rows = np.concatenate(groups)
        first = np.concatenate([[0], np.cumsum([len(group) for group in groups])])[:-1]
        total = np.add.reduceat(self.graph.analysis.timeline.launches.dur_ns[rows], first)
        played = np.logical_or.reduceat(self.graph.played[rows], first)
        return [float(ns) if here else None for ns, here in zip(total, played, strict=True)]

    @_apply.register
    def _(self, edit: edits.Insert) -> None:
        rows = _rows(edit.after)
        item = self._item[rows]
        durations = self._of(edit.dur_ns, len(rows))
        for at, row, dur in zip(item.tolist(), rows.tolist(), durations.tolist(), strict=True):
            if at >= 0:
                self.inserted.append((at, int(self.stream[row]), dur, edit.host_ns))

    @_apply.register
    def _(self, edit: edits.DropSync) -> None:
        items = self.graph.items
        self.waits &= (items.kind == LAUNCH) | ~np.isin(items.call, _rows(edit.calls))

    @_apply.register
    def _(self, edit: edits.HostTime) -> None:
        ops = self.graph.analysis.timeline.trace.ops
        chosen = _rows(edit.ops)
        factor = self._of(edit.factor, len(chosen))
        wanted = np.zeros(len(ops), bool)
        wanted[chosen] = True
        parent = self.graph.analysis.timeline.op_parent
        outermost = nearest(parent[chosen], parent, wanted) < 0
        piece_factor = np.ones(len(self.host))
        own, host = chosen[outermost], self.graph.host
        first = host.position(ops.ts_ns[own])
        last = host.position(ops.ts_ns[own] + ops.dur_ns[own])
        for a, b, share in zip(first.tolist(), last.tolist(), factor[outermost].tolist(), strict=True):
            piece_factor[a:b] = share
        self.host = np.minimum(self.host, piece_factor) * np.maximum(piece_factor, 1.0)

    @_apply.register
    def _(self, edit: edits.HostRemove) -> None:
        host = self.graph.host
        goes = 1.0 - float(np.mean(edit.left.of(self.case)))
        track = np.broadcast_to(edit.track, len(edit.start_ns))
        for lane in np.unique(track).tolist():
            own = track == lane
            covered = host.covered(*merged(edit.start_ns[own], edit.end_ns[own]))
            here = (host.track == lane) | (host.next_track == lane)
            self.host = np.minimum(self.host, np.where(here, 1.0 - goes * covered, 1.0))

    @_apply.register
    def _(self, edit: edits.Overlap) -> None:
        graph, rows = self.graph, _rows(edit.rows)
        if self.stream is graph.streams.stream:
            self.stream, self.stream_count = self.stream.copy(), graph.streams.count + 1
        self.stream[rows] = graph.streams.count
        self._retime(rows, edit.dur_ns)
        self.gap_ns[rows], self.latency_ns[rows] = (
            graph.streams.typical_gap_ns,
            graph.streams.typical_latency_ns,
        )
        # A blocking copy waits in its own call, or in a synchronisation that the same operator makes.
        op = graph.analysis.timeline.launches.op[rows]
        call, items = graph.call_of[rows], graph.items
        same_op = np.isin(graph.host.call_op[items.call], op[op >= 0])
        waited = (items.call >= 0) & (np.isin(items.call, call[call >= 0]) | same_op)
        self.waits &= (items.kind == LAUNCH) | ~waited

    @_apply.register
    def _(self, edit: edits.Input) -> None:
        loader, items = self.graph.loader, self.graph.items
        if not len(loader.start_ns):
            return
        host_ns, period_ns = (float(np.mean(e.of(self.case))) for e in (edit.host_ns, edit.period_ns))
        # Of several ways to fetch, the fastest holds: one's host time does not go with another's period.
        if max(host_ns, period_ns) >= self._fetch_ns:
            return
        self._fetch_ns = max(host_ns, period_ns)
        host = self.graph.host
        self.host = np.minimum(self.host, 1.0 - host.covered(*merged(loader.start_ns, loader.end_ns)))
        self.extra_host_ns[items.kind == FETCH] = host_ns
        self.loader_ns = period_ns

    @_apply.register
    def _(self, edit: edits.LaunchAsGraph) -> None:
        graph, items, rows = self.graph, self.graph.items, _rows(edit.rows)
        host_ns = float(np.mean(edit.host_ns.of(self.case)))
        captured = np.zeros(len(self.alive), bool)
        captured[rows] = True
        captured &= graph.played & self.alive
        at = np.flatnonzero((items.kind == LAUNCH) & captured[np.maximum(items.row, 0)])
        window = graph.windows.at(graph.analysis.timeline.launches.launch_ts_ns[items.row[at]])
        goes = self._outside_of(graph.played & self.alive & ~captured)
        for number in np.unique(window).tolist():
            own = at[window == number]
            first, last = int(self.position[own[0]]), int(self.position[own[-1]])
            stretch = slice(first, last)
            self.host[stretch] = np.where(goes[stretch], 0.0, self.host[stretch])
            self.order[own] = self.order[own[0]] + np.arange(len(own)) / (2.0 * len(own))
            self.position[own] = first
            self.extra_host_ns[own[0]] += host_ns
        # What stalls for longer waits for something that the trace does not show, in a graph as well.
        idle_ns = np.maximum(self.gap_ns, self.latency_ns)
        stalls = captured & (idle_ns >= _STALL_NS)
        self.gap_ns[captured] = np.minimum(self.gap_ns[captured], edit.gap_ns)
        self.gap_ns[stalls] = idle_ns[stalls]
        self.latency_ns[captured] = graph.streams.typical_latency_ns
        self._drop_host(captured)

    def _outside_of(self, kept: np.ndarray) -> np.ndarray:
        """bool (pieces,): host work that has no part in these launches, nor in fetching batches."""
        graph = self.graph
        timeline, host = graph.analysis.timeline, graph.host
        op = timeline.launches.op[kept]
        needed = launches_in_ops(op[op >= 0], timeline.op_parent) > 0
        calls = np.zeros(len(timeline.trace.runtime), bool)
        calls[graph.call_of[kept]] = True
        stays = host.covered(*merged(graph.loader.start_ns, graph.loader.end_ns)) > 0
        inside, in_call = host.op >= 0, host.call >= 0
        stays[inside] |= needed[host.op[inside]]
        stays[in_call] |= calls[host.call[in_call]]
        return ~stays

    def _drop_host(self, gone: np.ndarray) -> None:
        """Take away the host's part of launches: their calls, and operators that then launch nothing."""
        graph = self.graph
        timeline, host, call_of = graph.analysis.timeline, graph.host, graph.call_of
        calls = len(timeline.trace.runtime)
        linked = call_of >= 0
        all_of_call = np.bincount(call_of[linked], minlength=calls)
        gone_of_call = np.bincount(call_of[linked & gone], minlength=calls)
        call_dead = (gone_of_call > 0) & (gone_of_call == all_of_call)

        op, parent = timeline.launches.op, timeline.op_parent
        in_op = op >= 0
        ops = len(parent)
        total, lost = graph.launches_in_op, launches_in_ops(op[in_op & gone], parent)
        empty = (lost > 0) & (lost == total)
        op_dead = nearest(np.arange(ops), parent, empty) >= 0

        dead = np.zeros(len(host), bool)
        in_call, inside = host.call >= 0, host.op >= 0
        dead[in_call] |= call_dead[host.call[in_call]]
        dead[inside] |= op_dead[host.op[inside]]
        self.host[dead] = 0.0
        before = host.next_op >= 0
        before[before] = op_dead[host.next_op[before]]
        self.host[before] = np.minimum(self.host[before], 1.0 - host.next_share[before])

        items = graph.items
        called = (items.kind != LAUNCH) & (items.call >= 0)
        call = items.call[called]
        around = host.call_op[call]
        in_dead = op_dead[np.maximum(around, 0)] & (around >= 0) if ops else np.zeros(len(call), bool)
        self.waits[called] &= ~(call_dead[call] | in_dead)


def _rows(rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows)
    return np.flatnonzero(rows) if rows.dtype == bool else rows.astype(np.int64)


#: Later ones see what earlier ones left.
_ORDER = (
    edits.Retime, edits.Remove, edits.Fuse, edits.Overlap, edits.DropSync, edits.HostTime, edits.HostRemove,
    edits.Input, edits.LaunchAsGraph, edits.Insert,
)  # fmt: skip
