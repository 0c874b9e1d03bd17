"""Gates: conditions that a run must meet, for continuous integration."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from advisor.errors import UsageError
from advisor.report import format as fmt
from advisor.report.compare import Comparison, compare, has_baseline, step_ms
from advisor.report.model import Report
from advisor.report.noise import DEVICE_FLOOR, floor_of

_TIMES_MS = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3}
_SIZES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_NUMBER = re.compile(r"\s*([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-zµ%]*)\s*$")


@dataclass(frozen=True)
class Metric:
    """A figure that can be gated.

    Attributes:
        unit: ``time`` (ms), ``fraction``, ``bytes`` or ``count``.
        read: the figure, or None where the report does not know it.
        better: ``"lower"`` or ``"higher"``.
        what: for the list of metrics.
        noise: what two runs of one program differ in it by: ``step`` (as the step time does), ``idle`` (by as
            much time as the step does), ``device`` (as kernels do), or ``none``, for what is counted.
    """

    unit: str
    read: Callable[[Report], Any]
    better: str
    what: str
    noise: str

    @property
    def of_step(self) -> bool:
        """Whether it is told against the real step, where that is known."""
        return self.noise in ("step", "idle")


def _part(report: Report, name: str) -> float | None:
    """A slice of the step; None where the report has none of that name."""
    return next((part.time_ms_per_step for part in report.breakdown.step if part.name == name), None)


def _costed(report: Report) -> float | None:
    return report.summary.coverage.costed_time_fraction


METRICS: dict[str, Metric] = {
    "step_time": Metric(
        "time", step_ms, "lower", "a step, without the profiler where that is known", noise="step"
    ),
    "kernel_time": Metric(
        "time",
        lambda r: r.summary.kernel_time_ms_per_step,
        "lower",
        "kernels of a step, summed",
        noise="device",
    ),
    "operator_time": Metric(
        "time",
        lambda r: r.summary.operator_time_ms_per_step,
        "lower",
        "operators of a step, summed, where it ran on the CPU",
        noise="step",
    ),
    "gpu_busy": Metric(
        "fraction", lambda r: r.summary.gpu_busy_fraction, "higher", "share of the step at work", noise="step"
    ),
    "mfu": Metric("fraction", lambda r: r.summary.mfu, "higher", "model FLOPs utilisation", noise="step"),
    "roof": Metric(
        "fraction",
        lambda r: r.summary.roof_fraction,
        "higher",
        "time at the roof over time taken",
        noise="device",
    ),
    "launches": Metric(
        "count", lambda r: r.summary.kernels_per_step, "lower", "kernels launched by a step", noise="none"
    ),
    "peak_memory": Metric(
        "bytes", lambda r: r.summary.peak_memory_bytes, "lower", "high-water mark of memory", noise="none"
    ),
    "communication": Metric(
        "time",
        lambda r: _part(r, "exposed communication"),
        "lower",
        "exposed collectives of a step",
        noise="device",
    ),
    "idle": Metric("time", lambda r: _part(r, "idle"), "lower", "device idle in a step", noise="idle"),
    "coverage": Metric("fraction", _costed, "higher", "share of device time with a cost", noise="none"),
}


@dataclass(frozen=True)
class Outcome:
    """How one gate came out: `held` is None where it cannot be told; `reason` is one line."""

    gate: str
    held: bool | None
    reason: str


def check_limits(report: Report, at_most: Sequence[str], at_least: Sequence[str]) -> list[Outcome]:
    """Limits such as ``step_time=30ms``.

    Raises:
        UsageError: a limit is not of the form METRIC=VALUE.
    """
    return [
        *(_limit(report, text, "--max", lambda value, limit: value <= limit) for text in at_most),
        *(_limit(report, text, "--min", lambda value, limit: value >= limit) for text in at_least),
    ]


def check_changes(
    report: Report, against: Report, changes: Sequence[str], *, noise_floor: float | None = None
) -> list[Outcome]:
    """Changes against another report such as ``step_time:+5%``: fails on a change for the worse beyond that.

    A change within the noise of the two fails no gate.

    Args:
        report: the run to hold.
        against: the run to hold it against.
        changes: METRIC:+PERCENT% each.
        noise_floor: as `compare` takes it.

    Raises:
        UsageError: a change is not of the form METRIC:+PERCENT%.
    """
    compared = compare(against, report, noise_floor=noise_floor)
    floor = floor_of(against, report, compared.basis) if noise_floor is None else noise_floor
    return [_change(report, against, text, compared, floor) for text in changes]


def _limit(report: Report, text: str, option: str, holds: Callable[[float, float], bool]) -> Outcome:
    name, separator, value = text.partition("=")
    if not separator:
        raise UsageError(f"{option} {text!r}: give METRIC=VALUE, as step_time=30ms")
    metric = _metric(name, f"{option} {text}")
    limit = _quantity(value, metric.unit, f"{option} {text}")
    found = metric.read(report)
    if found is None:
        return Outcome(text, None, f"{name} is not known from {report.trace.path}")
    word = "at most" if option == "--max" else "at least"
    return Outcome(
        text,
        holds(found, limit),
        f"{name} is {_show(found, metric.unit)}{_as_profiled(metric, not has_baseline(report))}, "
        f"asked for {word} {_show(limit, metric.unit)}",
    )


def _change(report: Report, against: Report, text: str, compared: Comparison, floor: float) -> Outcome:
    name, separator, value = text.partition(":")
    found = re.fullmatch(r"\s*\+?(\d+(?:\.\d+)?)\s*%\s*", value)
    if not separator or not found:
        raise UsageError(f"--fail-on {text!r}: give METRIC:+PERCENT%, as step_time:+5%")
    metric = _metric(name, f"--fail-on {text}")
    allowed = float(found.group(1)) / 100
    before, after = metric.read(against), metric.read(report)
    if name == "step_time":
        before, after = compared.before.step_ms, compared.after.step_ms
    elif metric.of_step and has_baseline(report) != has_baseline(against):
        why = "is told against the real step on one side and the profiled one on the other"
        return Outcome(text, None, f"{name} {why}: give both step times without the profiler, or neither")
    if before is None or after is None:
        side = against if before is None else report
        return Outcome(text, None, f"{name} is not known from {side.trace.path}")
    # From nothing, any more is worse by more than any percentage.
    change = (after - before) / before if before else math.copysign(math.inf, after) if after else 0.0
    worse = change * (1 if metric.better == "lower" else -1)
    size = "" if math.isinf(worse) else f"{abs(worse):.1%} "
    how = f"{size}worse" if worse > 0 else f"{size}better" if worse < 0 else "the same"
    told = f"{name} went from {_show(before, metric.unit)} to {_show(after, metric.unit)} ({how})"
    told += _as_profiled(metric, compared.basis == "profiled")
    if worse <= allowed:
        return Outcome(text, True, f"{told}, allowed {allowed:.1%} worse")
    noise = _noise(metric, compared)
    least, whole = floor if noise is None else noise, ""
    if metric.noise == "idle" and compared.before.step_ms:
        worse, whole = (after - before) / compared.before.step_ms, " of the step"
    if worse <= least:
        return Outcome(text, True, f"{told}, within the noise of {least:.1%}{whole}")
    if noise is None:
        return Outcome(
            text, None, f"{told}, but with fewer than two steps on both sides the noise is not known"
        )
    return Outcome(text, False, f"{told}, allowed {allowed:.1%} worse")


def _noise(metric: Metric, compared: Comparison) -> float | None:
    """Changes of it below this are noise; None where that is not known."""
    return {"none": 0.0, "device": DEVICE_FLOOR}.get(metric.noise, compared.noise_fraction)


def _as_profiled(metric: Metric, profiled: bool) -> str:
    return ", as profiled" if profiled and metric.of_step else ""


def _metric(name: str, where: str) -> Metric:
    if name not in METRICS:
        raise UsageError(f"{where}: no metric {name!r}; there are {', '.join(METRICS)}")
    return METRICS[name]


def _quantity(text: str, unit: str, where: str) -> float:
    value = _parsed(text, unit)
    # What no run can miss, or none can meet, is a slip of the pen.
    if value is None or not 0 <= value < math.inf or (unit == "fraction" and value > 1):
        forms = {"time": "30ms", "fraction": "0.8 or 80%", "bytes": "20GB", "count": "500"}
        raise UsageError(f"{where}: {text!r} is no value of this metric; give one as {forms[unit]}")
    return value


def _parsed(text: str, unit: str) -> float | None:
    found = _NUMBER.match(text)
    if found:
        number, suffix = float(found.group(1)), found.group(2)
        if unit == "time" and (suffix or "ms") in _TIMES_MS:
            return number * _TIMES_MS[suffix or "ms"]
        if unit == "bytes" and (suffix or "b").lower() in _SIZES:
            return number * _SIZES[(suffix or "b").lower()]
        if unit == "fraction" and suffix == "%":
            return number / 100
        # A bare 40 may be meant as 40 % or as 4,000 %.
        if unit == "fraction" and not suffix and number <= 1:
            return number
        if unit == "count" and not suffix:
            return number
    return None


def _show(value: float, unit: str) -> str:
    show = {"time": fmt.duration, "fraction": fmt.percent, "bytes": fmt.nbytes, "count": fmt.number}
    return show[unit](value)
