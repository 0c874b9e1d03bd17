"""The clock: CUDA events, medians, cold L2, variants interleaved.

Every call gets inputs that the cache no longer holds: input sets rotate, and there are enough of them to fill
it several times. Variants take turns, so that clocks and neighbours disturb all alike. Before each timed call
the GPU is kept busy for longer than the host needs to enqueue it, so that no gap between launches is timed.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .in_a_row import Call, InARow, time_in_a_row

#: What one set of inputs is made into.
Variant = Callable[[Sequence[Any]], Call]

_CACHE_FILLS = 3
_MAX_SETS = 48
#: Calls between two looks at whether the medians are known well enough, and looks before the first.
_ROUND = 10
_LEAST_ROUNDS = 2
#: Half a median's interval of 95 %, over the median.
_WELL_KNOWN = 0.01


@dataclass
class Case:
    """One kernel at one size, and all that compete there.

    Attributes:
        kernel: e.g. ``layer_norm``.
        shape: for a reader, e.g. ``16384x4096``.
        dtype: for a reader.
        direction: ``forward``, ``backward`` or ``forward+backward``.
        inputs: makes one set of random inputs on the device.
        variants: by name; ``ours`` is the bundled kernel.
        bytes: compulsory: every input read once, every output written once.
        flops: of matrix products; 0 for a kernel that memory bounds.
        required: variants whose failure fails the run; others are left out with the reason.
    """

    kernel: str
    shape: str
    dtype: str
    direction: str
    inputs: Callable[[], Sequence[Any]]
    variants: Mapping[str, Variant]
    bytes: int
    flops: float = 0.0
    required: tuple[str, ...] = ("ours",)


@dataclass
class Result:
    """Median times of a case's variants, in ms, with the spread of the middle half.

    `interval` is half the median's interval of 95 % over the median, `repeats` the calls of each variant;
    `in_a_row` has the second clock's times where that one ran.
    """

    case: Case
    ms: dict[str, float] = field(default_factory=dict)
    spread_ms: dict[str, float] = field(default_factory=dict)
    interval: dict[str, float] = field(default_factory=dict)
    repeats: int = 0
    peak_bytes: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    in_a_row: InARow = field(default_factory=InARow)


def forward(function: Callable[..., Any]) -> Variant:
    """Times `function(*inputs)` without autograd."""

    def prepare(inputs: Sequence[Any]) -> Call:
        def call() -> object:
            with torch.no_grad():
                return function(*inputs)

        return call

    return prepare


def backward(function: Callable[..., Any]) -> Variant:
    """Times the backward alone; the forward ran once when the inputs were made."""

    def prepare(inputs: Sequence[Any]) -> Call:
        outputs, douts, leaves = _graph(function, inputs)
        return lambda: torch.autograd.grad(outputs, leaves, douts, retain_graph=True, allow_unused=True)

    return prepare


def forward_backward(function: Callable[..., Any]) -> Variant:
    """Times forward and backward together, gradients returned rather than accumulated."""

    def prepare(inputs: Sequence[Any]) -> Call:
        _, douts, leaves = _graph(function, inputs)
        return lambda: torch.autograd.grad(_outputs(function(*inputs)), leaves, douts, allow_unused=True)

    return prepare


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under torch.compile, for these shapes alone: what was compiled before its first call is
    forgotten then, whenever this was made."""
    made: list[Callable[..., Any]] = []

    def call(*inputs: Any) -> Any:
        if not made:
            torch._dynamo.reset()
            made.append(torch.compile(function, dynamic=False))
        return made[0](*inputs)

    return call


