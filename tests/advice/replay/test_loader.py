"""Batches that come late, seen in the trace or not."""

from __future__ import annotations

import pytest

from advisor.advice.edits import Estimate, Input, Remove
from tests.advice.scripted import Script, rows_named, us

exactly = Estimate.exactly


def busy(s: Script, pieces: int, each_us: float = 2) -> None:
    """Operators one after the other, each with a profiler's share in it, and a launch at the end."""
    for _ in range(pieces):
        s.op(each_us)
    s.launch(5)


def test_a_wait_in_a_fetch_that_no_operator_borders_on_is_no_work_of_the_host():
    # GIVEN Python before and after the fetch, so that one gap between operators holds all three
    script = Script(lambda s: (s.work(40), s.fetch(20), s.work(30), s.launch(100)), workers_us=900)
    replay = script.replay()

    assert us(replay.profiled_ns) == pytest.approx(900, rel=0.01)
    # THEN a fetch is taken to need 300 µs at most by itself
    assert replay.graph.work_ns.sum() / len(replay.graph.windows) == pytest.approx(378_000, abs=3_000)
    # WHEN batches are always ready THEN a step takes the rest
    ready = us(replay.step_ns([Input(exactly(20_000.0), exactly(0.0))]))
    assert ready == pytest.approx(101, abs=8)


def test_workers_that_were_late_in_the_capture_are_as_late_without_the_profiler():
    # GIVEN workers that lived from their queue for part of the capture, and 1000 µs a step without it
    replay = Script(lambda s: (s.fetch(20), busy(s, 100)), workers_us=900).replay(baseline_step_ms=1.0)

    assert us(replay.loader_ns) == pytest.approx(1000)
    assert replay.result_scale == pytest.approx(1, abs=1e-6)
    assert us(replay.step_ns([Remove(rows_named(replay, "gemm"))])) == pytest.approx(1000)


def test_a_loop_that_is_slower_than_its_host_can_be_waits_for_workers_that_no_fetch_waited_for():
    # GIVEN 400 operators in 820 µs, whose recording alone costs 400 µs or more, and steps that take 800
    # without any recording
    script = Script(lambda s: (s.fetch(10), busy(s, 400)))
    replay = script.replay(baseline_step_ms=0.8)

    assert not replay.graph.loader.waits
    assert us(replay.loader_ns) == pytest.approx(800)
    # THEN nothing is won on the host
    assert us(replay.step_ns([Remove(rows_named(replay, "gemm"))])) == pytest.approx(800)


def test_a_host_with_few_events_is_as_slow_without_the_profiler_and_keeps_no_workers_waiting():
    # GIVEN the same time in few, long operators
    script = Script(lambda s: (s.fetch(10), busy(s, 20, each_us=40)))
    replay = script.replay(baseline_step_ms=0.8)

    assert replay.loader_ns == 0
    assert us(replay.critical_path().host_ns) == pytest.approx(800, rel=0.02)


def test_a_loop_without_workers_has_nobody_to_wait_for():
    script = Script(lambda s: (s.fetch(10, workers=False), busy(s, 400)))

    assert script.replay(baseline_step_ms=0.8).loader_ns == 0


def test_a_device_that_is_somewhat_slower_in_the_long_run_waits_for_no_workers():
    # GIVEN kernels of 2000 µs a step, and steps of 2150 without the profiler
    script = Script(lambda s: (s.fetch(10), busy(s, 100), s.launch(2_000)))

    assert script.replay(baseline_step_ms=2.15).loader_ns == 0
    # AND where they take half as long again something else holds them up
    assert us(script.replay(baseline_step_ms=3.0).loader_ns) == pytest.approx(3_000)
