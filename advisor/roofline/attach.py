"""Give every launch of a timeline its cost: where the trace and the cost formulas meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from advisor.roofline import costs
from advisor.roofline.costs import Cost, Launch, OpCall, Tensor
from advisor.trace.link import CPU_OP, Launches, Timeline
from advisor.trace.nesting import nearest

#: An operator whose costed children make up this share of its own formula is a composite: its formula
#: would count their work twice.
_COMPOSITE_SHARE = 0.5
_MAX_ANCESTORS = 4


@dataclass(slots=True, eq=False)
class LaunchCosts:
    """Costs of the launches of a timeline, NaN where there is none.

    Attributes:
        flops, bytes_read, bytes_written: float64 (n,).
        pipe: int8 (n,), index into `pipes`; -1 where there is no cost.
        pipes: names of the pipes in use.
    """

    flops: np.ndarray
    bytes_read: np.ndarray
    bytes_written: np.ndarray
    pipe: np.ndarray
    pipes: list[str]

    @classmethod
    def unknown(cls, n: int) -> LaunchCosts:
        """No cost for any of n launches."""
        return cls(*(np.full(n, np.nan) for _ in range(3)), np.full(n, -1, np.int8), [])

    @property
    def known(self) -> np.ndarray:
        """bool (n,): has a cost."""
        return self.pipe >= 0

    def put(self, rows: np.ndarray, found: Sequence[Cost | None]) -> None:
        """Store one cost a row."""
        for row, cost in zip(rows.tolist(), found, strict=True):
            if cost is None:
                continue
            self.flops[row] = cost.flops
            self.bytes_read[row] = cost.bytes_read
            self.bytes_written[row] = cost.bytes_written
            if cost.pipe not in self.pipes:
                self.pipes.append(cost.pipe)
            self.pipe[row] = self.pipes.index(cost.pipe)


def attach_costs(timeline: Timeline) -> LaunchCosts:
    """Cost of every launch.

    The formula is that of the innermost operator around the launch which has one; all launches under
    that operator, less those under a nearer one with a cost, share it.
    """
    calls = _Calls(timeline)
    result = LaunchCosts.unknown(len(timeline.launches))
    rows = np.arange(len(timeline.launches))
    owner = nearest(timeline.launches.op, timeline.op_parent, calls.known)
    climbing = False
    while (owner >= 0).any():
        failed_rows, failed_owner = [], []
        for op, group in _groups(owner, rows):
            found = calls.costs(op, group, check_composite=climbing or timeline.cpu_only)
            if any(cost is not None for cost in found):
                result.put(group, found)
                calls.count_inside(op, found)
            else:
                failed_rows.append(group)
                failed_owner.append(np.full(len(group), timeline.op_parent[op], np.int32))
        if timeline.cpu_only or not failed_rows:
            break
        rows = np.concatenate(failed_rows)
        owner = nearest(np.concatenate(failed_owner), timeline.op_parent, calls.known)
        climbing = True
    return result


def gather_host_operators(timeline: Timeline) -> Timeline:
    """For a trace without device work: one row per operator with a formula, in place of kernels.

    A row's time is the operator's own and that of the operators inside it which have no formula.
    """
    rows, ops = timeline.launches, timeline.trace.ops
    known = _known_operators(timeline)
    unit = nearest(rows.op, timeline.op_parent, known)
    unit = np.where(unit >= 0, unit, rows.op)
    own_ns = ops.dur_ns.astype(np.float64)
    child = np.flatnonzero(timeline.op_parent >= 0)
    own_ns -= np.bincount(timeline.op_parent[child], ops.dur_ns[child], minlength=len(ops))
    total = np.bincount(unit, np.maximum(own_ns, 0), minlength=len(ops))
    kept = np.unique(unit)
    columns = {name: getattr(rows, name)[kept] for name in Launches.__dataclass_fields__}
    columns["dur_ns"] = np.rint(total[kept]).astype(np.int64)
    return replace(timeline, launches=Launches(**columns))


def _known_operators(timeline: Timeline) -> np.ndarray:
    names = np.array([costs.knows(name) for name in timeline.trace.names], bool)
    return names[timeline.trace.ops.name]


def _groups(owner: np.ndarray, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Rows by owner, inner operators before those around them."""
    owned = owner >= 0
    owner, rows = owner[owned], rows[owned]
    order = np.lexsort((rows, -owner.astype(np.int64)))
    owner, rows = owner[order], rows[order]
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    yield from zip(owner[starts].tolist(), np.split(rows, starts[1:]), strict=True)


