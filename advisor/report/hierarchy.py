"""The device's levels of memory as the report has them, and what they mean for its verdict."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.report import format as fmt
from advisor.report.metrics import peaks_used
from advisor.report.model import MemoryLevel, Report
from advisor.report.pace import pace
from advisor.roofline.devices import Device
from advisor.roofline.hierarchy import hierarchy

#: Share of the time from which one kind of kernel is said to set the pace.
_MOSTLY = 0.5


def memory_levels(device: Device) -> list[MemoryLevel]:
    """The levels with the price of a byte at each, against the nearest one above whose rate is known."""
    found: list[MemoryLevel] = []
    above: MemoryLevel | None = None
    for level in hierarchy(device):
        rate = level.bandwidth_bytes_per_s
        one = MemoryLevel(
            name=level.name, size_bytes=level.size_bytes, bandwidth_bytes_per_s=rate, source=level.source
        )
        if rate and above is not None and above.bandwidth_bytes_per_s:
            one.times_slower_than_above = above.bandwidth_bytes_per_s / rate
            one.compared_with = above.name
        found.append(one)
        above = one if rate else above
    return found


def price(levels: Sequence[MemoryLevel], place: int) -> str:
    """How many times slower than the level above: ``16×``; names that level where one was skipped."""
    level = levels[place]
    if level.times_slower_than_above is None:
        return fmt.MISSING
    times = f"{fmt.number(level.times_slower_than_above)}×"
    skipped = place and level.compared_with != levels[place - 1].name
    return f"{times} vs {_short(level.compared_with or '')}" if skipped else times


def meaning(report: Report) -> str:
    """One sentence: what the levels mean for this loop; empty without a ridge point."""
    peaks, levels = peaks_used(report), report.device.hierarchy
    memory = next((level for level in levels if level.name.startswith("Device memory")), None)
    rate = memory.bandwidth_bytes_per_s if memory else None
    share = report.summary.bound_time_fraction
    work = "operator" if report.summary.cpu_only else "kernel"
    if not peaks or not rate or not peaks[0].ridge_flops_per_byte or share.memory is None:
        return ""
    text = (
        f"Each byte from device memory has to serve {fmt.number(peaks[0].ridge_flops_per_byte)} "
        f"FLOP of {fmt.pipe(peaks[0].pipe)} work, the ridge point, to keep those units busy. In this loop "
        f"{fmt.percent(share.memory)} of the {work} time goes to memory-bound {work}s, which do less"
    )
    found = pace(share, report.kernels)
    if found.far and found.share >= _MOSTLY:
        return (
            f"{text}. The {found.bound}-bound ones reach {fmt.percent(found.efficiency)} of their roof: slow "
            "or small kernels set the pace."
        )
    near = next((level for level in levels if level.name.startswith("Shared")), None)
    if share.memory >= _MOSTLY and near and near.bandwidth_bytes_per_s:
        times = fmt.number(near.bandwidth_bytes_per_s / rate)
        return (
            f"{text}: fused, they keep values in registers or shared memory, "
            f"where a byte is {times}× cheaper."
        )
    if (share.compute or 0.0) >= _MOSTLY:
        return (
            f"{text}: arithmetic sets the pace, so fewer or narrower operations help more than fewer bytes."
        )
    return f"{text}."


def line(levels: Sequence[MemoryLevel]) -> str:
    """All levels with a known bandwidth in one line, each with its price against the one before."""
    return ", ".join(
        f"{level.name} {fmt.bytes_per_s(level.bandwidth_bytes_per_s)}"
        + (f" ({price(levels, place)})" if level.times_slower_than_above else "")
        for place, level in enumerate(levels)
        if level.bandwidth_bytes_per_s
    )


def _short(name: str) -> str:
    return {"Shared memory and L1": "shared memory", "L2 cache": "L2", "Registers": "registers"}.get(
        name, name.split(" (")[0].lower()
    )
