from __future__ import annotations

import pytest

from advisor.capture import aftercheck
from advisor.capture.aftercheck import SETTLE_STEPS, AfterCheck
from advisor.capture.plan import AFTER_BATCHES


class FakeClock:
    """Every step takes as long as the test says."""

    def __init__(self):
        self.step_ms = 10.0
        self.measured = []
        self.chained = False

    def clear(self):
        self.measured, self.chained = [], False

    def cut(self):
        self.chained = False

    def mark(self):
        if self.chained:
            self.measured.append(self.step_ms)
        self.chained = True

    def distances_ms(self):
        return list(self.measured)


@pytest.fixture
def finalized(monkeypatch):
    calls = []
    monkeypatch.setattr(aftercheck.cupti, "finalize", lambda: calls.append(1) or True)
    return calls


def steps_until_over(check, limit=100):
    for count in range(1, limit):
        if check.step():
            return count
    raise AssertionError("the check never ended")


def test_a_loop_that_is_back_is_verified_after_the_settling_steps(finalized):
    check = AfterCheck(FakeClock(), [10.0] * 10, cycle=1)

    assert steps_until_over(check) == SETTLE_STEPS + AFTER_BATCHES
    assert check.outcome() == {
        "step_ms": [10.0] * AFTER_BATCHES,
        "median_ms": 10.0,
        "ratio": 1.0,
        "verified": True,
        "cupti_finalized": False,
    }
    assert finalized == []


def test_a_slower_loop_has_cupti_detached_by_force_once_and_is_timed_again(finalized):
    # GIVEN a loop that is slower until CUPTI is detached
    clock = FakeClock()
    clock.step_ms = 14.0
    check = AfterCheck(clock, [10.0] * 10, cycle=1)
    for _ in range(SETTLE_STEPS + AFTER_BATCHES):
        assert not check.step()
    assert finalized == [1]

    # WHEN it has its old speed again
    clock.step_ms = 10.0
    steps_until_over(check)

    # THEN that is what is noted
    assert check.outcome()["verified"] is True
    assert check.outcome()["cupti_finalized"] is True


def test_a_loop_that_stays_slower_is_reported_as_such(finalized):
    clock = FakeClock()
    clock.step_ms = 14.0
    check = AfterCheck(clock, [10.0] * 10, cycle=1)

    steps_until_over(check)

    assert check.outcome()["verified"] is False
    assert check.outcome()["ratio"] == pytest.approx(1.4)
    assert finalized == [1]


def test_where_there_is_no_cupti_the_check_ends_at_once(monkeypatch):
    monkeypatch.setattr(aftercheck.cupti, "finalize", lambda: False)
    clock = FakeClock()
    clock.step_ms = 14.0
    check = AfterCheck(clock, [10.0] * 10, cycle=1)

    assert steps_until_over(check) == SETTLE_STEPS + AFTER_BATCHES
    assert check.outcome()["cupti_finalized"] is False


def test_a_loop_that_ends_early_leaves_the_question_open(finalized):
    check = AfterCheck(FakeClock(), [10.0] * 10, cycle=1)
    check.step()

    assert check.outcome()["verified"] is None
    assert check.outcome()["ratio"] is None
