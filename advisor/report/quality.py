"""How far the figures can be trusted: remarks on the trace, each one function."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from advisor.report import format as fmt
from advisor.report.model import Quality, Summary
from advisor.roofline.analysis import Analysis, device_properties
from advisor.roofline.bound import BOUNDS
from advisor.roofline.devices import find_device

Check = Callable[[Analysis, Summary], Iterator[Quality]]
_CHECKS: list[Check] = []
_LEVELS = ("error", "warning", "info")
#: Operators that are looked at for shapes.
_SAMPLED_OPS = 2000
#: Operators without a cost that are named.
_NAMED_OPS = 3
#: The profiler's own cost is worth a word from this ratio of profiled to real step time.
_INFLATION = 1.15
#: Device time may exceed the real step by this much: clocks and medians are good to a few percent.
_SLACK = 1.05
#: An operator this many times as fast as its roof says something of the roof...
_FAR_ABOVE = 2.0
#: ...where more than this share of the time goes to such operators.
_WORTH_TELLING = 0.005
#: Rows of one device with memories this close are not told apart.
_ALIKE = 1.05


def check(function: Check) -> Check:
    """Register a check; each yields no, one or several remarks."""
    _CHECKS.append(function)
    return function


def data_quality(analysis: Analysis, summary: Summary) -> list[Quality]:
    """All remarks, errors first."""
    return by_level([remark for function in _CHECKS for remark in function(analysis, summary)])


def by_level(remarks: list[Quality]) -> list[Quality]:
    """Errors first, then warnings, then the rest."""
    return sorted(remarks, key=lambda remark: _LEVELS.index(remark.level))


def _ms(duration_ns: float) -> str:
    return fmt.duration(duration_ns / 1e6)


def _remark(level: str, code: str, message: str) -> Quality:
    return Quality(level=level, code=code, message=message)


@check
def losses(analysis: Analysis, summary: Summary) -> Iterator[Quality]:
    """Something in the file could not be read."""
    for loss in analysis.timeline.trace.losses:
        yield _remark("warning", f"read.{loss.kind}", f"{loss.detail or loss.kind} ({loss.count:,})")


@check
def steps(analysis: Analysis, summary: Summary) -> Iterator[Quality]:
    """Steps that were inferred, missing, or too few to show a spread."""
    source = analysis.timeline.steps.source
    if source == "trace":
        yield _remark(
            "warning",
            "steps.none",
            "no training steps are marked in the trace: 'per step' means 'in the whole trace'. "
            "Call profiler.step() once a step, or capture with TrainingAdvisor",
        )
    elif source != "profiler":
        marks = "DataLoader fetches" if source == "dataloader" else "optimizer steps"
        yield _remark("info", "steps.inferred", f"no ProfilerStep ranges: steps are told by {marks}")
    left_out = len(analysis.timeline.steps) - analysis.step_count - (len(analysis.timeline.steps) > 1)
    if left_out > 0:
        yield _remark(
            "info",
            "steps.irregular",
            f"{left_out} step(s) were left out: without device work, with unusually much or little of it, or "
            "with a validation run inside",
        )
    if analysis.timeline.batches_per_optimizer_step > 1:
        yield _remark(
            "info",
            "steps.accumulated",
            f"gradients are accumulated over {analysis.timeline.batches_per_optimizer_step} batches: a step "
            "here is one batch, and step times are means over whole cycles",
        )
    if source != "trace" and analysis.step_count == 1:
        yield _remark("info", "steps.single", "a single steady step: its spread is not known")


@check
def device(analysis: Analysis, summary: Summary) -> Iterator[Quality]:
    """A device whose roofs are not known."""
    if not analysis.device.peaks:
        yield _remark(
            "warning",
            "device.unknown",
            f"the roofs of {analysis.device.name!r} are not known, so nothing is classified: "
            f"{analysis.device.note or 'give --device NAME'}",
        )


@check
def device_given(analysis: Analysis, summary: Summary) -> Iterator[Quality]:
    """A device named by the user where the trace names another one that is known."""
    told, taken = find_device(device_properties(analysis.timeline)), analysis.device
    if taken.roofs != "datasheet" or not told.matched or told.matched == taken.matched:
        return
    rates = [rate for rate in (told.bandwidth_bytes_per_s, taken.bandwidth_bytes_per_s) if rate]
    # A plain name ("A100") stands for several rows that hardly differ.
    if len(rates) < 2 or max(rates) > _ALIKE * min(rates):
        yield _remark(
            "warning",
            "device.contradicted",
            f"the trace names {told.name!r}, but its kernels are set against the roofs of {taken.matched}, "
            "as --device says",
        )


@check
def roofs(analysis: Analysis, summary: Summary) -> Iterator[Quality]:
    """Roofs that were measured in place of the datasheet's."""
    found = analysis.device
    if found.roofs == "measured" and found.datasheet_peaks:
        yield _remark(
            "info",
            "device.measured",
            f"efficiencies are told of roofs {found.bandwidth_source}; "
            "--roofs datasheet takes the datasheet's",
        )


