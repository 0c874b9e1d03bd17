"""Join a trace up: each launch with its host call, operator, module, phase and step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from advisor.trace.events import KIND_NAMES, Trace
from advisor.trace.intervals import union_ns
from advisor.trace.modules import assign_modules
from advisor.trace.nesting import Nesting
from advisor.trace.phases import VALIDATION, assign_phases
from advisor.trace.read import read_trace
from advisor.trace.steps import Steps, find_steps, steady_steps

if TYPE_CHECKING:
    import pandas

#: Kind of a row that stands for host operators, in a trace without any device.
CPU_OP = len(KIND_NAMES)


@dataclass(slots=True, eq=False)
class Launches:
    """What ran on the device, in time order, with what it was joined to.

    All columns have length n. -1 means unknown.

    Attributes:
        ts_ns, dur_ns: int64, on the device.
        name: int32, index into `Trace.names`.
        kind: uint8, KERNEL, MEMCPY, MEMSET (see `advisor.trace.events`) or CPU_OP.
        device, stream: int32.
        bytes: int64, of a copy or memset.
        grid_blocks: int64, of a kernel.
        launch_ts_ns: int64, start of the host call that launched it; -1 for an orphan.
        track: int32, the host thread that launched it.
        op: int32, index into `Trace.ops`: the innermost operator around the host call.
        step: int32, index into `Timeline.steps`: the step that launched it.
        phase: int8, index into `PHASES`.
        module: int32, index into `Timeline.modules`.
    """

    ts_ns: np.ndarray
    dur_ns: np.ndarray
    name: np.ndarray
    kind: np.ndarray
    device: np.ndarray
    stream: np.ndarray
    bytes: np.ndarray
    grid_blocks: np.ndarray
    launch_ts_ns: np.ndarray
    track: np.ndarray
    op: np.ndarray
    step: np.ndarray
    phase: np.ndarray
    module: np.ndarray

    def __len__(self) -> int:
        return len(self.ts_ns)

    @property
    def end_ns(self) -> np.ndarray:
        """int64 (n,), end on the device."""
        return self.ts_ns + self.dur_ns


@dataclass(slots=True, eq=False)
class Timeline:
    """A trace joined up.

    Attributes:
        trace: the columns it was made from.
        launches: device work in time order; host operators where the trace has no device work.
        op_parent: int32 (operators,), the operator directly around each one, or -1.
        steps: the training steps.
        steady: bool (steps,), the steps that figures are taken from.
        modules: module paths.
        cpu_only: whether `launches` stands for host operators.
        batches_per_optimizer_step: more than 1 where gradients are accumulated; a step is a batch.
    """

    trace: Trace
    launches: Launches
    op_parent: np.ndarray
    steps: Steps
    steady: np.ndarray
    modules: list[str]
    cpu_only: bool
    batches_per_optimizer_step: int = 1

    def __repr__(self) -> str:
        """One line: a trace's columns are too much to print."""
        return f"<Timeline of {self.trace.path}: {len(self.launches):,} launches, {len(self.steps)} steps>"

    @property
    def orphan_time_fraction(self) -> float | None:
        """Share of device time whose host call is not in the trace; None without device time."""
        total = int(self.launches.dur_ns.sum())
        if not total:
            return None
        return float(self.launches.dur_ns[self.launches.launch_ts_ns < 0].sum()) / total

    @property
    def in_steady_step(self) -> np.ndarray:
        """bool (launches,): launched by a step that figures are taken from."""
        step = self.launches.step
        return (step >= 0) & self.steady[np.maximum(step, 0)]

    def device_work_of_steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Per step: end of its last device work (-1 for none) and length of its union; int64 (steps,).

        Of the device with the most work, where there are several.
        """
        launches, end_ns = self.launches, self.launches.end_ns
        end = np.full(len(self.steps), -1, np.int64)
        busy = np.zeros(len(self.steps), np.int64)
        rows = np.flatnonzero((launches.step >= 0) & (launches.device == self.main_device))
        rows = rows[np.argsort(launches.step[rows], kind="stable")]
        bounds = np.searchsorted(launches.step[rows], np.arange(len(self.steps) + 1))
        for i, (first, last) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
            if last > first:
                own = rows[first:last]
                end[i] = end_ns[own].max()
                busy[i] = union_ns(launches.ts_ns[own], end_ns[own])
        return end, busy

    @property
    def main_device(self) -> int:
        """The device with the most work; -1 where the trace does not number devices."""
        device = self.launches.device
        if not len(device):
            return -1
        numbers, inverse = np.unique(device, return_inverse=True)
        return int(numbers[np.bincount(inverse.reshape(-1), self.launches.dur_ns).argmax()])

    def op_name(self, op: int) -> str | None:
        """Name of an operator, or None for -1."""
        return self.trace.names[self.trace.ops.name[op]] if op >= 0 else None

    def to_pandas(self, table: str = "launches") -> pandas.DataFrame:
        """One of the timeline's tables as a data frame, names spelled out; what is not known is missing.

        Args:
            table: ``"launches"``, ``"ops"``, ``"steps"`` or ``"annotations"``.

        Raises:
            UsageError: no such table.
            MissingExtraError: pandas is not installed.
        """
        from advisor.trace.tables import frame

        return frame(self, table)


def load(path: str | os.PathLike[str], *, limit_bytes: int | None = None) -> Timeline:
    """Read a trace and join it up.

    Args:
        path: a ``.json`` or ``.json.gz`` trace, ``-`` for stdin, or an fsspec URL.
        limit_bytes: refuse a file larger than this unpacked.

    Raises:
        InputError: the file cannot be read as a trace.
    """
    return join(read_trace(path, limit_bytes=limit_bytes))


def join(trace: Trace) -> Timeline:
    """Join the events of a trace by correlation, time and thread."""
    nesting = Nesting(trace.ops.track, trace.ops.ts_ns, trace.ops.dur_ns)
    steps = find_steps(trace)
    cpu_only = not trace.has_device_work
    launches = _host_rows(trace) if cpu_only else _device_rows(trace, nesting)
    launches.step = np.where(launches.launch_ts_ns >= 0, steps.at(launches.launch_ts_ns), -1).astype(np.int32)
    launches.phase = assign_phases(trace, launches, nesting.parent, steps)
    launches.module, modules = assign_modules(trace, launches, nesting.parent)
    in_step = launches.step >= 0
    per_step = np.bincount(launches.step[in_step], minlength=len(steps))
    validating = np.bincount(launches.step[in_step & (launches.phase == VALIDATION)], minlength=len(steps))
    cycle = trace.context.get("accumulate_grad_batches")
    cycle = cycle if isinstance(cycle, int) and cycle > 1 else 1
    return Timeline(
        trace=trace,
        launches=launches,
        op_parent=nesting.parent,
        steps=steps,
        steady=steady_steps(steps, per_step, validating > 0, cycle),
        modules=modules,
        cpu_only=cpu_only,
        batches_per_optimizer_step=cycle,
    )


def _device_rows(trace: Trace, nesting: Nesting) -> Launches:
    device, runtime = trace.device, trace.runtime
    call = host_calls(trace)
    linked = call >= 0
    launch_ts = np.full(len(device), -1, np.int64)
    track = np.full(len(device), -1, np.int32)
    launch_ts[linked] = runtime.ts_ns[call[linked]]
    track[linked] = runtime.track[call[linked]]
    op = nesting.innermost(track, launch_ts)
    n = len(device)
    return Launches(
        ts_ns=device.ts_ns,
        dur_ns=device.dur_ns,
        name=device.name,
        kind=device.kind,
        device=device.device,
        stream=device.stream,
        bytes=device.bytes,
        grid_blocks=device.grid_blocks,
        launch_ts_ns=launch_ts,
        track=track,
        op=op,
        step=np.full(n, -1, np.int32),
        phase=np.zeros(n, np.int8),
        module=np.full(n, -1, np.int32),
    )


def host_calls(trace: Trace) -> np.ndarray:
    """Position in the runtime calls of what launched each device event, or -1; int64 (n,).

    A correlation number that several calls carry means the latest of them before the work began.
    """
    runtime, device = trace.runtime, trace.device
    order = np.lexsort((runtime.ts_ns, runtime.correlation))
    number, begin = runtime.correlation[order], runtime.ts_ns[order]
    if not len(order):
        return np.full(len(device), -1, np.int64)
    first = np.searchsorted(number, device.correlation, "left")
    last = np.searchsorted(number, device.correlation, "right") - 1
    found = (last >= first) & (device.correlation >= 0)
    chosen = np.where(found, last, 0)
    for i in np.flatnonzero(found & (last > first)).tolist():
        before = np.searchsorted(begin[first[i] : last[i] + 1], device.ts_ns[i], "right")
        chosen[i] = first[i] + max(before - 1, 0)
    return np.where(found, order[chosen], -1)


def _host_rows(trace: Trace) -> Launches:
    """Every operator as a row of its own; `advisor.roofline.attach` gathers them into units of cost."""
    ops = trace.ops
    n = len(ops)

    def unknown(dtype: type) -> np.ndarray:
        return np.full(n, -1, dtype)

    return Launches(
        ts_ns=ops.ts_ns,
        dur_ns=ops.dur_ns,
        name=ops.name,
        kind=np.full(n, CPU_OP, np.uint8),
        device=unknown(np.int32),
        stream=unknown(np.int32),
        bytes=unknown(np.int64),
        grid_blocks=unknown(np.int64),
        launch_ts_ns=ops.ts_ns,
        track=ops.track,
        op=np.arange(n, dtype=np.int32),
        step=unknown(np.int32),
        phase=np.zeros(n, np.int8),
        module=unknown(np.int32),
    )
