"""The training steps of a trace: where they are, which are steady, how long they take."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from advisor.trace.events import Trace
from advisor.trace.names import named

_PROFILER_STEP = re.compile(r"ProfilerStep#(\d+)$")
#: Fewer fetches or optimizer steps than this do not show a period.
_MIN_MARKS = 3
#: Steps whose launches differ from the median's by more than this fraction did something else besides.
_ODD_FRACTION = 0.5
#: Times in ns since 1970 are far beyond this; an event at 0 among them has lost its clock.
_CLOCK_NS = 10**15
#: The last range is cut where it ends so long, and so many times the others' longest, after its last event.
_TAIL_NS, _TAILS = 1_000_000, 2


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
    chosen = marks.take(named(trace.names, marks.name, _PROFILER_STEP.match))
    if not len(chosen):
        return _inferred(trace)
    number = np.array([_number(trace.names[i]) for i in chosen.name.tolist()], np.int64)
    # One range a step: a second copy (another thread's, or a lane of the device) is the shorter one.
    order = np.lexsort((-chosen.dur_ns, number))
    order = order[np.unique(number[order], return_index=True)[1]]
    order = order[np.argsort(chosen.ts_ns[order], kind="stable")]
    start, end = chosen.ts_ns[order], chosen.end_ns[order]
    end[:-1] = np.minimum(end[:-1], start[1:])
    return _without_the_stop(Steps(number[order], start, end, "profiler"), trace)


def _without_the_stop(steps: Steps, trace: Trace) -> Steps:
    """The last range may stay open while the profiler is being stopped, which is no part of the loop."""
    last_ns = np.full(len(steps), -1, np.int64)
    calls = trace.runtime
    if len(trace.ops):
        # A thread that pins batches goes on while the profiler is stopped.
        calls = calls.take(np.isin(calls.track, np.unique(trace.ops.track)))
    for events in (trace.ops, calls):
        index = steps.at(events.ts_ns)
        np.maximum.at(last_ns, index[index >= 0], events.end_ns[index >= 0])
    tails_ns = np.maximum(steps.end_ns - last_ns, 0)
    others_ns = tails_ns[:-1][last_ns[:-1] >= 0]
    if not len(others_ns) or last_ns[-1] < 0:
        return steps
    if tails_ns[-1] > max(_TAIL_NS, _TAILS * others_ns.max()):
        end_ns = steps.end_ns.copy()
        end_ns[-1] = last_ns[-1] + np.median(others_ns)
        return Steps(steps.number, steps.start_ns, end_ns, steps.source)
    return steps


def _number(name: str) -> int:
    found = _PROFILER_STEP.match(name)
    return int(found.group(1)) % (1 << 62) if found else -1


def _inferred(trace: Trace) -> Steps:
    marks = trace.annotations
    for prefix, source in (("enumerate(DataLoader)", "dataloader"), ("Optimizer.step#", "optimizer")):
        chosen = named(trace.names, marks.name, re.compile(re.escape(prefix)).match)
        bounds = np.unique((marks.ts_ns if source == "dataloader" else marks.end_ns)[chosen])
        if len(bounds) < _MIN_MARKS:
            continue
        return Steps(np.arange(len(bounds) - 1), bounds[:-1], bounds[1:], source)
    start_ns, end_ns = extent(trace)
    return Steps(np.zeros(1, np.int64), np.array([start_ns]), np.array([end_ns + 1]), "trace")


def extent(trace: Trace) -> tuple[int, int]:
    """First start and last end of anything in the trace, in ns; (0, 0) if it is empty."""
    tables = [t for t in (trace.ops, trace.runtime, trace.device, trace.annotations) if len(t)]
    if not tables:
        return 0, 0
    starts = np.concatenate([t.ts_ns for t in tables])
    timed = starts[starts > 0]
    start = timed.min() if len(timed) and timed.min() > _CLOCK_NS else starts.min()
    return int(start), max(int(t.end_ns.max()) for t in tables)


def steady_steps(
    steps: Steps, launches_per_step: np.ndarray, interrupted: np.ndarray, cycle: int = 1
) -> np.ndarray:
    """Which steps the figures are taken from; bool (n,).

    The first is dropped (the profiler starts up in it), then those without any launch, those with a
    validation run inside, and those that launched far more or less than the median (a checkpoint, an
    unmarked validation run, a cut-off step). A condition that no step meets is waived.

    Args:
        steps: n steps.
        launches_per_step: int (n,).
        interrupted: bool (n,), something other than training ran inside.
        cycle: batches to a step of the optimizer. With more than one, batches differ by design and the
            last condition does not apply.
    """
    chosen = np.ones(len(steps), bool)
    busy = launches_per_step > 0
    if len(steps) > 1:
        chosen[0] = False
    if busy.any() and not (chosen & busy).any():
        chosen[:] = True
    # The first step has a vote on what is usual: of two others, neither is.
    usual = np.median(launches_per_step[busy]) if busy.any() else 0
    regular = np.abs(launches_per_step - usual) <= _ODD_FRACTION * usual
    for condition in (busy, ~interrupted, regular if cycle == 1 else busy):
        if (chosen & condition).any():
            chosen &= condition
    return chosen


def step_times_ns(
    steps: Steps, steady: np.ndarray, device_end_ns: np.ndarray, busy_ns: np.ndarray
) -> tuple[np.ndarray, str]:
    """Time of each steady step: the distance between the same points of successive steps.

    A host that runs ahead closes a step's range long before the device is through with it, so the
    distance is taken on the busier side: between the ends of successive steps' device work where the
    device is the longer one, else between the ends of the host's ranges. A step without a predecessor in
    the trace has its own range, or its own device time.

    Args:
        steps: n steps.
        steady: bool (n,).
        device_end_ns: int64 (n,), end of the last device work that each step launched; -1 for none.
        busy_ns: int64 (n,), length of the union of each step's device work.

    Returns:
        int64 (number of steady steps,) and the side, ``"host"`` or ``"device"``.
    """
    chosen = np.flatnonzero(steady)
    if not len(chosen):
        return np.zeros(0, np.int64), "host"
    follows = np.diff(steps.number, prepend=steps.number[0]) == 1
    host = np.where(follows, np.diff(steps.end_ns, prepend=0), steps.end_ns - steps.start_ns)
    worked = device_end_ns >= 0
    paired = follows & worked & np.roll(worked, 1)
    device = np.where(paired, np.maximum(np.diff(device_end_ns, prepend=0), busy_ns), busy_ns)
    side = "device" if np.median(device[chosen]) > np.median(host[chosen]) else "host"
    return (device if side == "device" else host)[chosen], side
