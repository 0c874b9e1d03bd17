"""Whole steps without and with: when blocks change, what they tell, when it is kept."""

from __future__ import annotations

import pytest

from advisor.capture.swapping import steps
from advisor.capture.swapping.steps import Comparison, compared, cycles_per_block, objection, saving_of


class Clock:
    """Host time that only moves when told."""

    def __init__(self, monkeypatch):
        self.now_ns = 0
        monkeypatch.setattr("advisor.capture.clock.time.perf_counter_ns", lambda: self.now_ns)

    def run(self, ms):
        self.now_ns += int(ms * 1e6)


def run(comparison, clock, toggles, *, eager_ms, swapped_ms, cycle=1):
    """Batches until the comparison is over; returns how often it was on."""
    comparison.step()
    for _ in range(comparison.batches):
        clock.run((swapped_ms if toggles[-1] else eager_ms) / cycle)
        comparison.step()


def test_the_shift_and_its_interval_are_those_of_the_textbook() -> None:
    # GIVEN steps that are all shorter by exactly 3
    eager = [10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0]
    saving = saving_of(eager, [value - 3.0 for value in eager])

    # THEN the estimate is it; for m = n = 8 the 95 % interval leaves 13 of 64 differences out on each side
    assert saving is not None
    assert saving.likely == pytest.approx(3.0)
    differences = sorted(a - b + 3.0 for a in eager for b in eager)
    assert saving.low == differences[12]
    assert saving.high == differences[-13]


def test_one_outlier_moves_neither_the_estimate_nor_the_interval_much() -> None:
    eager = [10.0 + 0.01 * n for n in range(10)]
    saving = saving_of([*eager[:-1], 500.0], [value - 2.0 for value in eager])
    assert saving is not None
    assert saving.likely == pytest.approx(2.0, abs=0.02)
    assert 1.9 < saving.low <= saving.high < 2.2


def test_too_few_steps_tell_nothing() -> None:
    assert saving_of([1.0] * 3, [0.5] * 30) is None
    assert saving_of([], []) is None
    assert objection(compared([10.0] * 3, [1.0] * 3), 0.0) == "too few steps could be timed to tell"


def test_a_gain_within_the_noise_is_not_kept() -> None:
    noisy = [10.0, 12.0, 9.0, 11.0, 13.0, 8.0, 10.5, 11.5]
    why = objection(compared(noisy, [value - 0.2 for value in noisy]), 0.0)
    assert "gain nothing beyond the noise" in why
    assert "10.6 ms with swaps" in why
    assert not objection(compared(noisy, [value - 6.0 for value in noisy]), 0.0)


@pytest.mark.parametrize(
    ("after", "growth", "kept"),
    [(1.005, 0.0, True), (1.05, 0.0, False), (1.05, 0.1, True), (1.2, 0.1, False)],
)
def test_memory_that_grows_beyond_the_limit_is_not_kept(after: float, growth: float, kept: bool) -> None:
    why = objection(compared([10.0] * 8, [5.0] * 8, 10**10, int(10**10 * after)), growth)
    assert (why == "") is kept
    assert kept or "peak memory grows from 10.0 GB" in why


@pytest.mark.parametrize(
    ("left", "cycle", "cycles"),
    [(None, 1, 10), (1000, 1, 10), (51, 1, 10), (50, 1, 9), (27, 1, 4), (26, 1, 0), (204, 4, 10), (0, 1, 0)],
)
def test_blocks_fit_into_the_batches_that_are_left(left: int | None, cycle: int, cycles: int) -> None:
    assert cycles_per_block(left, cycle) == cycles
    if cycles and left is not None:
        assert Comparison(lambda _on: None, "cpu", cycle, cycles).batches <= left


def test_blocks_alternate_and_only_settled_steps_are_timed(monkeypatch) -> None:
    # GIVEN steps of 10 ms without and 4 ms with
    clock, toggles = Clock(monkeypatch), []
    comparison = Comparison(toggles.append, "cpu", cycle=1, cycles=5)
    run(comparison, clock, toggles, eager_ms=10.0, swapped_ms=4.0)

    # THEN it warmed up, then went off, on, on, off, and timed five steps of each block
    found = comparison.outcome()
    assert toggles == [True, False, True, True, False]
    assert found.eager_ms == [10.0] * 10
    assert found.swapped_ms == [4.0] * 10
    assert (found.eager_p50_ms, found.swapped_p50_ms) == (10.0, 4.0)
    assert found.saving_ms is not None
    assert found.saving_ms.low == found.saving_ms.high == pytest.approx(6.0)
    assert found.eager_peak_bytes is None


@pytest.mark.parametrize(
    ("loop_bytes", "told"), [(500, 500), (None, 620), (900, 620)], ids=["before", "unknown", "less since"]
)
def test_the_peak_without_swaps_is_that_of_the_loop_before_there_were_any(
    monkeypatch, loop_bytes: int | None, told: int
) -> None:
    # GIVEN blocks without swaps beside whose steps lies what those hold
    clock, toggles = Clock(monkeypatch), []
    monkeypatch.setattr(steps, "peak_bytes", lambda _: 540 if toggles[-1] else 620)
    comparison = Comparison(
        toggles.append, "cpu", cycle=1, cycles=4, held_bytes=lambda: 10, loop_bytes=loop_bytes
    )
    run(comparison, clock, toggles, eager_ms=2.0, swapped_ms=1.0)
    found = comparison.outcome()
    assert (found.eager_peak_bytes, found.swapped_peak_bytes) == (told, 550)


def test_accumulated_gradients_are_compared_in_whole_cycles(monkeypatch) -> None:
    clock, toggles = Clock(monkeypatch), []
    comparison = Comparison(toggles.append, "cpu", cycle=4, cycles=4)
    run(comparison, clock, toggles, eager_ms=40.0, swapped_ms=20.0, cycle=4)

    found = comparison.outcome()
    assert comparison.batches == 4 * (3 + 4 * (2 + 4))
    assert found.eager_ms == [10.0] * 8
    assert found.swapped_ms == [5.0] * 8


def test_a_validation_run_is_not_timed_as_a_step(monkeypatch) -> None:
    clock, toggles = Clock(monkeypatch), []
    comparison = Comparison(toggles.append, "cpu", cycle=1, cycles=6)
    comparison.step()
    for batch in range(comparison.batches):
        if batch == 8:
            comparison.cut()
            clock.run(5000.0)
        clock.run(4.0 if toggles[-1] else 10.0)
        comparison.step()

    found = comparison.outcome()
    assert max(found.eager_ms) == 10.0
    assert len(found.eager_ms) == 11


def test_steps_after_the_last_block_change_nothing(monkeypatch) -> None:
    clock, toggles = Clock(monkeypatch), []
    comparison = Comparison(toggles.append, "cpu", cycle=1, cycles=4)
    run(comparison, clock, toggles, eager_ms=2.0, swapped_ms=1.0)
    before = comparison.outcome()
    for _ in range(5):
        clock.run(100.0)
        comparison.step()
    assert comparison.outcome() == before
    assert steps.ORDER.count(True) == steps.ORDER.count(False)
