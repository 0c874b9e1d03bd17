"""What swap did, as the report holds it: built from outcomes, kept in a file beside the traces, read back.

Outcomes are read by their fields alone, so that nothing here needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from advisor.report import format as fmt
from advisor.report.files import is_json_report, is_report, to_json, write_text
from advisor.report.model import Quality, Report, Swaps, SwapSite, SwapTrial

#: Beside the traces of a run; analysing them takes it in.
FILE = "swaps.json"
#: Places named in a diff.
_PLACES = 3


def swap_sites(outcomes: Iterable[Any], step_ms: float | None = None) -> list[SwapSite]:
    """Sites of the report, those that were kept first, then by the time they take.

    Args:
        outcomes: what was decided; objects with the fields of `advisor.swap.site.Outcome`.
        step_ms: time of a step without swaps.
    """
    sites = [_site(outcome, step_ms) for outcome in outcomes]
    return sorted(sites, key=lambda site: (site.chosen is None, -(site.eager_ms_per_step or 0.0)))


def _site(outcome: Any, step_ms: float | None) -> SwapSite:
    site, chosen = outcome.site, outcome.chosen
    candidates = {candidate.name: candidate for candidate in site.candidates}
    trials = [_trial(trial, candidates.get(trial.candidate)) for trial in outcome.trials]
    calls = int(site.calls_per_step)
    before = next((trial.eager_time_ms for trial in trials if trial.eager_time_ms is not None), None)
    after = None
    if chosen is not None:
        mine = next((trial for trial in trials if trial.candidate == chosen.name), None)
        if mine is not None:
            before, after = mine.eager_time_ms, mine.time_ms
    eager_ms = None if before is None else before * calls
    return SwapSite(
        kind=str(site.kind),
        what=str(site.what),
        where=[str(place) for place in site.where],
        mechanism=str(site.mechanism),
        calls_per_step=calls,
        chosen=None if chosen is None else str(chosen.name),
        reason=str(outcome.reason),
        eager_ms_per_step=eager_ms,
        swapped_ms_per_step=None if after is None else after * calls,
        step_fraction=eager_ms / step_ms if eager_ms is not None and step_ms else None,
        permanent="" if chosen is None else as_diff(str(site.what), site.where, str(chosen.permanent)),
        trials=trials,
    )


def _trial(trial: Any, candidate: Any) -> SwapTrial:
    return SwapTrial(
        candidate=str(trial.candidate),
        source="" if candidate is None else str(candidate.source),
        refused=str(trial.refused),
        deterministic=None if candidate is None else bool(candidate.deterministic),
        error=_finite(trial.error),
        eager_error=_finite(trial.eager_error),
        time_ms=_milliseconds(trial.time_ns),
        eager_time_ms=_milliseconds(trial.original_ns),
        memory_bytes=_whole(trial.memory_bytes),
        eager_memory_bytes=_whole(trial.original_memory_bytes),
    )


def as_diff(what: str, where: Sequence[str], permanent: str) -> str:
    """The change by hand as a diff: what stands where goes, the candidate's own lines come.

    Lines that are marked as those of a diff already stay as they are.
    """
    lines = permanent.strip("\n").splitlines()
    if not any(line.strip() for line in lines):
        return ""
    head = [f"@@ {fmt.few(where, _PLACES)} @@"] if any(where) else []
    if any(line.startswith(("-", "+")) for line in lines):
        return "\n".join([*head, *lines])
    return "\n".join([*head, *(f"-{line}" for line in what.splitlines()), *(f"+{line}" for line in lines)])


def write_swaps(swaps: Swaps, folder: Path) -> Path:
    """Write `FILE` into the folder of a run.

    Raises:
        UsageError: it cannot be written.
    """
    path = folder / FILE
    write_text(path, to_json(swaps))
    return path


def add_swaps(report: Report, folder: Path | None = None) -> None:
    """Take in what swap left beside the report's primary trace, if anything; a broken file is a remark.

    Args:
        folder: where to look, if not beside the trace.
    """
    trace = report.trace.path
    if folder is None and (trace == "-" or "://" in trace):
        return
    path = (Path(trace).parent if folder is None else folder) / FILE
    try:
        if not path.is_file():
            return
        report.swaps = msgspec.json.decode(path.read_bytes(), type=Swaps)
    except (OSError, ValueError) as error:
        # msgspec's errors are ValueErrors, and so is a path that no file can have.
        report.data_quality.append(
            Quality(
                level="warning",
                code="swaps.unreadable",
                message=f"{path}: what swap did cannot be read ({error}) and is left out",
            )
        )


def refresh(folder: Path) -> bool:
    """Bring a finished report up to date with what swap has done since; files that are missing stay so.

    Returns:
        Whether there was a report that did not have it yet.
    """
    stored = folder / "report.json"
    if not (stored.is_file() and is_json_report(stored) and (folder / FILE).is_file()):
        return False
    report = msgspec.json.decode(stored.read_bytes(), type=Report)
    before = report.swaps
    add_swaps(report, folder)
    if report.swaps is None or report.swaps == before:
        return False
    write_text(stored, to_json(report))
    page, text = folder / "report.html", folder / "report.md"
    if is_report(page):
        from advisor.report import html

        html.write(report, page)
    if is_report(text):
        from advisor.report import markdown

        write_text(text, markdown.render(report))
    return True


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _milliseconds(time_ns: Any) -> float | None:
    value = _finite(time_ns)
    return None if value is None else value / 1e6


def _whole(value: Any) -> int | None:
    return None if _finite(value) is None else int(value)
