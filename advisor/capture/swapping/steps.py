"""Whole live steps without and with swaps, in alternating blocks, and what they tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from advisor.capture.clock import StepClock
from advisor.capture.steptime import median_ms
from advisor.report import format as fmt
from advisor.report.model import Saving, SwapSteps
from advisor.swap.memory import grows

#: Which blocks run with swaps: each way is first once and last once, so that a drift weighs on both alike.
ORDER = (False, True, True, False)
#: Cycles that warm up what is swapped in (tracing, Triton's compiler), and those after each change of ways.
WARM_CYCLES = 3
SETTLE_CYCLES = 2
#: Cycles that are timed in a block, at most and at least.
MOST, LEAST = 10, 4
_Z95 = 1.959964


def cycles_per_block(batches_left: int | None, cycle: int) -> int:
    """How many cycles a block can time within the batches that are left; 0 if there are too few.

    Args:
        batches_left: None if it is not known.
        cycle: batches per optimizer step.
    """
    if batches_left is None:
        return MOST
    cycles = batches_left // max(1, cycle) - WARM_CYCLES
    fits = cycles // len(ORDER) - SETTLE_CYCLES
    return 0 if fits < LEAST else min(fits, MOST)


def batches_compared(cycle: int, cycles: int, blocks: int = len(ORDER)) -> int:
    """Batches that a comparison takes which times so many cycles in each block."""
    return cycle * (WARM_CYCLES + blocks * (SETTLE_CYCLES + cycles))


def saving_of(eager_ms: Sequence[float], swapped_ms: Sequence[float]) -> Saving | None:
    """By how much steps got shorter: Hodges and Lehmann's shift with its distribution-free 95 % interval.

    The estimate is the median of all differences between a step without and one with; its interval ends at
    the differences whose ranks the Mann-Whitney statistic allows (Hollander, Wolfe and Chicken,
    Nonparametric Statistical Methods, 4.2 and 4.3). None where steps are too few for an interval.
    """
    m, n = len(eager_ms), len(swapped_ms)
    if min(m, n) < LEAST:
        return None
    shifts = sorted(a - b for a in eager_ms for b in swapped_ms)
    beyond = math.floor(m * n / 2 - _Z95 * math.sqrt(m * n * (m + n + 1) / 12))
    if beyond < 1:
        return None
    return Saving(low=shifts[beyond - 1], likely=_median(shifts), high=shifts[-beyond])


def compared(
    eager_ms: Sequence[float],
    swapped_ms: Sequence[float],
    eager_peak_bytes: int | None = None,
    swapped_peak_bytes: int | None = None,
) -> SwapSteps:
    """The report's part on whole steps."""
    return SwapSteps(
        eager_ms=[round(value, 4) for value in eager_ms],
        swapped_ms=[round(value, 4) for value in swapped_ms],
        eager_p50_ms=median_ms(eager_ms),
        swapped_p50_ms=median_ms(swapped_ms),
        saving_ms=saving_of(eager_ms, swapped_ms),
        eager_peak_bytes=eager_peak_bytes,
        swapped_peak_bytes=swapped_peak_bytes,
    )


def objection(steps: SwapSteps, max_memory_growth: float) -> str:
    """Why what was swapped in is not kept; empty if it is."""
    saving, before, after = steps.saving_ms, steps.eager_p50_ms, steps.swapped_p50_ms
    if saving is None or before is None or after is None:
        return "too few steps could be timed to tell"
    if saving.low <= 0:
        return (
            f"whole steps gain nothing beyond the noise: {fmt.duration(after)} with swaps, "
            f"{fmt.duration(before)} without"
        )
    peaks = steps.eager_peak_bytes, steps.swapped_peak_bytes
    if peaks[0] and peaks[1] and grows(peaks[0], peaks[1], max_memory_growth):
        return (
            f"peak memory grows from {fmt.nbytes(peaks[0])} to {fmt.nbytes(peaks[1])}; "
            "swap_max_memory_growth allows more"
        )
    return ""


@dataclass
class _Block:
    on: bool
    clock: StepClock
    peak_bytes: int | None = None


