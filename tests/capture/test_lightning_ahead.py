from __future__ import annotations

import math
import types

import pytest

from advisor.capture.lightning_ahead import EpochLengths, of_evaluation, of_fit
from advisor.capture.plan import Ahead


def trainer(**options):
    """As much of a Trainer as says what lies ahead: ten batches an epoch, three epochs."""
    defaults = {
        "num_training_batches": 10, "max_epochs": 3, "current_epoch": 0, "max_steps": -1, "global_step": 0,
        "accumulate_grad_batches": 1, "is_last_batch": False, "should_stop": False, "val_check_batch": 10,
        "enable_validation": False,
    }  # fmt: skip
    return types.SimpleNamespace(**{**defaults, **options})


def counted(*epochs):
    """Epochs of so many batches each, the last still running."""
    lengths = EpochLengths()
    for batches in epochs:
        lengths.start()
        for _ in range(batches):
            lengths.count()
    return lengths


def left(ahead: Ahead):
    return ahead.left_in_epoch, ahead.left_later


def test_batches_left_are_counted_in_this_epoch_and_the_later_ones():
    assert left(of_fit(trainer(), 3, counted(4))) == (6, 20)
    assert left(of_fit(trainer(current_epoch=2), 3, counted(4))) == (6, 0)


def test_epochs_without_end_leave_the_later_batches_unknown():
    assert left(of_fit(trainer(max_epochs=-1), 3, counted(4))) == (6, None)
    assert left(of_fit(trainer(max_epochs=None), 3, counted(4))) == (6, None)


@pytest.mark.parametrize(
    ("max_steps", "step", "batch_idx", "cycle", "expected"),
    [
        (6, 4, 3, 1, (2, 0)),
        (10, 4, 3, 1, (6, 0)),
        (25, 4, 3, 1, (6, 15)),
        (1000, 4, 3, 1, (6, 20)),
        (4, 4, 3, 1, (0, 0)),
        (2, 1, 4, 4, (3, 0)),
        (2, 1, 3, 4, (4, 0)),
    ],
)
def test_a_limit_on_steps_counts_batches_by_accumulation(max_steps, step, batch_idx, cycle, expected):
    run = trainer(max_steps=max_steps, global_step=step, accumulate_grad_batches=cycle)

    assert left(of_fit(run, batch_idx, counted(batch_idx + 1))) == expected


def test_the_last_batch_and_a_stop_leave_nothing():
    assert left(of_fit(trainer(is_last_batch=True, num_training_batches=math.inf), 3, counted(4)))[0] == 0
    assert left(of_fit(trainer(should_stop=True), 3, counted(4)))[0] == 0


def test_a_loader_of_unknown_length_is_judged_by_the_epoch_before():
    run = trainer(num_training_batches=math.inf)

    assert left(of_fit(run, 3, counted(4))) == (None, None)
    assert left(of_fit(run, 3, counted(9, 4))) == (5, 18)
    assert left(of_fit(run, 11, counted(9, 12)))[0] is None


def test_validation_is_seen_only_where_there_is_any():
    every_four = trainer(val_check_batch=4, enable_validation=True)

    assert of_fit(every_four, 0, counted(1)).to_validation == 3
    assert of_fit(every_four, 3, counted(4)).to_validation == 4
    assert of_fit(trainer(val_check_batch=4), 0, counted(1)).to_validation is None
    assert (
        of_fit(trainer(val_check_batch=math.inf, enable_validation=True), 0, counted(1)).to_validation is None
    )


def test_evaluation_counts_each_loader_as_an_epoch():
    assert left(of_evaluation([10, 5], 3, 0)) == (6, 5)
    assert left(of_evaluation([10, 5], 3, 1)) == (1, 0)
    assert left(of_evaluation([math.inf], 3, 0)) == (None, 0)
    assert left(of_evaluation(8, 3, 0)) == (4, 0)
