"""The training steps of a trace: where they are, which are steady, how long they take."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from advisor.trace.events import Trace

_PROFILER_STEP = re.compile(r"ProfilerStep#(\d+)$")
#: Fewer fetches or optimizer steps than this do not show a period.
_MIN_MARKS = 3
#: Steps whose launches differ from the median's by more than this fraction did something else besides.
_ODD_FRACTION = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Steps in time order.

    Attributes:
        number: int64 (n,), as the profiler counted them.
        start_ns: int64 (n,), start on the host.
        end_ns: int64 (n,), end on the host.
        source: ``"profiler"`` (ProfilerStep ranges), ``"dataloader"`` or ``"optimizer"`` (inferred from
            their ranges), or ``"trace"`` (no steps found: the whole trace is taken as one).
    """

    number: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    source: str

    def __len__(self) -> int:
        return len(self.number)

    def at(self, ts_ns: np.ndarray) -> np.ndarray:
        """Index of the step that each time lies in, or -1; int32 (m,)."""
        index = np.searchsorted(self.start_ns, ts_ns, side="right") - 1
        inside = (index >= 0) & (ts_ns < self.end_ns[np.maximum(index, 0)])
        return np.where(inside, index, -1).astype(np.int32)


def find_steps(trace: Trace) -> Steps:
    """Steps by the profiler's ranges, else by the loader's or optimizer's, else the whole trace as one."""
    marks = trace.annotations
    numbers = [_PROFILER_STEP.match(trace.names[i]) for i in marks.name.tolist()]
    is_step = np.array([m is not None for m in numbers], bool)
    if is_step.any():
        number = np.array([int(m.group(1)) for m in numbers if m], np.int64)
        chosen = marks.take(is_step)
        # One range a step: a second copy (another thread's, or a lane of the device) is the shorter one.
        order = np.lexsort((-chosen.dur_ns, number))
        order = order[np.unique(number[order], return_index=True)[1]]
        order = order[np.argsort(chosen.ts_ns[order], kind="stable")]
        start, end = chosen.ts_ns[order], chosen.end_ns[order]
        end[:-1] = np.minimum(end[:-1], start[1:])
        return Steps(number[order], start, end, "profiler")
    return _inferred(trace)


def _inferred(trace: Trace) -> Steps:
    marks = trace.annotations
    start_ns, end_ns = extent(trace)
    for prefix, source in (("enumerate(DataLoader)", "dataloader"), ("Optimizer.step#", "optimizer")):
        chosen = np.array([trace.names[i].startswith(prefix) for i in marks.name.tolist()], bool)
        if chosen.sum() < _MIN_MARKS:
            continue
        bounds = np.unique(marks.ts_ns[chosen] if source == "dataloader" else marks.end_ns[chosen])
        return Steps(np.arange(len(bounds) - 1), bounds[:-1], bounds[1:], source)
    return Steps(np.zeros(1, np.int64), np.array([start_ns]), np.array([end_ns + 1]), "trace")


def extent(trace: Trace) -> tuple[int, int]:
    """First start and last end of anything in the trace, in ns; (0, 0) if it is empty."""
    tables = [t for t in (trace.ops, trace.runtime, trace.device, trace.annotations) if len(t)]
    if not tables:
        return 0, 0
    return min(int(t.ts_ns[0]) for t in tables), max(int(t.end_ns.max()) for t in tables)


def steady_steps(steps: Steps, launches_per_step: np.ndarray) -> np.ndarray:
    """Which steps the figures are taken from; bool (n,).

    The first is dropped (the profiler starts up in it), then those without any launch, and those that
    launched far more or less than the median (a validation run, a checkpoint, a cut-off step).
    """
    steady = np.ones(len(steps), bool)
    if len(steps) > 1:
        steady[0] = False
    counts = launches_per_step
    busy = steady & (counts > 0)
    if not busy.any():
        busy = counts > 0
    if not busy.any():
        return steady
    usual = np.median(counts[busy])
    regular = busy & (np.abs(counts - usual) <= _ODD_FRACTION * usual)
    return regular if regular.any() else busy


def step_times_ns(
    steps: Steps, steady: np.ndarray, device_end_ns: np.ndarray, busy_ns: np.ndarray
) -> tuple[np.ndarray, str]:
    """Time of each steady step: the distance between the same points of successive steps.

    A host that runs ahead closes a step's range long before the device is through with it, so the
    distance is taken on the busier side: between the ends of successive steps' device work where the
    device is the longer one, else between the ends of the host's ranges.

    Args:
        steps: n steps.
        steady: bool (n,).
        device_end_ns: int64 (n,), end of the last device work that each step launched; -1 for none.
        busy_ns: int64 (n,), length of the union of each step's device work.

    Returns:
        int64 (number of steady steps,) and the side, ``"host"`` or ``"device"``.
    """
    chosen = np.flatnonzero(steady)
    host = steps.end_ns - steps.start_ns
    successive = np.zeros(len(steps), bool)
    successive[1:] = steps.number[1:] == steps.number[:-1] + 1
    host[1:] = np.where(successive[1:], np.diff(steps.end_ns), host[1:])
    device = busy_ns.astype(np.int64).copy()
    paired = successive.copy()
    paired[1:] &= (device_end_ns[1:] >= 0) & (device_end_ns[:-1] >= 0)
    gap = np.diff(device_end_ns, prepend=0)
    device = np.where(paired, np.maximum(gap, device), device)
    if not len(chosen):
        return np.zeros(0, np.int64), "host"
    side = "device" if np.median(device[chosen]) > np.median(host[chosen]) else "host"
    return (device if side == "device" else host)[chosen], side
