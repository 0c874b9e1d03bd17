from __future__ import annotations

import pytest

from advisor.capture.steptime import is_back, is_stable, median_ms, noise_ms, per_cycle_ms


def test_cycles_average_over_whole_accumulation_cycles_counted_from_the_end():
    assert per_cycle_ms([99, 1, 1, 4, 1, 1, 7], 3) == [2, 3]


def test_noise_is_the_standard_deviation_of_normal_values_and_ignores_an_outlier():
    assert noise_ms([9, 10, 11, 10, 500]) == pytest.approx(1.4826)
    assert noise_ms([5]) == 0


def test_the_median_of_nothing_is_unknown():
    assert median_ms([]) is None


def test_a_steady_loop_is_stable():
    assert is_stable([10.0] * 16)


def test_a_loop_that_still_speeds_up_is_not_stable():
    assert not is_stable([30.0] * 8 + [10.0] * 8)
    assert not is_stable([20 - 0.5 * i for i in range(16)])


def test_a_loop_that_jitters_by_more_than_the_tolerance_is_stable_all_the_same():
    assert is_stable([8, 12, 10, 9, 11, 13, 8, 10, 9, 12, 11, 8, 13, 10, 12, 9.5])


def test_a_few_steps_are_never_called_stable():
    assert not is_stable([10.0] * 15)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([10, 10, 10, 10], [10, 10.3, 10.2, 10.1], True),
        ([10, 10.1, 9.9, 10], [13, 13.1, 12.9, 13], False),
        ([10, 14, 6, 10], [11, 15, 8, 12], None),
        ([10, 10, 10], [8, 8, 8], True),
        ([10, 10], [20, 20, 20], None),
        ([10, 10, 10], [], None),
    ],
)
def test_the_speed_is_back_not_back_or_cannot_be_told(before, after, expected):
    assert is_back(before, after) is expected
