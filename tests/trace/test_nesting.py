"""Innermost intervals and unions, against brute force."""

from __future__ import annotations

import time as clock
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from advisor.trace import nesting as nesting_module
from advisor.trace.intervals import merged, union_ns
from advisor.trace.nesting import Nesting, nearest

INTERVALS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 12)), max_size=25)


def nesting_of(intervals: list[tuple[int, int, int]]) -> Nesting:
    table = np.array(intervals, np.int64).reshape(-1, 3)
    return Nesting(table[:, 0].astype(np.int32), table[:, 1], table[:, 2])


def innermost(nesting: Nesting, track: int, time: int) -> int:
    return int(nesting.innermost(np.array([track], np.int32), np.array([time], np.int64))[0])


def test_the_innermost_interval_is_the_last_started_one_that_still_runs() -> None:
    # GIVEN an outer interval with two children on one thread, and a stranger on another
    nesting = nesting_of([(0, 0, 100), (0, 10, 20), (0, 50, 20), (1, 0, 500)])
    # THEN each time finds its own
    assert innermost(nesting, 0, 15) == 1
    assert innermost(nesting, 0, 30) == 0
    assert innermost(nesting, 0, 50) == 2
    assert innermost(nesting, 1, 60) == 3
    assert nesting.parent.tolist() == [-1, 0, 0, -1]


def test_a_time_outside_every_interval_finds_none() -> None:
    nesting = nesting_of([(1, 10, 10)])
    for track, time in ((1, 9), (1, 20), (0, 15), (2, 15), (-1, 15)):
        assert innermost(nesting, track, time) == -1
    assert nesting_of([]).innermost(np.zeros(2, np.int32), np.zeros(2, np.int64)).tolist() == [-1, -1]


def test_a_sibling_that_starts_before_its_neighbour_ends_is_not_its_child() -> None:
    # GIVEN b, which starts a moment before a ends and runs on, both within an outer one
    nesting = nesting_of([(0, 0, 100), (0, 10, 20), (0, 28, 40), (0, 50, 10)])
    # THEN b is the outer one's child, and what runs inside b is b's
    assert nesting.parent.tolist() == [-1, 0, 0, 2]


def test_a_child_that_outlasts_its_parent_by_rounding_stays_its_child() -> None:
    nesting = nesting_of([(0, 0, 100), (0, 10, 20), (0, 15, 16)])
    assert nesting.parent.tolist() == [-1, 0, 1]


def test_an_event_at_time_zero_among_events_of_today_does_not_overflow() -> None:
    # GIVEN ten threads, a broken clock on one of them and times in ns since 1970 on the others
    now = 1_760_000_000_000_000_000
    track = np.arange(10, dtype=np.int32)
    ts = np.array([0] + [now] * 9, np.int64)
    nesting = Nesting(track, ts, np.full(10, 100, np.int64))
    # THEN each thread still finds its own
    assert nesting.innermost(track, ts + 50).tolist() == list(range(10))


@given(INTERVALS, st.integers(0, 3), st.integers(-1, 45))
def test_innermost_agrees_with_brute_force(intervals, track, time) -> None:
    found = innermost(nesting_of(intervals), track, time)
    holding = [i for i, (lane, ts, dur) in enumerate(intervals) if lane == track and ts <= time < ts + dur]
    if not holding:
        assert found == -1
        return
    latest = max(intervals[i][1] for i in holding)
    assert found in holding
    # Of those that started last, the shortest; equals are one another's peers.
    assert intervals[found][1] == latest
    assert intervals[found][2] == min(intervals[i][2] for i in holding if intervals[i][1] == latest)


@given(INTERVALS)
def test_a_parent_holds_its_child_and_nothing_lies_between(intervals) -> None:
    parent = nesting_of(intervals).parent.tolist()
    for i, above in enumerate(parent):
        lane, ts, dur = intervals[i]
        holding = {
            k
            for k, (other, start, length) in enumerate(intervals)
            if k != i and other == lane and start <= ts < start + length and ts + dur <= start + length + 2
        }
        assert above in holding or above == -1
        strictly = [k for k in holding if intervals[k][1] < ts and sum(intervals[k][1:]) >= ts + dur]
        if strictly:
            assert above >= 0
            assert intervals[above][1] >= max(intervals[k][1] for k in strictly)


def test_nearest_climbs_to_the_first_wanted_one_and_no_further() -> None:
    parent = np.array([-1, 0, 1, 2], np.int32)
    wanted = np.array([True, True, False, False])
    assert nearest(np.array([3, 2, 1, 0, -1]), parent, wanted).tolist() == [1, 1, 1, 0, -1]
    assert nearest(np.array([3]), parent, np.zeros(4, bool)).tolist() == [-1]


@given(INTERVALS, st.lists(st.booleans(), min_size=25, max_size=25))
def test_climbing_in_strides_finds_what_climbing_one_by_one_finds(intervals, wanted) -> None:
    nesting = nesting_of(intervals)
    track = np.repeat(np.arange(3, dtype=np.int32), 45)
    time = np.tile(np.arange(45), 3)
    start, flags = np.arange(-1, len(intervals)), np.array(wanted[: len(intervals)], bool)
    plainly = nesting.innermost(track, time), nearest(start, nesting.parent, flags)
    with mock.patch.object(nesting_module, "_PLAIN_CLIMB", 0):
        in_strides = nesting.innermost(track, time), nearest(start, nesting.parent, flags)
    for one, other in zip(plainly, in_strides, strict=True):
        assert one.tolist() == other.tolist()


def test_a_hundred_thousand_levels_are_climbed_in_no_time() -> None:
    # GIVEN intervals one within the other, and as many questions after all but the outermost have ended
    n = 100_000
    nesting = Nesting(np.zeros(n, np.int32), np.arange(n), np.append(10 * n, n * 4 - 2 * np.arange(1, n)))
    begun = clock.process_time()
    found = nesting.innermost(np.zeros(n, np.int32), np.full(n, 6 * n))
    above = nearest(np.arange(n), nesting.parent, np.arange(n) == 0)
    # THEN each finds the outermost, in a time that one step a level and question could not keep
    assert (found == 0).all()
    assert (above == 0).all()
    assert clock.process_time() - begun < 5


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=25))
def test_the_length_of_a_union_is_the_number_of_moments_covered(intervals) -> None:
    table = np.array(intervals, np.int64).reshape(-1, 2)
    start, end = table[:, 0], table[:, 0] + table[:, 1]
    covered = {moment for ts, dur in intervals for moment in range(ts, ts + dur)}
    assert union_ns(start, end) == len(covered)
    begins, ends = merged(start, end)
    assert (begins[1:] > ends[:-1]).all()
