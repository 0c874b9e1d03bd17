"""How well modelled costs agree with hardware counters, weighted by time.

Judged are: how much of the time has a cost; FLOPs of matrix units; bytes read, of kernels that read enough
for caches not to matter; and the bound. Bytes written are not: what stays in a cache is not written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from advisor.roofline.counters import Counted
from advisor.roofline.devices import Device

#: FLOPs this near count as equal.
FLOPS_TOLERANCE = 0.02
#: Bytes read are judged above this.
LARGE_READ_BYTES = 64e6
#: The bound is judged where so much memory traffic was counted.
_LABELLED_BYTES = 4e6
_READ_FACTORS = (1.25, 1.5)


@dataclass(frozen=True, slots=True)
class Modelled:
    """What the model says of one launch; None where it says nothing."""

    flops: float | None
    bytes_read: float | None
    bound: str


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One launch that the model gets wrong.

    Attributes:
        index: of the pair.
        what: ``uncosted``, ``flops``, ``bytes read`` or ``bound``.
        modelled, counted: the two figures, or the two bounds.
        time_ns: of the launch.
    """

    index: int
    what: str
    modelled: float | str | None
    counted: float | str | None
    time_ns: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shares of the time, None where nothing was to be judged.

    Attributes:
        costed: has a cost.
        flops: of kernels of matrix units, those whose FLOPs are within `FLOPS_TOLERANCE`.
        read_within_1_25, read_within_1_5: of kernels that read over `LARGE_READ_BYTES`, those whose bytes
            read are within that factor.
        bound: whose bound is the one that the counted intensity gives.
        read_ratios: modelled over counted bytes read of those kernels: the 5th, 50th and 95th percentile.
        disagreements: by time, longest first.
    """

    costed: float | None
    flops: float | None
    read_within_1_25: float | None
    read_within_1_5: float | None
    bound: float | None
    read_ratios: tuple[float, float, float] | None
    disagreements: list[Disagreement] = field(default_factory=list)


def counted_bound(counted: Counted, device: Device) -> str | None:
    """The bound that the counters' own intensity gives; None where it cannot be told.

    A kernel with little memory traffic has no bound worth the name.
    """
    if counted.flops is None or counted.bytes is None or counted.bytes <= _LABELLED_BYTES:
        return None
    ridge = device.ridge(counted.pipe) if counted.pipe else None
    if ridge is None:
        return None
    return "compute" if counted.flops / counted.bytes > ridge else "memory"


def agreement(pairs: Sequence[tuple[Modelled, Counted]], device: Device) -> Agreement:
    """Judge pairs of what was modelled and what was counted.

    Args:
        pairs: of one launch each; those without a counted time are left out.
        device: whose ridges decide the bound.
    """
    timed = [(i, m, c, c.time_ns) for i, (m, c) in enumerate(pairs) if c.time_ns]
    wrong: list[Disagreement] = []
    costed = [(t, m.bytes_read is not None) for _, m, _, t in timed]
    wrong += [Disagreement(i, "uncosted", None, None, t) for i, m, _, t in timed if m.bytes_read is None]
    flops: list[tuple[float, bool]] = []
    reads: list[tuple[float, float]] = []
    bounds: list[tuple[float, bool]] = []
    for i, m, c, t in timed:
        if m.bytes_read is None:
            continue
        if c.on_tensor_cores:
            true = c.flops or 0.0
            good = abs((m.flops or 0.0) - true) <= FLOPS_TOLERANCE * true
            flops.append((t, good))
            if not good:
                wrong.append(Disagreement(i, "flops", m.flops, true, t))
        if c.bytes_read is not None and c.bytes_read > LARGE_READ_BYTES:
            ratio = max(m.bytes_read, 1.0) / c.bytes_read
            reads.append((t, ratio))
            if not _within(ratio, _READ_FACTORS[0]):
                wrong.append(Disagreement(i, "bytes read", m.bytes_read, c.bytes_read, t))
        label = counted_bound(c, device)
        if label is not None:
            bounds.append((t, m.bound == label))
            if m.bound != label:
                wrong.append(Disagreement(i, "bound", m.bound, label, t))
    near, nearer = _READ_FACTORS[1], _READ_FACTORS[0]
    return Agreement(
        costed=_share(costed),
        flops=_share(flops),
        read_within_1_25=_share((t, _within(ratio, nearer)) for t, ratio in reads),
        read_within_1_5=_share((t, _within(ratio, near)) for t, ratio in reads),
        bound=_share(bounds),
        read_ratios=_percentiles(reads),
        disagreements=sorted(wrong, key=lambda d: -d.time_ns),
    )


def _within(ratio: float, factor: float) -> bool:
    return 1 / factor <= ratio <= factor


def _share(weighted: Iterable[tuple[float, bool]]) -> float | None:
    pairs = list(weighted)
    total = sum(time for time, _ in pairs)
    return sum(time for time, good in pairs if good) / total if total else None


def _percentiles(weighted: Sequence[tuple[float, float]]) -> tuple[float, float, float] | None:
    """The 5th, 50th and 95th percentile by time."""
    if not weighted:
        return None
    ordered = sorted(weighted, key=lambda pair: pair[1])
    reached = np.cumsum([time for time, _ in ordered])
    low, middle, high = (
        ordered[int(np.searchsorted(reached, share * reached[-1]))][1] for share in (0.05, 0.5, 0.95)
    )
    return low, middle, high
