"""Sites within sites: where a module is replaced as a whole, what it called is not called any more, and the
step's graph has a kernel there in place of what a pattern was found in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from advisor.swap.site import Outcome


def settled(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The same without choices that would never come to bear: of a module and what it covers, whichever
    saves less. What has places elsewhere too stays. Of modules and a pattern that what they cover is part
    of, the pattern stays where it saves more than all of them.
    """
    found = _without_overlaps(outcomes)
    # From the inside out, so that what is within has been settled itself.
    for i in sorted(range(len(found)), key=lambda i: len(found[i].site.covers)):
        outer = found[i]
        if outer.chosen is None or not outer.site.covers:
            continue
        covered = set(outer.site.covers)
        inner = [j for j, o in enumerate(found) if o.chosen is not None and covered.issuperset(o.site.where)]
        if sum(found[j].saved_ns for j in inner) > outer.saved_ns:
            found[i] = replace(outer, chosen=None, reason="what is within it saves more by itself")
            continue
        for j in inner:
            why = f"within {outer.site.what}, which is replaced as a whole"
            found[j] = replace(found[j], chosen=None, reason=why)
    return found


def _without_overlaps(outcomes: Sequence[Outcome]) -> list[Outcome]:
    found = list(outcomes)
    for i, pattern in enumerate(found):
        parts = set(pattern.site.within)
        if pattern.chosen is None or not parts:
            continue
        rivals = [
            j for j, o in enumerate(found) if o.chosen is not None and parts.intersection(o.site.covers)
        ]
        if not rivals:
            continue
        if pattern.saved_ns > sum(found[j].saved_ns for j in rivals):
            for j in rivals:
                why = f"what it calls is part of {pattern.site.what}, which saves more"
                found[j] = replace(found[j], chosen=None, reason=why)
        else:
            why = f"part of it is in {found[rivals[0]].site.what}, which is replaced as a whole"
            found[i] = replace(pattern, chosen=None, reason=why)
    return found
