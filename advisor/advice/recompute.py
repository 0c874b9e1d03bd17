"""Forward work that is done again in backward, as activation checkpointing does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from advisor.advice.edits import HostRemove
from advisor.trace.names import named
from advisor.trace.nesting import nearest
from advisor.trace.phases import is_backward

if TYPE_CHECKING:
    from advisor.advice.loop import Loop

#: Begins each region that `torch.utils.checkpoint` keeps no activations of, right after it has noted the
#: state of the random generators and of autocast; the reentrant kind lies around the region and notes inside.
_ENTRY, _AROUND = "_NoopSaveInputs", "CheckpointFunction"


def recomputed_ops(loop: Loop) -> np.ndarray:
    """bool (ops,): forward operators within backward.

    Only where gradients are recorded do operators get a sequence number; in a plain backward they do not.
    """
    trace, parent = loop.timeline.trace, loop.timeline.op_parent
    engine = named(trace.names, trace.ops.name, is_backward)
    inside = np.flatnonzero(~engine & (nearest(parent, parent, engine) >= 0))
    numbered = np.zeros(len(trace.ops), bool)
    numbered[[op for op in inside.tolist() if b'"Sequence number"' in bytes(trace.ops.args[op])]] = True
    return numbered


def host_of_checkpoints(loop: Loop, again: np.ndarray) -> HostRemove | None:
    """What checkpointing costs the host, the Python between operators included; None without any.

    Args:
        loop: whose host.
        again: bool (ops,), as from `recomputed_ops`.
    """
    ops = loop.timeline.trace.ops
    found = sorted({*_recomputes(loop, again), *_entries(loop)})
    if not found:
        return None
    start, end, op = np.array(found, np.int64).T
    return HostRemove(start, end, ops.track[op])


def _recomputes(loop: Loop, again: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(start, end, gradient's operator) of each recompute.

    A gradient's operator finds its activations missing, runs the forward and goes on: what happens in it
    before its own next operator, and after the last of its own that launched something, is the recompute's.
    """
    ops, parent = loop.timeline.trace.ops, loop.timeline.op_parent
    outermost = again & (parent >= 0)
    outermost[outermost] = ~again[parent[outermost]]
    inner = np.isin(parent, np.unique(parent[outermost]))
    launching = np.zeros(len(ops), bool)
    under = loop.under(inner)
    launching[under[under >= 0]] = True
    for holder in np.unique(parent[outermost]).tolist():
        own = np.flatnonzero(parent == holder)
        own = own[np.argsort(ops.ts_ns[own], kind="stable")]
        last = int(np.flatnonzero(outermost[own])[-1])
        stays = ~outermost[own] & (launching[own] | (np.arange(len(own)) > last))
        since, recomputes = int(ops.ts_ns[holder]), False
        for op, kept in zip(own.tolist(), stays.tolist(), strict=True):
            if kept and recomputes:
                yield since, int(ops.ts_ns[op]), holder
            if kept:
                since, recomputes = int(ops.end_ns[op]), False
            recomputes |= bool(outermost[op])
        if recomputes:
            yield since, int(ops.end_ns[holder]), holder


def _entries(loop: Loop) -> Iterator[tuple[int, int, int]]:
    """(start, end, operator) of what precedes each checkpointed region in the forward."""
    ops, parent, names = loop.timeline.trace.ops, loop.timeline.op_parent, loop.timeline.trace.names
    for op in np.flatnonzero(loop.ops_named(rf"^{_AROUND}$")).tolist():
        inside = np.flatnonzero(parent == op)
        if len(inside):
            yield int(ops.ts_ns[op]), int(ops.ts_ns[inside].min()), op
    entries = np.flatnonzero(loop.ops_named(rf"^{_ENTRY}$"))
    for around, track in {(int(parent[op]), int(ops.track[op])) for op in entries.tolist()}:
        beside = np.flatnonzero((parent == around) & (ops.track == track))
        beside = beside[np.argsort(ops.ts_ns[beside], kind="stable")].tolist()
        for place, op in enumerate(beside):
            if names[ops.name[op]] != _ENTRY:
                continue
            before = place - 1
            # The region's own tensor, without elements, that autograd hangs it on.
            if before >= 0 and names[ops.name[beside[before]]] == "aten::empty":
                before -= 1
            if before >= 0:
                yield int(ops.end_ns[beside[before]]), int(ops.end_ns[op]), op
