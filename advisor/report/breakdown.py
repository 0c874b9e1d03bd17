"""Where the step goes, as stacked bars: by kind of work, by bound, by phase, by family of operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from advisor.report import format as fmt
from advisor.report.model import Report, Slice

#: Colours of the categorical palette in advisor.css; the last one is for all the rest.
_COLOURS = 8
#: Families that are bounds too keep the bound's colour; the busiest of the others take these in turn.
_RESERVED_COLOURS = {"communication": 3, "copy": 2}
_FREE_COLOURS = (1, 5, 4, 0, 6)
#: Phases in the order in which a step goes through them.
_PHASES = {
    name: place
    for place, name in enumerate(
        ("input", "forward", "loss", "backward", "optimizer", "communication", "logging", "other")
    )
}


@dataclass(frozen=True)
class Segment:
    """A part of a stacked bar; `style` names its colour class."""

    name: str
    time: str
    share: str
    fraction: float
    style: str


@dataclass(frozen=True)
class Bar:
    """A stacked bar with what it adds up to."""

    title: str
    whole: str
    segments: list[Segment]


def family_colours(report: Report) -> dict[str, int]:
    """A colour number for each family of operators, the busiest first; rare ones share the last."""
    times: dict[str, float] = {part.name: part.time_ms_per_step for part in report.breakdown.family}
    for group in report.kernels:
        times.setdefault(group.family, 0.0)
    ranked = sorted(times, key=lambda name: (-times[name], name))
    free = iter(_FREE_COLOURS)
    return {
        name: _RESERVED_COLOURS[name] if name in _RESERVED_COLOURS else next(free, _COLOURS - 1)
        for name in ranked
    }


def bars(report: Report) -> list[Bar]:
    """The stacked bars of where the step goes; those without a figure are left out."""
    colours = family_colours(report)
    in_order = sorted(report.breakdown.phase, key=lambda part: _PHASES.get(part.name, len(_PHASES)))
    phases = {part.name: f"p{min(place, _COLOURS - 1)}" for place, part in enumerate(in_order)}
    device_ms = sum(group.time_ms_per_step for group in report.kernels)
    bounds = [
        Slice(
            name=name,
            time_ms_per_step=fraction * device_ms,
            fraction=fraction,
        )
        for name in report.summary.bound_time_fraction.__struct_fields__
        if (fraction := getattr(report.summary.bound_time_fraction, name))
    ]
    device = "operator time" if report.summary.cpu_only else "device time"
    return [
        bar
        for bar in (
            _bar("The step", _whole_step(report), report.breakdown.step, _step_style),
            _bar("By bound", device, bounds, lambda name: f"b-{name}"),
            _bar("By phase", device, in_order, lambda name: phases[name]),
            _bar("By family", device, report.breakdown.family, lambda name: f"c{colours[name]}"),
        )
        if bar.segments
    ]


def _bar(title: str, whole: str, parts: list[Slice], style: Callable[[str], str]) -> Bar:
    total = sum(part.time_ms_per_step for part in parts)
    segments = []
    for part in parts:
        share = (
            part.fraction if part.fraction is not None else part.time_ms_per_step / total if total else 0.0
        )
        if part.time_ms_per_step > 0 or share > 0:
            segments.append(
                Segment(
                    part.name,
                    fmt.duration(part.time_ms_per_step) if part.time_ms_per_step else "",
                    fmt.percent(share),
                    share,
                    style(part.name),
                )
            )
    return Bar(title, f"{fmt.duration(total)} {whole}" if total else whole, segments)


def _whole_step(report: Report) -> str:
    """Which of the two steps the breakdown adds up to: the profiled one or the real one."""
    total = sum(part.time_ms_per_step for part in report.breakdown.step)
    real, profiled = report.summary.baseline_step_ms, report.summary.step_time_ms.p50
    if real and (not profiled or abs(total - real) < abs(total - profiled)):
        return "wall time of a real step"
    return "wall time of a profiled step" + (", its idle time swollen by profiling" if real else "")


def _step_style(name: str) -> str:
    for word in ("idle", "communication", "copy"):
        if word in name:
            return f"s-{word}"
    return "s-compute"
