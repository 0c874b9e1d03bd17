"""Clocks that time calls in turns: the host's for a CPU, events for a GPU; a test brings its own."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

from advisor.swap.guard import no_garbage_collected

Call = Callable[[], object]

MIN_ROUNDS, MAX_ROUNDS = 7, 25
#: A variant that takes this many times as long as the fastest is not timed again.
_HOPELESS = 4.0


class Clock(Protocol):
    """Times calls that are ready to run."""

    @property
    def host_ns(self) -> Mapping[str, float]:
        """After `times`, by name, how long the host took to enqueue a call; empty where that is its time."""
        ...

    def times(self, calls: Mapping[str, Call], budget_s: float) -> dict[str, list[float]]:
        """Nanoseconds of each run of each call, run in turns for about `budget_s`."""
        ...

    def peak_bytes(self, call: Call) -> int | None:
        """What one run takes beyond what it was given; None where it cannot be known."""
        ...


def clock_for(devices: Iterable[torch.device]) -> Clock:
    """The clock of the device that does the work."""
    gpu = next((d for d in devices if d.type == "cuda"), None)
    return CpuClock() if gpu is None else CudaClock(gpu)


class CpuClock:
    """`time.perf_counter_ns`, or another counter of nanoseconds."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._now_ns = now_ns
        self.host_ns: Mapping[str, float] = {}

    def times(self, calls: Mapping[str, Call], budget_s: float) -> dict[str, list[float]]:
        """Each round runs every call once, every other round the other way round."""

        def once(call: Call) -> float:
            start = self._now_ns()
            call()
            return float(self._now_ns() - start)

        with _undisturbed():
            return _in_turns(calls, once, budget_s)

    def peak_bytes(self, call: Call) -> int | None:
        """What the backward of one run holds on to: saved tensors, each piece of memory once."""
        held: dict[int, int] = {}
        kept: list[torch.Tensor] = []

        def pack(t: torch.Tensor) -> torch.Tensor:
            # Kept alive, so that no address is handed out twice.
            kept.append(t.detach())
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            call()
        return sum(held.values())


class CudaClock:
    """CUDA events, caches cold, of the device's time; the host's is noted beside it.

    Resets the device's peak memory statistics.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        size = 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._flush = torch.empty(max(size, 2**22), dtype=torch.uint8, device=device)
        self.host_ns: Mapping[str, float] = {}

    def times(self, calls: Mapping[str, Call], budget_s: float) -> dict[str, list[float]]:
        """Before each call the L2 cache is overwritten, and the GPU kept busy while the host enqueues it."""
        hosts = {call: [self._host_ns(call)] for call in calls.values()}
        ahead = int(min(2 * max((ns[0] for ns in hosts.values()), default=0.0) + 1e5, 2e7))

        def once(call: Call) -> float:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            # About 2 cycles a ns: no gap between launches is timed.
            torch.cuda._sleep(2 * ahead)
            start.record()
            before = time.perf_counter_ns()
            call()
            hosts[call].append(float(time.perf_counter_ns() - before))
            stop.record()
            stop.synchronize()
            return float(start.elapsed_time(stop)) * 1e6

        with torch.cuda.device(self._device), _undisturbed():
            found = _in_turns(calls, once, budget_s)
        # Behind so many launches that they fill the device's queue, a run waits for the device.
        self.host_ns = {n: min(hosts[c][0], statistics.median(hosts[c])) for n, c in calls.items()}
        return found

    def _host_ns(self, call: Call) -> float:
        torch.cuda.synchronize(self._device)
        start = time.perf_counter_ns()
        call()
        elapsed = float(time.perf_counter_ns() - start)
        torch.cuda.synchronize(self._device)
        return elapsed

    def peak_bytes(self, call: Call) -> int | None:
        """The allocator's peak during one run, beyond what was allocated before."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        call()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device) - before)


def _in_turns(
    calls: Mapping[str, Call], once: Callable[[Call], float], budget_s: float
) -> dict[str, list[float]]:
    if not calls:
        return {}
    found: dict[str, list[float]] = {name: [once(call)] for name, call in calls.items()}
    fastest = min(values[0] for values in found.values())
    # The first name is the original's: it is always timed in full.
    first = next(iter(calls))
    running = [n for n in calls if n == first or found[n][0] <= _HOPELESS * fastest]
    cost_ns = sum(found[name][0] for name in running)
    rounds = int(min(max(budget_s * 1e9 / max(cost_ns, 1.0), MIN_ROUNDS), MAX_ROUNDS))
    for i in range(rounds):
        for name in running if i % 2 else reversed(running):
            found[name].append(once(calls[name]))
    # The first run of those that went on warmed up.
    return {name: values[1:] or values for name, values in found.items()}


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage is collected within, and none is left over from just before.

    That of long ago is not looked for: where many packages are loaded it takes a good part of a second.
    """
    gc.collect(1)
    with no_garbage_collected():
        yield
