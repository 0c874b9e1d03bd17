"""What waits for what, told from calls and times alone: traces name neither streams nor events."""

from __future__ import annotations

import numpy as np
import pytest

from advisor.advice.edits import Estimate, Remove, Retime
from advisor.advice.replay.graph import SYNC_ALL, SYNC_SLOT, SYNC_STREAM
from tests.advice.scripted import COMPUTE, RETURN, SIDE, UNRECORDED, Script, rows_named, us

exactly = Estimate.exactly


def approx(value: float) -> object:
    return pytest.approx(value, rel=0.01, abs=2)


def kinds(script: Script) -> set[int]:
    items = script.replay().graph.items
    return set(items.kind.tolist()) & {SYNC_ALL, SYNC_SLOT, SYNC_STREAM}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudaStreamSynchronize", SYNC_STREAM),
        ("hipStreamSynchronize", SYNC_STREAM),
        ("cuStreamSynchronize_ptsz", SYNC_STREAM),
        ("cudaDeviceSynchronize", SYNC_ALL),
        ("hipDeviceSynchronize", SYNC_ALL),
        ("cuCtxSynchronize", SYNC_ALL),
        ("cudaEventSynchronize", SYNC_SLOT),
        ("hipEventSynchronize", SYNC_SLOT),
        ("cudaFree", SYNC_ALL),
        ("hipFree", SYNC_ALL),
    ],
)
def test_waiting_calls_are_known_by_what_their_names_say(name, kind):
    steps = Script(lambda s: (s.work(20), s.launch(300), s.sync(name=name), s.work(100)))

    assert kinds(steps) == {kind}
    replay = steps.replay()
    # THEN what they wait is not the host's own time
    expected = 20 + 3 + 5 + 300 + RETURN + 100
    assert us(replay.profiled_ns) == approx(expected)
    assert us(replay.step_ns([Retime(rows_named(replay, "gemm"), exactly(100_000.0))])) == approx(
        expected - 200
    )


def test_memory_that_is_freed_while_the_device_works_on_was_not_waited_for():
    # GIVEN a cudaFree that returns long before the kernel ends
    steps = Script(lambda s: (s.launch(300), s.sync(name="cudaFree", until=s.now + 50), s.work(100)))
    assert kinds(steps) == set()


def test_an_event_is_waited_for_without_what_was_launched_after_it():
    # GIVEN a wait for the first of two kernels, while the second runs on
    def step(s: Script) -> None:
        s.launch(200)
        first = s.free()
        s.launch(300, kernel="second")
        s.sync(name="cudaEventSynchronize", until=first)
        s.work(400)

    steps = Script(step)
    replay = steps.replay()

    assert us(replay.profiled_ns) == approx(steps.period_us)
    # WHEN the first shrinks THEN the host goes on earlier; the second hides behind what it does
    before = us(replay.profiled_ns)
    assert us(replay.step_ns([Retime(rows_named(replay, "gemm"), exactly(100_000.0))])) == approx(
        before - 100
    )
    assert us(replay.step_ns([Retime(rows_named(replay, "second"), exactly(200_000.0))])) == approx(before)


def test_a_wait_that_cost_nothing_may_cost_something_once_the_kernel_is_slower():
    replay = Script(lambda s: (s.launch(10), s.work(400), s.sync(), s.work(50))).replay()
    assert us(replay.profiled_ns) == approx(461)

    slower = replay.step_ns([Retime(rows_named(replay, "gemm"), exactly(900_000.0))])
    assert us(slower) == approx(3 + 5 + 900 + RETURN + 50)


def test_a_stream_waits_for_another_though_no_event_is_recorded_in_the_trace():
    def step(s: Script) -> None:
        s.launch(300)
        s.wait(SIDE, COMPUTE, UNRECORDED)
        s.launch(200, SIDE, kernel="side")
        s.wait(COMPUTE, SIDE, UNRECORDED)
        s.launch(100)

    replay = Script(step).replay()

    assert us(replay.profiled_ns) == approx(603)
    assert us(replay.step_ns([Retime(rows_named(replay, "side"), exactly(50_000.0))])) == approx(453)


def test_a_stream_waits_for_another_though_no_call_tells_of_it():
    # GIVEN work on a side stream that begins, late, just when the other stream's ends
    def step(s: Script) -> None:
        s.launch(300)
        s.wait(SIDE, COMPUTE, ())
        s.launch(200, SIDE, kernel="side")
        s.sync(SIDE)

    replay = Script(step).replay()

    assert len(replay.graph.streams.waits)
    before = us(replay.profiled_ns)
    assert us(replay.step_ns([Retime(rows_named(replay, "gemm"), exactly(100_000.0))])) == approx(
        before - 200
    )


def test_a_wait_that_the_times_contradict_is_none():
    # GIVEN a wait call between launches on two streams that run at once all the same
    def step(s: Script) -> None:
        s.launch(300)
        s._free[SIDE], kept = s._free.get(SIDE, 0.0), s._free.get(SIDE, 0.0)
        s.wait(SIDE, COMPUTE)
        s._free[SIDE] = kept
        s.launch(200, SIDE, kernel="side")
        s.sync(None)

    replay = Script(step).replay()

    assert not len(replay.graph.streams.waits)


