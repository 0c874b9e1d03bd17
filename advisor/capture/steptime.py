"""Medians, noise and stability of step times. Pure functions of lists of milliseconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

#: Steps in each of the two runs that are compared to call the step time stable.
STABLE_RUN = 8
#: Relative change between two runs that still counts as stable, and as "back at the baseline".
TOLERANCE = 0.05


def per_cycle_ms(step_ms: Sequence[float], cycle: int) -> list[float]:
    """Mean time of a batch over each whole accumulation cycle; the batches themselves if ``cycle`` is 1.

    With accumulated gradients only one batch in a cycle steps the optimizer, so single batches
    have no common time.
    """
    if cycle <= 1 or len(step_ms) < cycle:
        return list(step_ms)
    whole = len(step_ms) - len(step_ms) % cycle
    tail = step_ms[len(step_ms) - whole :]
    return [sum(tail[i : i + cycle]) / cycle for i in range(0, whole, cycle)]


def median_ms(step_ms: Sequence[float]) -> float | None:
    """Median, or None for no steps."""
    return statistics.median(step_ms) if step_ms else None


def noise_ms(step_ms: Sequence[float]) -> float:
    """Spread around the median as a standard deviation: 1.4826 times the median absolute deviation."""
    if len(step_ms) < 2:
        return 0.0
    middle = statistics.median(step_ms)
    return 1.4826 * statistics.median(abs(value - middle) for value in step_ms)


def is_stable(step_ms: Sequence[float]) -> bool:
    """Whether the last `STABLE_RUN` steps take as long as the `STABLE_RUN` before them.

    As long means within `TOLERANCE`, or within the smaller of the two runs' own noise, so that a
    loop that jitters is not waited for without end while one that still speeds up is.
    """
    if len(step_ms) < 2 * STABLE_RUN:
        return False
    before, after = step_ms[-2 * STABLE_RUN : -STABLE_RUN], step_ms[-STABLE_RUN:]
    old, new = statistics.median(before), statistics.median(after)
    return abs(new - old) <= max(TOLERANCE * old, min(noise_ms(before), noise_ms(after)))


def is_back(baseline_ms: Sequence[float], after_ms: Sequence[float]) -> bool | None:
    """Whether steps after the window are as fast as before it: at most `TOLERANCE` slower by the median.

    Returns:
        False if they are slower by more than two standard errors beyond that; None if they are
        slower, but the noise is too large to tell, or if either side has fewer than three steps.
    """
    if len(baseline_ms) < 3 or len(after_ms) < 3:
        return None
    allowed = statistics.median(baseline_ms) * (1 + TOLERANCE)
    new = statistics.median(after_ms)
    if new <= allowed:
        return True
    error = math.hypot(_median_error_ms(baseline_ms), _median_error_ms(after_ms))
    return False if new > allowed + 2 * error else None


def _median_error_ms(step_ms: Sequence[float]) -> float:
    """Standard error of a median of normally spread values."""
    return math.sqrt(math.pi / 2) * noise_ms(step_ms) / math.sqrt(len(step_ms))
