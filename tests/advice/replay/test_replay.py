"""Steps whose time can be told in closed form, as captured and with edits."""

from __future__ import annotations

import pytest

from advisor.advice.edits import Estimate, Input, Remove, Retime
from tests.advice.scripted import COMPUTE, OP, RETURN, SIDE, Script, rows_named, us

exactly = Estimate.exactly


def approx(value: float) -> object:
    return pytest.approx(value, rel=0.01, abs=2)


def test_a_step_that_waits_for_its_kernels_takes_their_time():
    # GIVEN 100 µs of host work and two kernels of 250
    replay = Script(lambda s: (s.work(84), s.launch(250), s.launch(250, kernel="other"))).replay()

    # THEN kernels and their gaps set the pace, though the host is through long before
    assert us(replay.profiled_ns) == approx(502)
    assert replay.fidelity == pytest.approx(1, abs=0.01)
    # WHEN one shrinks a little THEN the whole of it is won
    assert us(replay.step_ns([Retime(rows_named(replay, "gemm"), exactly(50_000.0))])) == approx(302)
    # WHEN both shrink to nothing THEN the host's 100 µs are left
    assert us(replay.step_ns([Retime(rows_named(replay, ""), exactly(1_000.0))])) == approx(100)


def test_a_step_that_waits_for_its_host_gains_nothing_from_faster_kernels():
    # GIVEN a host that takes 1016 µs and kernels that take 200
    replay = Script(lambda s: (s.work(500), s.launch(100), s.work(500), s.launch(100))).replay()

    assert us(replay.profiled_ns) == approx(1016)
    rows = rows_named(replay, "gemm")
    assert us(replay.step_ns([Retime(rows, exactly(1_000.0))])) == approx(1016)
    # WHEN the launches go with their host part THEN their operators' time and the usual gap before them goes
    assert us(replay.step_ns([Remove(rows, with_host=False)])) == approx(1016)
    assert us(replay.step_ns([Remove(rows)])) < 1016 - 2 * OP + 1


def test_a_step_that_waits_for_workers_gains_nothing_until_they_are_faster():
    # GIVEN workers that deliver every 1000 µs, a host that needs 208 and a kernel of 300
    steps = Script(lambda s: (s.fetch(20), s.work(180), s.launch(300)), workers_us=1000)
    replay = steps.replay()

    assert us(replay.profiled_ns) == approx(1000)
    assert replay.graph.loader.waits
    assert us(replay.step_ns([Retime(rows_named(replay, "gemm"), exactly(10_000.0))])) == approx(1000)
    assert us(replay.step_ns([Remove(rows_named(replay, "gemm"))])) == approx(1000)
    # WHEN they deliver every 500 µs, or at once
    twice = Input(host_ns=exactly(20_000.0), period_ns=exactly(500_000.0))
    ready = Input(host_ns=exactly(20_000.0), period_ns=exactly(0.0))
    assert us(replay.step_ns([twice])) == approx(500)
    # THEN what was hidden behind them comes out: here the kernel
    assert us(replay.step_ns([ready])) == approx(301)


def test_workers_that_keep_up_set_no_pace():
    replay = Script(lambda s: (s.fetch(20), s.work(500), s.launch(100)), workers_us=300).replay()

    assert not replay.graph.loader.waits
    assert us(replay.profiled_ns) == approx(528)


def test_fetching_in_the_training_process_is_work_that_can_move_away():
    replay = Script(lambda s: (s.fetch(700, workers=False), s.work(100), s.launch(50))).replay()

    assert us(replay.profiled_ns) == approx(808)
    moved = Input(host_ns=exactly(10_000.0), period_ns=exactly(200_000.0))
    assert us(replay.step_ns([moved])) == approx(200)


def test_the_second_stream_of_two_that_wait_for_each_other_is_not_free():
    # GIVEN compute 300, then on another stream 200 that wait for it, then compute that waits for those
    def step(s: Script) -> None:
        s.launch(300)
        s.wait(SIDE, COMPUTE)
        s.launch(200, SIDE, kernel="side")
        s.wait(COMPUTE, SIDE)
        s.launch(100)

    steps = Script(step)
    replay = steps.replay()

    # THEN the step is the sum of all three
    assert steps.period_us == approx(603)
    assert us(replay.profiled_ns) == approx(603)
    # WHEN the middle one goes THEN the others are left
    assert us(replay.step_ns([Remove(rows_named(replay, "side"))])) == approx(402)
    assert us(replay.step_ns([Retime(rows_named(replay, "gemm"), exactly(10_000.0))])) == approx(223)


def test_a_stream_beside_another_hides_behind_it():
    # GIVEN 200 on a side stream that begin with the 300 on the main one
    def step(s: Script) -> None:
        s.launch(10, kernel="first")
        s.wait(SIDE, COMPUTE)
        s.launch(300)
        s.launch(200, SIDE, kernel="side")

    replay = Script(step).replay()

    assert us(replay.profiled_ns) == approx(312)
    assert us(replay.step_ns([Remove(rows_named(replay, "side"))])) == approx(312)
    # WHEN the main one shrinks THEN the other comes out from behind it
    assert us(replay.step_ns([Retime(rows_named(replay, "gemm"), exactly(20_000.0))])) == approx(201)


