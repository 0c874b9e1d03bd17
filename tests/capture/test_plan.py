from __future__ import annotations

import pytest

from advisor.capture.plan import LEAD_BATCHES, Ahead, batches_to_capture, check_counts, whole_cycles
from advisor.errors import UsageError


def opened_at(
    batches: int,
    *,
    capture: int = 3,
    cycle: int = 1,
    epochs: int = 1,
    ready_after: int = 10**9,
    validate_every: int | None = None,
) -> tuple[int, int, int] | None:
    """Plays a fit through; returns (epoch, first batch inside the window, batches to capture)."""
    measured = 0
    for epoch in range(epochs):
        for batch in range(batches):
            ahead = Ahead(
                left_in_epoch=batches - batch - 1,
                left_later=(epochs - epoch - 1) * batches,
                epoch_batches=batches,
                next_batch=batch + 1,
                to_validation=None
                if validate_every is None
                else validate_every - (batch + 1) % validate_every,
                between_validations=validate_every,
            )
            chosen = batches_to_capture(
                ahead, capture=capture, cycle=cycle, ready=measured >= ready_after, measured=measured
            )
            if chosen:
                return epoch, batch + 1, chosen
            measured += 1
    return None


def test_a_window_opens_as_soon_as_the_loop_is_ready_where_there_is_room():
    assert opened_at(100, ready_after=20) == (0, 21, 3)


@pytest.mark.parametrize("batches", range(4, 60))
def test_a_window_never_runs_past_its_epoch_and_never_holds_the_first_batch(batches):
    # GIVEN a loop that never becomes stable
    # WHEN it is played through
    _, first, capture = opened_at(batches)

    # THEN the window lies inside the only epoch, behind its first batch
    assert first >= 1
    assert first + LEAD_BATCHES + capture <= batches


@pytest.mark.parametrize(
    ("batches", "expected"), [(3, None), (4, (0, 1, 1)), (5, (0, 1, 2)), (6, (0, 1, 3)), (0, None)]
)
def test_few_batches_shrink_the_window_and_too_few_give_none(batches, expected):
    assert opened_at(batches) == expected


def test_a_loop_that_never_settles_leaves_batches_for_both_baseline_and_check():
    _, first, capture = opened_at(60)

    assert first > 30
    assert 60 - first - LEAD_BATCHES - capture == 12


def test_short_epochs_shrink_the_window_to_one_epoch():
    epoch, first, capture = opened_at(5, epochs=20, ready_after=30)

    assert (first, capture) == (1, 2)
    assert epoch >= 6


def test_a_loop_that_is_not_ready_in_the_last_epoch_is_recorded_all_the_same():
    epoch, _, capture = opened_at(10, epochs=3)

    assert epoch == 2
    assert capture == 3


@pytest.mark.parametrize("cycle", [2, 3, 4, 8])
def test_accumulated_gradients_are_captured_in_whole_cycles_from_a_cycles_start(cycle):
    capture = whole_cycles(3, cycle)

    _, first, chosen = opened_at(200, capture=capture, cycle=cycle, ready_after=31)

    assert chosen % cycle == 0
    assert chosen >= cycle
    assert (first + LEAD_BATCHES) % cycle == 0


def test_a_cycle_that_does_not_fit_is_captured_in_part():
    assert opened_at(6, capture=8, cycle=8) == (0, 1, 3)


def test_a_window_waits_for_the_validation_run_that_would_cut_through_it():
    _, first, _ = opened_at(100, ready_after=17, validate_every=20)

    assert first == 20


@pytest.mark.parametrize("every", [1, 4])
def test_validation_that_no_window_can_avoid_is_accepted_at_once(every):
    assert opened_at(40, ready_after=9, validate_every=every) == (0, 10, 3)


def test_an_epoch_of_unknown_length_opens_once_the_loop_is_ready():
    ahead = Ahead(next_batch=5)

    assert batches_to_capture(ahead, capture=3, cycle=1, ready=False, measured=500) == 0
    assert batches_to_capture(ahead, capture=3, cycle=1, ready=True, measured=5) == 3


def test_epochs_without_end_wait_for_a_stable_loop():
    ahead = Ahead(left_in_epoch=9, left_later=None, epoch_batches=10, next_batch=1)

    assert batches_to_capture(ahead, capture=3, cycle=1, ready=False, measured=10**6) == 0


@pytest.mark.parametrize(
    ("warmup", "capture"), [(-1, 3), ("soon", 3), (True, 3), (1.5, 3), (5, 0), (5, "3"), (5, True)]
)
def test_counts_out_of_range_are_refused_with_the_value(warmup, capture):
    with pytest.raises(UsageError, match="steps="):
        check_counts(warmup, capture)
