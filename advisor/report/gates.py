"""Gates: conditions that a run must meet, for continuous integration."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from advisor.errors import UsageError
from advisor.report import format as fmt
from advisor.report.compare import NOISE_FLOOR, compare, step_ms
from advisor.report.model import Report

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
    """

    unit: str
    read: Callable[[Report], Any]
    better: str
    what: str


def _part(report: Report, name: str) -> float | None:
    """A slice of the step; None where the report has none of that name."""
    return next((part.time_ms_per_step for part in report.breakdown.step if part.name == name), None)


METRICS: dict[str, Metric] = {
    "step_time": Metric(
        "time",
        step_ms,
        "lower",
        "a step, without the profiler where that is known",
    ),
    "kernel_time": Metric(
        "time", lambda r: r.summary.kernel_time_ms_per_step, "lower", "kernels of a step, summed"
    ),
    "operator_time": Metric(
        "time",
        lambda r: r.summary.operator_time_ms_per_step,
        "lower",
        "operators of a step, summed, where it ran on the CPU",
    ),
    "gpu_busy": Metric(
        "fraction", lambda r: r.summary.gpu_busy_fraction, "higher", "share of the step at work"
    ),
    "mfu": Metric("fraction", lambda r: r.summary.mfu, "higher", "model FLOPs utilisation"),
    "roof": Metric(
        "fraction", lambda r: r.summary.roof_fraction, "higher", "time at the roof over time taken"
    ),
    "launches": Metric("count", lambda r: r.summary.kernels_per_step, "lower", "kernels launched by a step"),
    "peak_memory": Metric(
        "bytes", lambda r: r.summary.peak_memory_bytes, "lower", "high-water mark of memory"
    ),
    "communication": Metric(
        "time", lambda r: _part(r, "exposed communication"), "lower", "exposed collectives of a step"
    ),
    "idle": Metric("time", lambda r: _part(r, "idle"), "lower", "device idle in a step"),
    "coverage": Metric(
        "fraction",
        lambda r: r.summary.coverage.costed_time_fraction,
        "higher",
        "share of device time with a cost",
    ),
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


def check_changes(report: Report, against: Report, changes: Sequence[str]) -> list[Outcome]:
    """Changes against another report such as ``step_time:+5%``: fails on a change for the worse beyond that.

    A change of the step time within the noise of the two fails no gate.

    Raises:
        UsageError: a change is not of the form METRIC:+PERCENT%.
    """
    return [_change(report, against, text) for text in changes]


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
        f"{name} is {_show(found, metric.unit)}, asked for {word} {_show(limit, metric.unit)}",
    )


def _change(report: Report, against: Report, text: str) -> Outcome:
    name, separator, value = text.partition(":")
    found = re.fullmatch(r"\s*\+?(\d+(?:\.\d+)?)\s*%\s*", value)
    if not separator or not found:
        raise UsageError(f"--fail-on {text!r}: give METRIC:+PERCENT%, as step_time:+5%")
    metric = _metric(name, f"--fail-on {text}")
    allowed = float(found.group(1)) / 100
    if name == "step_time":
        compared = compare(against, report)
        before, after, noise = compared.before.step_ms, compared.after.step_ms, compared.noise_fraction
    else:
        before, after, noise = metric.read(against), metric.read(report), NOISE_FLOOR
    if before is None or after is None:
        side = against if before is None else report
        return Outcome(text, None, f"{name} is not known from {side.trace.path}")
    # From nothing, any more is worse by more than any percentage.
    change = (after - before) / before if before else math.copysign(math.inf, after) if after else 0.0
    worse = change * (1 if metric.better == "lower" else -1)
    size = "" if math.isinf(worse) else f"{abs(worse):.1%} "
    how = f"{size}worse" if worse > 0 else f"{size}better" if worse < 0 else "the same"
    told = f"{name} went from {_show(before, metric.unit)} to {_show(after, metric.unit)} ({how})"
    if worse <= allowed:
        return Outcome(text, True, f"{told}, allowed {allowed:.1%}")
    if noise is None:
        return Outcome(
            text, None, f"{told}, but with fewer than two steps on both sides the noise is not known"
        )
    if worse <= noise:
        return Outcome(text, True, f"{told}, within the noise of {noise:.1%}")
    return Outcome(text, False, f"{told}, allowed {allowed:.1%}")


def _metric(name: str, where: str) -> Metric:
    if name not in METRICS:
        raise UsageError(f"{where}: no metric {name!r}; there are {', '.join(METRICS)}")
    return METRICS[name]


def _quantity(text: str, unit: str, where: str) -> float:
    found = _NUMBER.match(text)
    if found:
        number, suffix = float(found.group(1)), found.group(2)
        if unit == "time" and (suffix or "ms") in _TIMES_MS:
            return number * _TIMES_MS[suffix or "ms"]
        if unit == "bytes" and (suffix or "b").lower() in _SIZES:
            return number * _SIZES[(suffix or "b").lower()]
        if unit == "fraction" and suffix in ("", "%"):
            return number / 100 if suffix else number
        if unit == "count" and not suffix:
            return number
    forms = {"time": "30ms", "fraction": "0.8 or 80%", "bytes": "20GB", "count": "500"}
    raise UsageError(f"{where}: {text!r} is no value of this metric; give one as {forms[unit]}")


def _show(value: float, unit: str) -> str:
    show = {"time": fmt.duration, "fraction": fmt.percent, "bytes": fmt.nbytes, "count": fmt.number}
    return show[unit](value)