@check
def cpu_roofs(analysis: Analysis, summary: Summary) -> Iterator[Quality]:
    """Operators far above the roofs of a CPU, which are an estimate."""
    found = analysis.device
    if not analysis.timeline.cpu_only or not found.peaks:
        return
    time_ns = np.where(analysis.counted, analysis.timeline.launches.dur_ns, 0.0)
    share = float(time_ns[analysis.bounds.efficiency > _FAR_ABOVE].sum()) / max(float(time_ns.sum()), 1.0)
    if share <= _WORTH_TELLING:
        return
    if found.roofs == "measured":
        why = "measured in about a second, the memory's beyond the caches, where small tensors lie"
    else:
        why = f"they are given, those of {found.matched or found.name}, and were not measured here"
    yield _remark(
        "info",
        "device.cpu_roofs",
        f"operators that take {share:.1%} of the time are over {_FAR_ABOVE:g} times as fast as this CPU's "
        f"roofs, which are an estimate: {why}",
    )


@check
def observer(analysis: Analysis, summary: Summary) -> Iterator[Quality]:
    """The profiler's own cost on the host side."""
    profiled, baseline = analysis.profiled_step_ns, analysis.baseline_ns
    busy = 0.0 if analysis.timeline.cpu_only else sum(analysis.busy_ns_per_step.values())
    if analysis.timeline.steps.source == "trace" or not profiled:
        return
    if not baseline:
        yield _remark(
            "info" if (summary.gpu_busy_fraction or 0) > 0.9 else "warning",
            "baseline.unknown",
            "the step time without the profiler is not known: profiling slows the host, so idle time and "
            "step time are upper bounds. Give it with --baseline-step-ms",
        )
    elif busy > _SLACK * baseline:
        yield _remark(
            "warning",
            "baseline.too_short",
            f"the device works {_ms(busy)} in a step, more than the {_ms(baseline)} that a "
            "step is said to take without the profiler: the two are not of the same loop, or other ranks are "
            "waited for longer under the profiler",
        )
    elif profiled * _INFLATION < baseline:
        yield _remark(
            "warning",
            "baseline.too_long",
            f"the profiled steps took {_ms(profiled)}, less than the {_ms(baseline)} that a "
            "step is said to take without the profiler: the loop was not steady, the machine was busy with "
            "other work, or the two are not of the same loop",
        )
    elif profiled > _INFLATION * baseline:
        yield _remark(
            "info",
            "baseline.inflated",
            f"the profiled steps took {fmt.ratio(profiled / baseline)} the real step time"
            + (
                ""
                if analysis.timeline.cpu_only
                else ": busy share and breakdown are told against the real one"
            ),
        )


@check
def lingering(analysis: Analysis, summary: Summary) -> Iterator[Quality]:
    """Steps that stayed slower after the capture window."""
    after = analysis.timeline.trace.context.get("after")
    # On a CPU the analysis of the capture takes its share of the same cores for a while.
    if analysis.timeline.cpu_only or not isinstance(after, dict) or after.get("verified") is not False:
        return
    ratio = after.get("ratio")
    times = fmt.ratio(ratio) if isinstance(ratio, (int, float)) else "longer than"
    yield _remark("warning", "capture.lingering", f"steps after the capture took {times} those before it")


@check
def orphans(analysis: Analysis, summary: Summary) -> Iterator[Quality]:
    """Device work whose host call lies outside the trace."""
    fraction = summary.coverage.orphan_time_fraction or 0.0
    if fraction > 0.005:
        yield _remark(
            "warning" if fraction > 0.05 else "info",
            "join.orphans",
            f"{fraction:.1%} of device time was launched before the trace began; it belongs to no step and "
            "is left out of the per-step figures",
        )