def measure(case: Case, *, repeats: int = 40, in_a_row: bool = False) -> Result:
    """Run a case.

    Args:
        case: what to time.
        repeats: timed calls of each variant at most; fewer once every median is known to 1 %.
        in_a_row: whether the second clock runs too.

    Raises:
        Exception: whatever a required variant raises.
    """
    result = Result(case)
    sets = [case.inputs()]
    held = max(_bytes_of(sets[0]), 1)
    cache = _CACHE_FILLS * torch.cuda.get_device_properties(0).L2_cache_size
    # Each set is touched by every variant in turn, so the sets between two visits must fill the cache.
    sets += [case.inputs() for _ in range(min(_MAX_SETS, max(2, -(-cache // held))))]
    calls: dict[str, list[Call]] = {}
    host_ns: dict[str, float] = {}
    for name, variant in case.variants.items():
        try:
            calls[name] = [variant(inputs) for inputs in sets]
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            host_ns[name] = _warm_up(calls[name])
            result.peak_bytes[name] = torch.cuda.max_memory_allocated() - before
        except Exception as error:
            if name in case.required:
                raise
            calls.pop(name, None)
            result.failures[name] = why(error)
    times = settled(partial(_interleaved, calls, host_ns, len(sets)), repeats)
    for name, ms in times.items():
        result.ms[name] = statistics.median(ms)
        result.interval[name] = median_interval(ms)
        result.repeats = len(ms)
        quarters = statistics.quantiles(ms, n=4)
        result.spread_ms[name] = quarters[2] - quarters[0]
    if in_a_row:
        # Autograd works on the stream of the forward, which is not the one that a graph captures.
        capture = "backward" not in case.direction
        result.in_a_row = time_in_a_row(calls, host_ns, capture=capture)
    del calls, sets
    gc.collect()
    torch.cuda.empty_cache()
    return result


def why(error: Exception) -> str:
    """What was raised, in a line: torch.compile tells the cause in its second."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def settled(timed: Callable[[int, int], Mapping[str, list[float]]], repeats: int) -> dict[str, list[float]]:
    """Times by variant, taken in rounds until every median is known to 1 % or there are `repeats`.

    Args:
        timed: gives so many times of each variant, beginning at this call of all.
        repeats: times of each variant at most.
    """
    times: dict[str, list[float]] = {}
    done = 0
    while done < repeats:
        count = min(_ROUND, repeats - done)
        for name, ms in timed(count, done * len(times)).items():
            times.setdefault(name, []).extend(ms)
        done += count
        enough = done >= _LEAST_ROUNDS * _ROUND
        if enough and all(median_interval(ms) <= _WELL_KNOWN for ms in times.values()):
            break
    return times


def median_interval(times: Sequence[float]) -> float:
    """Half the width of the median's interval of 95 %, over the median, by the times' ranks."""
    ordered = sorted(times)
    rank = max(math.floor((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2) - 1, 0)
    return (ordered[-1 - rank] - ordered[rank]) / 2 / statistics.median(ordered)


def median_ms(calls: Sequence[Call], repeats: int) -> float:
    """Median time of one variant's calls, which take turns, after a warm-up.

    Args:
        calls: the same work on one set of inputs each.
        repeats: timed calls.
    """
    host_ns = _warm_up(calls)
    return statistics.median(_interleaved({"": calls}, {"": host_ns}, len(calls), repeats)[""])


def rotated_ms(calls: Mapping[str, Sequence[Call]], repeats: int) -> dict[str, float]:
    """Median time of each variant, by name, all taking turns after a warm-up of each.

    Args:
        calls: by variant, the same work on one set of inputs each, as many for all.
        repeats: timed calls of each variant.
    """
    host_ns = {name: _warm_up(own) for name, own in calls.items()}
    sets = len(next(iter(calls.values())))
    return {n: statistics.median(ms) for n, ms in _interleaved(calls, host_ns, sets, repeats).items()}


def both_clocks_ms(calls: Mapping[str, Sequence[Call]], repeats: int) -> dict[str, tuple[float, float]]:
    """Median time of each variant, by name: of a single call, and of one in a row; as `rotated_ms` else.

    Args:
        calls: by variant, the same work on one set of inputs each, as many for all.
        repeats: timed calls of each variant.
    """
    host_ns = {name: _warm_up(own) for name, own in calls.items()}
    single = _interleaved(calls, host_ns, len(next(iter(calls.values()))), repeats)
    row = time_in_a_row(calls, host_ns).ms
    return {name: (statistics.median(ms), row[name]) for name, ms in single.items()}


def copy_bandwidth(size_bytes: int = 2**30, repeats: int = 20) -> float:
    """Bytes per second of a device-to-device copy, read and written bytes counted."""
    source = torch.randint(0, 255, (size_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size_bytes / median_ms([lambda: target.copy_(source)], repeats) * 1e3


def matmul_rate(dtype: torch.dtype = torch.bfloat16, n: int = 8192, repeats: int = 20) -> float:
    """FLOP/s of an n x n x n matrix product of random numbers through PyTorch."""
    a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
    return 2 * n**3 / median_ms([lambda: a @ b], repeats) * 1e3


def _warm_up(calls: Sequence[Call], rounds: int = 3) -> float:
    """Host time of one call in ns, after compilation."""
    calls[0]()
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for i in range(rounds):
        calls[i % len(calls)]()
    elapsed = (time.perf_counter_ns() - start) / rounds
    torch.cuda.synchronize()
    return elapsed


def _interleaved(
    calls: Mapping[str, Sequence[Call]], host_ns: Mapping[str, float], sets: int, repeats: int, turn: int = 0
) -> dict[str, list[float]]:
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name in calls:
            call = calls[name][turn % sets]
            turn += 1
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # About 2 cycles a ns: the GPU idles this long while the host enqueues the call.
            torch.cuda._sleep(int(min(4 * host_ns[name] + 2e5, 2e7)))
            start.record()
            call()
            stop.record()
            events[name].append((start, stop))
        torch.cuda.synchronize()
    return {name: [start.elapsed_time(stop) for start, stop in pairs] for name, pairs in events.items()}


def _outputs(result: Any) -> list[Tensor]:
    found = [result] if isinstance(result, Tensor) else list(result)
    return [out for out in found if isinstance(out, Tensor) and out.requires_grad]


def _graph(
    function: Callable[..., Any], inputs: Sequence[Any]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    outputs = _outputs(function(*inputs))
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    # A scalar's gradient is 1, as in training.
    douts = [torch.ones_like(o) if o.dim() == 0 else torch.randn_like(o) for o in outputs]
    return outputs, douts, leaves


def _bytes_of(inputs: Sequence[Any]) -> int:
    return sum(x.numel() * x.element_size() for x in inputs if isinstance(x, Tensor))
