"""What renderers say of findings and their savings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from advisor.advice.finding import NEGLIGIBLE, TOGETHER
from advisor.report import format as fmt
from advisor.report import ranks
from advisor.report.model import Finding, Report, Saving, Together

#: Above the sum of its parts by this much, a common saving wants a word of explanation.
_MORE_THAN_SUM = 1.02


def gain(finding: Finding | Together) -> str:
    """The likely saving of a step in words: ``saves 3.2 ms a step (12 %)``."""
    saving = finding.saving_ms
    if isinstance(finding, Finding) and finding.wrong:
        return "results are likely wrong" if finding.confidence == "heuristic" else "results are wrong"
    if saving is None:
        return "no saving told"
    share = finding.saving_fraction
    if is_nothing(finding):
        return "likely saves nothing"
    told = f"saves {fmt.duration(saving.likely)} a step"
    return told if share is None else f"{told} ({fmt.percent(share)})"


def is_nothing(finding: Finding | Together) -> bool:
    """Whether the likely saving is none, or lost in the step."""
    saving, share = finding.saving_ms, finding.saving_fraction
    if saving is None:
        return False
    return saving.likely <= 0 or (share is not None and share < NEGLIGIBLE)


def spread(finding: Finding | Together) -> str:
    """The range of a saving; empty where none is told.

    ``between 1.20 ms and 3.40 ms``; where it may be a loss, that is told as one. Of what likely saves nothing
    the best case is told alone: the worst is that nothing comes of the work.
    """
    saving = finding.saving_ms
    if saving is None:
        return ""
    if is_nothing(finding):
        return f"at best {fmt.duration(saving.high)}" if saving.high > 0 else between(saving)
    return between(saving)


def between(saving: Saving) -> str:
    """The range of a saving: ``between 1.20 ms and 3.40 ms``; where it may be a loss, that is told as one."""
    low, high = fmt.duration(abs(saving.low)), fmt.duration(saving.high)
    if saving.low >= 0:
        return f"between {low} and {high}"
    return f"between {low} slower and {high} faster" if saving.high > 0 else f"up to {low} slower"


def how_known(finding: Finding) -> str:
    """How the saving is known; empty where none is told."""
    return finding.confidence if finding.saving_ms else ""


def plain_fix(finding: Finding) -> str:
    """The change without Lightning, where it is another."""
    return "" if finding.fix_torch == finding.fix else finding.fix_torch


def worthwhile(findings: Sequence[Finding]) -> list[Finding]:
    """Findings that shorten the step, or may: those with the largest saving first, then those without one.

    Before them those of wrong results.
    """
    return [finding for finding in findings if not is_nothing(finding)]


def fruitless(findings: Sequence[Finding]) -> list[Finding]:
    """Findings that likely save nothing as the loop is now."""
    return [finding for finding in findings if is_nothing(finding)]


class Combined(NamedTuple):
    """How the common saving of the top findings is told."""

    #: Which of them: ``the first 3 made together``.
    made: str
    #: Which others would add nothing; empty for none.
    besides: str
    #: Why it is not the sum of its parts.
    note: str


def combined(report: Report) -> Combined | None:
    """What to say of the common saving; None where it is that of one finding and no other was tried."""
    together = report.together
    if together is None:
        return None
    count, idle = len(together.rules), list(dict.fromkeys(_idle(report, together)))
    if count < 2 and not idle:
        return None
    saving = [finding for finding in report.findings if not finding.wrong]
    top = [finding.rule for finding in saving[:count]]
    first = top == together.rules and len(saving) == len(report.findings)
    alone, several = ("the first", f"the first {count}") if first else ("one of these", f"{count} of these")
    return Combined(
        made=f"{alone} alone" if count < 2 else f"{several} made together",
        besides=f"on top of that, {_joined(idle)} would add nothing" if idle else "",
        note=_note(report, together),
    )


def _note(report: Report, together: Together) -> str:
    rest, total = list(report.findings), 0.0
    for rule in together.rules:
        found = next((finding for finding in rest if finding.rule == rule and finding.saving_ms), None)
        if found and found.saving_ms:
            rest.remove(found)
            total += found.saving_ms.likely
    if total and together.saving_ms.likely > _MORE_THAN_SUM * total:
        return "more than the sum: each alone would only get as far as the next limit"
    return "played in one replay of the step, since savings that hide behind one another do not add up"


def caveat(report: Report) -> str:
    """That the findings are of a rank that waits for another; empty where that is not so."""
    waiting = ranks.find_waiting(report.ranks, report.trace.rank)
    if waiting is None or waiting.longest.rank != waiting.shown:
        return ""
    last = waiting.last.rank
    return (
        f"told for rank {waiting.shown}, which waits for rank {last}: only what makes rank {last} faster too "
        "shortens the step, so analyse that one's trace alone as well"
    )


def _idle(report: Report, together: Together) -> list[str]:
    """Rules of findings that were tried and left out, since they add nothing to the others."""
    left, idle = list(together.rules), []
    for finding in report.findings:
        if finding.saving_ms is None or is_nothing(finding):
            continue
        if left and left[0] == finding.rule:
            left.pop(0)
        elif left or len(together.rules) < TOGETHER:
            idle.append(finding.rule)
    return idle


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
