"""The headline figures in the order in which every renderer shows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from advisor.report import format as fmt
from advisor.report.model import CrossCheck, KernelGroup, Peak, Report

_SHAPES_REMEDY = "record shapes (record_shapes=True)"

#: What a flag of a kernel means, for its tooltip and the glossary.
FLAGS = {
    "latency": "too small to fill the device: fuse it, or launch fewer",
    "inefficient": "large, and far from its roof: a better kernel exists",
    "few_blocks": "too few thread blocks to give work to half the multiprocessors",
    "cached": "faster than device memory allows, as far as the cache explains it",
    "above_roof": "above its roof beyond what the cache explains: its cost or the roof is wrong",
    "no_roof": "has a cost, but the device has no figure to set it against",
    "pageable": "copied from or to pageable host memory: pin it (pin_memory=True)",
    "padded": "much of its arithmetic is on padding: sizes that are multiples of its tile save it",
}
#: Of these, the ones that say why a group is above its roof.
_ABOVE = ("cached", "above_roof")


@dataclass(frozen=True)
class Metric:
    """One headline figure.

    Attributes:
        label: what it is.
        value: the figure with its unit, or None where it was not measured.
        note: the denominator or the condition that the figure holds under.
        remedy: how to get the figure, for when `value` is None.
    """

    label: str
    value: str | None
    note: str = ""
    remedy: str = ""


def metrics(report: Report) -> list[Metric]:
    """Step time, busy share, utilisation, bounds, memory and launches of a report."""
    return [
        _real_step(report),
        _profiled_step(report),
        _busy(report),
        _mfu(report),
        _roof(report),
        _bounds(report),
        _memory(report),
        _kernels(report),
    ]


def pipes_used(report: Report) -> list[str]:
    """Pipes that the step's kernels compute on, the busiest first."""
    times: dict[str, float] = {}
    for group in report.kernels:
        if group.pipe and group.pipe != "none" and group.flops:
            times[group.pipe] = times.get(group.pipe, 0.0) + group.time_ms_per_step
    return sorted(times, key=lambda pipe: (-times[pipe], pipe))


def peaks_used(report: Report) -> list[Peak]:
    """The device's roofs that the step's kernels run under, the busiest first."""
    peaks = {peak.pipe: peak for peak in report.device.peaks}
    return [peaks[pipe] for pipe in pipes_used(report) if pipe in peaks]


def by_time(groups: list[KernelGroup]) -> list[KernelGroup]:
    """The groups, those that take longest first and those of unknown time last."""
    return sorted(groups, key=lambda g: -g.time_ms_per_step if fmt.known(g.time_ms_per_step) else 0.0)


def flops_per_s(group: KernelGroup) -> float | None:
    """Arithmetic rate that a group achieved, or None without FLOPs."""
    return None if group.flops is None else _per_second(group.flops, group)


def bytes_per_s(group: KernelGroup) -> float | None:
    """Bandwidth that a group achieved, re-reads included, or None without a cost."""
    moved = total_bytes(group)
    return None if moved is None else _per_second(moved, group)


def total_bytes(group: KernelGroup) -> float | None:
    """Bytes read and written, or None where either is unknown."""
    if group.bytes_read is None or group.bytes_written is None:
        return None
    return group.bytes_read + group.bytes_written


def efficiency(group: KernelGroup) -> str:
    """Efficiency for a table; ``299%!`` where a flag says why it is above the roof (`above_roof_notes`)."""
    value = group.efficiency
    if value is None or not fmt.known(value) or value <= 1 or not set(_ABOVE) & set(group.flags):
        return fmt.percent(value)
    return f"{100 * value:.0f}%!" if value < 10 else ">999%!"


def above_roof_notes(groups: Iterable[KernelGroup]) -> list[str]:
    """What the marks of `efficiency` in these rows mean, one line a kind; empty without marks."""
    flags = {flag for group in groups if efficiency(group).endswith("!") for flag in group.flags}
    return [f"! {flag}: {FLAGS[flag]}" for flag in _ABOVE if flag in flags]


def differs(check: CrossCheck) -> bool:
    """Whether another tool's figure lies more than 2 % from ours."""
    return check.difference_fraction is not None and abs(check.difference_fraction) > 0.02


def _per_second(amount: float, group: KernelGroup) -> float | None:
    return amount / (group.time_ms_per_step / 1e3) if group.time_ms_per_step > 0 else None


def _optional(text: str) -> str | None:
    return None if text == fmt.MISSING else text


def _real_step(report: Report) -> Metric:
    summary = report.summary
    profiled, real = summary.step_time_ms.p50, summary.baseline_step_ms
    note = "without the profiler"
    if profiled and real and profiled >= real:
        note += f"; profiling stretched it {fmt.ratio(profiled / real)}"
    return Metric(
        "Step time, as it really runs",
        _optional(fmt.duration(real)),
        note,
        "capture with the TrainingAdvisor callback, or pass --baseline-step-ms",
    )


