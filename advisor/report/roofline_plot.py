"""Geometry of the roofline plot: from kernel groups to pixels, without drawing anything."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from advisor.report import format as fmt
from advisor.report import metrics
from advisor.report.model import KernelGroup, Peak, Report


class Frame(NamedTuple):
    """The drawing's size and the edges of the area between its axes, in pixels."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float


FRAME = Frame(width=1140.0, height=540.0, left=84.0, right=1116.0, top=28.0, bottom=488.0)
#: Groups with less of the device time would stretch the axes for the sake of specks.
MIN_SHARE = 0.0002
#: Smaller groups are counted below the plot and not drawn; each dot costs the page some 300 bytes.
MAX_DOTS = 250
_LARGEST_RADIUS, _SMALLEST_RADIUS = 24.0, 3.0
_LABEL_HEIGHT, _LABEL_WIDTH, _RIDGE_LABEL_WIDTH = 15.0, 190.0, 74.0
#: Room beyond the outermost point or roof, as a factor.
_MARGIN = 2.2


@dataclass(frozen=True)
class Tick:
    """A grid line at `at` pixels with its label."""

    at: float
    label: str


@dataclass(frozen=True)
class Roof:
    """A compute roof from its ridge point (`x`, `y`) to the right edge; the label may be moved off others."""

    x: float
    y: float
    label: str
    label_x: float
    label_y: float
    anchor: str
    ridge_label: str
    ridge_label_y: float


@dataclass(frozen=True)
class Slope:
    """The memory roof from (`x1`, `y1`) up to (`x2`, `y2`), its label along it."""

    x1: float
    y1: float
    x2: float
    y2: float
    label: str
    label_x: float
    label_y: float
    angle: float


@dataclass(frozen=True)
class Dot:
    """A kernel group; `row` is its place in `Report.kernels`. Area is in proportion to time."""

    row: int
    x: float
    y: float
    r: float


@dataclass(frozen=True)
class Plot:
    """All that the template draws. `dots` is empty where nothing has FLOPs and bytes."""

    dots: list[Dot] = field(default_factory=list)
    roofs: list[Roof] = field(default_factory=list)
    slope: Slope | None = None
    x_ticks: list[Tick] = field(default_factory=list)
    y_ticks: list[Tick] = field(default_factory=list)
    #: The region under the highest roof, as SVG polygon points.
    attainable: str = ""
    #: Share of device time in the dots, and groups left out because they have no arithmetic or are small.
    shown_fraction: float | None = None
    without_flops: int = 0
    too_small: int = 0