def test_a_copy_back_to_pageable_memory_holds_the_host():
    steps = Script(lambda s: (s.launch(300), s.copy(50, blocking=True), s.work(200)))
    replay = steps.replay()

    assert us(replay.profiled_ns) == approx(steps.period_us)
    faster = us(replay.step_ns([Retime(rows_named(replay, "gemm"), exactly(100_000.0))]))
    assert faster == approx(steps.period_us - 200)


def test_a_copy_that_returns_at_once_holds_nobody():
    replay = Script(lambda s: (s.launch(300), s.copy(50, blocking=False), s.work(200))).replay()
    assert us(replay.profiled_ns) == approx(352)


def test_a_step_that_took_far_longer_than_the_others_is_not_played():
    # GIVEN five steps of which one was held up for 700 µs
    held = iter([0] * 23 + [700] + [0] * 10)
    steps = Script(lambda s: (s.work(500 + next(held)), s.launch(10)), recorded=6)
    replay = steps.replay()

    assert len(replay.graph.windows) == 5
    assert us(replay.profiled_ns) == approx(508)


def test_a_trace_with_device_work_alone_takes_its_own_time():
    script = Script(lambda s: s.launch(100))
    script.builder.events = [e for e in script.builder.events if e["cat"] in ("kernel", "user_annotation")]

    replay = script.replay()

    assert replay.fidelity == pytest.approx(1, abs=0.03)
    assert replay.step_ns([Remove(np.arange(3))]) <= replay.step_ns()


def test_an_asynchronous_copy_within_an_idle_device_is_not_waited_for():
    # GIVEN a small copy and a fill that are over before their calls return, as a profiler slows these down
    def step(s: Script) -> None:
        for name, cat in (
            ("Memcpy DtoD (Device -> Device)", "gpu_memcpy"),
            ("Memset (Device)", "gpu_memset"),
        ):
            s._correlation += 1
            call = "cudaMemcpyAsync" if cat == "gpu_memcpy" else "cudaMemsetAsync"
            s._emit("call", s.now, correlation=s._correlation, name=call, dur=20)
            s._work(name, s.now + 5, 1, COMPUTE, cat, bytes=4)
            s.now += 20
        s.work(100)
        s.launch(50)

    steps = Script(step)

    assert kinds(steps) == set()
    replay = steps.replay()
    assert us(replay.profiled_ns) == approx(148)
    # WHEN the kernel is slower than the host THEN it alone is the step
    slower = us(replay.step_ns([Retime(rows_named(replay, "gemm"), exactly(400_000.0))]))
    assert slower == approx(400 + 1 + 1 + 3)


def staged(nbytes: int, took_us: float, ends_us: float) -> Script:
    """A pageable copy behind a kernel, in a call that returns so much before the copy is through."""

    def step(s: Script) -> None:
        s.launch(300)
        s._correlation += 1
        begin, number = s.now, s._correlation
        end = s._work(
            "Memcpy HtoD (Pageable -> Device)", begin + 5, took_us, COMPUTE, "gpu_memcpy", bytes=nbytes
        )
        length = end - ends_us - begin
        s._emit("call", begin, correlation=number, name="cudaMemcpyAsync", dur=length)
        s.now += length
        s.work(60)

    return Script(step)


def test_a_large_pageable_copy_is_waited_for_though_its_call_ends_with_the_last_piece_staged():
    replay = staged(38_000_000, 500, ends_us=13).replay()

    assert us(replay.profiled_ns) == pytest.approx(300 + 500 + 60, rel=0.03)
    # WHEN it goes from pinned memory THEN the wait goes with it
    faster = us(replay.step_ns([Retime(rows_named(replay, "Memcpy"), exactly(50_000.0))]))
    assert faster == pytest.approx(300 + 50 + 60, abs=30)


def test_a_call_that_ends_long_before_its_pageable_copy_did_not_wait():
    assert kinds(staged(38_000_000, 500, ends_us=250)) == set()


def test_a_small_pageable_copy_that_returns_at_once_is_not_waited_for():
    def step(s: Script) -> None:
        s.work(100)
        s._correlation += 1
        s._emit("call", s.now, correlation=s._correlation, name="cudaMemcpyAsync", dur=20)
        s._work("Memcpy HtoD (Pageable -> Device)", s.now + 5, 1, COMPUTE, "gpu_memcpy", bytes=32)
        s.now += 20
        s.launch(50)

    assert kinds(Script(step)) == set()


def test_a_copy_by_a_call_that_is_not_asynchronous_is_waited_for_whatever_its_memory():
    def step(s: Script) -> None:
        s.work(100)
        s._correlation += 1
        s._emit("call", s.now, correlation=s._correlation, name="cudaMemcpy", dur=30)
        s._work("Memcpy DtoH (Device -> Pinned)", s.now + 5, 20, COMPUTE, "gpu_memcpy", bytes=4096)
        s.now += 30

    assert kinds(Script(step)) == {SYNC_SLOT}
