"""Reports from what a user has at hand: a trace, a JSON report, or the folder of a run."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from advisor.errors import InputError, UsageError
from advisor.report.compare import Comparison
from advisor.report.compare import compare as compare_reports
from advisor.report.files import is_json_report
from advisor.report.model import SCHEMA_VERSION, Report


def open_report(path: str | os.PathLike[str], *, baseline_step_ms: float | None = None) -> Report:
    """The report that a file stands for.

    Args:
        path: a JSON report, a trace, several ranks' traces as a folder or glob, or the folder of a captured
            run, whose ``report.json`` is taken if there is just one.
        baseline_step_ms: step time without the profiler, for a trace.

    Raises:
        InputError: the file is neither, a report of another major version, or a folder of several windows.
        UsageError: a step time is given for a report, which has its own.
    """
    found = Path(path)
    stored = _report_in(found) if found.is_dir() else found
    if stored.is_file() and is_json_report(stored):
        if baseline_step_ms is not None:
            raise UsageError(
                f"{stored} is a report, with the step time that it was made with: give the trace instead, or "
                "leave the step time out"
            )
        return _decode(stored)
    from advisor.report.build import analyze

    return analyze(path, baseline_step_ms=baseline_step_ms)


def _report_in(folder: Path) -> Path:
    """The report of a recorded window, or of the only one in a run's folder; it need not exist."""
    own = folder / "report.json"
    inside = [] if own.is_file() else list(folder.glob("**/step_*/report.json"))
    return inside[0] if len(inside) == 1 else own


def compare(
    before: Report | str | os.PathLike[str],
    after: Report | str | os.PathLike[str],
    *,
    noise_floor: float | None = None,
) -> Comparison:
    """Two runs of one program beside each other: is the second faster beyond the noise, and by which kernels?

    Args:
        before: a report, or what `open_report` takes.
        after: the same.
        noise_floor: fraction that the step times of two such runs differ by though nothing changed: by
            default 0.02, or 0.1 where the host limits one of them.

    Raises:
        InputError: a file is neither trace nor report, or a report of another major version.
    """
    sides = (one if isinstance(one, Report) else open_report(one) for one in (before, after))
    return compare_reports(*sides, noise_floor=noise_floor)


def _decode(path: Path) -> Report:
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=dict).get("schema_version")
        if str(version).partition(".")[0] != SCHEMA_VERSION.partition(".")[0]:
            raise InputError(
                f"{path}: a report of version {version}, this tool reads {SCHEMA_VERSION}: "
                f"analyse its trace again"
            )
        return msgspec.json.decode(data, type=Report)
    except (msgspec.DecodeError, OSError) as error:
        raise InputError(f"{path}: cannot be read as a report: {error}") from error
