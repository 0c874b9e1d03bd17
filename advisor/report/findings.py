"""Advice as the report tells it."""

from __future__ import annotations

from advisor.advice.advise import advise
from advisor.advice.finding import Advice, Advised
from advisor.advice.finding import Saving as SavingNs
from advisor.advice.replay import Replay
from advisor.advice.rule import find_rule
from advisor.report.model import Finding, Passed, Quality, ReplayInfo, Report, Saving, Together
from advisor.roofline.analysis import Analysis

#: A baseline this far from what the replay can explain is remarked upon.
_FITS = 0.15


def add_findings(report: Report, analysis: Analysis) -> None:
    """Ask the rules, and put what they say into the report."""
    advised = advise(analysis)
    if advised.replay is None:
        return
    step_ns = advised.replay.step_ns()
    report.replay = _replay(advised.replay)
    report.findings = [_finding(advice, step_ns) for advice in advised.advice]
    report.together = _together(advised, step_ns)
    report.passed = [Passed(rule=rule, title=find_rule(rule).title) for rule in advised.passed]
    report.not_applicable = list(advised.not_applicable)
    report.data_quality += _misfit(advised.replay)
    report.data_quality += [
        Quality(
            level="warning",
            code="advice.failed",
            message=f"the rule {rule} broke on this trace ({error}) and is left out; please report it",
        )
        for rule, error in advised.failed
    ]


def _misfit(replay: Replay) -> list[Quality]:
    """A step time without the profiler that no speed of the host explains."""
    scale = replay.result_scale
    if abs(scale - 1) <= _FITS:
        return []
    side, given_ms = ("below" if scale < 1 else "above"), replay.baseline_ns / 1e6
    return [
        Quality(
            level="warning",
            code="baseline.misfit",
            message=f"a step of {given_ms:.3g} ms without the profiler is {side} what this trace can explain "
            f"({given_ms / scale:.3g} ms): all savings are scaled by {scale:.2f}; see that the time given "
            "is of the same loop on the same device",
        )
    ]


def _finding(advice: Advice, step_ns: float) -> Finding:
    found = advice.finding
    return Finding(
        rule=advice.rule,
        title=_sentence(found.title),
        saving_ms=_saving(advice.saving) if advice.saving else None,
        saving_fraction=advice.saving.likely_ns / step_ns if advice.saving and step_ns else None,
        confidence=found.confidence,
        evidence=list(found.evidence),
        fix=found.fix,
        fix_torch=found.fix_torch,
        risk=found.risk,
        note=found.note,
        swap=found.swap,
        wrong=found.wrong,
    )


def _sentence(title: str) -> str:
    """The title with a capital, unless it begins with a name such as ``bf16``."""
    first = title.partition(" ")[0]
    word = first.rstrip(":,").replace("-", "")
    return title[0].upper() + title[1:] if word.isalpha() and word.islower() else title


def _together(advised: Advised, step_ns: float) -> Together | None:
    if advised.together is None:
        return None
    saving, rules = advised.together
    return Together(
        rules=rules,
        saving_ms=_saving(saving),
        saving_fraction=saving.likely_ns / step_ns if step_ns else None,
    )


def _replay(replay: Replay) -> ReplayInfo:
    return ReplayInfo(
        step_ms=replay.step_ns() / 1e6,
        observed_ms=replay.observed_ns / 1e6,
        replayed_ms=replay.profiled_ns / 1e6,
        host_factor=replay.host_scale if replay.debiased else None,
    )


def _saving(saving: SavingNs) -> Saving:
    return Saving(low=saving.low_ns / 1e6, likely=saving.likely_ns / 1e6, high=saving.high_ns / 1e6)
