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
from advisor.trace.phases import PHASES, VALIDATION

#: Numbers of kernels by name, grid and block.
_Keys: TypeAlias = dict[tuple[str, tuple[int, ...], tuple[int, ...]], int]
#: Kernels launched one by one that are looked at: some steps of a large model.
_MAX_EXAMPLES = 20_000
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
        costs: of its launches; those of replayed kernels are put here in place.
        reference: another trace of the same program and its costs, asked for what the trace itself leaves
            open. It gives costs alone; operators, modules and phases come from the trace itself.

    Returns:
        The timeline in which replayed kernels carry the operator, phase and, where they have none, module of
        their examples, each where it is unambiguous; and the costs.
    """
    replayed = replays >= 0
    keys: _Keys = {}
    graph_rows, ids = _graph_sequences(timeline, replays, keys)
    # An operator around a graph's launch did not do all that is in the graph.
    for figure in costs.FIGURES:
        getattr(costs, figure)[replayed] = np.nan
    costs.pipe[replayed] = -1
    inferred = np.zeros(len(replays), bool)
    carried = timeline
    for examples, example_costs in [(timeline, costs), *([reference] if reference else [])]:
        own = examples is timeline
        outside = ~replayed if own else find_replays(examples) < 0
        order, example_ids = _example_sequence(examples, outside, keys)
        if not (example_ids >= 0).any():
            continue
        rows = examples.launches
        works = [_distinct_work(example_costs, order)]
        if own:
            works += [_op_names(timeline)[order], rows.module[order], rows.phase[order]]
        sources = _sources(graph_rows, ids, example_ids, works, _needs_order(keys), len(replays))
        source = sources[0]
        take = replayed & ~inferred & (source >= 0)
        take[take] = example_costs.known[order[source[take]]]
        _copy_costs(costs, take, example_costs, order[source[take]])
        inferred |= take
        if own:
            carried = _carry(timeline, [(np.flatnonzero(s >= 0), order[s[s >= 0]]) for s in sources[1:]])
    return carried, Replays(replayed, inferred, costs)


class Match:
    """The examples of each kernel of one graph, and how far the kernels around both are the same.

    Args:
        sequence: int64, kernels of a graph in order, by identity; negative for one without.
        examples: int64, kernels launched one by one, in order; negative where there is a gap.
    """

    def __init__(self, sequence: np.ndarray, examples: np.ndarray) -> None:
        self._sequence = sequence
        places = {int(key): np.flatnonzero(examples == key) for key in np.unique(sequence) if key >= 0}
        nothing = np.zeros(0, np.int64)
        #: Places of each kernel's examples.
        self._places = [places.get(key, nothing) for key in sequence.tolist()]
        self._before = _runs(sequence, examples, self._places)
        backwards = [len(examples) - 1 - place for place in reversed(self._places)]
        self._after = _runs(sequence[::-1], examples[::-1], backwards)[::-1]

    def same(self, work: np.ndarray, needs_order: np.ndarray) -> np.ndarray:
        """For each kernel an example that did the same work, or -1; int64 (len(sequence),).

        Where examples did different work, the one counts that has the longest common run of kernels both
        before and after it. If there is none, or several that disagree, the work is not known.

        Args:
            work: int64, as long as the examples: equal where the work was.
            needs_order: bool, by identity: the kernels next to it must agree with an example's even if all
                examples did the same.
        """
        found = np.full(len(self._sequence), -1, np.int64)
        last = len(self._sequence) - 1
        for at, key in enumerate(self._sequence.tolist()):
            places = self._places[at]
            if not len(places):
                continue
            if _agree(work[places]) and not needs_order[key]:
                found[at] = places[0]
                continue
            before, after = self._before[at], self._after[at]
            likely = ((before > 0) | (at == 0)) & ((after > 0) | (at == last))
            # A graph of one kernel has no order that could tell.
            if last == 0 or not likely.any():
                continue
            if not _agree(work[places[likely]]):
                likely &= (before == before[likely].max()) & (after == after[likely].max())
            if likely.any() and _agree(work[places[likely]]):
                found[at] = places[likely][0]
        return found


def _agree(values: np.ndarray) -> bool:
    return bool((values == values[0]).all())


def _runs(sequence: np.ndarray, examples: np.ndarray, places: list[np.ndarray]) -> list[np.ndarray]:
    """For each kernel and each of its examples: how many kernels right before them are the same in both."""
    found = []
    run = np.zeros(len(examples) + 1, np.int32)
    for at, key in enumerate(sequence.tolist()):
        found.append(run[places[at]])
        run[1:] = np.where(examples == key, run[:-1] + 1, 0) if key >= 0 else 0
        run[0] = 0
    return found


def _sources(
    graph_rows: list[np.ndarray],
    ids: list[np.ndarray],
    examples: np.ndarray,
    works: Sequence[np.ndarray],
    needs_order: np.ndarray,
    n: int,
) -> list[np.ndarray]:
    """`Match.same` over all replays, for each of `works`; by launch, int64 (n,)."""
    sources = [np.full(n, -1, np.int64) for _ in works]
    done: dict[bytes, list[np.ndarray]] = {}
    for rows, sequence in zip(graph_rows, ids, strict=True):
        # Replays of one graph are equal.
        key = sequence.tobytes()
        if key not in done:
            matched = Match(sequence, examples)
            done[key] = [matched.same(work, needs_order) for work in works]
        for source, found in zip(sources, done[key], strict=True):
            source[rows] = found
    return sources


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
    chosen = chosen[np.lexsort((rows.ts_ns[chosen], rows.launch_ts_ns[chosen]))][:_MAX_EXAMPLES]
    ids = _identities(timeline, chosen, keys)
    ids[~outside[chosen]] = _NO_KEY
    return chosen, ids


def _distinct_work(costs: LaunchCosts, order: np.ndarray) -> np.ndarray:
    figures = np.stack([getattr(costs, figure)[order] for figure in (*costs.FIGURES, "pipe")])
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
    for figure in costs.FIGURES:
        getattr(costs, figure)[take] = getattr(source, figure)[rows]
    costs.pipe[take] = renumbered[source.pipe[rows]]


def _op_names(timeline: Timeline) -> np.ndarray:
    """Name of each launch's operator, -1 for none."""
    op, names = timeline.launches.op, timeline.trace.ops.name
    found = np.full(len(op), -1, np.int64)
    found[op >= 0] = names[op[op >= 0]]
    return found


def _carry(timeline: Timeline, examples: list[tuple[np.ndarray, np.ndarray]]) -> Timeline:
    """Operators, modules and phases of the examples: for each the launches that have one, and those."""
    rows = timeline.launches
    op, module, phase = rows.op.copy(), rows.module.copy(), rows.phase.copy()
    (taking, example), of_module, of_phase = examples
    known = rows.op[example] >= 0
    op[taking[known]] = rows.op[example[known]]
    taking, example = of_module
    open_ = rows.module[taking] < 0
    module[taking[open_]] = rows.module[example[open_]]
    taking, example = of_phase
    # A graph may hold the whole step, whatever part of the loop launches it.
    open_ = (rows.phase[taking] != VALIDATION) & (rows.phase[example] != PHASES.index("other"))
    phase[taking[open_]] = rows.phase[example[open_]]
    return replace(timeline, launches=replace(rows, op=op, module=module, phase=phase))
