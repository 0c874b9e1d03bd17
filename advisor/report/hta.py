"""Holistic Trace Analysis' figures beside ours: a check of the ones both have, and what it has besides."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.advice.replay import Replay
from advisor.errors import InputError, MissingExtraError
from advisor.report.hta_basis import UNITS, on_hta_basis
from advisor.report.model import CrossCheck, Quality, Report
from advisor.roofline.analysis import Analysis
from advisor.trace.link import Timeline, load

TOOL = "Holistic Trace Analysis"
#: HTA reads about 35,000 events a second and takes several times that for a critical path.
_SECONDS_PER_EVENT = 1e-3
_SECONDS_AT_LEAST = 120.0
_FAILURES_SHOWN = 4
_GZIP = b"\x1f\x8b"
_PATH = "critical path of step"


@dataclass(frozen=True, slots=True)
class _File:
    """A trace that HTA is to read.

    Attributes:
        path: as in the report.
        label: what tells its figures from those of the others; empty for a single file.
        events: number of events in it.
        timeline: ours, where it is loaded already.
    """

    path: str
    label: str
    events: int
    timeline: Timeline | None


def require_hta() -> None:
    """Check that HTA is installed, without importing it.

    Raises:
        MissingExtraError: it is not.
    """
    if importlib.util.find_spec("hta") is None:
        raise MissingExtraError("--hta", "traceinsight", "pandas<3")


def add_hta(report: Report, analysis: Analysis, *, timeout_s: float | None = None) -> None:
    """Add HTA's figures to a report, as `Report.cross_checks`; ours are computed on HTA's basis.

    What HTA cannot read or compute, or not in time, becomes one remark in `Report.data_quality`.

    Args:
        report: from the files that HTA is to read; changed in place.
        analysis: of the report's primary trace.
        timeout_s: how long HTA may take, in seconds; by default it grows with the number of events.

    Raises:
        MissingExtraError: HTA is not installed.
    """
    require_hta()
    files = _files(report, analysis)
    readable = [file for file in files if os.path.isfile(file.path)]
    failures = [f"{file.path} is not a local file" for file in files if file not in readable]
    if timeout_s is None:
        timeout_s = _SECONDS_AT_LEAST + _SECONDS_PER_EVENT * sum(file.events for file in readable)
    lines, failure = _run(readable, _critical_path_step(analysis), timeout_s) if readable else ([], None)
    for number, file in enumerate(readable):
        own = [line for line in lines if line["file"] == number]
        theirs = {line["figure"]: (line["unit"], line["value"]) for line in own if "figure" in line}
        failures += [f"{file.label}{line['section']}: {line['error']}" for line in own if "error" in line]
        if theirs:
            path = _path(analysis, theirs) if file.timeline is not None else {}
            report.cross_checks += _cross_checks(file, theirs, path)
    if failure:
        failures.append(failure)
    if failures:
        report.data_quality.append(_remark(failures))


def _remark(failures: list[str]) -> Quality:
    shown = "; ".join(failures[:_FAILURES_SHOWN])
    more = len(failures) - _FAILURES_SHOWN
    return Quality(
        level="info",
        code="hta.failed",
        message=f"{TOOL} could not do all: {shown}" + (f"; and {more} more" if more > 0 else ""),
    )


def _files(report: Report, analysis: Analysis) -> list[_File]:
    traces = report.trace.files or [report.trace]
    primary = analysis.timeline.trace.path
    ranks = {trace.rank for trace in traces}
    told_by_rank = None not in ranks and len(ranks) == len(traces)

    def label(rank: int | None, path: str) -> str:
        if len(traces) == 1:
            return ""
        return f"rank {rank}: " if told_by_rank else f"{Path(path).name}: "

    return [
        _File(
            path=trace.path,
            label=label(trace.rank, trace.path),
            events=trace.events,
            timeline=analysis.timeline if trace.path == primary else None,
        )
        for trace in traces
    ]


def _critical_path_step(analysis: Analysis) -> int | None:
    """Number of the first steady step that the profiler marked."""
    steps, steady = analysis.timeline.steps, analysis.timeline.steady
    if steps.source != "profiler" or not steady.any():
        return None
    return int(steps.number[steady][0])


def _path(analysis: Analysis, theirs: dict[str, tuple[str, float]]) -> dict[str, float | None]:
    """Our figures in the place of HTA's critical path: of a step as profiled, in the steady state.

    HTA takes one step with its own start and end, so the two need not be equal.
    """
    whole = next((name for name in theirs if name.startswith(_PATH) and ":" not in name), None)
    if whole is None:
        return {}
    found = Replay(analysis).critical_path(profiled=True)
    if not found.step_ns:
        return {}
    parts = {
        "host work": found.host_ns,
        "compute kernels": found.compute_ns,
        "communication": found.communication_ns,
    }
    shares = {f"{whole}: {part}": 100 * ns / found.step_ns for part, ns in parts.items()}
    return {whole: found.step_ns / 1e6, **{name: share for name, share in shares.items() if name in theirs}}


def _cross_checks(
    file: _File, theirs: dict[str, tuple[str, float]], path: dict[str, float | None]
) -> list[CrossCheck]:
    """Rows of one file: the figures both have, then those of HTA alone; `path` holds ours of those."""
    ours = _ours(file) | path
    shared = [name for name in UNITS if ours.get(name) is not None or name in theirs]
    return [
        CrossCheck(
            tool=TOOL,
            figure=file.label + name,
            unit=theirs[name][0] if name in theirs else UNITS[name],
            ours=ours.get(name),
            theirs=theirs[name][1] if name in theirs else None,
            difference_fraction=difference(ours.get(name), theirs[name][1] if name in theirs else None),
        )
        for name in [*shared, *(name for name in theirs if name not in UNITS)]
    ]


def _ours(file: _File) -> dict[str, float | None]:
    try:
        split = on_hta_basis(file.timeline or load(file.path))
    except InputError:
        return {}
    return split.figures() if split else {}


def difference(ours: float | None, theirs: float | None) -> float | None:
    """Ours against theirs, as a fraction of theirs; 1 where theirs is 0 and ours is not; None if unknown."""
    if ours is None or theirs is None:
        return None
    if ours == theirs:
        return 0.0
    return (ours - theirs) / abs(theirs) if theirs else 1.0


def _run(
    files: list[_File], critical_path_step: int | None, timeout_s: float
) -> tuple[list[dict[str, Any]], str | None]:
    """What the worker wrote, and why it stopped early if it did."""
    with tempfile.TemporaryDirectory(prefix="advisor-hta-") as name:
        folder = Path(name)
        job, result = folder / "job.json", folder / "result.jsonl"
        wanted = [
            {
                "path": str(_alias(Path(file.path), folder / f"trace{number}")),
                "critical_path_step": critical_path_step if file.timeline is not None else None,
            }
            for number, file in enumerate(files)
        ]
        job.write_text(json.dumps(wanted), encoding="utf-8")
        try:
            status = subprocess.run(
                [sys.executable, "-m", "advisor.report.hta_worker", str(job), str(result)],
                cwd=folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=timeout_s,
                check=False,
            ).returncode
            failure = f"its process ended with status {status}" if status else None
        except subprocess.TimeoutExpired:
            failure = f"it was stopped after {timeout_s:g} s"
        text = result.read_text(encoding="utf-8") if result.exists() else ""
    # A worker that was stopped may leave half a line.
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")], failure


def _alias(path: Path, link: Path) -> Path:
    """A link to the trace under a name that HTA accepts: it tells gzip from JSON by the ending alone."""
    with path.open("rb") as file:
        ending = ".json.gz" if file.read(2) == _GZIP else ".json"
    link = link.with_name(link.name + ending)
    link.symlink_to(path.resolve())
    return link


def _environment() -> dict[str, str]:
    """The worker's environment: this process's import path, and HTA's rounding to whole us off."""
    return {
        **os.environ,
        "HTA_DISABLE_NS_ROUNDING": "1",
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path),
        "PYTHONWARNINGS": "ignore",
    }
