"""Take the profiler's own cost out of host work, by the step time without the profiler.

Each recorded event costs the host time, in the operator and in the Python around it; kernels run as fast as
ever. So each short piece of host work is slower by one factor, to be found, while long pieces (a memcpy, an
image being decoded, a sleep) hold few events and hardly swell.

Where the device sets the pace, the step time hardly depends on the factor, and a percent of drift between
the two measurements would throw it far off. So it is found as the likeliest one: given what profilers are
known to cost, and that two measurements of one loop agree to about a percent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from advisor.advice.replay.host_work import HostWork
from advisor.trace.events import Trace

#: The profiler's share in a piece of host work is of no more than this, and as much for each Python frame
#: that is recorded in it.
_SWELLS_NS = 50_000.0
#: Host time without the profiler over that with it: 2 to 3 times as long with operators, shapes and device
#: activity. Source: step times of ten loops that the host limits, on an H200 inside and outside the window.
_USUAL, _SPREAD = 0.45, 0.13
#: Each event that is recorded costs the host at least this; 2.5 to 5 µs in those loops.
_LEAST_AN_EVENT_NS = 1_000.0
#: Relative deviation of two measurements of one loop's step time, and of what of it is the host's work: its
#: cores have other things to do, and their clocks go up and down.
DRIFT, HOST_DRIFT = 0.01, 0.04
#: The same of the capture and of steps without the profiler: its start is a pause, and a device that has
#: rested runs up to 4 % faster for a while.
_FIT = 0.02
#: The same of the time to make a batch, at least: it hangs on what other processes do to memory and disk.
FETCH_DRIFT = 0.1
#: Standard deviations that nine in ten values stay below.
NINE_IN_TEN = 1.28
_LEAST, _MOST, _TRIALS = 0.25, 1.15, 10
#: A real step this many times the played one, where the device sets its pace, waits for something else.
_DEVICE_MISFIT = 1.15
#: A step this many times the real one is not explained by the profiler. How fast the host may really be then,
#: how closely that is looked for, and how far it may be off.
_MISFIT, _SLOWEST, _HALVINGS, _UNEVEN = 1.05, 0.05, 8, 1.3


def swelling_ns(trace: Trace, host: HostWork, work_ns: np.ndarray) -> np.ndarray:
    """How much of each piece of host work is subject to the factor; float (pieces,).

    Args:
        trace: the trace.
        host: pieces of host time.
        work_ns: float (pieces,), what of each is work.
    """
    events = np.ones(len(host))
    if len(trace.python):
        begins = np.sort(trace.python.ts_ns)
        events += np.searchsorted(begins, host.start_ns + host.dur_ns) - np.searchsorted(
            begins, host.start_ns
        )
    return np.minimum(work_ns, _SWELLS_NS * events)


@dataclass(frozen=True, slots=True)
class Speed:
    """How host work really runs, relative to the capture.

    Attributes:
        host: factor on what swells under the profiler.
        fetch: factor on fetching batches in the training process itself.
        long: factor on the long pieces that hardly swell, other than fetches.
        loader_ns: time between the batches of the loader's workers; None as captured.
    """

    host: float = 1.0
    fetch: float = 1.0
    long: float = 1.0
    loader_ns: float | None = None


AS_PROFILED = Speed()


@dataclass(frozen=True, slots=True)
class Speeds:
    """What may be known of a host's real speed.

    Attributes:
        likely: the likeliest.
        fast, slow: nine in ten times it is no faster, and no slower, than these.
    """

    likely: Speed
    fast: Speed
    slow: Speed

    def behind(self, loader_ns: float) -> Speeds:
        """The same host, behind workers of this pace."""
        return Speeds(*(replace(one, loader_ns=loader_ns) for one in (self.likely, self.fast, self.slow)))


#: Without any baseline: as profiled, at worst; nothing else may be promised.
UNKNOWN = Speeds(AS_PROFILED, Speed(_USUAL), AS_PROFILED)


@dataclass(frozen=True, slots=True)
class FetchTime:
    """Time to make a batch in the training process, over that in the played steps: mean and deviation."""

    usual: float = 1.0
    spread: float = FETCH_DRIFT


def likeliest_speeds(
    step_ns: Callable[[Speed], float], target_ns: float, *, fetch: FetchTime | None = None
) -> Speeds:
    """Speed of the host without the profiler.

    Args:
        step_ns: step time at a speed; does not shrink as a factor grows.
        target_ns: step time without the profiler.
        fetch: how long batches take where the training process makes them itself; their time may have
            drifted. None where it does not.
    """
    usual, spread = (fetch.usual, fetch.spread) if fetch else (1.0, 0.0)
    host = np.linspace(_LEAST, _MOST, _TRIALS)
    steps = np.array([step_ns(Speed(float(factor), usual)) for factor in host])
    slope = np.zeros(_TRIALS)
    if fetch:
        slope = np.array([step_ns(Speed(float(factor), usual + spread)) for factor in host]) - steps
    fine = np.linspace(_LEAST, _MOST, 20 * (_TRIALS - 1) + 1)[:, None]
    drift = np.linspace(-2.0, 2.0, 81)[None] if fetch else np.zeros((1, 1))
    played = np.interp(fine, host, steps) + drift * np.interp(fine, host, slope)
    off = (target_ns / np.maximum(played, 1.0) - 1.0) / _FIT
    cost = off**2 + ((fine - _USUAL) / _SPREAD) ** 2 + drift**2

    def at(place: int) -> Speed:
        drifted = float(drift[0, cost[place].argmin()])
        return Speed(float(fine[place, 0]), max(usual + spread * drifted, _LEAST))

    best = cost.min(axis=1)
    able = np.flatnonzero(best <= best.min() + NINE_IN_TEN**2)
    found = Speeds(at(int(best.argmin())), at(int(able[0])), at(int(able[-1])))
    if step_ns(found.likely) > _MISFIT * target_ns:
        return _slow_throughout(step_ns, target_ns, found)
    return found


def seen_drift(context: Mapping[str, Any], baseline_ns: float) -> float:
    """By how much measurements of this very loop without the profiler differ, relative; 0 with one alone.

    Args:
        context: the capture's block, with step times from before its window and from after it.
        baseline_ns: the step time that holds.
    """
    blocks = [context.get(name) for name in ("baseline", "after")]
    medians = [block.get("median_ms") for block in blocks if isinstance(block, Mapping)]
    known = [time_ns for ms in medians if (time_ns := _time_ns(ms))]
    times = np.array([baseline_ns, *known])
    return float(times.std() / times.mean()) if baseline_ns > 0 else 0.0


def _time_ns(ms: object) -> float:
    known = isinstance(ms, (int, float)) and not isinstance(ms, bool) and 0 < ms < math.inf
    return float(ms) * 1e6 if known else 0.0  # type: ignore[arg-type]


def with_cheapest_profiler(work_ns: float, events: int) -> Speed:
    """The host at its slowest: as fast as it must be if recording costs as little as it ever does.

    Args:
        work_ns: what of the host's work swells under the profiler.
        events: that were recorded meanwhile.
    """
    return Speed(max(1.0 - _LEAST_AN_EVENT_NS * events / max(work_ns, 1.0), _LEAST))


def falls_short(step_ns: Callable[[Speed], float], slowest: Speed, target_ns: float) -> bool:
    """Whether a step is too short to be the real one, even with the slowest host that may be.

    A device that rested before the capture was faster in it, and may be power-limited in the long run.
    """
    played_ns = step_ns(slowest)
    of_device = played_ns < (1 + _FIT) * step_ns(Speed(_LEAST))
    return played_ns * (_DEVICE_MISFIT if of_device else _MISFIT) < target_ns


def _slow_throughout(step_ns: Callable[[Speed], float], target_ns: float, found: Speeds) -> Speeds:
    """Speed of a host that was slower in the capture than the profiler makes it, long pieces included.

    Other processes shared its cores, say. A device does not run slower for that, so what the profiler does
    not explain is the host's as far as that can be, before anything is taken off the device's time.
    """

    def at(factor: float) -> Speed:
        return Speed(min(_USUAL * factor, found.likely.host), found.likely.fetch, min(factor, 1.0))

    low, high = _SLOWEST, 1.0
    # Where the device sets the pace, no slower a host than that takes.
    target_ns = max(target_ns, step_ns(at(low))) * (1 + DRIFT)
    if step_ns(at(high)) <= target_ns:
        return found
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if step_ns(at(middle)) > target_ns else (middle, high)
    return Speeds(at(low), at(low / _UNEVEN), at(low * _UNEVEN))
