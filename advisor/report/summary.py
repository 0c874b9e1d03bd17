"""The headline figures, the breakdown of the step, and the sentence above them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from advisor.report.model import (
    BoundTimeFraction,
    Breakdown,
    Coverage,
    KernelGroup,
    Slice,
    StepTime,
    Summary,
)
from advisor.report.pace import BUSY_ENOUGH, Pace, meaning, pace, roof_fraction
from advisor.report.ranks import Waiting, limit
from advisor.roofline.analysis import Analysis
from advisor.roofline.bound import BOUNDS
from advisor.trace.events import KERNEL
from advisor.trace.link import CPU_OP

#: Families whose FLOPs count as the model's in the utilisation.
_MODEL_FAMILIES = frozenset({"matmul", "attention", "convolution", "rnn"})
#: The profiler makes host-bound steps up to this many times as long (docs/capture.md).
_STRETCH = 2.0


def summarise(analysis: Analysis, groups: list[KernelGroup], waiting: Waiting | None = None) -> Summary:
    """Headline figures of one trace, one of several ranks' where they wait for each other."""
    times = analysis.step_times_ns / 1e6
    real_ms = analysis.real_step_ns / 1e6 if analysis.real_step_ns else None
    profiled_ms = analysis.profiled_step_ns / 1e6 if analysis.profiled_step_ns else None
    busy_ms = sum(analysis.busy_ns_per_step.values()) / 1e6 if analysis.step_count else None
    on_device = not analysis.timeline.cpu_only
    summary = Summary(
        verdict="",
        steps=analysis.step_count,
        step_time_ms=StepTime(
            p50=float(np.median(times)) if len(times) else None,
            p95=float(np.percentile(times, 95)) if len(times) else None,
            all=[float(t) for t in times],
        ),
        baseline_step_ms=analysis.baseline_ns / 1e6 if analysis.baseline_ns else None,
        gpu_busy_fraction=_fraction(busy_ms, real_ms) if on_device else None,
        gpu_busy_fraction_profiled=_fraction(busy_ms, profiled_ms) if on_device else None,
        gpu_busy_ms_per_step=busy_ms if on_device else None,
        kernel_time_ms_per_step=_per_step(analysis, KERNEL, times=True) if on_device else None,
        kernels_per_step=_per_step(analysis, KERNEL, times=False) if on_device else None,
        operator_time_ms_per_step=None if on_device else _per_step(analysis, CPU_OP, times=True),
        bound_time_fraction=_bound_fractions(groups),
        coverage=_coverage(analysis),
        # The time of a collective includes waiting for other ranks, which no better kernel saves.
        roof_fraction=roof_fraction([g for g in groups if g.bound != "communication"]),
        flops_per_step=_total(useful_flops(g) for g in groups),
        bytes_per_step=_total(
            g.bytes_read + g.bytes_written
            for g in groups
            if g.bytes_read is not None and g.bytes_written is not None
        ),
        mfu=_mfu(analysis, groups, real_ms),
        peak_memory_bytes=_peak_memory_bytes(analysis.timeline.trace.context),
        cpu_only=analysis.timeline.cpu_only,
    )
    whole = "trace" if analysis.timeline.steps.source == "trace" else "step"
    found = pace(summary.bound_time_fraction, groups)
    summary.verdict = verdict(
        summary,
        found,
        roofs_known=bool(analysis.device.peaks),
        whole=whole,
        waiting=waiting,
        has_device=bool(analysis.timeline.trace.meta.get("deviceProperties")),
    )
    return summary


def break_down(analysis: Analysis, groups: list[KernelGroup]) -> Breakdown:
    """Where the step goes: on the device's clock, by phase, by family of operator."""
    return Breakdown(
        step=_step_slices(analysis),
        phase=_slices((g.phase, g.time_ms_per_step) for g in groups),
        family=_slices((g.family, g.time_ms_per_step) for g in groups),
    )


def verdict(
    summary: Summary,
    found: Pace,
    *,
    roofs_known: bool,
    whole: str = "step",
    waiting: Waiting | None = None,
    has_device: bool = False,
) -> str:
    """One sentence: what limits this loop.

    Args:
        summary: the headline figures.
        found: what sets the pace of the kernels.
        roofs_known: whether kernels could be set against the device's roofs.
        whole: what the busy share is of: ``"step"``, or ``"trace"`` where no steps are marked.
        waiting: how ranks wait for each other: then one of them limits the loop, whoever's figures these are.
        has_device: whether the trace names a device: without work on it, the CPU need not have done it all.
    """
    bound = summary.bound_time_fraction
    if all(share is None for share in (bound.memory, bound.unknown)):
        return "No device work was recorded, so there is nothing to classify."
    first = _limit(summary, whole, has_device)
    if waiting:
        first = limit(waiting, first)
    if not roofs_known:
        return f"{first}; the device's roofs are not known, so kernels are not classified."
    place = "CPU operator" if summary.cpu_only else "device"
    if waiting:
        place = f"rank {waiting.shown}'s {place}"
    return f"{first}; {found.share:.0%} of {place} time is {meaning(found)}."


