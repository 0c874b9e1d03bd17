"""Where the steps are, which of them count, and how long they take."""

from __future__ import annotations

import numpy as np
import pytest

from advisor.trace.steps import Steps, extent, find_steps, steady_steps, step_times_ns
from tests.trace.builder import Builder


def steps_of(n: int, length: int = 100) -> Steps:
    start = np.arange(n, dtype=np.int64) * length
    return Steps(np.arange(n), start, start + length, "profiler")


def steady(counts: list[int], *, interrupted: tuple[int, ...] = (), cycle: int = 1) -> list[int]:
    stopped = np.isin(np.arange(len(counts)), interrupted)
    chosen = steady_steps(steps_of(len(counts)), np.array(counts), stopped, cycle)
    return np.flatnonzero(chosen).tolist()


def test_steps_are_the_profilers_ranges_in_time_order_however_the_file_orders_them() -> None:
    found = find_steps(Builder().step(6, 200, 90).step(5, 100, 90).step(10, 300, 90).trace())
    assert found.number.tolist() == [5, 6, 10]
    assert found.start_ns.tolist() == [100_000, 200_000, 300_000]
    assert found.source == "profiler"


def test_of_two_ranges_of_one_step_the_longer_one_counts() -> None:
    # GIVEN a second copy of a step's range on another thread
    found = find_steps(Builder().step(5, 100, 90).on(9).step(5, 110, 20).trace())
    assert found.start_ns.tolist() == [100_000]
    assert found.end_ns.tolist() == [190_000]


def test_a_step_ends_where_the_next_begins_even_if_its_range_says_later() -> None:
    found = find_steps(Builder().step(1, 0, 150).step(2, 100, 100).trace())
    assert found.end_ns.tolist() == [100_000, 200_000]


def test_the_last_step_ends_before_the_profiler_is_stopped_in_it() -> None:
    # GIVEN steps that end 10 µs after their last operator, and a last one that stays open for 50 ms
    trace = Builder()
    for number, length in ((1, 100), (2, 100), (3, 50_000)):
        trace.step(number, number * 100, length).op("aten::mm", number * 100 + 10, 80)
    assert find_steps(trace.trace()).end_ns.tolist() == [200_000, 300_000, 400_000]


def test_a_thread_without_operators_that_goes_on_does_not_keep_the_last_step_open() -> None:
    # GIVEN a thread that pins batches, also while the profiler is being stopped
    trace = Builder()
    for number, length in ((1, 100), (2, 100), (3, 50_000)):
        trace.on(1).step(number, number * 100, length).op("aten::mm", number * 100 + 10, 80)
        trace.on(9).call(number * 100 + (49_000 if number == 3 else 20), correlation=number)
    assert find_steps(trace.trace()).end_ns.tolist() == [200_000, 300_000, 400_000]


def test_a_last_step_that_waits_as_the_others_do_keeps_its_end() -> None:
    # GIVEN steps that each end with 40 ms of sleep
    trace = Builder()
    for number in (1, 2, 3):
        trace.step(number, number * 50_000, 49_000).op("aten::mm", number * 50_000 + 10, 80)
    assert find_steps(trace.trace()).end_ns.tolist() == [99_000_000, 149_000_000, 199_000_000]


def test_a_time_between_two_steps_belongs_to_neither() -> None:
    found = find_steps(Builder().step(1, 100, 50).step(2, 200, 50).trace())
    assert found.at(np.array([99, 100, 149, 150, 200, 250]) * 1000).tolist() == [-1, 0, 0, -1, 1, -1]


@pytest.mark.parametrize(
    ("mark", "source", "starts"),
    [
        ("enumerate(DataLoader)#_Iter.__next__", "dataloader", [0, 100_000, 200_000]),
        ("Optimizer.step#SGD.step", "optimizer", [10_000, 110_000, 210_000]),
    ],
)
def test_without_profiler_ranges_steps_are_told_by_loader_or_optimizer(mark, source, starts) -> None:
    builder = Builder()
    for i in range(4):
        builder.range(mark, i * 100, 10)
    found = find_steps(builder.trace())
    assert found.source == source
    assert found.start_ns.tolist() == starts


def test_without_any_marks_the_whole_trace_is_one_step() -> None:
    # GIVEN too few marks for a period
    trace = Builder().op("aten::mm", 50, 10).range("enumerate(DataLoader)#x", 60, 5).trace()
    found = find_steps(trace)
    assert (found.source, len(found)) == ("trace", 1)
    assert found.at(np.array([50_000, 64_999])).tolist() == [0, 0]


