"""What renderers say of swaps: plain values, the renderers only lay them out."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.report import format as fmt
from advisor.report.findings_view import between
from advisor.report.model import Swaps, SwapSite, SwapSteps, SwapTrial

#: Sites and candidates of one that are shown; the JSON has them all.
MAX_SITES = 100
MAX_TRIALS = 20


@dataclass(frozen=True)
class Tried:
    """A candidate as it is told."""

    name: str
    source: str
    outcome: str
    error: str
    eager_error: str
    time: str
    eager_time: str
    memory: str
    eager_memory: str


@dataclass(frozen=True)
class Row:
    """A site as it is told."""

    kept: bool
    kind: str
    what: str
    where: str
    calls: str
    decision: str
    reason: str
    before: str
    after: str
    share: str
    #: Of the candidate that won, else of the fastest that was timed, else of the first; None without any.
    best: Tried | None
    tried: list[Tried]
    permanent: str


def rows(swaps: Swaps) -> list[Row]:
    """The sites, at most `MAX_SITES`."""
    return [_row(site) for site in swaps.sites[:MAX_SITES]]


def _row(site: SwapSite) -> Row:
    best = _best(site)
    return Row(
        kept=site.chosen is not None,
        kind=site.kind,
        what=site.what,
        where=fmt.few(site.where),
        calls=fmt.count(site.calls_per_step),
        decision=site.chosen if site.chosen is not None else "left alone",
        reason=site.reason,
        before=fmt.duration(site.eager_ms_per_step),
        after=fmt.duration(site.swapped_ms_per_step),
        share=fmt.percent(site.step_fraction),
        best=None if best is None else _tried(best, site),
        tried=[_tried(trial, site) for trial in site.trials[:MAX_TRIALS]],
        permanent=site.permanent,
    )


def _best(site: SwapSite) -> SwapTrial | None:
    for trial in site.trials:
        if trial.candidate == site.chosen:
            return trial
    timed = [trial for trial in site.trials if fmt.known(trial.time_ms)]
    return min(timed, key=lambda trial: trial.time_ms or 0.0) if timed else next(iter(site.trials), None)


def _tried(trial: SwapTrial, site: SwapSite) -> Tried:
    return Tried(
        name=trial.candidate,
        source={"bundled": "bundled", "torch": "torch's own"}.get(trial.source, trial.source),
        outcome=trial.refused or ("kept" if trial.candidate == site.chosen else "not the fastest"),
        error=error(trial.error),
        eager_error=error(trial.eager_error),
        time=fmt.duration(trial.time_ms),
        eager_time=fmt.duration(trial.eager_time_ms),
        memory=fmt.nbytes(trial.memory_bytes),
        eager_memory=fmt.nbytes(trial.eager_memory_bytes),
    )


def error(value: float | None) -> str:
    """An error of computed values: ``1.2e-03``."""
    return f"{value:.1e}" if value is not None and fmt.known(value) else fmt.MISSING


def figures(steps: SwapSteps) -> list[tuple[str, str]]:
    """The comparison of whole steps, as (label, text)."""
    saved = fmt.MISSING
    if steps.saving_ms is not None:
        likely = steps.saving_ms.likely
        saved = fmt.duration(likely) if likely >= 0 else f"a loss of {fmt.duration(-likely)}"
        saved += f", {between(steps.saving_ms)} with 95% confidence"
    return [
        ("Step without swaps, median", _median(steps.eager_p50_ms, len(steps.eager_ms))),
        ("Step with swaps, median", _median(steps.swapped_p50_ms, len(steps.swapped_ms))),
        ("A step saves", saved),
        (
            "Peak memory without and with",
            f"{fmt.nbytes(steps.eager_peak_bytes)} and {fmt.nbytes(steps.swapped_peak_bytes)}",
        ),
    ]


def _median(value: float | None, count: int) -> str:
    return f"{fmt.duration(value)} of {count} steps" if count else fmt.MISSING
