"""What renderers say of a finding's saving."""

from __future__ import annotations

from advisor.report import format as fmt
from advisor.report.model import Finding, Saving, Together

#: A likely saving below this share of the step is told as none.
_NOTHING = 0.003


def gain(finding: Finding | Together) -> str:
    """The likely saving of a step in words: ``saves 3.2 ms a step (12 %)``."""
    saving = finding.saving_ms
    if saving is None:
        return "saving not known"
    share = finding.saving_fraction
    if saving.likely <= 0 or (share is not None and share < _NOTHING):
        return "likely saves nothing"
    told = f"saves {fmt.duration(saving.likely)} a step"
    return told if share is None else f"{told} ({fmt.percent(share)})"


def between(saving: Saving) -> str:
    """The range of a saving; a loss is told as such."""
    low = fmt.duration(saving.low) if saving.low >= 0 else f"a loss of {fmt.duration(-saving.low)}"
    return f"between {low} and {fmt.duration(max(saving.high, 0.0))}"
