"""From traces to a report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from advisor import __version__
from advisor.errors import InputError
from advisor.report.communication import Exchange, Key, collective_groups, exchanges, shortest_ns
from advisor.report.counters import add_counters
from advisor.report.findings import add_findings
from advisor.report.groups import kernel_groups
from advisor.report.hierarchy import memory_levels
from advisor.report.hta import add_hta, require_hta
from advisor.report.model import DeviceInfo, Loss, Peak, Quality, RankSummary, Report, TraceFile, TraceInfo
from advisor.report.quality import by_level, data_quality
from advisor.report.ranks import Waiting, add_waiting, find_waiting, remark
from advisor.report.summary import break_down, summarise
from advisor.report.swaps import add_swaps
from advisor.roofline.analysis import Analysis, analyse_timeline
from advisor.roofline.counters import read_counters
from advisor.roofline.devices import Device
from advisor.trace.events import KERNEL
from advisor.trace.link import load
from advisor.trace.sources import find_traces


def analyze(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    device: str | None = None,
    devices_toml: str | os.PathLike[str] | None = None,
    baseline_step_ms: float | None = None,
    limit_bytes: int | None = None,
    hta: bool = False,
    roofs: str = "auto",
    counters: str | os.PathLike[str] | None = None,
    reference: str | os.PathLike[str] | None = None,
) -> Report:
    """Report on saved traces.

    Args:
        paths: a trace, or several of one job: files, folders, globs, ``-`` or URLs.
        device: device name, for traces that do not say or say wrongly; see ``advisor devices``.
        devices_toml: device rows of your own.
        baseline_step_ms: step time without the profiler, in ms.
        limit_bytes: refuse a trace larger than this unpacked.
        hta: add Holistic Trace Analysis' figures beside ours; see `advisor.report.hta`.
        roofs: ``"auto"``, ``"datasheet"`` or ``"measured"``; see `analyse_timeline`.
        reference: a trace of the same program without graphs, for the kernels that these traces replay from
            CUDA or HIP graphs; see `advisor.roofline.graphs`.
        counters: Nsight Compute's CSV of a run of the same program; see `advisor.roofline.counters`.

    Returns:
        The report; details are those of the lowest rank, `Report.ranks` has one row a trace.

    Raises:
        InputError: no trace was found, or none can be read; or the counters cannot.
        UsageError: no such device.
        MissingExtraError: `hta` without its packages.

    Example:
        >>> report = analyze("trace.json.gz")  # doctest: +SKIP
        >>> report.summary.bound_time_fraction.memory  # doctest: +SKIP
        0.71
    """
    if hta:
        require_hta()
    counted = read_counters(Path(counters)) if counters else None
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    report, primary = analyze_files(
        find_traces(given),
        device=device,
        devices_toml=Path(devices_toml) if devices_toml else None,
        baseline_step_ms=baseline_step_ms,
        roofs=roofs,
        limit_bytes=limit_bytes,
        reference=os.fspath(reference) if reference else None,
    )
    if hta:
        add_hta(report, primary)
    if counted:
        add_counters(report, primary, counted)
    return report


def analyze_files(
    files: Sequence[str],
    *,
    device: str | None = None,
    devices_toml: Path | None = None,
    baseline_step_ms: float | None = None,
    roofs: str = "auto",
    limit_bytes: int | None = None,
    progress: Callable[[str], None] | None = None,
    reference: str | None = None,
) -> tuple[Report, Analysis]:
    """As `analyze`, over files already found; also gives the primary trace's analysis.

    The primary trace is that of the lowest rank, or the first where none states its rank. Only its launches
    are costed; the others are compared by time alone.

    Args:
        progress: called with each file's name before it is read.
    """
    outside_graphs = load(reference, limit_bytes=limit_bytes) if reference else None
    primary: Analysis | None = None
    ranks: list[RankSummary] = []
    exchanged: dict[int, dict[Key, Exchange]] = {}
    traces: list[TraceFile] = []
    unreadable: list[Quality] = []
    for file in files:
        if progress:
            progress(file)
        try:
            timeline = load(file, limit_bytes=limit_bytes)
        except InputError as error:
            if len(files) == 1:
                raise
            unreadable.append(Quality(level="error", code="read.file", message=str(error)))
            continue
        analysis = analyse_timeline(
            timeline,
            device=device,
            devices_toml=devices_toml,
            baseline_step_ms=baseline_step_ms,
            roofs=roofs,
            reference=outside_graphs,
        )
        ranks.append(_rank_summary(analysis))
        if len(files) > 1 and analysis.timeline.trace.rank is not None:
            exchanged[analysis.timeline.trace.rank] = exchanges(analysis)
        traces.append(_trace_file(analysis))
        if primary is None or _comes_before(analysis, primary):
            primary = analysis
    if primary is None:
        raise InputError(
            f"none of {len(files)} files can be read as a trace; the first: {unreadable[0].message}"
        )
    add_waiting(ranks)
    waiting = find_waiting(ranks, primary.timeline.trace.rank)
    report = build_report(primary, waiting, shortest_ns(exchanged.values()))
    if len(ranks) > 1:
        _add_ranks(report, ranks, traces)
    add_swaps(report)
    report.data_quality = by_level(unreadable + report.data_quality)
    return report, primary


def build_report(
    analysis: Analysis, waiting: Waiting | None = None, transfers_ns: Mapping[Key, int] | None = None
) -> Report:
    """The report on one trace.

    Args:
        waiting: how the trace's rank and others of its job wait for each other.
        transfers_ns: time of collectives on the ranks where they are shortest.
    """
    groups = kernel_groups(analysis)
    summary = summarise(analysis, groups, waiting)
    file = _trace_file(analysis)
    report = Report(
        tool_version=__version__,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        trace=TraceInfo(
            path=file.path,
            size_bytes=file.size_bytes,
            events=file.events,
            rank=file.rank,
            losses=file.losses,
            world_size=analysis.timeline.trace.world_size,
            files=[file],
        ),
        device=device_info(analysis.device),
        environment=dict(analysis.timeline.trace.context),
        summary=summary,
        breakdown=break_down(analysis, groups),
        kernels=groups,
        communication=collective_groups(analysis, transfers_ns),
        data_quality=[*([remark(waiting)] if waiting else []), *data_quality(analysis, summary)],
    )
    add_findings(report, analysis)
    return report


def device_info(device: Device) -> DeviceInfo:
    """The report's view of a device."""
    return DeviceInfo(
        name=device.name,
        matched=device.matched,
        roofs=device.roofs,
        peaks=[
            Peak(
                pipe=pipe,
                flops_per_s=peak,
                ridge_flops_per_byte=device.ridge(pipe) or 0.0,
                source=device.peak_sources.get(pipe, ""),
                datasheet_flops_per_s=_datasheet_peak(device, pipe),
            )
            for pipe, peak in device.peaks.items()
        ],
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
        bandwidth_source=device.bandwidth_source,
        memory_bytes=device.memory_bytes,
        l2_bytes=device.l2_bytes,
        sms=device.sms,
        link_bytes_per_s=device.link_bytes_per_s,
        link_source=device.link_source,
        hierarchy=memory_levels(device),
    )


