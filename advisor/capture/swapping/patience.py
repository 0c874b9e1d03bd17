"""How long the loop trains on while kernels are compiled, before candidates are tried."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds, at most.
LIMIT_S = 30.0
#: And of the batches that a run has to spare, the share.
_SHARE = 0.5


class Patience:
    """Rank 0's.

    Args:
        spare: batches that the run has beyond those that swap needs; None if that is not known.
        now_s: reads the clock.
    """

    def __init__(self, spare: int | None = None, now_s: Callable[[], float] = time.monotonic) -> None:
        self._spare, self._now_s = spare, now_s
        self._end_s = now_s()
        self._last: int | None = None

    def start(self, batch: int) -> None:
        """Kernels are being compiled from this batch on."""
        self._end_s = self._now_s() + LIMIT_S
        self._last = None if self._spare is None else batch + int(self._spare * _SHARE)

    def lasts(self, batch: int) -> bool:
        """Whether the loop may train on until this batch has ended."""
        return self._now_s() < self._end_s and (self._last is None or batch <= self._last)
