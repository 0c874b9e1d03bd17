"""Whether the loop is as fast after the window as it was before."""

from __future__ import annotations

from typing import Any

from advisor.capture import cupti
from advisor.capture.clock import StepClock
from advisor.capture.plan import AFTER_BATCHES, whole_cycles
from advisor.capture.steptime import is_back, median_ms, per_cycle_ms

#: Steps that still feel the end of the window (allocator, queue refilling) and are not measured.
SETTLE_STEPS = 2


class AfterCheck:
    """Times steps after the window; if they are slower, detaches CUPTI by force and times again, once.

    Args:
        clock: marks the steps; what it has measured so far is dropped.
        baseline_ms: step times before the window.
        cycle: batches per optimizer step.
    """

    def __init__(self, clock: StepClock, baseline_ms: list[float], cycle: int) -> None:
        self._clock = clock
        self._baseline_ms = per_cycle_ms(baseline_ms, cycle)
        self._cycle = cycle
        self._settle = SETTLE_STEPS
        self._tried = False
        self._finalized = False
        clock.clear()

    def step(self) -> bool:
        """A step has ended.

        Returns:
            Whether the check is over.
        """
        if self._settle > 0:
            self._settle -= 1
            self._clock.cut()
            self._clock.mark()
            return False
        self._clock.mark()
        after_ms = self._clock.distances_ms()
        if len(after_ms) < whole_cycles(AFTER_BATCHES, self._cycle):
            return False
        if is_back(self._baseline_ms, per_cycle_ms(after_ms, self._cycle)) is not False or self._tried:
            return True
        self._tried = True
        self._finalized = cupti.finalize()
        if not self._finalized:
            return True
        self._settle = SETTLE_STEPS
        self._clock.clear()
        return False

    def outcome(self) -> dict[str, Any]:
        """The entry ``after`` of the context block, from the steps timed so far."""
        step_ms = self._clock.distances_ms()
        after_ms = per_cycle_ms(step_ms, self._cycle)
        old, new = median_ms(self._baseline_ms), median_ms(after_ms)
        return {
            "step_ms": [round(value, 4) for value in step_ms],
            "median_ms": new,
            "ratio": new / old if old and new else None,
            "verified": is_back(self._baseline_ms, after_ms),
            "cupti_finalized": self._finalized,
        }
