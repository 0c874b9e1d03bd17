import numpy as np

from advisor.trace.intervals import covered_before, merged, union_ns


def test_intervals_that_overlap_or_touch_become_one():
    start, end = merged(np.array([20, 0, 5, 30]), np.array([30, 10, 8, 40]))

    assert start.tolist() == [0, 20]
    assert end.tolist() == [10, 40]
    assert union_ns(np.array([20, 0, 5, 30]), np.array([30, 10, 8, 40])) == 30


def test_what_lies_before_a_time_counts_whole_intervals_and_the_part_of_the_one_around_it():
    # GIVEN 10 ns from 0 on and 20 ns from 20 on
    start, end = np.array([0, 20]), np.array([10, 40])

    # WHEN asked before, in, between and after them, in any order
    found = covered_before(np.array([40, -5, 0, 4, 15, 25, 99]), start, end)

    # THEN each has what ended by then and what has begun
    assert found.tolist() == [30, 0, 0, 4, 10, 15, 30]


def test_nothing_lies_before_any_time_where_there_are_no_intervals():
    empty = np.zeros(0, np.int64)

    assert covered_before(np.array([1, 2]), empty, empty).tolist() == [0, 0]