def _datasheet_peak(device: Device, pipe: str) -> float | None:
    if device.roofs == "measured":
        return device.datasheet_peaks.get(pipe)
    return device.peak(pipe) if device.roofs == "datasheet" else None


def _trace_file(analysis: Analysis) -> TraceFile:
    trace = analysis.timeline.trace
    return TraceFile(
        path=trace.path,
        size_bytes=trace.size_bytes,
        events=trace.event_count,
        rank=trace.rank,
        losses=[Loss(kind=loss.kind, count=loss.count, detail=loss.detail) for loss in trace.losses],
    )


def _rank_summary(analysis: Analysis) -> RankSummary:
    rows, steps = analysis.timeline.launches, analysis.step_count
    busy_ns = sum(analysis.busy_ns_per_step.values())
    step_ns = analysis.real_step_ns

    def per_step_ms(mask: np.ndarray) -> float | None:
        return float(rows.dur_ns[mask].sum()) / steps / 1e6 if steps else None

    return RankSummary(
        rank=analysis.timeline.trace.rank,
        path=analysis.timeline.trace.path,
        device=analysis.device.name,
        step_time_ms=step_ns / 1e6 if step_ns else None,
        gpu_busy_fraction=min(busy_ns / step_ns, 1.0) if step_ns and not analysis.timeline.cpu_only else None,
        kernel_time_ms_per_step=None
        if analysis.timeline.cpu_only
        else per_step_ms(analysis.counted & (rows.kind == KERNEL)),
        communication_ms_per_step=per_step_ms(analysis.counted & analysis.collective),
        exposed_communication_ms_per_step=analysis.busy_ns_per_step["communication"] / 1e6 if steps else None,
    )


def _comes_before(one: Analysis, other: Analysis) -> bool:
    ranks = (one.timeline.trace.rank, other.timeline.trace.rank)
    return ranks[0] is not None and (ranks[1] is None or ranks[0] < ranks[1])


def _add_ranks(report: Report, ranks: list[RankSummary], traces: list[TraceFile]) -> None:
    report.trace.files = sorted(traces, key=lambda t: (t.rank is None, t.rank or 0, t.path))
    report.ranks = sorted(ranks, key=lambda r: (r.rank is None, r.rank or 0, r.path))
    numbers = [r.rank for r in ranks]
    if None in numbers or len(set(numbers)) < len(numbers):
        report.data_quality.append(
            Quality(
                level="warning",
                code="ranks.unclear",
                message=f"these {len(ranks)} traces do not all state a rank of their own, so they may not be "
                f"of one job; details are those of {report.trace.path}",
            )
        )
    world = report.trace.world_size
    if world and len(set(numbers) - {None}) < world:
        report.data_quality.append(
            Quality(
                level="info",
                code="ranks.missing",
                message=f"{len(set(numbers) - {None})} of {world} ranks are here",
            )
        )
