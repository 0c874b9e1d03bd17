"""What sets the pace of the kernels: the bound of most of their time, and how near its roof they come.

A bound is told by intensity alone. Far from the roof it is neither data nor arithmetic that the kernels wait
for, so every sentence on it asks here first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from advisor.report.model import BoundTimeFraction, KernelGroup

#: Below this share of the step at work, the device is not what limits the loop.
BUSY_ENOUGH = 0.85
#: Below this share of its roof, a bound by intensity alone is not what sets the pace.
_NEAR_ROOF = 0.5


@dataclass(frozen=True, slots=True)
class Pace:
    """The bound with the largest share of the device time.

    Attributes:
        bound: memory, compute, communication, copy or unknown.
        share: of the device time, 0..1.
        efficiency: time at the roof over time taken, of the kernels under this bound; None without a roof.
    """

    bound: str
    share: float
    efficiency: float | None

    @property
    def far(self) -> bool:
        """Whether a roof is known and too far away to be what limits."""
        near = self.efficiency is None or self.efficiency >= _NEAR_ROOF
        return self.bound in ("memory", "compute") and not near


def pace(shares: BoundTimeFraction, groups: Sequence[KernelGroup]) -> Pace:
    """The pace of these kernel groups, whose time the shares are of."""
    known = {bound: getattr(shares, bound) or 0.0 for bound in shares.__struct_fields__}
    bound = max(known, key=known.__getitem__)
    return Pace(bound, known[bound], roof_fraction([group for group in groups if group.bound == bound]))


def roof_fraction(groups: Sequence[KernelGroup]) -> float | None:
    """Time at the roof over time taken, of the groups that have a roof; None if none has."""
    timed = [(g.efficiency, g.time_ms_per_step) for g in groups if g.efficiency is not None]
    total = sum(time_ms for _, time_ms in timed)
    return sum(min(efficiency, 1.0) * time_ms for efficiency, time_ms in timed) / total if total else None


def meaning(found: Pace) -> str:
    """What the bound says of the kernels under it."""
    if found.far:
        return (
            f"{found.bound}-bound by intensity, but at {found.efficiency:.0%} of that roof: "
            "slow or small kernels set the pace"
        )
    return {
        "memory": "memory-bound: it waits for data, not for arithmetic",
        "compute": "compute-bound: arithmetic sets the pace",
        "communication": "communication between ranks",
        "copy": "copies over the host link",
        "unknown": "of unknown cost",
    }[found.bound]