class _Calls:
    """Operator calls of a timeline and their costs, each distinct call worked out once."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._names = timeline.trace.names
        self._parent = timeline.op_parent
        self._parameters = _parameters(timeline.trace.context)
        self._settings = timeline.trace.context.get("flags") or {}
        self._cache: dict[Any, tuple[Cost | None, ...]] = {}
        self._inside: dict[int, float] = {}
        self.known = _known_operators(timeline)

    def costs(self, op: int, rows: np.ndarray, *, check_composite: bool) -> tuple[Cost | None, ...]:
        launches = self._timeline.launches
        ops = self._timeline.trace.ops
        args = _arguments(ops.args[op])
        work = () if self._timeline.cpu_only else tuple(
            (launches.name[i], launches.grid_blocks[i], launches.bytes[i]) for i in rows.tolist()
        )  # fmt: skip
        key = (ops.name[op], args, work, self._ancestors(op))
        if key not in self._cache:
            self._cache[key] = self._work_out(key)
        found = self._cache[key]
        if check_composite and self._is_composite(op, found):
            return (None,) * len(rows)
        return found

    def count_inside(self, op: int, found: Sequence[Cost | None]) -> None:
        """Remember, for the operators around this one, how much of their work is costed already."""
        amount = _amount(found)
        above = int(self._parent[op])
        while above >= 0:
            self._inside[above] = self._inside.get(above, 0.0) + amount
            above = int(self._parent[above])

    def _is_composite(self, op: int, found: Sequence[Cost | None]) -> bool:
        inside = self._inside.get(op, 0.0)
        return inside > 0 and inside >= _COMPOSITE_SHARE * _amount(found)

    def _ancestors(self, op: int) -> tuple[int, ...]:
        above, chain = int(self._parent[op]), []
        while above >= 0 and len(chain) < _MAX_ANCESTORS:
            chain.append(int(self._timeline.trace.ops.name[above]))
            above = int(self._parent[above])
        return tuple(chain)

    def _work_out(self, key: Any) -> tuple[Cost | None, ...]:
        name, args, work, ancestors = key
        inputs, concrete = _parsed(args)
        call = OpCall(
            name=self._names[name],
            inputs=inputs,
            concrete=concrete,
            launches=tuple(Launch(self._names[n], _or_none(grid), _or_none(size)) for n, grid, size in work),
            ancestors=tuple(self._names[i] for i in ancestors),
            parameter_shapes=self._parameters,
            settings=self._settings,
        )
        if self._timeline.cpu_only:
            return (costs.op_cost(call),)
        return costs.launch_costs(call)


def _amount(found: Sequence[Cost | None]) -> float:
    return sum(cost.bytes + cost.flops for cost in found if cost is not None)


def _or_none(value: Any) -> int | None:
    return int(value) if value >= 0 else None


class _OpArgs(msgspec.Struct, gc=False):
    dims: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw, name="Input type")
    strides: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw, name="Input Strides")
    concrete: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw, name="Concrete Inputs")


_OP_ARGS = msgspec.json.Decoder(_OpArgs)


def _arguments(raw: msgspec.Raw) -> tuple[bytes, bytes, bytes, bytes]:
    """Dims, types, strides and values of a call's arguments, still as JSON; a cheap key for equal calls."""
    try:
        args = _OP_ARGS.decode(raw)
    except msgspec.DecodeError:
        return b"", b"", b"", b""
    return bytes(args.dims), bytes(args.types), bytes(args.strides), bytes(args.concrete)


def _parsed(args: tuple[bytes, bytes, bytes, bytes]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    lists = []
    for text in args:
        try:
            lists.append(msgspec.json.decode(text) if text else None)
        except msgspec.DecodeError:
            lists.append(None)
    return costs.parse_inputs(*lists)


def _parameters(context: dict[str, Any]) -> tuple[Tensor, ...]:
    """The parameters that the optimizer steps, from the capture's context block."""
    found = []
    for entry in context.get("parameters") or ():
        if isinstance(entry, dict) and isinstance(entry.get("shape"), list):
            tensor = Tensor(tuple(entry["shape"]), str(entry.get("dtype", "unknown")))
            found += [tensor] * int(entry.get("count", 1) or 1)
    return tuple(found)


__all__ = ["CPU_OP", "LaunchCosts", "attach_costs", "gather_host_operators"]
