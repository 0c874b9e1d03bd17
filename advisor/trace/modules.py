"""The module whose forward, or whose part of backward, made each launch."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from advisor.trace.events import Events, Trace
from advisor.trace.names import coded, named
from advisor.trace.nesting import Nesting, nearest
from advisor.trace.phases import is_backward

if TYPE_CHECKING:
    from advisor.trace.link import Launches

#: Ranges of the capture, and of Lightning's PyTorchProfiler with `record_module_names`.
_RANGE = re.compile(r"^(?:advisor::module::|\[pl\]\[module\][^:]*: )(.+)$", re.DOTALL)
#: Frames that the profiler records with stacks: the class, and a number for each instance.
_FRAME = re.compile(r"^nn\.Module: (.+?)(?:_\d+)?$", re.DOTALL)
#: Threads told apart, the busiest, and levels of modules in a path; a program has fewer of either.
_MAX_THREADS = 64
_MAX_LEVELS = 64


_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _Sequence(msgspec.Struct, gc=False):
    number: _Int64 = msgspec.field(default=-1, name="Sequence number")
    forward_thread: _Int64 = msgspec.field(default=0, name="Fwd thread id")


_SEQUENCE = msgspec.json.Decoder(_Sequence)


def assign_modules(trace: Trace, launches: Launches, parent: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Module of each launch, as an index into the returned paths, or -1; int32 (n,).

    Forward launches take the innermost module range around them on their thread; so does what
    activation checkpointing computes again during backward. Other backward launches take the module of
    the forward operator that carries the same autograd sequence number.
    """
    ranges, labels, paths = _module_ranges(trace)
    if not len(ranges):
        return np.full(len(launches), -1, np.int32), []
    nesting = Nesting(ranges.track, ranges.ts_ns, ranges.dur_ns)

    def at(track: np.ndarray, ts_ns: np.ndarray) -> np.ndarray:
        inner = nesting.innermost(track, ts_ns)
        return np.where(inner >= 0, labels[inner], -1).astype(np.int32)

    module = at(launches.track, launches.launch_ts_ns)
    engine = named(trace.names, trace.ops.name, is_backward)
    owner = nearest(launches.op, parent, engine)
    waiting = np.flatnonzero((owner >= 0) & (module < 0))
    if len(waiting):
        owners, which = np.unique(owner[waiting], return_inverse=True)
        in_module = at(trace.ops.track, trace.ops.ts_ns)
        forward = forward_of(trace.ops, np.flatnonzero(~engine), owners)
        found = np.where(forward >= 0, in_module[forward], -1)
        module[waiting] = found[which.reshape(-1)]
    return module, paths


def _module_ranges(trace: Trace) -> tuple[Events, np.ndarray, list[str]]:
    """Module ranges, each one's label (index into the paths), and the paths."""
    own = named(trace.names, trace.annotations.name, _RANGE.match)
    if own.any():
        ranges = trace.annotations.take(own)
        paths: dict[str, int] = {}
        labels = coded(
            trace.names,
            ranges.name,
            lambda name: paths.setdefault(_RANGE.sub(r"\1", name), len(paths)),
            np.dtype(np.int32),
        )
        return ranges, labels, list(paths)
    ranges = trace.python.take(named(trace.names, trace.python.name, _FRAME.match))
    return ranges, *_paths_of_frames(trace, ranges)


