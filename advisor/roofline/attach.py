"""Give every launch of a timeline its cost: where the trace and the cost formulas meet."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np

from advisor.roofline import costs
from advisor.roofline.costs import Cost, Launch, OpCall, Tensor
from advisor.roofline.devices import Device
from advisor.roofline.op_arguments import NO_ARGUMENTS, RawArguments, parsed_arguments, raw_arguments
from advisor.roofline.partners import Partners
from advisor.trace.events import MEMCPY, MEMSET
from advisor.trace.link import Launches, Timeline
from advisor.trace.names import named
from advisor.trace.nesting import nearest

#: An operator is a composite, and its formula would count work twice, when operators inside it are costed
#: with this share of its FLOPs; or of its bytes, where it computes nothing.
_COMPOSITE_FLOPS = 0.5
_COMPOSITE_BYTES = 0.75
#: Operators looked through, of all threads, for the one after a convolution on its own.
_MAX_FOLLOWING = 64
#: Formulas asked in turn, outwards, for one launch; and parameters of one optimizer. No program has more.
_MAX_ASKED = 32
_MAX_PARAMETERS = 1_000_000
#: FLOPs and bytes; and the costs of an operator's launches, none at all if none can be told, with their sum.
_Amount: TypeAlias = "tuple[float, float]"
_Found: TypeAlias = "tuple[tuple[Cost | None, ...], _Amount]"
_NO_AMOUNT: _Amount = (0.0, 0.0)
_NOTHING: _Found = ((), _NO_AMOUNT)
#: Operators that return their argument as it is where there is nothing to convert.
_MAY_COPY_NOTHING = frozenset(
    {"aten::to", "aten::type_as", "aten::contiguous", "aten::resolve_conj", "aten::lift_fresh"}
)


@dataclass(slots=True, eq=False)
class LaunchCosts:
    """Costs of the launches of a timeline, NaN where there is none.

    Attributes:
        flops, bytes_read, bytes_written: float64 (n,), what the device does.
        flops_padding, bytes_reread: float64 (n,), the parts of `flops` and `bytes_read` that no result needs.
        pipe: int8 (n,), index into `pipes`; -1 where there is no cost.
        pipes: names of the pipes in use.
    """

    flops: np.ndarray
    bytes_read: np.ndarray
    bytes_written: np.ndarray
    pipe: np.ndarray
    pipes: list[str]
    flops_padding: np.ndarray
    bytes_reread: np.ndarray

    #: Of these, in this order, the figures of one launch consist.
    FIGURES: ClassVar = ("flops", "bytes_read", "bytes_written", "flops_padding", "bytes_reread")

    @classmethod
    def unknown(cls, n: int) -> LaunchCosts:
        """No cost for any of n launches."""
        figures = {name: np.full(n, np.nan) for name in cls.FIGURES}
        return cls(**figures, pipe=np.full(n, -1, np.int8), pipes=[])

    @property
    def known(self) -> np.ndarray:
        """bool (n,): has a cost."""
        return self.pipe >= 0

    def put(self, rows: Sequence[int], found: Sequence[Cost]) -> None:
        """Store one cost a row."""
        at = np.array(rows, np.int64)
        for name in self.FIGURES:
            getattr(self, name)[at] = [getattr(cost, name) for cost in found]
        self.pipe[at] = [self._pipe(cost.pipe) for cost in found]

    def put_traffic(self, bytes_read: np.ndarray, bytes_written: np.ndarray) -> None:
        """Store pure memory traffic, float64 (n,), in place of what is there; not where it is NaN."""
        at = ~np.isnan(bytes_read + bytes_written)
        self.flops[at] = self.flops_padding[at] = self.bytes_reread[at] = 0.0
        self.bytes_read[at], self.bytes_written[at] = bytes_read[at], bytes_written[at]
        if at.any():
            self.pipe[at] = self._pipe("none")

    def _pipe(self, name: str) -> int:
        if name not in self.pipes:
            self.pipes.append(name)
        return self.pipes.index(name)


def attach_costs(timeline: Timeline, device: Device | None = None) -> LaunchCosts:
    """Cost of every launch.

    The formula is that of the innermost operator around the launch which has one; all launches under
    that operator, less those costed under a nearer one, share it. Where a formula cannot tell, the next
    operator outwards is asked.

    Args:
        timeline: launches with their operators.
        device: its cache and size decide what is read more than once; None for neither.
    """
    rows = timeline.launches
    calls = _Calls(timeline, device)
    owner = nearest(rows.op, timeline.op_parent, calls.known)
    pending: dict[int, list[int]] = {}
    for row, op in enumerate(owner.tolist()):
        if op >= 0:
            pending.setdefault(op, []).append(row)
    # Operators are sorted by start, longer first, so those inside come after those around them.
    queue = [-op for op in pending]
    heapq.heapify(queue)
    kinds = rows.kind.tolist()
    costed_rows: list[int] = []
    costed: list[Cost] = []
    asked: dict[int, int] = {}

    def outwards(op: int, rows: list[int]) -> None:
        """Leave these launches to the operator around this one, which also learns what is costed inside."""
        outer = calls.known_around(op)
        if outer >= 0:
            if outer not in pending:
                heapq.heappush(queue, -outer)
            pending.setdefault(outer, []).extend(rows)
            asked[outer] = max(asked.get(outer, 0), asked.get(op, 0) + 1 if rows else 0)

    while queue:
        op = -heapq.heappop(queue)
        own = sorted(pending.pop(op))
        found, amount = calls.costs(op, own) if own else _NOTHING
        calls.pass_on(op, amount)
        if found:
            known = [(row, cost) for row, cost in zip(own, found, strict=True) if cost is not None]
            costed_rows += [row for row, _ in known]
            costed += [cost for _, cost in known]
            # Memsets and copies have a cost under any operator, and do not show that its formula can tell.
            if len(known) == len(own) or any(kinds[row] not in (MEMCPY, MEMSET) for row, _ in known):
                own = []
            else:
                own = [row for row, cost in zip(own, found, strict=True) if cost is None]
        if not timeline.cpu_only:
            outwards(op, own if asked.get(op, 0) < _MAX_ASKED else [])
    for name, run in _bare_runs(timeline, owner):
        for row, cost in zip(run, calls.bare_costs(name, run), strict=True):
            if cost is not None:
                costed_rows.append(row)
                costed.append(cost)
    result = LaunchCosts.unknown(len(rows))
    result.put(costed_rows, costed)
    return result


def _bare_runs(timeline: Timeline, owner: np.ndarray) -> Iterator[tuple[str, list[int]]]:
    """Kernels outside any operator whose names have a formula: what they are called, and which were launched
    one after the other."""
    rows, names = timeline.launches, timeline.trace.names
    bare = {i: found for i in np.unique(rows.name).tolist() if (found := costs.bare_operator(names[i]))}
    if not bare:
        return
    run: list[int] = []
    running: tuple[int, str] | None = None
    for row in np.argsort(rows.launch_ts_ns, kind="stable").tolist():
        name = bare.get(int(rows.name[row]), "") if owner[row] < 0 else ""
        this = (int(rows.track[row]), name)
        if run and running is not None and this != running:
            yield running[1], run
            run = []
        running = this
        if name:
            run.append(row)
    if run and running is not None:
        yield running[1], run


def operator_call(timeline: Timeline, op: int) -> OpCall:
    """What one operator was called with: name, shapes, dtypes, strides and values of its arguments.

    Args:
        op: index into ``timeline.trace.ops``.

    Returns:
        The call without launches or settings; without inputs where the trace has no shapes.
    """
    ops = timeline.trace.ops
    inputs, concrete = parsed_arguments(raw_arguments(ops.args[op]))
    return OpCall(timeline.trace.names[ops.name[op]], inputs, concrete)


def gather_host_operators(timeline: Timeline) -> Timeline:
    """For a trace without device work: one row per operator with a formula, in place of kernels.

    A row's time is the operator's own and that of the operators inside it which have no formula. Where
    no operator around has one, each operator is a row of its own, without those inside it. So the rows'
    times add up to the time of the outermost operators.
    """
    rows, ops = timeline.launches, timeline.trace.ops
    unit = nearest(rows.op, timeline.op_parent, _known_operators(timeline))
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
    def known(name: str) -> bool:
        # A launch shows that they copied; on the CPU the copy is an operator inside.
        return costs.knows(name) and not (timeline.cpu_only and name in _MAY_COPY_NOTHING)

    return named(timeline.trace.names, timeline.trace.ops.name, known)


class _Calls:
    """Operator calls of a timeline and their costs, each distinct call worked out once."""

    def __init__(self, timeline: Timeline, device: Device | None) -> None:
        ops, rows = timeline.trace.ops, timeline.launches
        self.known = _known_operators(timeline)
        self._whole_operators = timeline.cpu_only
        self._names = timeline.trace.names
        self._ops, self._args = ops, ops.args
        # Lists: single elements of arrays are slow to read.
        self._op_name, self._parent = ops.name.tolist(), timeline.op_parent.tolist()
        self._known_around = nearest(timeline.op_parent, timeline.op_parent, self.known).tolist()
        self._op_of_row = rows.op.tolist()
        self._launches = list(
            zip(rows.name.tolist(), rows.grid_blocks.tolist(), rows.bytes.tolist(), strict=True)
        )
        self._parameters = _parameters(timeline)
        self._partners = Partners(ops, timeline.trace.names)
        self._settings = _settings(timeline, device)
        self._cache: dict[Any, _Found] = {}
        #: FLOPs and bytes of what is costed inside an operator.
        self._inside: dict[int, _Amount] = {}

    def costs(self, op: int, rows: Sequence[int]) -> _Found:
        """Costs of these launches of an operator; nothing if none can be told, or it is a composite."""
        work = () if self._whole_operators else tuple([self._launches[row] for row in rows])
        args = raw_arguments(self._args[op])
        key = (self._op_name[op], args, work, self._following(op, args), self._partner(op))
        found = self._cache.get(key)
        if found is None:
            each = self._work_out(*key)
            found = self._cache[key] = (each, _amount(each)) if any(each) else _NOTHING
        return _NOTHING if op in self._inside and self._is_composite(op, found[1], rows) else found

    def bare_costs(self, name: str, rows: Sequence[int]) -> tuple[Cost | None, ...]:
        """Cost of each of these launches, which no operator surrounds."""
        work = tuple(self._launches[row] for row in rows)
        call = OpCall(
            name, launches=self._launched(work), parameter_shapes=self._parameters, settings=self._settings
        )
        return costs.launch_costs(call)

    def pass_on(self, op: int, own: _Amount) -> None:
        """Tell the operator around this one how much of its work is costed here and inside."""
        inside = self._inside.get(op, _NO_AMOUNT)
        above = self._known_around[op]
        if above >= 0 and (own is not _NO_AMOUNT or op in self._inside):
            so_far = self._inside.get(above, _NO_AMOUNT)
            self._inside[above] = so_far[0] + own[0] + inside[0], so_far[1] + own[1] + inside[1]

    def known_around(self, op: int) -> int:
        """The nearest operator around this one that has a formula, or -1."""
        return self._known_around[op]

    def _launched(self, work: Sequence[tuple[int, int, int]]) -> tuple[Launch, ...]:
        return tuple(
            Launch(self._names[kernel], _or_none(grid), _or_none(size)) for kernel, grid, size in work
        )

    def _following(self, op: int, args: RawArguments) -> Tensor | None:
        """What the operator after a convolution takes first, where the convolution's values are missing."""
        if args[3] or not args[0] or "conv" not in self._names[self._op_name[op]]:
            return None
        outermost = op
        while self._parent[outermost] >= 0 and "conv" in self._names[self._op_name[self._parent[outermost]]]:
            outermost = self._parent[outermost]
        ops = self._ops
        start = int(np.searchsorted(ops.ts_ns, ops.end_ns[outermost]))
        for at in range(start, min(start + _MAX_FOLLOWING, len(ops))):
            if ops.track[at] == ops.track[op]:
                inputs, _ = parsed_arguments(raw_arguments(self._args[at]))
                # Counters, such as batch norm's, are numbers.
                found = next((item for item in inputs if isinstance(item, Tensor) and item.shape), None)
                if found is not None:
                    return found
        return None

    def _partner(self, op: int) -> RawArguments:
        """Arguments of the other half of an operator's autograd node, if its formula asks for them."""
        wanted = costs.partner_of(self._names[self._op_name[op]])
        at = self._partners.partner(op, wanted) if wanted else -1
        return raw_arguments(self._args[at]) if at >= 0 else NO_ARGUMENTS

    def _is_composite(self, op: int, amount: _Amount, rows: Sequence[int]) -> bool:
        if not self._whole_operators and all(self._op_of_row[row] == op for row in rows):
            # What it launched itself it did itself: squares, say, before a mean inside.
            return False
        flops, nbytes = amount
        inside_flops, inside_bytes = self._inside[op]
        if flops > 0:
            return inside_flops >= _COMPOSITE_FLOPS * flops
        return inside_bytes >= _COMPOSITE_BYTES * nbytes

    def _work_out(
        self,
        name: int,
        args: RawArguments,
        work: tuple[tuple[int, int, int], ...],
        following: Tensor | None,
        partner: RawArguments,
    ) -> tuple[Cost | None, ...]:
        inputs, concrete = parsed_arguments(args)
        call = OpCall(
            name=self._names[name],
            inputs=inputs,
            concrete=concrete,
            launches=self._launched(work),
            parameter_shapes=self._parameters,
            settings=self._settings,
            following=following,
            partner=parsed_arguments(partner)[0],
        )
        return (costs.op_cost(call),) if self._whole_operators else costs.launch_costs(call)


