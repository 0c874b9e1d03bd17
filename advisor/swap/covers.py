"""Sites within sites: where a module is replaced as a whole, what it called is not called any more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from advisor.swap.site import Outcome


def settled(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The same without choices that would never come to bear: of a module and what it covers, whichever
    saves less. What has places elsewhere too stays.
    """
    found = list(outcomes)
    # From the inside out, so that what is within has been settled itself.
    for i in sorted(range(len(found)), key=lambda i: len(found[i].site.covers)):
        outer = found[i]
        if outer.chosen is None or not outer.site.covers:
            continue
        covered = set(outer.site.covers)
        inner = [j for j, o in enumerate(found) if o.chosen is not None and covered.issuperset(o.site.where)]
        if sum(_saving_ns(found[j]) for j in inner) > _saving_ns(outer):
            found[i] = replace(outer, chosen=None, reason="what is within it saves more by itself")
            continue
        for j in inner:
            why = f"within {outer.site.what}, which is replaced as a whole"
            found[j] = replace(found[j], chosen=None, reason=why)
    return found


def _saving_ns(outcome: Outcome) -> float:
    """A step's, of the candidate that was chosen."""
    chosen = outcome.chosen.name if outcome.chosen else ""
    for trial in outcome.trials:
        if trial.candidate == chosen and trial.time_ns is not None and trial.original_ns is not None:
            return (trial.original_ns - trial.time_ns) * outcome.site.calls_per_step
    return 0.0
