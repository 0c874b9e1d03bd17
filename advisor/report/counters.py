"""Hardware counters beside the model: joined to launches, to kernel groups, and judged as a whole."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from advisor.report.groups import generic_modules
from advisor.report.model import CounterSummary, Disagreement, KernelGroup, Measured, Quality, Report
from advisor.roofline.agreement import Agreement, Modelled, agreement, counted_bound
from advisor.roofline.analysis import Analysis
from advisor.roofline.bound import BOUNDS
from advisor.roofline.counter_join import join_launches
from advisor.roofline.counters import Counted, CounterFile, base_name
from advisor.trace.events import KERNEL
from advisor.trace.phases import PHASES

#: Launches listed that the model gets wrong.
_LISTED = 20


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Counters of a trace's launches.

    Attributes:
        counted: by launch index of the timeline; launches without counters are absent.
        file: where they come from.
    """

    counted: dict[int, Counted]
    file: CounterFile


def join_counters(analysis: Analysis, file: CounterFile) -> Joined:
    """Find the counters of each kernel launch; see `advisor.roofline.counter_join`."""
    rows, costs = analysis.timeline.launches, analysis.costs
    names = analysis.timeline.trace.names
    kernels = np.flatnonzero(rows.kind == KERNEL)
    counted = [base_name(launch.kernel) for launch in file.launches]
    base = {i: base_name(names[i]) for i in np.unique(rows.name[kernels]).tolist()}
    work = np.stack([costs.flops, costs.bytes_read, costs.bytes_written, rows.grid_blocks, rows.name])
    same: dict[int, Hashable] = {i: work[:, i].tobytes() for i in kernels.tolist()}
    best: list[tuple[int, int]] = []
    # Nsight Compute runs kernels one by one as they are launched; on several streams that differs from
    # the order in which they start.
    for order in (np.lexsort((rows.ts_ns[kernels], rows.launch_ts_ns[kernels])), np.arange(len(kernels))):
        index = kernels[order].tolist()
        pairs = join_launches([base[int(rows.name[i])] for i in index], counted, [same[i] for i in index])
        if len(pairs) > len(best):
            best = [(index[i], j) for i, j in pairs]
    return Joined({i: file.launches[j] for i, j in best}, file)


def add_counters(report: Report, analysis: Analysis, file: CounterFile) -> Joined:
    """Put counters into a report: `KernelGroup.measured` and `Report.counters`."""
    joined = join_counters(analysis, file)
    indices = sorted(joined.counted)
    pairs = [(modelled(analysis, i), joined.counted[i]) for i in indices]
    judged = agreement(pairs, analysis.device)
    report.counters = _summary(analysis, joined, indices, judged)
    by_key = {
        (g.name, g.op, g.module, g.phase, g.bound, g.pipe): g for g in report.kernels if g.measured is None
    }
    members: dict[Any, list[int]] = {}
    modules = generic_modules(analysis.timeline.modules)
    for i in indices:
        if analysis.counted[i]:
            members.setdefault(_key(analysis, modules, i), []).append(i)
    for key, launches in members.items():
        group: KernelGroup | None = by_key.get(key)
        if group is not None:
            group.measured = _measured(analysis, joined, launches)
    _remark(report, joined)
    return joined


def modelled(analysis: Analysis, i: int) -> Modelled:
    """What the model says of launch i."""
    costs = analysis.costs
    return Modelled(
        flops=_known(costs.flops[i]),
        bytes_read=_known(costs.bytes_read[i]),
        bound=BOUNDS[analysis.bounds.bound[i]],
    )


def _key(analysis: Analysis, modules: list[str], i: int) -> tuple[str | None, ...]:
    timeline, rows = analysis.timeline, analysis.timeline.launches
    pipe = int(analysis.costs.pipe[i])
    return (
        timeline.trace.names[rows.name[i]],
        timeline.op_name(int(rows.op[i])),
        modules[rows.module[i]] if rows.module[i] >= 0 else None,
        PHASES[rows.phase[i]],
        BOUNDS[analysis.bounds.bound[i]],
        analysis.costs.pipes[pipe] if pipe >= 0 else None,
    )


def _measured(analysis: Analysis, joined: Joined, launches: list[int]) -> Measured:
    counted = [joined.counted[i] for i in launches]
    costs = analysis.costs
    labels = {counted_bound(one, analysis.device) for one in counted}
    return Measured(
        launches=len(launches),
        time_ms=_mean([None if c.time_ns is None else c.time_ns / 1e6 for c in counted]),
        bytes_read=_mean([c.bytes_read for c in counted]),
        bytes_written=_mean([c.bytes_written for c in counted]),
        flops=_mean([c.flops for c in counted]),
        dram_fraction=_mean([None if c.dram_pct is None else c.dram_pct / 100 for c in counted]),
        modelled_bytes_read=_mean([_known(costs.bytes_read[i]) for i in launches]),
        modelled_bytes_written=_mean([_known(costs.bytes_written[i]) for i in launches]),
        modelled_flops=_mean([_known(costs.flops[i]) for i in launches]),
        bound=labels.pop() if len(labels) == 1 else None,
    )


def _summary(analysis: Analysis, joined: Joined, indices: list[int], judged: Agreement) -> CounterSummary:
    rows = analysis.timeline.launches
    kernel_ns = float(rows.dur_ns[rows.kind == KERNEL].sum())
    names = analysis.timeline.trace.names
    low, median, high = judged.read_ratios or (None, None, None)
    return CounterSummary(
        path=joined.file.path,
        launches=len(joined.file.launches),
        joined=len(indices),
        joined_launch_fraction=_share(len(indices), int((rows.kind == KERNEL).sum())),
        joined_time_fraction=_share(float(rows.dur_ns[indices].sum()), kernel_ns),
        costed_time_fraction=judged.costed,
        flops_agree_time_fraction=judged.flops,
        read_within_1_25_time_fraction=judged.read_within_1_25,
        read_within_1_5_time_fraction=judged.read_within_1_5,
        bound_agrees_time_fraction=judged.bound,
        read_ratio_p5=low,
        read_ratio_p50=median,
        read_ratio_p95=high,
        disagreements=[
            Disagreement(
                name=names[rows.name[indices[d.index]]],
                op=analysis.timeline.op_name(int(rows.op[indices[d.index]])),
                what=d.what,
                modelled=d.modelled,
                measured=d.counted,
                time_ms=d.time_ns / 1e6,
            )
            for d in judged.disagreements[:_LISTED]
        ],
    )


def _remark(report: Report, joined: Joined) -> None:
    given, found = len(joined.file.launches), len(joined.counted)
    if found < given:
        report.data_quality.append(
            Quality(
                level="warning" if found < 0.9 * given else "info",
                code="counters.unjoined",
                message=f"{given - found:,} of {given:,} launches in {joined.file.path} could not be told "
                "apart or have no counterpart in the trace; they are left out. Profile the same steps of the "
                "same program, without --launch-skip and --launch-count",
            )
        )


def _known(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)


def _mean(values: list[float | None]) -> float | None:
    """The mean, or None where any is missing."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
