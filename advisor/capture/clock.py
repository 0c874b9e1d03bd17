"""Time between the same points of successive steps, taken without making the training loop wait."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

#: Distances kept; older ones are of no use.
KEPT = 256


class StepClock:
    """Distances between marks, on the device where there is one.

    A device mark is an event in the current stream: recording it costs microseconds and waits for
    nothing, and the distance is read only once the device has passed both ends. A loop that runs ahead of
    its GPU, whose host times say little, is timed as it really runs.

    Args:
        device_type: ``"cuda"`` or ``"xpu"`` for device events, anything else for the host's clock.
    """

    def __init__(self, device_type: str) -> None:
        self._event = _event_maker(device_type)
        self._last: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()
        self._distances_ms: deque[float] = deque(maxlen=KEPT)

    def mark(self) -> None:
        """Mark the end of a step."""
        if self._event is None:
            mark: Any = time.perf_counter_ns()
        else:
            mark = self._event()
            mark.record()
        if self._last is not None:
            self._pending.append((self._last, mark))
        self._last = mark

    def cut(self) -> None:
        """Something other than a step happened: the time up to the next mark does not count."""
        self._last = None

    def clear(self) -> None:
        """Forget all distances."""
        self._last = None
        self._pending.clear()
        self._distances_ms.clear()

    def distances_ms(self) -> list[float]:
        """Distances whose ends have both been passed, oldest first, in milliseconds."""
        while self._pending and (self._event is None or self._pending[0][1].query()):
            start, end = self._pending.popleft()
            elapsed = (end - start) / 1e6 if self._event is None else start.elapsed_time(end)
            self._distances_ms.append(float(elapsed))
        return list(self._distances_ms)


def _event_maker(device_type: str) -> Any:
    import torch

    module = getattr(torch, device_type, None) if device_type in ("cuda", "xpu") else None
    if module is None or not module.is_available():
        return None
    return lambda: module.Event(enable_timing=True)
