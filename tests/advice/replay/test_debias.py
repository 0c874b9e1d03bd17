"""What comes out of host work when the step time without the profiler is known."""

from __future__ import annotations

import pytest

from advisor.advice.edits import Estimate, Remove, Retime
from advisor.advice.replay.debias import FetchTime, Speed, likeliest_speeds, seen_drift
from tests.advice.scripted import Script, rows_named, us

exactly = Estimate.exactly


def _pieces(s: Script, kernel: float = 5) -> None:
    """Forty short pieces of host work with a launch each."""
    for number in range(40):
        s.work(22)
        s.launch(
            kernel, kernel="even" if number % 2 else "odd", op=f"aten::{'even' if number % 2 else 'odd'}"
        )


def test_short_pieces_of_host_work_shrink_until_the_step_takes_the_baseline():
    # GIVEN 1200 µs of host work as profiled, of which 700 are without the profiler
    replay = Script(_pieces).replay(baseline_step_ms=0.7)

    assert replay.profiled_ns == pytest.approx(1_200_000, rel=0.01)
    assert replay.host_scale == pytest.approx(7 / 12, abs=0.01)
    # WHEN half of the launches go THEN half of the real time is won, not of the profiled
    assert us(replay.step_ns([Remove(rows_named(replay, "even"))])) == pytest.approx(350, rel=0.02)


def test_an_unedited_step_takes_exactly_the_baseline():
    for baseline_ms in (0.3, 0.7, 1.1999, 1.3, 2.0):
        replay = Script(_pieces).replay(baseline_step_ms=baseline_ms)
        rows = rows_named(replay, "even")

        assert replay.step_ns() == baseline_ms * 1e6
        unchanged = replay.step_ns([Retime(rows, exactly(5_000.0))])
        assert unchanged == pytest.approx(baseline_ms * 1e6, rel=1e-9)


def test_where_the_device_sets_the_pace_host_work_is_taken_as_usually_profiled():
    # GIVEN kernels of 4000 µs under a host of 1200, and a baseline one percent below what the kernels need
    replay = Script(lambda s: _pieces(s, kernel=100)).replay(baseline_step_ms=4.0)

    assert us(replay.profiled_ns) == pytest.approx(4040, rel=0.001)
    # THEN the percent says nothing of the host
    assert replay.host_scale == pytest.approx(0.45, abs=0.02)
    assert replay.result_scale == pytest.approx(4000 / 4040, rel=0.001)
    # AND when kernels shrink to nothing the host comes out, as it really is
    found = us(replay.step_ns([Retime(rows_named(replay, ""), exactly(1_000.0))]))
    assert found == pytest.approx(1200 * 0.45 * 4000 / 4040, rel=0.05)


def test_a_long_piece_of_host_work_hardly_swells():
    # GIVEN a piece of 3000 µs, which is no profiler's work, beside 1200 µs in short ones
    replay = Script(lambda s: (s.work(3000), _pieces(s))).replay(baseline_step_ms=3.7)

    # THEN what the profiler cost comes out of the short ones
    short = rows_named(replay, "")
    left = us(replay.step_ns([Remove(short)]))
    assert left == pytest.approx(3000, rel=0.03)


def test_python_frames_recorded_in_a_piece_let_it_swell():
    def step(s: Script) -> None:
        for number in range(100):
            s._emit("python", f"frame {number}", s.now + 30 * number, 20)
        s.work(3000)
        s.launch(5)

    replay = Script(step).replay(baseline_step_ms=1.8)

    assert replay.host_scale == pytest.approx(0.6, abs=0.02)
    assert replay.result_scale == pytest.approx(1, abs=0.02)


def test_making_batches_in_the_training_process_may_drift_by_itself():
    # GIVEN a fetch of 5000 µs and 1200 µs of short pieces, and a baseline as long as the profiled step
    replay = Script(lambda s: (s.fetch(5000, workers=False), _pieces(s))).replay(baseline_step_ms=6.2)

    # THEN the loop without the profiler fetched more slowly, rather than that the profiler cost nothing
    assert replay.speeds.likely.fetch > 1.03
    assert replay.host_scale < 0.9
    assert us(replay.step_ns()) == 6200


