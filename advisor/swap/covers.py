"""Sites within sites: where a module is replaced as a whole, what it called is not called any more, and the
step's graph has a kernel there in place of what a pattern was found in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import product

from advisor.swap.site import Outcome, Site

#: Patterns that reach into modules which would be replaced, of which all combinations are weighed; of more,
#: those that save least give way.
_MOST = 8


def settled(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The same without choices that would never come to bear.

    Of a module and what it covers, whichever saves less; what has places elsewhere too stays. Of patterns and
    modules that would be replaced and that they are part of, or parts of which they are, those stand that
    save most together.
    """
    reaching = [i for i, o in enumerate(outcomes) if _rivals(outcomes, o)]
    largest = sorted(reaching, key=lambda i: -outcomes[i].saved_ns)[:_MOST]
    ways = []
    for kept in product((False, True), repeat=len(largest)):
        standing = {i for i, stands in zip(largest, kept, strict=True) if stands}
        ways.append(_with_patterns(outcomes, standing, set(reaching) - standing))
    return max(ways, key=lambda found: sum(o.saved_ns for o in found))


def _with_patterns(
    outcomes: Sequence[Outcome], standing: Collection[int], leaving: Collection[int]
) -> list[Outcome]:
    """What is left if, of the patterns that have rivals, these stand and those do not."""
    found = list(outcomes)
    for i in leaving:
        found[i] = replace(found[i], chosen=None)
    for i in standing:
        site = outcomes[i].site
        for j in _rivals(outcomes, outcomes[i]):
            part = "it" if set(site.within).intersection(outcomes[j].site.where) else "what it calls"
            why = f"{part} is part of {site.what}, which saves more"
            found[j] = replace(found[j], chosen=None, reason=why)
    found = _nested(found)
    for i in leaving:
        rivals = [found[j] for j in _rivals(outcomes, outcomes[i])]
        whole = max(rivals, key=lambda o: o.saved_ns).site.what
        found[i].reason = f"part of it is in {whole}, which is replaced as a whole"
    return found


def _nested(outcomes: Sequence[Outcome]) -> list[Outcome]:
    found = list(outcomes)
    # From the inside out, so that what is within has been settled itself.
    for i in sorted(range(len(found)), key=lambda i: len(_covered(found[i].site))):
        outer = found[i]
        covered = _covered(outer.site)
        if outer.chosen is None or not covered:
            continue
        inner = [j for j, o in enumerate(found) if o.chosen is not None and covered.issuperset(o.site.where)]
        if sum(found[j].saved_ns for j in inner) > outer.saved_ns:
            found[i] = replace(outer, chosen=None, reason="what is within it saves more by itself")
            continue
        for j in inner:
            why = f"within {outer.site.what}, which is replaced as a whole"
            found[j] = replace(found[j], chosen=None, reason=why)
    return found


def _rivals(outcomes: Sequence[Outcome], pattern: Outcome) -> list[int]:
    """The chosen modules that a chosen pattern is part of, or that are part of it."""
    parts = set(pattern.site.within)
    if pattern.chosen is None or not parts:
        return []
    return [
        j
        for j, o in enumerate(outcomes)
        if o.chosen is not None
        and o.site.mechanism == "module"
        and not parts.isdisjoint([*o.site.where, *_covered(o.site)])
    ]


def _covered(site: Site) -> set[str]:
    """Paths of the modules that its places cover, where not all that were found alike are left to it."""
    return {path for path in site.covers if any(not p or path.startswith(f"{p}.") for p in site.where)}
