"""What the step times of two runs of one program differ by though nothing changed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from advisor.report.model import Report
from advisor.report.pace import BUSY_ENOUGH

#: Runs of one program differ by this much though their own steps do not: below it nothing is called a change.
#: Of 36 loops on an H200 whose steps were timed twice within minutes, those that the device limits stayed
#: within 2.2 %; of those that the host limits, two in three stayed within 10 %.
DEVICE_FLOOR, HOST_FLOOR = 0.02, 0.10
#: Standard errors of the difference that count as noise.
_SIGMAS = 2.0
#: Standard error of a median over that of a mean, for normal noise.
_MEDIAN_ERROR = 1.2533
#: Standard deviation over median absolute deviation, for normal noise.
_MAD_TO_SD = 1.4826
#: With fewer values the median of their deviations says little.
_FEW = 5


def error_fraction(times: Sequence[float]) -> float | None:
    """Standard error of the median of some step times over it; None with fewer than two."""
    centre = statistics.median(times) if len(times) > 1 else 0.0
    if not centre > 0:
        return None
    if len(times) < _FEW:
        return statistics.stdev(times) / math.sqrt(len(times)) / centre
    deviation = statistics.median(abs(t - centre) for t in times)
    return _MEDIAN_ERROR * _MAD_TO_SD * deviation / math.sqrt(len(times)) / centre


def noise_fraction(errors: Sequence[float | None], floor: float) -> float | None:
    """Changes below this are noise; None where no side has an error to tell it from."""
    known = [error for error in errors if error is not None]
    return max(_SIGMAS * math.hypot(*known), floor) if known else None


def floor_of(before: Report, after: Report, basis: str) -> float:
    """`HOST_FLOOR` where the host limits one of the two, else `DEVICE_FLOOR`."""
    return HOST_FLOOR if host_limits(before, basis) or host_limits(after, basis) else DEVICE_FLOOR


def host_limits(report: Report, basis: str) -> bool:
    """Whether the host sets the pace of the steps that are compared, as it does where there is no device.

    Args:
        report: one of the two.
        basis: ``"baseline"`` or ``"profiled"``, what the step times are.
    """
    summary = report.summary
    busy = summary.gpu_busy_fraction if basis == "baseline" else summary.gpu_busy_fraction_profiled
    return busy is None or busy < BUSY_ENOUGH
