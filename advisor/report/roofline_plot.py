"""Geometry of the roofline plot: from kernel groups to pixels, without drawing anything."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from advisor.report import format as fmt
from advisor.report import metrics
from advisor.report.model import KernelGroup, Peak, Report

WIDTH, HEIGHT = 1000.0, 520.0
LEFT, RIGHT, TOP, BOTTOM = 84.0, 24.0, 28.0, 52.0
#: Smaller groups are counted below the plot and not drawn; each dot costs the page some 300 bytes.
MAX_DOTS = 250
_LARGEST_RADIUS, _SMALLEST_RADIUS = 24.0, 3.0
_LABEL_HEIGHT, _LABEL_WIDTH = 15.0, 190.0
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
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, flops_per_s: float) -> float:
        share = (math.log10(flops_per_s) - self.y0) / (self.y1 - self.y0)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def plot(report: Report) -> Plot:
    """Lay out the costed kernel groups of a report, on log-log axes, under the roofs they run under."""
    located = [(row, group, where) for row, group in enumerate(report.kernels) if (where := _locate(group))]
    without_flops = len(report.kernels) - len(located)
    if not located:
        return Plot(without_flops=without_flops)
    located.sort(key=lambda item: (-item[1].time_ms_per_step, item[0]))
    drawn = located[:MAX_DOTS]
    peaks = metrics.peaks_used(report)
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
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    return slope, f"{LEFT},{floor} {x1},{floor} {x1},{y1} {x2},{y2} {right},{y2} {right},{floor}"


def _roofs(axes: _Axes, peaks: list[Peak], bandwidth: float | None) -> list[Roof]:
    by_rate: dict[float, list[Peak]] = {}
    for peak in peaks:
        by_rate.setdefault(peak.flops_per_s, []).append(peak)
    roofs: list[Roof] = []
    for rate in sorted(by_rate, reverse=True):
        names = ", ".join(fmt.pipe(peak.pipe) for peak in by_rate[rate])
        ridge = rate / bandwidth if bandwidth else None
        y = axes.y(rate)
        # Above the highest roof, below the others, where the slope does not cross the label.
        label_y = max(y + 16, roofs[-1].label_y + _LABEL_HEIGHT) if roofs else y - 6
        x = axes.x(ridge) if ridge else LEFT
        crowded = x > WIDTH - RIGHT - _LABEL_WIDTH
        roofs.append(
            Roof(
                x,
                y,
                f"{names} {fmt.flops_per_s(rate)}",
                WIDTH - RIGHT if crowded else x + 8,
                label_y,
                "end" if crowded else "start",
                f"ridge {fmt.number(ridge)}" if ridge else "",
            )
        )
    return roofs
