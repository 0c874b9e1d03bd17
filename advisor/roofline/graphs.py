"""Kernels replayed from CUDA or HIP graphs: their work, taken from the same kernels seen outside a graph.

A replay records kernels without operators and shapes. A kernel launched one by one tells what the same kernel
in a graph does if it has the same name, grid and block; where such kernels did different work, the kernels
around them must tell which it is. What cannot be told this way stays unknown.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgspec
import numpy as np

from advisor.roofline.attach import LaunchCosts
from advisor.trace.events import KERNEL
from advisor.trace.link import Timeline
from advisor.trace.phases import PHASES

#: Numbers of kernels by name, grid and block.
_Keys: TypeAlias = dict[tuple[str, tuple[int, ...], tuple[int, ...]], int]
#: Kernels on either side that are looked at.
_REACH = 64
#: Stands for a kernel that is no example: uncosted, of a graph, or without a recorded grid.
_NO_KEY = -1


@dataclass(frozen=True, slots=True, eq=False)
class Replays:
    """What became known of the launches replayed from graphs.

    Attributes:
        replayed: bool (launches,), kernels replayed from a graph.
        inferred: bool (launches,), of these, those whose cost was taken from an example.
        costs: of all launches, the inferred ones included.
    """

    replayed: np.ndarray
    inferred: np.ndarray
    costs: LaunchCosts


def find_replays(timeline: Timeline) -> np.ndarray:
    """Number of the graph launch that each launch is replayed by, or -1; int64 (launches,).

    A graph launch is known by its name, or by the several kernels that share it.
    """
    rows, trace = timeline.launches, timeline.trace
    found = np.full(len(rows), -1, np.int64)
    kernels = np.flatnonzero((rows.kind == KERNEL) & (rows.launch_ts_ns >= 0))
    if timeline.cpu_only or not len(kernels):
        return found
    calls = np.stack([rows.track[kernels], rows.launch_ts_ns[kernels]])
    distinct, call, count = np.unique(calls, axis=1, return_inverse=True, return_counts=True)
    is_graph = np.array(["graphlaunch" in name.lower() for name in trace.names], bool)[trace.runtime.name]
    named = set(
        zip(trace.runtime.track[is_graph].tolist(), trace.runtime.ts_ns[is_graph].tolist(), strict=True)
    )
    graph = (count > 1) | np.array([(int(a), int(b)) in named for a, b in distinct.T], bool)
    call = call.reshape(-1)
    found[kernels] = np.where(graph[call], call, -1)
    return found


def infer_replays(
    timeline: Timeline,
    replays: np.ndarray,
    costs: LaunchCosts,
    reference: tuple[Timeline, LaunchCosts] | None = None,
) -> tuple[Timeline, Replays]:
    """Fill in what other launches tell of replayed kernels.

    Args:
        timeline: the joined trace.
        replays: from `find_replays`.
        costs: of its launches; the inferred ones are added here.
        reference: another trace of the same program and its costs, asked for what the trace itself leaves
            open. It gives costs alone; operators, modules and phases come from the trace itself.

    Returns:
        The timeline in which replayed kernels carry the operator, module and phase of their examples, where
        those are unambiguous and nothing better is known; and the costs.
    """
    replayed = replays >= 0
    keys: _Keys = {}
    graph_rows, ids = _graph_sequences(timeline, replays, keys)
    missing = replayed & ~costs.known
    inferred = np.zeros(len(replays), bool)
    carried = timeline
    for examples, example_costs in [(timeline, costs), *([reference] if reference else [])]:
        own = examples is timeline
        outside = ~replayed if own else find_replays(examples) < 0
        order, example_ids = _example_sequence(examples, outside, keys)
        if not (example_ids >= 0).any():
            continue
        work = _distinct_work(example_costs, order)
        source = _match_all(graph_rows, ids, example_ids, work, _needs_order(keys), len(replays))
        take = missing & ~inferred & (source >= 0)
        take[take] = example_costs.known[order[source[take]]]
        _copy_costs(costs, take, example_costs, order[source[take]])
        inferred |= take
        if own:
            carried = _carry(timeline, graph_rows, ids, order, example_ids, keys)
    return carried, Replays(replayed, inferred, costs)


def match(
    sequence: np.ndarray, examples: np.ndarray, work: np.ndarray, needs_order: np.ndarray
) -> np.ndarray:
    """For each kernel of a sequence an example that did the same, or -1; int64 (len(sequence),).

    Among examples of the kernel, those whose neighbours differ from the sequence's are struck off, further
    and further out on both sides, until all that are left did the same work. On a side where no example
    agrees any more nothing further is asked, but the nearest neighbours must agree where there are any.

    Args:
        sequence: int64, kernels of a graph in order, by identity; negative for one without.
        examples: int64, kernels launched one by one, in order; negative where there is a gap.
        work: int64, as long as `examples`: equal where the work was.
        needs_order: bool, by identity: its neighbours must agree even if all examples did the same.
    """
    found = np.full(len(sequence), -1, np.int64)
    places = {int(key): np.flatnonzero(examples == key) for key in np.unique(sequence) if key >= 0}
    for at, key in enumerate(sequence.tolist()):
        if key < 0 or not len(places[key]):
            continue
        left = places[key]
        if (work[left] == work[left[0]]).all() and not needs_order[key]:
            found[at] = left[0]
            continue
        found[at] = _by_neighbours(sequence, at, examples, left, work)
    return found


def _by_neighbours(
    sequence: np.ndarray, at: int, examples: np.ndarray, left: np.ndarray, work: np.ndarray
) -> int:
    sides = [-1, 1]
    for distance in range(1, _REACH + 1):
        for side in tuple(sides):
            beside = at + side * distance
            if not 0 <= beside < len(sequence):
                sides.remove(side)
                continue
            there = left + side * distance
            inside = (there >= 0) & (there < len(examples))
            kept = left[inside][examples[there[inside]] == sequence[beside]]
            if sequence[beside] < 0 or not len(kept):
                if distance == 1:
                    return -1
                sides.remove(side)
                continue
            left = kept
        if (work[left] == work[left[0]]).all():
            # A sequence of one kernel has no order that could tell.
            return int(left[0]) if len(sequence) > 1 else -1
        if not sides:
            break
    return -1


def _match_all(
    graph_rows: list[np.ndarray],
    ids: list[np.ndarray],
    examples: np.ndarray,
    work: np.ndarray,
    needs_order: np.ndarray,
    n: int,
) -> np.ndarray:
    """`match` over all replays; equal ones are worked out once. By launch, int64 (n,)."""
    source = np.full(n, -1, np.int64)
    done: dict[bytes, np.ndarray] = {}
    for rows, sequence in zip(graph_rows, ids, strict=True):
        key = sequence.tobytes()
        if key not in done:
            done[key] = match(sequence, examples, work, needs_order)
        source[rows] = done[key]
    return source


class _Shape(msgspec.Struct, gc=False):
    grid: list[int] | None = None
    block: list[int] | None = None


_SHAPE = msgspec.json.Decoder(_Shape)


def _identities(timeline: Timeline, rows: np.ndarray, keys: _Keys) -> np.ndarray:
    """Number of each launch's name, grid and block in `keys`, `_NO_KEY` where they are not recorded."""
    names, args = timeline.trace.names, timeline.trace.device.args
    name = timeline.launches.name
    found = np.full(len(rows), _NO_KEY, np.int64)
    for place, row in enumerate(rows.tolist()):
        try:
            shape = _SHAPE.decode(args[row])
        except msgspec.DecodeError:
            continue
        if shape.grid:
            key = names[name[row]], tuple(shape.grid), tuple(shape.block or ())
            found[place] = keys.setdefault(key, len(keys))
    return found