@dataclass(frozen=True)
class _Axes:
    """What the plot spans, as log10 of FLOP/byte and of FLOP/s."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, intensity: float) -> float:
        share = (math.log10(intensity) - self.x0) / (self.x1 - self.x0)
        return round(FRAME.left + share * (FRAME.right - FRAME.left), 1)

    def y(self, flops_per_s: float) -> float:
        share = (math.log10(flops_per_s) - self.y0) / (self.y1 - self.y0)
        return round(FRAME.bottom - share * (FRAME.bottom - FRAME.top), 1)


def plot(report: Report) -> Plot:
    """Lay out the costed kernel groups of a report, on log-log axes, under the roofs they run under."""
    located = [(row, group, where) for row, group in enumerate(report.kernels) if (where := _locate(group))]
    without_flops = len(report.kernels) - len(located)
    if not located:
        return Plot(without_flops=without_flops)
    located.sort(key=lambda item: (-item[1].time_ms_per_step, item[0]))
    drawn = [item for item in located if item[1].time_fraction >= MIN_SHARE][:MAX_DOTS] or located[:MAX_DOTS]
    peaks = _peaks([group for _, group, _ in drawn], report)
    bandwidth = report.device.bandwidth_bytes_per_s
    axes = _axes([where for _, _, where in drawn], peaks)
    longest = drawn[0][1].time_ms_per_step
    dots = [
        Dot(row, axes.x(where[0]), axes.y(where[1]), _radius(group.time_ms_per_step / longest))
        for row, group, where in drawn
    ]
    slope, attainable = None, ""
    if bandwidth and peaks:
        slope, attainable = _memory_roof(axes, bandwidth, max(peak.flops_per_s for peak in peaks))
    return Plot(
        dots=dots,
        roofs=_roofs(axes, peaks, bandwidth),
        slope=slope,
        x_ticks=[Tick(axes.x(10.0**e), fmt.decade(e)) for e in _decades(axes.x0, axes.x1)],
        y_ticks=[Tick(axes.y(10.0**e), fmt.decade(e, "FLOP/s")) for e in _decades(axes.y0, axes.y1)],
        attainable=attainable,
        shown_fraction=sum(group.time_fraction for _, group, _ in drawn),
        without_flops=without_flops,
        too_small=len(located) - len(drawn),
    )


def _locate(group: KernelGroup) -> tuple[float, float] | None:
    """Intensity and achieved FLOP/s of a group, or None where it has no place on the axes."""
    moved, achieved = metrics.total_bytes(group), metrics.flops_per_s(group)
    if not group.flops or not moved or not achieved:
        return None
    ratio = group.flops / moved
    return (ratio, achieved) if 1e-9 < ratio < 1e9 and 1 < achieved < 1e21 else None


def _axes(points: list[tuple[float, float]], peaks: list[Peak]) -> _Axes:
    xs = [x for x, _ in points] + [
        peak.ridge_flops_per_byte for peak in peaks if peak.ridge_flops_per_byte > 0
    ]
    ys = [y for _, y in points] + [peak.flops_per_s for peak in peaks]
    x0, x1 = math.log10(min(xs) / _MARGIN), math.log10(max(xs) * _MARGIN)
    y0, y1 = math.log10(min(ys) / _MARGIN), math.log10(max(ys) * _MARGIN)
    return _Axes(x0, x1, y0, y1)


def _decades(low: float, high: float) -> range:
    return range(math.ceil(low), math.floor(high) + 1)


def _radius(share_of_longest: float) -> float:
    return round(max(_LARGEST_RADIUS * math.sqrt(max(share_of_longest, 0.0)), _SMALLEST_RADIUS), 1)


def _memory_roof(axes: _Axes, bandwidth: float, peak: float) -> tuple[Slope, str]:
    low = max(10.0**axes.x0, 10.0**axes.y0 / bandwidth)
    x1, y1 = axes.x(low), axes.y(low * bandwidth)
    x2, y2 = axes.x(peak / bandwidth), axes.y(peak)
    across, up = x2 - x1, y2 - y1
    slope = Slope(
        x1,
        y1,
        x2,
        y2,
        f"memory {fmt.bytes_per_s(bandwidth)}",
        round(x1 + 0.3 * across, 1),
        round(y1 + 0.3 * up, 1),
        round(math.degrees(math.atan2(up, across)), 1),
    )
    _, _, left, right, _, floor = FRAME
    return slope, f"{left},{floor} {x1},{floor} {x1},{y1} {x2},{y2} {right},{y2} {right},{floor}"


def _peaks(groups: list[KernelGroup], report: Report) -> list[Peak]:
    """The roofs of pipes that take a noticeable part of the drawn time."""
    times: dict[str | None, float] = {}
    for group in groups:
        times[group.pipe] = times.get(group.pipe, 0.0) + group.time_ms_per_step
    least = 0.005 * sum(times.values())
    return [peak for peak in metrics.peaks_used(report) if times.get(peak.pipe, 0.0) >= least]


def _roofs(axes: _Axes, peaks: list[Peak], bandwidth: float | None) -> list[Roof]:
    by_rate: dict[float, list[Peak]] = {}
    for peak in peaks:
        by_rate.setdefault(peak.flops_per_s, []).append(peak)
    rates = sorted(by_rate, reverse=True)
    lines = [axes.y(rate) for rate in rates]
    roofs: list[Roof] = []
    for rate, y, label_y in zip(rates, lines, _label_places(lines), strict=True):
        ridge = rate / bandwidth if bandwidth else None
        x = axes.x(ridge) if ridge else FRAME.left
        crowded = x > FRAME.right - _LABEL_WIDTH
        names = ", ".join(fmt.pipe(peak.pipe) for peak in by_rate[rate])
        close = bool(roofs) and roofs[-1].x - x < _RIDGE_LABEL_WIDTH
        roofs.append(
            Roof(
                x=x,
                y=y,
                label=f"{names} {fmt.flops_per_s(rate)}",
                label_x=FRAME.right if crowded else x + 8,
                label_y=label_y,
                anchor="end" if crowded else "start",
                ridge_label=f"ridge {fmt.number(ridge)}" if ridge else "",
                ridge_label_y=roofs[-1].ridge_label_y - _LABEL_HEIGHT if close else FRAME.bottom - 6,
            )
        )
    return roofs


def _label_places(lines: list[float]) -> list[float]:
    """Where the labels of roofs go, given their lines from the top down, so that no line crosses one.

    The highest has its label above it. Under each run of close lines stand the labels of that run.
    """
    runs: list[list[int]] = []
    for place in range(1, len(lines)):
        if runs and lines[place] - lines[runs[-1][-1]] < _LABEL_HEIGHT + 6:
            runs[-1].append(place)
        else:
            runs.append([place])
    places = [lines[0] - 6] if lines else []
    for run in runs:
        places += [lines[run[-1]] + _LABEL_HEIGHT * (order + 1) for order in range(len(run))]
    return places