@check
def outside(analysis: Analysis, summary: Summary) -> Iterator[Quality]:
    """Work that was launched between or after the marked steps."""
    rows = analysis.timeline.launches
    total = float(rows.dur_ns.sum())
    lost = float(rows.dur_ns[(rows.step < 0) & (rows.launch_ts_ns >= 0)].sum())
    if total and lost > 0.05 * total:
        kind = "operator" if analysis.timeline.cpu_only else "device"
        yield _remark(
            "warning",
            "steps.outside",
            f"{lost / total:.0%} of {kind} time was launched outside the marked steps and is left out of the "
            "per-step figures",
        )


@check
def coverage(analysis: Analysis, summary: Summary) -> Iterator[Quality]:
    """Device time without a cost, and why."""
    costed = summary.coverage.costed_time_fraction
    if costed is None or costed >= 0.9 or not analysis.device.peaks:
        return
    yield _remark(
        "warning",
        "cost.coverage",
        f"{1 - costed:.0%} of device time could not be classified{_reason(analysis)}",
    )


def _reason(analysis: Analysis) -> str:
    args = analysis.timeline.trace.ops.args
    if not any(b'"Input Dims"' in bytes(args[i]) for i in range(min(len(args), _SAMPLED_OPS))):
        return ": the trace has no shapes (capture with record_shapes=True)"
    rows, unknown = analysis.timeline.launches, BOUNDS.index("unknown")
    # What a graph replayed has no operator to be told by; another remark tells its share.
    chosen = analysis.counted & (analysis.bounds.bound == unknown) & (rows.op >= 0)
    trace, total = analysis.timeline.trace, float(rows.dur_ns[analysis.counted].sum())
    times = np.bincount(trace.ops.name[rows.op[chosen]], weights=rows.dur_ns[chosen], minlength=1)
    largest = [i for i in np.argsort(-times, kind="stable")[:_NAMED_OPS].tolist() if times[i] > 0.02 * total]
    named = ", ".join(f"{trace.names[i]} {times[i] / total:.0%}" for i in largest)
    return f": no formula, or too little recorded, for {named}" if named else ""


@check
def graphs(analysis: Analysis, summary: Summary) -> Iterator[Quality]:
    """Kernels replayed from a graph have no operator and no shapes of their own."""
    share = summary.coverage.replayed_time_fraction or 0.0
    if share <= 0.01:
        return
    rows = analysis.timeline.launches
    total = float(rows.dur_ns.sum())
    unknown = float(rows.dur_ns[analysis.replayed & ~analysis.costs.known].sum()) / total
    told = summary.coverage.inferred_time_fraction or 0.0
    message = (
        f"{share:.0%} of device time was replayed from CUDA/HIP graphs, where operators and shapes are not "
        f"recorded. For {told:.0%} the work is that of the "
        f"same kernels outside a graph; {unknown:.0%} stays unknown"
    )
    if unknown > 0.01:
        message += ". Give a trace of the same program without graphs with --reference"
    yield _remark("warning" if unknown > 0.01 else "info", "join.graphs", message)


@check
def devices(analysis: Analysis, summary: Summary) -> Iterator[Quality]:
    """Several devices driven by one process."""
    numbers = np.unique(analysis.timeline.launches.device)
    count = int((numbers >= 0).sum())
    if count > 1:
        yield _remark(
            "info", "device.several", f"this process drove {count} devices; GPU busy is that of the busiest"
        )


@check
def processes(analysis: Analysis, summary: Summary) -> Iterator[Quality]:
    """Several processes merged into one file, whose launch numbers are mistaken for each other's."""
    trace = analysis.timeline.trace
    launching = {trace.tracks[track][0] for track in np.unique(trace.runtime.track).tolist()}
    if len(launching) > 1:
        yield _remark(
            "warning",
            "join.processes",
            f"calls of {len(launching)} processes are in this one file: each numbers its launches by itself, "
            "so kernels may be given to the wrong one. Analyse one file a process",
        )


@check
def cpu_only(analysis: Analysis, summary: Summary) -> Iterator[Quality]:
    """Nothing ran on a device."""
    if analysis.timeline.cpu_only and len(analysis.timeline.launches):
        message = (
            "no device work in the trace: CPU operators stand in for kernels, and the rules, which play a "
            "device's step again, give no advice"
        )
        properties = analysis.timeline.trace.meta.get("deviceProperties")
        if properties:
            name = (device_properties(analysis.timeline) or {}).get("name") or "one without a name"
            message += (
                f". The machine has a device ({name}): if it was in use, another profiler may have held it, "
                "this is WSL, or work of its kind is not read yet"
            )
        yield _remark("warning" if properties else "info", "device.none", message)
