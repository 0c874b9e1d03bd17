"""The module whose forward, or whose part of backward, made each launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from advisor.trace.events import Events, Trace
from advisor.trace.nesting import Nesting, nearest
from advisor.trace.phases import is_backward

if TYPE_CHECKING:
    from advisor.trace.link import Launches

MODULE_PREFIX = "advisor::module::"
_PYTHON_PREFIX = "nn.Module: "


class _Sequence(msgspec.Struct, gc=False):
    number: int | None = msgspec.field(default=None, name="Sequence number")
    forward_thread: int | None = msgspec.field(default=None, name="Fwd thread id")


_SEQUENCE = msgspec.json.Decoder(_Sequence)


def assign_modules(trace: Trace, launches: Launches, parent: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Module of each launch, as an index into the returned paths, or -1; int32 (n,).

    Forward launches take the innermost module range around them on their thread. Backward launches
    take the module of the forward operator that carries the same autograd sequence number.
    """
    ranges, labels, paths = _module_ranges(trace)
    if not len(ranges):
        return np.full(len(launches), -1, np.int32), []
    nesting = Nesting(ranges.track, ranges.ts_ns, ranges.dur_ns)

    def at(track: np.ndarray, ts_ns: np.ndarray) -> np.ndarray:
        inner = nesting.innermost(track, ts_ns)
        return np.where(inner >= 0, labels[np.maximum(inner, 0)], -1).astype(np.int32)

    module = at(launches.track, launches.launch_ts_ns)
    engine = np.array([is_backward(name) for name in trace.names], bool)[trace.ops.name]
    owner = nearest(launches.op, parent, engine)
    waiting = np.flatnonzero((owner >= 0) & (module < 0))
    if len(waiting):
        forward = _forward_of(trace.ops, engine, owner[waiting])
        known = forward >= 0
        source = forward[known]
        module[waiting[known]] = at(trace.ops.track[source], trace.ops.ts_ns[source])
    return module, paths


def _module_ranges(trace: Trace) -> tuple[Events, np.ndarray, list[str]]:
    """Module ranges, each one's label (index into the paths), and the paths."""
    own = np.array([name.startswith(MODULE_PREFIX) for name in trace.names], bool)
    if own.any():
        ranges = trace.annotations.take(own[trace.annotations.name])
        used = np.unique(ranges.name)
        paths = [trace.names[i][len(MODULE_PREFIX) :] for i in used.tolist()]
        return ranges, np.searchsorted(used, ranges.name).astype(np.int32), paths
    python = np.array([name.startswith(_PYTHON_PREFIX) for name in trace.names], bool)
    ranges = trace.python.take(python[trace.python.name] if len(trace.python) else np.zeros(0, bool))
    return ranges, *_python_paths(trace, ranges)


def _python_paths(trace: Trace, ranges: Events) -> tuple[np.ndarray, list[str]]:
    """Paths such as ``GPT_0.Block_3.Linear_1`` from the module frames that stacks record."""
    parent = Nesting(ranges.track, ranges.ts_ns, ranges.dur_ns).parent.tolist()
    labels = np.full(len(ranges), -1, np.int32)
    index: dict[tuple[int, int], int] = {}
    paths: list[str] = []
    for i, name in enumerate(ranges.name.tolist()):
        above = int(labels[parent[i]]) if parent[i] >= 0 else -1
        key = (above, name)
        if key not in index:
            own = trace.names[name][len(_PYTHON_PREFIX) :]
            index[key] = len(paths)
            paths.append(f"{paths[above]}.{own}" if above >= 0 else own)
        labels[i] = index[key]
    return labels, paths


def _forward_of(ops: Events, engine: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Forward operator of each backward one: same sequence number, latest before it; -1 if unknown."""
    numbers, positions = [], []
    for i, raw in enumerate(ops.args):
        if engine[i] or b"Sequence number" not in bytes(raw):
            continue
        entry = _decode(raw)
        if entry.number is not None and entry.number >= 0 and not entry.forward_thread:
            numbers.append(entry.number)
            positions.append(i)
    found = np.full(len(backward), -1, np.int64)
    if not numbers:
        return found
    number, position = np.array(numbers, np.int64), np.array(positions, np.int64)
    order = np.lexsort((ops.ts_ns[position], number))
    number, position = number[order], position[order]
    for i, b in enumerate(backward.tolist()):
        wanted = _decode(ops.args[b]).number
        if wanted is None:
            continue
        lo, hi = np.searchsorted(number, wanted, "left"), np.searchsorted(number, wanted, "right")
        before = np.searchsorted(ops.ts_ns[position[lo:hi]], ops.ts_ns[b])
        if before:
            found[i] = position[lo + before - 1]
    return found


def _decode(raw: msgspec.Raw) -> _Sequence:
    try:
        return _SEQUENCE.decode(raw)
    except msgspec.DecodeError:
        return _Sequence()