def test_loader_marks_at_one_single_time_show_no_period() -> None:
    builder = Builder().op("aten::mm", 0, 100)
    for tid in (1, 2, 3, 4):
        builder.on(tid).range("enumerate(DataLoader)#x", 10, 5)
    assert find_steps(builder.trace()).source == "trace"


def test_an_event_at_time_zero_does_not_stretch_the_trace_over_fifty_years() -> None:
    now = 1.7e15
    trace = Builder().op("lost", 0, 1).op("aten::mm", now, 10).trace()
    start, end = extent(trace)
    assert end - start == 10_000


def test_an_empty_trace_has_one_empty_step() -> None:
    trace = Builder().event("something_else", "x", 5, 5).trace()
    assert extent(trace) == (0, 0)
    assert len(find_steps(trace)) == 1


def test_the_first_step_is_left_out() -> None:
    assert steady([10, 10, 10]) == [1, 2]


def test_a_single_step_is_all_there_is() -> None:
    assert steady([10]) == [0]


def test_steps_with_unusually_many_or_few_launches_are_left_out() -> None:
    assert steady([10, 10, 200, 11, 1]) == [1, 3]


def test_of_two_further_steps_the_first_one_tells_which_is_usual() -> None:
    assert steady([10, 10, 1000]) == [1]
    assert steady([10, 10, 2]) == [1]


def test_steps_without_launches_are_left_out_and_the_first_serves_if_only_it_has_any() -> None:
    assert steady([10, 10, 0]) == [1]
    assert steady([10, 0, 0]) == [0]


def test_a_host_only_trace_keeps_all_but_the_first() -> None:
    assert steady([0, 0, 0]) == [1, 2]


def test_a_step_with_validation_inside_is_left_out_unless_all_have_one() -> None:
    assert steady([10, 10, 12], interrupted=(2,)) == [1]
    assert steady([10, 10, 12], interrupted=(1, 2)) == [1, 2]


def test_batches_of_an_accumulation_cycle_differ_and_all_count() -> None:
    # GIVEN four batches to an optimizer step, which launches as much as the batches themselves
    assert steady([10, 10, 10, 10, 30], cycle=4) == [1, 2, 3, 4]
    assert steady([10, 10, 10, 10, 30]) == [1, 2, 3]


def test_a_host_bound_step_takes_the_distance_between_ends_on_the_host() -> None:
    # GIVEN steps of 100 on the host whose device work is 30
    end = np.array([80, 180, 280])
    times, side = step_times_ns(steps_of(3), np.array([False, True, True]), end, np.full(3, 30))
    assert (times.tolist(), side) == ([100, 100], "host")


def test_a_device_that_lags_behind_a_host_that_runs_ahead_sets_the_step_time() -> None:
    # GIVEN a host that is through with a step every 100 while the device needs 250
    end = np.array([300, 550, 800])
    times, side = step_times_ns(steps_of(3), np.array([False, True, True]), end, np.full(3, 245))
    assert (times.tolist(), side) == ([250, 250], "device")


def test_the_gap_between_two_ranges_counts_to_the_step_that_follows_it() -> None:
    steps = Steps(np.array([1, 2]), np.array([0, 130]), np.array([100, 230]), "profiler")
    times, _ = step_times_ns(steps, np.array([False, True]), np.array([-1, -1]), np.zeros(2, np.int64))
    assert times.tolist() == [130]


def test_steps_that_do_not_follow_each_other_are_not_subtracted() -> None:
    # GIVEN step 2 and, after a pause of the profiler, step 9
    steps = Steps(np.array([2, 9]), np.array([0, 10_000]), np.array([100, 10_120]), "profiler")
    times, _ = step_times_ns(steps, np.ones(2, bool), np.array([90, 10_110]), np.array([50, 50]))
    assert times.tolist() == [100, 120]


def test_device_time_of_a_step_is_at_least_its_own_work() -> None:
    # GIVEN an earlier step whose last kernel ends late, on another stream
    steps = steps_of(2, 10)
    times, side = step_times_ns(steps, np.array([False, True]), np.array([500, 510]), np.array([100, 300]))
    assert (times.tolist(), side) == ([300], "device")


def test_no_steady_step_has_no_time() -> None:
    times, side = step_times_ns(steps_of(2), np.zeros(2, bool), np.array([-1, -1]), np.zeros(2, np.int64))
    assert (len(times), side) == (0, "host")
