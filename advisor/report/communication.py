"""Collectives of a step in groups: what they move, how fast, and how much of it computation hides.

A rank's time in a collective includes waiting for the last rank to come. Where traces of several ranks are at
hand, the shortest time that one of them spends in the same collective is taken for the transfer: on the last
rank to come nothing is left but that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from advisor.report.model import CollectiveGroup
from advisor.roofline.analysis import Analysis
from advisor.roofline.collectives import Message
from advisor.roofline.messages import link_bytes_per_s

#: Upper ends of the classes of payload: from latency alone to the link's full rate.
_CLASSES = (
    (2**16, "up to 64 KiB"),
    (2**20, "64 KiB to 1 MiB"),
    (2**24, "1 to 16 MiB"),
    (2**28, "16 to 256 MiB"),
    (float("inf"), "over 256 MiB"),
)

#: Tells a collective from the others of a job: the step's number, the group's name and members, its place.
Key = tuple[int, str, tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective as one rank took part in it: what must be the same on all ranks, and its time."""

    kind: str
    payload_bytes: float | None
    dur_ns: int


def exchanges(analysis: Analysis) -> dict[Key, Exchange]:
    """The collectives of the steady steps whose process group is known."""
    dur_ns = analysis.timeline.launches.dur_ns
    return {
        key: Exchange(analysis.messages[row].kind, analysis.messages[row].payload_bytes, int(dur_ns[row]))
        for row, key in _keys(analysis).items()
    }


def shortest_ns(ranks: Iterable[Mapping[Key, Exchange]]) -> dict[Key, int]:
    """For each collective that two or more ranks took part in alike: the shortest time of any."""
    found: dict[Key, list[Exchange]] = {}
    for rank in ranks:
        for key, exchange in rank.items():
            found.setdefault(key, []).append(exchange)
    return {
        key: min(one.dur_ns for one in same)
        for key, same in found.items()
        if len(same) > 1 and len({(one.kind, one.payload_bytes) for one in same}) == 1
    }


def collective_groups(
    analysis: Analysis, transfers_ns: Mapping[Key, int] | None = None
) -> list[CollectiveGroup]:
    """The collectives of a steady step by kind, dtype, size of group and class of payload; longest first.

    Args:
        analysis: whose launches.
        transfers_ns: from `shortest_ns`, over the ranks at hand.
    """
    chosen = np.flatnonzero(analysis.counted & analysis.collective)
    if not len(chosen) or not analysis.step_count:
        return []
    exposed = analysis.exposed_ns(chosen)
    keys = _keys(analysis) if transfers_ns else {}
    groups: dict[tuple[object, ...], list[_Part]] = {}
    dur_ns = analysis.timeline.launches.dur_ns
    for row, exposed_ns in zip(chosen.tolist(), exposed.tolist(), strict=True):
        message = analysis.messages[row]
        part = _Part(
            message,
            int(dur_ns[row]),
            exposed_ns,
            transfers_ns.get(keys[row]) if transfers_ns and row in keys else None,
            link_bytes_per_s(analysis.device, analysis.timeline, message),
        )
        size = _size_class(message.payload_bytes)
        key = (message.kind, message.dtype, message.ranks, size, part.link_bytes_per_s)
        groups.setdefault(key, []).append(part)
    found = [_group(parts, analysis.step_count) for parts in groups.values()]
    return sorted(found, key=lambda group: (-group.time_ms_per_step, group.kind, group.dtype or ""))


@dataclass(frozen=True, slots=True)
class _Part:
    message: Message
    dur_ns: int
    exposed_ns: float
    transfer_ns: int | None
    link_bytes_per_s: float | None


def _group(parts: list[_Part], steps: int) -> CollectiveGroup:
    first = parts[0]
    time_ns = sum(part.dur_ns for part in parts)
    exposed_ns = sum(part.exposed_ns for part in parts)
    payload = _sum(part.message.payload_bytes for part in parts)
    bus = _sum(part.message.bus_bytes for part in parts)
    transfer_ns = _sum(part.transfer_ns for part in parts)
    taken_ns = time_ns if transfer_ns is None else transfer_ns
    rate = bus / taken_ns * 1e9 if bus is not None and taken_ns > 0 else None
    link = first.link_bytes_per_s
    return CollectiveGroup(
        kind=first.message.kind,
        dtype=None if first.message.dtype == "unknown" else first.message.dtype,
        ranks=first.message.ranks,
        size_class=_size_class(first.message.payload_bytes),
        calls_per_step=len(parts) / steps,
        payload_bytes=None if payload is None else payload / steps,
        bus_bytes=None if bus is None else bus / steps,
        time_ms_per_step=time_ns / steps / 1e6,
        transfer_ms_per_step=None if transfer_ns is None else transfer_ns / steps / 1e6,
        exposed_ms_per_step=exposed_ns / steps / 1e6,
        overlap_fraction=1 - exposed_ns / time_ns if time_ns else None,
        bus_bandwidth_bytes_per_s=rate,
        link_bytes_per_s=link,
        efficiency=rate / link if rate is not None and link else None,
    )


def _keys(analysis: Analysis) -> dict[int, Key]:
    """By launch, what tells a collective of a steady step from the others; those whose group is known."""
    rows, steps = analysis.timeline.launches, analysis.timeline.steps
    seen: Counter[tuple[int, str, tuple[int, ...]]] = Counter()
    found = {}
    for row in np.flatnonzero(analysis.counted & analysis.collective).tolist():
        message = analysis.messages[row]
        if message.members is not None:
            place = (int(steps.number[rows.step[row]]), message.group, message.members)
            found[row] = (*place, seen[place])
            seen[place] += 1
    return found


def _size_class(payload_bytes: float | None) -> str | None:
    if payload_bytes is None:
        return None
    return next(label for end, label in _CLASSES if payload_bytes <= end)


def _sum(values: Iterable[float | None]) -> float | None:
    """None if any is."""
    known = list(values)
    return None if any(value is None for value in known) else float(sum(v for v in known if v is not None))