def _amount(found: Sequence[Cost | None]) -> _Amount:
    known = [cost for cost in found if cost is not None]
    return sum(cost.flops for cost in known), sum(cost.bytes for cost in known)


def _or_none(value: int) -> int | None:
    return value if value >= 0 else None


def _settings(timeline: Timeline, device: Device | None) -> dict[str, object]:
    flags = timeline.trace.context.get("flags")
    settings: dict[str, object] = dict(flags) if isinstance(flags, dict) else {}
    if timeline.cpu_only:
        # They are set by default, whether or not there is a GPU that they could govern.
        settings = {name: flag for name, flag in settings.items() if not name.startswith("allow_tf32")}
    if device is not None:
        sizes = {"l2_bytes": device.llc_bytes or device.l2_bytes, "sm_count": device.sms}
        settings |= {key: size for key, size in sizes.items() if size}
    return settings


def _parameters(timeline: Timeline) -> tuple[Tensor, ...]:
    """The parameters that the optimizer steps: from the capture, else from the gradients of one step."""
    found: list[Tensor] = []
    entries = timeline.trace.context.get("parameters")
    for entry in entries if isinstance(entries, list) else ():
        shape, count = (entry.get("shape"), entry.get("count", 1)) if isinstance(entry, dict) else (None, 1)
        if isinstance(shape, list) and isinstance(count, int):
            if len(found) + count > _MAX_PARAMETERS:
                return ()
            found += [Tensor(tuple(shape), str(entry.get("dtype", "unknown")))] * count
    return tuple(found) or tuple(_gradients_of_a_step(timeline))


def _gradients_of_a_step(timeline: Timeline) -> Iterator[Tensor]:
    ops = timeline.trace.ops
    suffix = "torch::autograd::AccumulateGrad"
    accumulating = named(
        timeline.trace.names, ops.name, lambda name: name.endswith(suffix) and "evaluate_function" not in name
    )
    if timeline.steady.any():
        one = int(np.flatnonzero(timeline.steady)[0])
        accumulating &= timeline.steps.at(ops.ts_ns) == one
    for op in np.flatnonzero(accumulating).tolist():
        inputs, _ = parsed_arguments(raw_arguments(ops.args[op]))
        yield from [item for item in inputs if isinstance(item, Tensor)][:1]
