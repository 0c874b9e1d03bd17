"""The second clock: calls in a row, for kernels so short that a single call's start is much of its time.

Around one call between two events there lie its launch and its first misses of instructions, arguments and
page tables: some us, which a kernel of 10 us shows. A model that decodes runs a hundred such calls, each
right after the last. So here a CUDA graph holds a call on each set of inputs, several rounds of them where
the sets are few, and a replay's time is divided by its calls. The sets fill the cache several times, so that
every call reads memory. The gap between two kernels of a graph, about 1 us, is part of the figure, for all
variants alike.

What cannot be captured is enqueued call by call while the GPU is kept busy: gaps are a little longer then.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

Call = Callable[[], object]

#: Calls of a replay at least: what starting a graph costs is spread over them.
LEAST_CALLS = 32
#: The longest floor for which this clock runs.
SHORT_S = 40e-6


@dataclass
class InARow:
    """Median time of a call by variant, in ms, and why variants were timed without a graph."""

    ms: dict[str, float] = field(default_factory=dict)
    ungraphed: dict[str, str] = field(default_factory=dict)


class Device(Protocol):
    """What the clock needs of a GPU."""

    def captured(self, calls: Sequence[Call]) -> Call:
        """One call that replays these; raises where they cannot be captured."""

    def elapsed_ms(self, call: Call, host_ns: float) -> float:
        """GPU time of a call that takes the host so long to enqueue."""


class Cuda:
    """The current CUDA device."""

    def captured(self, calls: Sequence[Call]) -> Call:
        """A graph of the calls, replayed once before it is timed."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def elapsed_ms(self, call: Call, host_ns: float) -> float:
        """Between two events, after a wait in which the host enqueues all of it."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # About 2 cycles a ns: the GPU idles this long while the host enqueues.
        torch.cuda._sleep(int(min(4 * host_ns + 4e5, 4e7)))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)


def time_in_a_row(
    calls: Mapping[str, Sequence[Call]],
    host_ns: Mapping[str, float],
    *,
    repeats: int = 9,
    capture: bool = True,
    device: Device | None = None,
) -> InARow:
    """Time each variant's calls one after the other; variants take turns, a replay each.

    Args:
        calls: by variant, the same work on one set of inputs each, all of them compiled and warm.
        host_ns: by variant, what one call takes the host.
        repeats: replays of each variant.
        capture: whether to try a graph at all.
        device: the current CUDA device unless given.
    """
    device = device or Cuda()
    result = InARow()
    rows: dict[str, tuple[Call, int, float]] = {}
    for name, own in calls.items():
        row = list(own) * -(-LEAST_CALLS // len(own))
        host = host_ns[name] * len(row)
        replay: Call = _one_by_one(row)
        if capture:
            try:
                replay, host = device.captured(row), 0.0
            except Exception as error:  # noqa: BLE001
                result.ungraphed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            result.ungraphed[name] = "not captured"
        rows[name] = replay, len(row), host
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(repeats):
        for name, (replay, count, host) in rows.items():
            times[name].append(device.elapsed_ms(replay, host) / count)
    result.ms = {name: statistics.median(each) for name, each in times.items()}
    return result


def _one_by_one(calls: Sequence[Call]) -> Call:
    def run() -> None:
        for call in calls:
            call()

    return run