class Comparison:
    """Runs the blocks. Call `step` at the end of each batch, the one before the first among them.

    Nothing waits for the device until `outcome` is asked for.

    Args:
        toggle: puts what was swapped in force, or out of it.
        device_type: of the model's device.
        cycle: batches per optimizer step.
        cycles: timed in each block.
        order: which blocks run with swaps.
        held_bytes: what a step with swaps holds of the device's memory beside what is allocated.
        loop_bytes: the peak of the loop before anything was swapped. In the blocks without swaps what these
            hold lies beside the loop's own.
        time: told when steps begin to be timed, and when they no longer are.
    """

    def __init__(
        self,
        toggle: Callable[[bool], None],
        device_type: str,
        cycle: int,
        cycles: int,
        order: Sequence[bool] = ORDER,
        held_bytes: Callable[[], int] = lambda: 0,
        loop_bytes: int | None = None,
        time: Callable[[bool], None] = lambda on: None,
    ) -> None:
        self._toggle, self._held_bytes, self._time = toggle, held_bytes, time
        self._loop_bytes = loop_bytes
        self._device_type = device_type
        self._cycle = max(1, cycle)
        self._cycles = cycles
        self._order = order
        self._blocks: list[_Block] = []
        self._run_on = self._run()

    @property
    def batches(self) -> int:
        """Until the last block has ended, from the first `step` on."""
        return batches_compared(self._cycle, self._cycles, len(self._order))

    def step(self) -> None:
        """A batch has ended."""
        next(self._run_on, None)

    def cut(self) -> None:
        """Something other than a step happened: it is not timed."""
        if self._blocks:
            self._blocks[-1].clock.cut()

    def outcome(self) -> SwapSteps:
        """What the blocks tell, one that is not complete included."""
        synchronize(self._device_type)
        times: dict[bool, list[float]] = {False: [], True: []}
        peaks: dict[bool, list[int]] = {False: [], True: []}
        for block in self._blocks:
            times[block.on] += [cycle_ms / self._cycle for cycle_ms in block.clock.distances_ms()]
            if block.peak_bytes is not None:
                peaks[block.on].append(block.peak_bytes)
        own = [max(peaks[False], default=None), self._loop_bytes]
        least = min((peak for peak in own if peak), default=None)
        return compared(times[False], times[True], least, max(peaks[True], default=None))

    def _run(self) -> Iterator[None]:
        """Goes on at each batch's end."""
        self._toggle(True)
        yield from repeat(None, WARM_CYCLES * self._cycle)
        for on in self._order:
            self._toggle(on)
            yield from repeat(None, SETTLE_CYCLES * self._cycle)
            block = _Block(on, StepClock(self._device_type))
            self._blocks.append(block)
            self._time(True)
            reset_peak(self._device_type)
            block.clock.mark()
            for _ in range(self._cycles):
                yield from repeat(None, self._cycle)
                block.clock.mark()
            self._time(False)
            block.peak_bytes = peak_bytes(self._device_type)
            if block.peak_bytes is not None and on:
                block.peak_bytes += self._held_bytes()


def peak_bytes(device_type: str) -> int | None:
    """The allocator's high-water mark since `reset_peak`; None where there is none."""
    memory = _device_module(device_type)
    return None if memory is None else int(memory.max_memory_allocated())


def reset_peak(device_type: str) -> None:
    """Let the high-water mark start from what is allocated now."""
    memory = _device_module(device_type)
    if memory is not None:
        memory.reset_peak_memory_stats()


def headroom_bytes(device_type: str) -> int | None:
    """Device memory that not even the steps' peak so far has touched; None where it is not known."""
    module = _device_module(device_type)
    if module is None:
        return None
    total = module.get_device_properties(module.current_device()).total_memory
    return int(total - max(module.max_memory_allocated(), module.memory_reserved()))


def synchronize(device_type: str) -> None:
    """Wait for the device."""
    module = _device_module(device_type)
    if module is not None:
        module.synchronize()


def _device_module(device_type: str) -> Any:
    import torch

    module = getattr(torch, device_type, None) if device_type in ("cuda", "xpu") else None
    return module if module is not None and module.is_available() else None


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