def _graph_sequences(
    timeline: Timeline, replays: np.ndarray, keys: _Keys
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Launches of each replay in time order, and their identities."""
    rows = np.flatnonzero(replays >= 0)
    rows = rows[np.argsort(replays[rows], kind="stable")]
    ids = _identities(timeline, rows, keys)
    cuts = np.flatnonzero(np.diff(replays[rows])) + 1
    return np.split(rows, cuts), np.split(ids, cuts)


def _example_sequence(timeline: Timeline, outside: np.ndarray, keys: _Keys) -> tuple[np.ndarray, np.ndarray]:
    """Kernels in the order of their launches, and their identities; a kernel of a graph is a gap."""
    rows = timeline.launches
    chosen = np.flatnonzero((rows.kind == KERNEL) & (rows.launch_ts_ns >= 0))
    chosen = chosen[np.lexsort((rows.ts_ns[chosen], rows.launch_ts_ns[chosen]))]
    ids = _identities(timeline, chosen, keys)
    ids[~outside[chosen]] = _NO_KEY
    return chosen, ids


def _distinct_work(costs: LaunchCosts, order: np.ndarray) -> np.ndarray:
    figures = np.stack(
        [costs.flops[order], costs.bytes_read[order], costs.bytes_written[order], costs.pipe[order]]
    )
    return _numbered(list(map(bytes, np.ascontiguousarray(figures.T))))


def _numbered(values: Sequence[Hashable]) -> np.ndarray:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], np.int64)


def _needs_order(keys: _Keys) -> np.ndarray:
    # The inner size of a matrix product, a reduction or a norm shows in neither name nor grid; an elementwise
    # kernel's grid tells its size.
    return np.array(["elementwise_kernel" not in name for name, _grid, _block in keys], bool)


def _copy_costs(costs: LaunchCosts, take: np.ndarray, source: LaunchCosts, rows: np.ndarray) -> None:
    for pipe in source.pipes:
        if pipe not in costs.pipes:
            costs.pipes.append(pipe)
    renumbered = np.array([costs.pipes.index(pipe) for pipe in source.pipes] or [-1], np.int8)
    costs.flops[take], costs.bytes_read[take] = source.flops[rows], source.bytes_read[rows]
    costs.bytes_written[take], costs.pipe[take] = source.bytes_written[rows], renumbered[source.pipe[rows]]


def _carry(
    timeline: Timeline,
    graph_rows: list[np.ndarray],
    ids: list[np.ndarray],
    order: np.ndarray,
    example_ids: np.ndarray,
    keys: _Keys,
) -> Timeline:
    """Operators, modules and phases of the examples, each where the examples left agree on it."""
    rows = timeline.launches
    needs_order = _needs_order(keys)

    def source_of(value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Launches that take this column's value from an example, and those examples."""
        found = _match_all(
            graph_rows, ids, example_ids, value[order].astype(np.int64), needs_order, len(rows)
        )
        taking = np.flatnonzero(found >= 0)
        return taking, order[found[taking]]

    op, module, phase = rows.op.copy(), rows.module.copy(), rows.phase.copy()
    op_name = (
        np.where(rows.op >= 0, timeline.trace.ops.name[np.maximum(rows.op, 0)], -1)
        if len(timeline.trace.ops)
        else rows.op
    )
    taking, example = source_of(op_name)
    known = rows.op[example] >= 0
    op[taking[known]] = rows.op[example[known]]
    taking, example = source_of(rows.module)
    open_ = (rows.module[taking] < 0) & (rows.module[example] >= 0)
    module[taking[open_]] = rows.module[example[open_]]
    taking, example = source_of(rows.phase)
    open_ = rows.phase[taking] == PHASES.index("other")
    phase[taking[open_]] = rows.phase[example[open_]]
    return replace(timeline, launches=replace(rows, op=op, module=module, phase=phase))