def test_backwards_thread_takes_its_turn_between_what_the_main_thread_does():
    # GIVEN the main thread's 100 µs, then backward's 400 with a launch, then 100 again
    def step(s: Script) -> None:
        s.work(92)
        s.launch(10)
        s.backward(lambda: (s.work(392), s.launch(20, kernel="gradient")))
        s.work(100)

    replay = Script(step).replay()

    assert us(replay.profiled_ns) == approx(600)
    # WHEN backward's launch goes THEN its engine node launches nothing any more and goes with it
    assert us(replay.step_ns([Remove(rows_named(replay, "gradient"))])) == approx(200)


def test_a_host_far_ahead_waits_in_its_launches_and_that_is_no_work():
    # GIVEN 1600 kernels of 20 µs a step, launched in 8 µs each, room for 500, and a wait for all of them
    def step(s: Script) -> None:
        for _ in range(1600):
            s.launch(20)
        s.sync()

    steps = Script(step, depth=500, warm=2)
    replay = steps.replay()

    # THEN the kernels set the pace
    assert us(replay.profiled_ns) == approx(steps.period_us) == approx(1600 * 21)
    assert replay.graph.depth == pytest.approx(500, abs=5)
    # AND the waiting inside launches is not host work that would be left over after them
    assert us(replay.step_ns([Retime(rows_named(replay, "gemm"), exactly(1_000.0))])) == approx(1600 * OP)


def test_a_queue_that_is_always_full_is_told_from_work_too():
    def step(s: Script) -> None:
        for _ in range(300):
            s.launch(20)

    steps = Script(step, depth=500, warm=5)
    replay = steps.replay()

    assert us(replay.profiled_ns) == approx(steps.period_us) == approx(300 * 21)
    assert us(replay.step_ns([Retime(rows_named(replay, "gemm"), exactly(1_000.0))])) < 300 * 13


def test_a_queue_limits_how_much_work_can_hide_a_pause_of_the_host():
    # GIVEN 1200 kernels of 20 µs, launched in 8 µs each with room for 500, then 15 ms of Python
    def step(s: Script) -> None:
        for _ in range(1200):
            s.launch(20)
        s.work(15_000)

    steps = Script(step, depth=500, warm=3)
    replay = steps.replay()

    # THEN it takes longer than either side needs, 24.6 and 25.2 ms: the host waits for 700 before the pause
    assert steps.period_us > 29_000
    assert us(replay.profiled_ns) == approx(steps.period_us)
    halved = Script(step, depth=500, warm=3, dur=lambda number, length: length / 2)
    assert us(replay.step_ns([Retime(rows_named(replay, "gemm"), exactly(10_000.0))])) == approx(
        halved.period_us
    )


def test_kernels_of_a_graph_run_one_after_the_other_behind_a_single_call():
    replay = Script(lambda s: (s.work(30), s.graph(100, 100, 100), s.work(10))).replay()

    assert us(replay.profiled_ns) == approx(303)
    rows = rows_named(replay, "in_graph")
    # WHEN a kernel in each shrinks THEN so does the step
    assert us(replay.step_ns([Retime(rows[::3], exactly(40_000.0))])) == approx(243)
    # AND removing one kernel of a graph leaves its call
    assert us(replay.step_ns([Retime(rows, exactly(1_000.0))])) == approx(42)


def test_a_wait_for_the_device_in_mid_step_adds_host_and_device():
    # GIVEN 100 µs before and 200 µs after a synchronisation on a kernel of 300
    steps = Script(lambda s: (s.work(92), s.launch(300), s.sync(), s.work(200)))
    replay = steps.replay()

    expected = 92 + 3 + 5 + 300 + RETURN + 200
    assert steps.period_us == approx(expected)
    assert us(replay.profiled_ns) == approx(expected)
    # WHEN the kernel shrinks THEN the host waits for less, whatever the capture's wait was
    assert us(replay.step_ns([Retime(rows_named(replay, "gemm"), exactly(100_000.0))])) == approx(
        expected - 200
    )


def test_without_edits_the_step_is_the_baseline():
    steps = Script(lambda s: (s.work(500), s.launch(100), s.work(500), s.launch(100)))

    # WHEN the loop is known to take 600 µs without the profiler
    replay = steps.replay(baseline_step_ms=0.6)

    assert us(replay.step_ns()) == 600
    assert us(replay.step_ns([])) == 600
    assert replay.debiased
    # AND an edit that changes nothing saves nothing
    rows = rows_named(replay, "gemm")
    assert us(replay.step_ns([Retime(rows, exactly(100_000.0))])) == pytest.approx(600)


def test_without_a_baseline_the_step_is_as_observed():
    replay = Script(lambda s: (s.work(500), s.launch(100))).replay()

    assert not replay.debiased
    assert replay.host_scale == 1
    assert us(replay.step_ns()) == approx(508)
