"""Which steps a replay plays, and the stretch of host time that belongs to each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from advisor.roofline.analysis import Analysis

#: Steps further from the typical time than this share of it had something else happen in them.
_ODD = 0.05
#: Steps played at most, and launches in them: more of the same tell no more.
_MOST_STEPS = 8
_MOST_LAUNCHES = 40_000


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Stretches of host time, one a played step, in order; they do not overlap.

    Attributes:
        start_ns, end_ns: int64 (n,). A step takes in the time since the step before it ended.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def total_ns(self) -> int:
        """Length of all."""
        return int((self.end_ns - self.start_ns).sum())

    def at(self, ts_ns: np.ndarray) -> np.ndarray:
        """Index of the window that each time lies in, or -1; int64 (m,)."""
        index = np.searchsorted(self.start_ns, ts_ns, side="right") - 1
        return np.where((index >= 0) & (ts_ns < self.end_ns[np.maximum(index, 0)]), index, -1)

    def overlapping(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """bool (m,): intervals that share time with a window."""
        following = np.searchsorted(self.end_ns, start_ns, side="right")
        inside = following < len(self)
        return inside & (end_ns > self.start_ns[np.minimum(following, len(self) - 1)])


def typical_steps(analysis: Analysis) -> Windows:
    """The steady steps whose time is near the typical one, as windows on the host.

    Where gradients are accumulated the batches of a cycle differ by design, and all steady steps are taken.
    """
    timeline = analysis.timeline
    steps, chosen = timeline.steps, np.flatnonzero(timeline.steady)
    times, typical = analysis.step_times_ns.astype(float), analysis.profiled_step_ns or 0.0
    if timeline.batches_per_optimizer_step == 1 and len(chosen) > 1:
        off = np.abs(times - typical)
        order = np.argsort(off, kind="stable")
        near = order[off[order] <= max(_ODD * typical, off[order[0]] * 1.001)][:_MOST_STEPS]
        per_step = max(len(timeline.launches) // max(len(steps), 1), 1)
        near = near[: max(_MOST_LAUNCHES // per_step, 1)]
        chosen = np.sort(chosen[near])
    before = np.maximum(chosen - 1, 0)
    follows = (chosen > 0) & (steps.number[chosen] == steps.number[before] + 1)
    return Windows(np.where(follows, steps.end_ns[before], steps.start_ns[chosen]), steps.end_ns[chosen])