def test_the_likeliest_factor_is_the_one_that_gives_the_target():
    host_bound = likeliest_speeds(lambda speed: 1000.0 * speed.host, 450.0).likely
    assert host_bound.host == pytest.approx(0.45, abs=0.01)
    assert host_bound.fetch == 1

    # WHEN the factor makes no difference THEN it is the usual one
    device_bound = likeliest_speeds(lambda speed: 1000.0, 990.0).likely
    assert device_bound.host == pytest.approx(0.45, abs=0.01)

    # WHEN only fetching makes one THEN it explains what it can
    fetching = likeliest_speeds(lambda speed: 1000.0 * speed.fetch, 1100.0, fetch=FetchTime()).likely
    assert fetching.fetch == pytest.approx(1.1, abs=0.02)
    assert fetching.host == pytest.approx(0.45, abs=0.01)
    assert Speed() == Speed(1.0, 1.0)


def test_a_host_that_was_slow_throughout_the_capture_is_not_taken_for_a_slow_device():
    # GIVEN kernels of 2000 µs that the host's long pieces of 400 and short ones do not keep up with
    def step(s: Script) -> None:
        for _ in range(10):
            s.work(400)
            s.launch(200)

    replay = Script(step).replay(baseline_step_ms=2.1)

    assert replay.profiled_ns == pytest.approx(4_080_000, rel=0.01)
    # THEN the kernels still take what they take, and the host is what was slower
    assert replay.result_scale == pytest.approx(1, abs=0.06)
    halved = [Retime(rows_named(replay, ""), exactly(100_000.0))]
    assert us(replay.step_ns(halved)) > 1_600


def test_a_baseline_below_the_devices_own_time_is_left_to_the_scale():
    replay = Script(lambda s: _pieces(s, kernel=100)).replay(baseline_step_ms=2.0)

    assert us(replay.step_ns()) == 2_000
    assert replay.result_scale == pytest.approx(0.5, abs=0.02)


def test_batches_of_other_steps_tell_how_long_they_usually_take():
    # GIVEN a host of 1000 µs besides fetches of 1000 in the played steps, and steps of 2000 without recording
    def step_ns(speed: Speed) -> float:
        return 1000.0 * speed.host + 1000.0 * speed.fetch

    # WHEN all fetches took half as long again THEN the profiler is found to cost what it usually does
    usual = likeliest_speeds(step_ns, 1950.0, fetch=FetchTime(1.5, 0.1)).likely
    assert usual.host == pytest.approx(0.45, abs=0.02)
    assert usual.fetch == pytest.approx(1.5, abs=0.02)
    # AND fetches that hardly differ leave the difference to the host
    steady = likeliest_speeds(step_ns, 1950.0, fetch=FetchTime(1.0, 0.01)).likely
    assert steady.host > 0.85


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({}, 0.0),
        ({"baseline": {"median_ms": 2.0}}, 0.0),
        ({"baseline": {"median_ms": 1.0}, "after": {"median_ms": None}}, 1 / 3),
        ({"baseline": {"median_ms": 2.0}, "after": {"median_ms": 2.6}}, 0.2828 / 2.2),
        ({"baseline": "2.0", "after": {"median_ms": True}}, 0.0),
    ],
)
def test_measurements_of_one_loop_tell_by_what_they_differ(block, expected):
    assert seen_drift(block, 2e6) == pytest.approx(expected, abs=1e-3)


def test_a_loop_whose_measurements_differ_has_a_wider_range():
    def told(**context: object) -> float:
        script = Script(lambda s: _pieces(s, kernel=100))
        script.builder.context(**context)
        replay = script.replay(baseline_step_ms=4.0)
        return replay.outcome([Retime(rows_named(replay, "even"), exactly(50_000.0))]).noise_ns

    assert told(after={"median_ms": 4.8}) > 5 * told(after={"median_ms": 4.0})


def test_the_hosts_time_differs_more_from_run_to_run_than_the_devices():
    def noise_ns(kernel: float, baseline_ms: float) -> float:
        replay = Script(lambda s: _pieces(s, kernel=kernel)).replay(baseline_step_ms=baseline_ms)
        return replay.outcome([Remove(rows_named(replay, "even"), with_host=False)]).noise_ns / baseline_ms

    assert noise_ns(1, 0.6) > 2 * noise_ns(100, 4.0)