def _limit(summary: Summary, whole: str, has_device: bool) -> str:
    """Whether host or device limits the loop, as far as the busy share can tell."""
    busy = summary.gpu_busy_fraction
    if summary.cpu_only:
        ran = "The trace has no device work" if has_device else "This ran on the CPU"
        return f"{ran}, so operators stand in for kernels"
    if busy is None:
        return f"How much of the {whole} the GPU works is not known"
    if busy >= BUSY_ENOUGH:
        return f"The GPU works {busy:.0%} of the {whole}: its kernels limit this loop"
    if summary.baseline_step_ms:
        return f"The GPU works {busy:.0%} of the {whole}: the host limits this loop, not its kernels"
    first = f"The GPU works {busy:.0%} of the {whole} as profiled"
    if busy * _STRETCH < BUSY_ENOUGH:
        return f"{first} (the profiler itself slows the host): the host limits this loop, not its kernels"
    return (
        f"{first}: the profiler slows the host, so either host or kernels may limit this loop; the real "
        "step time would tell"
    )


def _peak_memory_bytes(context: Mapping[str, Any]) -> int | None:
    """The most that the allocator held, before the window or in it; None where it was not recorded."""
    block = context.get("peak_memory_bytes")
    values = block.values() if isinstance(block, Mapping) else ()
    return max((value for value in values if isinstance(value, int) and value > 0), default=None)


def _per_step(analysis: Analysis, kind: int, *, times: bool) -> float | None:
    """Launches of a kind in a steady step, or their summed time in ms.

    None without steps, and where all of that kind lies outside of them: it may be the steps' all the same.
    """
    rows = analysis.timeline.launches
    of_kind = rows.kind == kind
    if not analysis.step_count or (of_kind.any() and (rows.step[of_kind] < 0).all()):
        return None
    chosen = analysis.counted & of_kind
    total = float(rows.dur_ns[chosen].sum()) / 1e6 if times else float(chosen.sum())
    return total / analysis.step_count


def _bound_fractions(groups: list[KernelGroup]) -> BoundTimeFraction:
    total = sum(g.time_ms_per_step for g in groups)
    if not total:
        return BoundTimeFraction()
    share: dict[str, float] = dict.fromkeys(BOUNDS, 0.0)
    for group in groups:
        share[group.bound] += group.time_ms_per_step / total
    return BoundTimeFraction(**share)


def _coverage(analysis: Analysis) -> Coverage:
    rows, counted = analysis.timeline.launches, analysis.counted
    # What crosses a link needs no cost: it is set against the link by its kind.
    costed = analysis.costs.known | (analysis.bounds.bound != BOUNDS.index("unknown"))

    everything = np.ones(len(rows), bool)

    def share(part: np.ndarray, whole: np.ndarray) -> float | None:
        total = float(rows.dur_ns[whole].sum())
        return float(rows.dur_ns[part & whole].sum()) / total if total else None

    return Coverage(
        costed_time_fraction=share(costed, counted),
        attributed_time_fraction=share((rows.op >= 0) & ~analysis.inferred, everything),
        orphan_time_fraction=analysis.timeline.orphan_time_fraction,
        replayed_time_fraction=share(analysis.replayed, everything),
        inferred_time_fraction=share(analysis.inferred, everything),
    )


def _mfu(analysis: Analysis, groups: list[KernelGroup], real_ms: float | None) -> float | None:
    """Time the model's matrix work would take at its pipes' datasheet peaks, over the step time."""
    ideal_s, seen = 0.0, False
    for group in groups:
        flops = useful_flops(group)
        if group.family not in _MODEL_FAMILIES or not flops:
            continue
        peak = analysis.device.datasheet_peak(group.pipe) if group.pipe else None
        if peak is None:
            return None
        ideal_s += flops / peak
        seen = True
    return ideal_s * 1e3 / real_ms if seen and real_ms else None


def _step_slices(analysis: Analysis) -> list[Slice]:
    """The step on the device's clock; adds up to the real step.

    Where the profiled device time is longer than the real step, what is exposed gives way first: waiting
    for other ranks and copies stretch under the profiler, kernels hardly do.
    """
    whole_ns = analysis.real_step_ns
    if not whole_ns or analysis.timeline.cpu_only:
        return []
    slices, left_ns = [], whole_ns
    for name, key in (
        ("compute", "compute"),
        ("exposed communication", "communication"),
        ("exposed copy", "copy"),
    ):
        part_ns = min(analysis.busy_ns_per_step[key], left_ns)
        slices.append(Slice(name=name, time_ms_per_step=part_ns / 1e6, fraction=part_ns / whole_ns))
        left_ns -= part_ns
    return [*slices, Slice(name="idle", time_ms_per_step=left_ns / 1e6, fraction=left_ns / whole_ns)]


def _slices(pairs: Iterable[tuple[str, float]]) -> list[Slice]:
    sums: dict[str, float] = defaultdict(float)
    for name, value in pairs:
        sums[name] += value
    whole = sum(sums.values())
    return [
        Slice(name=name, time_ms_per_step=value, fraction=value / whole if whole else None)
        for name, value in sorted(sums.items(), key=lambda item: -item[1])
    ]


def _fraction(part: float | None, whole: float | None) -> float | None:
    return min(part / whole, 1.0) if part is not None and whole else None


def useful_flops(group: KernelGroup) -> float | None:
    """FLOPs of a group that its results need, or None without a cost."""
    return None if group.flops is None else group.flops - (group.flops_padding or 0.0)


def _total(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None
