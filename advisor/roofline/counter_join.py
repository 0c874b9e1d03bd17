"""Which launch of a trace is which launch of a counter file: by kernel names in order, never by a guess.

The two come from two runs of one program, the second perhaps profiled in part (Nsight Compute's
``--kernel-name``, ``--launch-skip``, ``--launch-count``). A pair is joined if every way of laying the counted
launches over the trace's gives that same pair, or one that cannot be told from it: same kernel, same work.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence

#: A run of counted launches is taken as uninterrupted if it has at least so many different kernels.
_TELLING_NAMES = 6
#: Two runs of equal length are laid side by side if this share of the names agrees.
_SIDE_BY_SIDE = 0.9
#: Lengths of the runs of names that, where unique in both, anchor one list to the other.
_ANCHORS = (1, 2, 4, 8, 16)


def join_launches(
    traced: Sequence[str], counted: Sequence[str], same_work: Sequence[Hashable] | None = None
) -> list[tuple[int, int]]:
    """Pairs of indices, ascending in both.

    Args:
        traced: base names of the trace's kernels, in the order of their launches.
        counted: base names of the counted kernels, in the order of their launches.
        same_work: for each traced kernel, what it did; two of one name that are equal here may stand
            for each other. Left out, none may.
    """
    work = list(range(len(traced))) if same_work is None else list(same_work)
    whole = _side_by_side(traced, counted)
    if whole is not None:
        return whole
    # A kernel that only one of the two runs has can have no partner.
    ours, theirs = set(traced), set(counted)
    kept = [i for i, name in enumerate(traced) if name in theirs]
    given = [j for j, name in enumerate(counted) if name in ours]
    pairs = _join([traced[i] for i in kept], [counted[j] for j in given], [work[i] for i in kept])
    return [(kept[i], given[j]) for i, j in pairs]


def _join(a: list[str], b: list[str], work: list[Hashable]) -> list[tuple[int, int]]:
    whole = _side_by_side(a, b)
    if whole is not None:
        return whole
    if len(a) > len(b) > 0:
        places = _places(a, b)
        if places and len(set(b)) >= _TELLING_NAMES:
            first = places[0]
            return [(first + j, j) for j in range(len(b)) if len({work[place + j] for place in places}) == 1]
        laid = _laid_both_ways(a, b)
        if laid is not None:
            return _undoubted(a, b, work, *laid)
    return _between_anchors(a, b, work)


def _side_by_side(a: Sequence[str], b: Sequence[str]) -> list[tuple[int, int]] | None:
    """Equal names at equal places, of lists of one length which differ in few places; else None."""
    if len(a) != len(b):
        return None
    agreeing = [(i, i) for i, name in enumerate(a) if name == b[i]]
    return agreeing if len(agreeing) >= _SIDE_BY_SIDE * len(a) else None


def _places(a: list[str], b: list[str]) -> list[int]:
    """Where b occurs in a without interruption; by Knuth, Morris and Pratt, in linear time."""
    border = [0] * len(b)
    k = 0
    for i in range(1, len(b)):
        while k and b[i] != b[k]:
            k = border[k - 1]
        k += b[i] == b[k]
        border[i] = k
    found, k = [], 0
    for i, name in enumerate(a):
        while k and (k == len(b) or name != b[k]):
            k = border[k - 1]
        k += name == b[k]
        if k == len(b):
            found.append(i - k + 1)
    return found


def _laid_both_ways(a: list[str], b: list[str]) -> tuple[list[int], list[int]] | None:
    """The earliest and the latest places of b's entries in a, gaps allowed; None if b does not fit."""
    earliest = _earliest(a, b)
    if earliest is None:
        return None
    mirrored = _earliest(a[::-1], b[::-1]) or []
    return earliest, [len(a) - 1 - i for i in reversed(mirrored)]


def _earliest(a: list[str], b: list[str]) -> list[int] | None:
    found, i = [], 0
    for name in b:
        while i < len(a) and a[i] != name:
            i += 1
        if i == len(a):
            return None
        found.append(i)
        i += 1
    return found


def _undoubted(
    a: list[str], b: list[str], work: list[Hashable], earliest: list[int], latest: list[int]
) -> list[tuple[int, int]]:
    """Pairs that hold however b is laid over a: between the two places nothing of that name differs."""
    of_name: dict[str, list[int]] = {}
    for i, name in enumerate(a):
        of_name.setdefault(name, []).append(i)
    rank = {i: place for places in of_name.values() for place, i in enumerate(places)}
    # changes[i]: how many of the same name up to here did other work than the one before them.
    changes: dict[int, int] = {}
    for places in of_name.values():
        count = 0
        for place, i in enumerate(places):
            count += place > 0 and work[i] != work[places[place - 1]]
            changes[i] = count
    return [
        (first, j)
        for j, (first, last) in enumerate(zip(earliest, latest, strict=True))
        if rank[first] <= rank[last] and changes[first] == changes[last]
    ]


def _between_anchors(a: list[str], b: list[str], work: list[Hashable]) -> list[tuple[int, int]]:
    anchors = _anchors(a, b)
    if not anchors:
        return []
    joined: list[tuple[int, int]] = []
    i = j = 0
    for x, y in [*anchors, (len(a), len(b))]:
        joined += [(i + p, j + q) for p, q in _join(a[i:x], b[j:y], work[i:x])]
        if x < len(a) and y < len(b):
            joined.append((x, y))
        i, j = x + 1, y + 1
    return joined


def _anchors(a: list[str], b: list[str]) -> list[tuple[int, int]]:
    """Pairs inside runs of names that occur once in each list, in an order that holds in both."""
    for length in _ANCHORS:
        once_a, once_b = _once(a, length), _once(b, length)
        pairs = sorted((i, once_b[run]) for run, i in once_a.items() if run in once_b)
        if pairs:
            starts = _ascending(pairs)
            inside = {(i + k, j + k) for i, j in starts for k in range(length)}
            return _ascending(list(inside))
    return []


def _once(names: list[str], length: int) -> dict[tuple[str, ...], int]:
    seen: dict[tuple[str, ...], int] = {}
    twice = set()
    for i in range(len(names) - length + 1):
        run = tuple(names[i : i + length])
        if run in seen:
            twice.add(run)
        seen[run] = i
    return {run: i for run, i in seen.items() if run not in twice}


def _ascending(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest choice of these pairs in which both numbers ascend (patience sorting)."""
    # Of pairs with one first number, the larger second comes first, so that no two of them ascend.
    pairs = sorted(pairs, key=lambda pair: (pair[0], -pair[1]))
    tails: list[int] = []
    tops: list[int] = []
    before: list[int] = [-1] * len(pairs)
    for n, (_, j) in enumerate(pairs):
        place = bisect.bisect_left(tails, j)
        before[n] = tops[place - 1] if place else -1
        tails[place : place + 1] = [j]
        tops[place : place + 1] = [n]
    found = []
    n = tops[-1] if tops else -1
    while n >= 0:
        found.append(pairs[n])
        n = before[n]
    return found[::-1]
