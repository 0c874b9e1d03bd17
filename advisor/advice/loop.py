"""What rules look at: one analysed loop, with the questions that many of them ask."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from advisor.advice.calls import Calls
from advisor.advice.edits import Edit
from advisor.advice.finding import NEGLIGIBLE
from advisor.advice.host_calls import HostSide
from advisor.advice.patterns.find import Patterns, find_patterns
from advisor.advice.replay import Replay
from advisor.advice.replay.change import Change
from advisor.advice.replay.tape import real_work_ns
from advisor.advice.rule import NotApplicable
from advisor.advice.waits import Wait, host_waits
from advisor.roofline import costs
from advisor.roofline.analysis import Analysis
from advisor.roofline.attach import operator_call
from advisor.roofline.costs import OpCall, Tensor
from advisor.roofline.devices import Device
from advisor.roofline.launch_class import HOST_COPY, PAGEABLE_COPY, goes_to_host
from advisor.trace.events import KERNEL
from advisor.trace.link import Launches, Timeline
from advisor.trace.names import coded, named
from advisor.trace.nesting import nearest
from advisor.trace.phases import PHASES

#: Parameters of one shape that a model has at most; a block that tells of more is wrong.
_MOST_ALIKE = 1_000_000
#: Host time is what a change saves where the two differ by less than this share.
_UNEXPLAINED = 0.25
#: What numbers a call, and differs where nothing else does.
_NUMBER = re.compile(
    rb'"(?:Ev Idx|External id|Sequence number|Record function id|Fwd thread id)"\s*:\s*-?\d+'
)


class Loop:
    """One loop as rules see it.

    Attributes:
        analysis: the joined trace with costs and bounds.
        replay: its steps as a dependency graph, de-biased.
    """

    def __init__(self, analysis: Analysis, replay: Replay) -> None:
        self.analysis = analysis
        self.replay = replay
        self._known: dict[bytes, OpCall] = {}

    @property
    def timeline(self) -> Timeline:
        """The joined trace."""
        return self.analysis.timeline

    @property
    def rows(self) -> Launches:
        """Device work."""
        return self.analysis.timeline.launches

    @property
    def device(self) -> Device:
        """What it ran on."""
        return self.analysis.device

    @property
    def context(self) -> Mapping[str, Any]:
        """The capture's context block; empty for a foreign trace."""
        return self.analysis.timeline.trace.context

    @property
    def counted(self) -> np.ndarray:
        """bool (launches,): of steady steps."""
        return self.analysis.counted

    @property
    def steps(self) -> int:
        """Steady steps."""
        return self.analysis.step_count

    @property
    def step_ns(self) -> float:
        """Step time that savings are told against."""
        return self.replay.step_ns()

    @cached_property
    def host(self) -> HostSide:
        """The host's side: runtime calls, batch fetches, Python frames."""
        return HostSide(self.timeline)

    @property
    def real_time(self) -> float:
        """Factor from host time as profiled to host time as it really is; at most 1.

        The profiler slows the host alone, so it is only known where the un-profiled step time is.
        """
        baseline, profiled = self.analysis.baseline_ns, self.analysis.profiled_step_ns
        return min(1.0, baseline / profiled) if baseline and profiled else 1.0

    @property
    def busy_share(self) -> float:
        """Share of the step in which the device works; above 1 where the two do not fit together."""
        return self.share(sum(self.analysis.busy_ns_per_step.values()))

    def setting(self, *path: str | int) -> Any:
        """An entry of the context block by its keys and positions; None where there is none."""
        found: Any = self.context
        for key in path:
            if isinstance(key, int):
                found = found[key] if isinstance(found, list) and len(found) > key else None
            else:
                found = found.get(key) if isinstance(found, Mapping) else None
        return found

    @property
    def peak_memory_bytes(self) -> float | None:
        """High-water mark of the allocator, in the window or else before it; None where not recorded."""
        found = (_amount(self.setting("peak_memory_bytes", part)) for part in ("in_window", "before"))
        return next((peak for peak in found if peak), None)

    @property
    def memory_bytes(self) -> float | None:
        """Memory of the device, as the capture saw it, or else of its kind; None where not known."""
        return _amount(self.setting("device", "total_memory_bytes")) or self.device.memory_bytes

    @cached_property
    def first_kernel_ns(self) -> np.ndarray:
        """int64 (steps,): host time of the first launch of each step that is no copy and no memset."""
        first = np.full(max(len(self.timeline.steps), 1), np.iinfo(np.int64).max)
        kernels = (self.rows.step >= 0) & (self.rows.kind == KERNEL)
        np.minimum.at(first, self.rows.step[kernels], self.rows.launch_ts_ns[kernels])
        return first

    @cached_property
    def trained(self) -> list[Tensor]:
        """Parameters that the optimizers step; empty where neither the capture nor autograd tells them."""
        listed = self.setting("parameters")
        if isinstance(listed, list) and (known := [tensor for entry in listed for tensor in _listed(entry)]):
            return known
        ops = self.timeline.trace.ops
        accumulating = self.ops_named(r"^(?:struct )?torch::autograd::AccumulateGrad$")
        steady = accumulating & self.host.in_steady_step(ops.ts_ns)
        step = self.timeline.steps.at(ops.ts_ns)
        one = np.flatnonzero(steady & (step == step[steady].max(initial=-1)))
        inputs = [self.call(op).inputs for op in one.tolist()]
        return [given[0] for given in inputs if given and isinstance(given[0], Tensor)]

    @cached_property
    def calls(self) -> Calls:
        """The model's operator calls, each with what it launched forward and backward."""
        return Calls(self)

    @cached_property
    def patterns(self) -> Patterns:
        """Groups of calls that one kernel could do; no call is in two of them."""
        return find_patterns(self)

    @cached_property
    def waits(self) -> list[Wait]:
        """Waits of the host in steady steps that the user's code asks for."""
        return host_waits(self)

    @cached_property
    def family(self) -> np.ndarray:
        """str (launches,): kind of work of each launch, as in the report."""
        names, ops = self.timeline.trace.names, self.timeline.trace.ops
        op_name = np.where(self.rows.op >= 0, ops.name[np.maximum(self.rows.op, 0)] if len(ops) else -1, -1)
        pairs, inverse = np.unique(np.stack([op_name, self.rows.name], axis=1), axis=0, return_inverse=True)
        found = [costs.family(names[op] if op >= 0 else "", names[kernel]) for op, kernel in pairs.tolist()]
        return np.array(found, object)[inverse.reshape(-1)] if len(self.rows) else np.zeros(0, object)

    @cached_property
    def to_host(self) -> np.ndarray:
        """bool (launches,): copies from the device to the host."""
        return self._host_copies & self.by_name(goes_to_host, bool)

    @cached_property
    def to_device(self) -> np.ndarray:
        """bool (launches,): copies from the host to the device."""
        return self._host_copies & ~self.by_name(goes_to_host, bool)

    @property
    def _host_copies(self) -> np.ndarray:
        return np.isin(self.analysis.classes, (HOST_COPY, PAGEABLE_COPY))

    def in_phase(self, *phases: str) -> np.ndarray:
        """bool (launches,): in one of these phases."""
        return np.isin(self.rows.phase, [PHASES.index(phase) for phase in phases])

    def flagged(self, flag: str) -> np.ndarray:
        """bool (launches,): carries this flag of `advisor.roofline.bound.FLAGS`."""
        return self.analysis.bounds.has_flag(flag)

    def kernels_named(self, pattern: str) -> np.ndarray:
        """bool (launches,): the kernel's name matches."""
        return named(self.timeline.trace.names, self.rows.name, re.compile(pattern).search)

    def ops_named(self, pattern: str) -> np.ndarray:
        """bool (ops,): the operator's name matches."""
        return named(self.timeline.trace.names, self.timeline.trace.ops.name, re.compile(pattern).search)

    def under(self, ops: np.ndarray) -> np.ndarray:
        """int32 (launches,): the nearest of these operators (bool (ops,)) around each launch, or -1."""
        return nearest(self.rows.op, self.timeline.op_parent, ops)

    def call(self, op: int) -> OpCall:
        """Shapes, dtypes and values that an operator was called with; see `operator_call`."""
        ops = self.timeline.trace.ops
        # A loop makes the same calls step after step: each distinct one is worked out once.
        key = int(ops.name[op]).to_bytes(4, "little") + _NUMBER.sub(b"", bytes(ops.args[op]))
        if key not in self._known:
            self._known[key] = operator_call(self.timeline, op)
        return self._known[key]

    def per_step_ns(self, rows: np.ndarray) -> float:
        """Device time of these launches (a mask, or rows) in a steady step, durations summed."""
        mask = rows if rows.dtype == bool else np.isin(np.arange(len(self.rows)), rows)
        return float(self.rows.dur_ns[mask & self.counted].sum()) / max(self.steps, 1)

    def share(self, ns_per_step: float) -> float:
        """Of the step time."""
        return ns_per_step / self.step_ns if self.step_ns else 0.0

    def module_of(self, row: int) -> str | None:
        """Module path of a launch."""
        module = int(self.rows.module[row])
        return self.timeline.modules[module] if module >= 0 else None

    def phase_of(self, row: int) -> str:
        """Phase of a launch."""
        return PHASES[int(self.rows.phase[row])]

    def by_name(self, code: Callable[[str], object], dtype: type = np.int8) -> np.ndarray:
        """A value of each launch's kernel name."""
        return coded(self.timeline.trace.names, self.rows.name, code, dtype)

    def hides(self, edits: Sequence[Edit]) -> bool:
        """Whether a change would not shorten the step, since something else sets the pace."""
        saved_ns = self.step_ns - self.replay.step_ns(edits, "optimistic")
        return saved_ns < NEGLIGIBLE * self.step_ns

    def host_gain_ns(self, edits: Sequence[Edit]) -> float:
        """Host time a step that likely goes with a change; 0 where that is not what shortens the step."""
        graph, speed = self.replay.graph, self.replay.speeds.likely
        change = Change(graph, edits)
        gone_ns = real_work_ns(graph, speed) @ (1.0 - change.host) - change.extra_host_ns.sum()
        found_ns = float(gone_ns) * self.replay.result_scale / len(graph.windows)
        saved_ns = self.step_ns - self.replay.step_ns(edits)
        return found_ns if abs(saved_ns - found_ns) < _UNEXPLAINED * saved_ns else 0.0

    def require(self, holds: object, why: str) -> None:
        """Raise `NotApplicable` unless something holds."""
        if not holds:
            raise NotApplicable(why)


def _amount(value: object) -> float | None:
    """A figure of the context block; None for what is none."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and 0 < value < math.inf else None  # type: ignore[arg-type, operator]


def _listed(entry: object) -> list[Tensor]:
    """The parameters that an entry of the context block stands for; none for what is no such entry."""
    if not isinstance(entry, Mapping):
        return []
    shape, dtype, count = entry.get("shape"), entry.get("dtype"), entry.get("count", 1)
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        return []
    if not isinstance(dtype, str) or type(count) is not int:
        return []
    return [Tensor(tuple(shape), dtype)] * min(count, _MOST_ALIKE)
