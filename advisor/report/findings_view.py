"""What renderers say of a finding's saving."""

from __future__ import annotations

from advisor.advice.finding import NEGLIGIBLE
from advisor.report import format as fmt
from advisor.report.model import Finding, Saving, Together


def gain(finding: Finding | Together) -> str:
    """The likely saving of a step in words: ``saves 3.2 ms a step (12 %)``."""
    saving = finding.saving_ms
    if saving is None:
        return "saving not known"
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


def between(saving: Saving) -> str:
    """The range of a saving: ``between 1.20 ms and 3.40 ms``; where it may be a loss, that is told as one."""
    low, high = fmt.duration(abs(saving.low)), fmt.duration(saving.high)
    if saving.low >= 0:
        return f"between {low} and {high}"
    return f"between {low} slower and {high} faster" if saving.high > 0 else f"up to {low} slower"