def _profiled_step(report: Report) -> Metric:
    summary = report.summary
    steps = f"{summary.steps} step" + ("" if summary.steps == 1 else "s")
    note = f"median of {steps}"
    if summary.steps > 1 and fmt.known(summary.step_time_ms.p95):
        note += f"; p95 {fmt.duration(summary.step_time_ms.p95)}"
    return Metric(
        "Step time, as profiled",
        _optional(fmt.duration(summary.step_time_ms.p50)),
        note,
        "capture two steps or more, with profiler.step() after each",
    )


def _busy(report: Report) -> Metric:
    summary = report.summary
    if fmt.known(summary.baseline_step_ms):
        note = "of the real step"
        if fmt.known(summary.gpu_busy_fraction_profiled):
            note += f"; {fmt.percent(summary.gpu_busy_fraction_profiled)} in the profiled trace"
    else:
        note = "of the profiled step: a lower bound, since profiling slows the host"
    waiting = next((r.waiting_ms_per_step for r in report.ranks if r.rank == report.trace.rank), None)
    if waiting:
        note += f"; up to {fmt.duration(waiting)} of it waits for other ranks"
    remedy = (
        "record device work: this trace has none" if summary.cpu_only else "capture at least one whole step"
    )
    return Metric("GPU busy", _optional(fmt.percent(summary.gpu_busy_fraction)), note, remedy)


def _mfu(report: Report) -> Metric:
    roofs = [peak for peak in peaks_used(report) if peak.pipe.startswith("tensor_")] or peaks_used(report)
    against = ", ".join(
        f"{fmt.flops_per_s(peak.datasheet_flops_per_s or peak.flops_per_s)} {fmt.pipe(peak.pipe)}"
        for peak in roofs[:2]
    )
    return Metric(
        "Model FLOPs utilisation",
        _optional(fmt.percent(report.summary.mfu)),
        f"of {against}" if against else "of the dense peak of the pipe in use",
        "the step has no matrix product or convolution" if _classified(report) else _costs_remedy(report),
    )


def _costs_remedy(report: Report) -> str:
    """How to get what needs costs and roofs; the roofs of a CPU are measured where the trace was made."""
    if not report.summary.cpu_only:
        return f"{_SHAPES_REMEDY} and name the device (--device)"
    if report.device.peaks:
        return _SHAPES_REMEDY
    return f"{_SHAPES_REMEDY} and analyse the trace on the machine that made it"


def _classified(report: Report) -> bool:
    """Whether nearly all time was set against a roof, so that a missing figure is no want of data."""
    unknown = report.summary.bound_time_fraction.unknown
    return unknown is not None and unknown < 0.01


def _roof(report: Report) -> Metric:
    work = "operator" if report.summary.cpu_only else "device"
    return Metric(
        "Fraction of the roof",
        _optional(fmt.percent(report.summary.roof_fraction)),
        f"time at the roof over time taken, {fmt.percent(report.summary.coverage.costed_time_fraction)} "
        f"of {work} time costed",
        _costs_remedy(report),
    )


def _bounds(report: Report) -> Metric:
    share = report.summary.bound_time_fraction
    value = None
    # Where nothing could be classified, shares of nought say nothing.
    if share.unknown is not None and share.unknown < 0.999:
        value = f"{fmt.percent(share.memory)} / {fmt.percent(share.compute)}"
    return Metric(
        "Memory- / compute-bound",
        value,
        "of operator time" if report.summary.cpu_only else "of device time",
        _costs_remedy(report),
    )


def _memory(report: Report) -> Metric:
    peak, size = report.summary.peak_memory_bytes, report.device.memory_bytes
    note = "allocated by PyTorch"
    if peak and size:
        note = f"{fmt.percent(peak / size)} of {fmt.nbytes(size)}"
    return Metric(
        "Peak memory", _optional(fmt.nbytes(peak)), note, "capture with the TrainingAdvisor callback on a GPU"
    )


def _kernels(report: Report) -> Metric:
    summary = report.summary
    label = "Operator time per step" if summary.cpu_only else "Kernel time per step"
    time_ms = summary.operator_time_ms_per_step if summary.cpu_only else summary.kernel_time_ms_per_step
    note = "summed over threads" if summary.cpu_only else "summed over streams"
    if not summary.cpu_only and fmt.known(summary.kernels_per_step):
        note = f"in {fmt.count(summary.kernels_per_step)} launches"
    return Metric(
        label,
        _optional(fmt.duration(time_ms)),
        note,
        "call the profiler's step() after each step: no steady one holds any of the recorded work",
    )