def _paths_of_frames(trace: Trace, ranges: Events) -> tuple[np.ndarray, list[str]]:
    """Paths such as ``GPT.Block[3].Linear[1]`` from the module frames that stacks record.

    The profiler numbers all instances of a class through; here they are numbered within their parent, in
    the order of their first call, so that the same place in each layer has the same number.
    """
    parent = Nesting(ranges.track, ranges.ts_ns, ranges.dur_ns).parent.tolist()
    labels = np.full(len(ranges), -1, np.int32)
    index: dict[tuple[int, int], int] = {}
    siblings: Counter[tuple[int, str]] = Counter()
    places: list[tuple[int, str, int]] = []
    level: list[int] = []
    for i, name in enumerate(ranges.name.tolist()):
        above = int(labels[parent[i]]) if parent[i] >= 0 else -1
        if above >= 0 and level[above] == _MAX_LEVELS:
            labels[i] = above
            continue
        key = (above, name)
        if key not in index:
            kind = _FRAME.sub(r"\1", trace.names[name])
            index[key] = len(places)
            places.append((above, kind, siblings[above, kind]))
            level.append(level[above] + 1 if above >= 0 else 1)
            siblings[above, kind] += 1
        labels[i] = index[key]
    paths: list[str] = []
    for above, kind, number in places:
        own = f"{kind}[{number}]" if siblings[above, kind] > 1 else kind
        paths.append(f"{paths[above]}.{own}" if above >= 0 else own)
    return labels, paths


def forward_of(ops: Events, candidates: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Forward operator of each backward one, or -1; int64 (len(backward),).

    The last one before it that carries its sequence number: operators that make no node of the graph
    carry the number of the next node, so the one that made it comes last.

    Args:
        ops: all operators.
        candidates: positions of those that may be forward operators, ascending.
        backward: positions of backward operators.
    """
    found = np.full(len(backward), -1, np.int64)
    entries = [_sequence(ops.args[i]) for i in candidates.tolist()]
    forward = np.array([e.number >= 0 and not e.forward_thread for e in entries], bool)
    number = np.array([e.number for e in entries], np.int64)[forward]
    position = candidates[forward]
    order = np.lexsort((position, number))
    number, position = number[order], position[order]

    wanted = [_sequence(ops.args[i]) for i in backward.tolist()]
    wanted_number = np.array([e.number for e in wanted], np.int64)
    thread = np.array([e.forward_thread for e in wanted], np.int64)
    for one in _busiest(thread):
        asked = np.flatnonzero((thread == one) & (wanted_number >= 0))
        own = _on_the_thread_of(wanted_number[asked], number, position, ops.track[position])
        found[asked] = _last_before(number[own], position[own], wanted_number[asked], backward[asked])
    return found


def _on_the_thread_of(
    wanted: np.ndarray, number: np.ndarray, position: np.ndarray, track: np.ndarray
) -> np.ndarray:
    """bool (n,): on the track that carries most of the wanted numbers; of equals, the one that did last.

    Each thread counts for itself, and the profiler's name of the forward thread is not the trace's.
    """
    tracks = _busiest(track)
    if len(tracks) < 2:
        return np.ones(len(number), bool)
    asked = np.isin(number, wanted)
    votes = [
        (len(np.unique(number[own])), int(position[own].max()) if own.any() else -1)
        for own in (asked & (track == one) for one in tracks)
    ]
    return track == tracks[votes.index(max(votes))]


def _busiest(thread: np.ndarray) -> list[int]:
    """The threads with most entries, ascending."""
    threads, counts = np.unique(thread, return_counts=True)
    return np.sort(threads[np.argsort(-counts, kind="stable")[:_MAX_THREADS]]).tolist()


def _last_before(
    number: np.ndarray, position: np.ndarray, wanted: np.ndarray, before: np.ndarray
) -> np.ndarray:
    """The last position of each wanted number that lies before a position, or -1.

    Args:
        number, position: sorted by number, then position.
        wanted, before: one question each.
    """
    found = np.full(len(wanted), -1, np.int64)
    first = np.searchsorted(number, wanted, "left")
    last = np.searchsorted(number, wanted, "right")
    for i in np.flatnonzero(last > first).tolist():
        earlier = int(np.searchsorted(position[first[i] : last[i]], before[i]))
        if earlier:
            found[i] = position[first[i] + earlier - 1]
    return found


def _sequence(raw: msgspec.Raw) -> _Sequence:
    try:
        return _SEQUENCE.decode(raw)
    except msgspec.DecodeError:
        return _Sequence()
