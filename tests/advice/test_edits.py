"""What each edit does to a step, alone and together with others."""

from __future__ import annotations

import numpy as np
import pytest

from advisor.advice.edits import (
    DropSync,
    Estimate,
    Fuse,
    HostRemove,
    HostTime,
    Input,
    Insert,
    LaunchAsGraph,
    Overlap,
    Remove,
    Retime,
)
from advisor.advice.replay import Replay
from advisor.roofline.analysis import analyse_timeline
from tests.advice.scripted import OP, RETURN, SYNC, Script, rows_named, us
from tests.trace.builder import Builder

exactly = Estimate.exactly


def approx(value: float) -> object:
    return pytest.approx(value, rel=0.01, abs=2)


def calls_named(replay: Replay, text: str) -> np.ndarray:
    trace = replay.graph.analysis.timeline.trace
    return np.flatnonzero([text in trace.names[i] for i in trace.runtime.name.tolist()])


def ops_named(replay: Replay, text: str) -> np.ndarray:
    trace = replay.graph.analysis.timeline.trace
    return np.flatnonzero([text in trace.names[i] for i in trace.ops.name.tolist()])


@pytest.fixture
def device_bound() -> Replay:
    """Three kernels: first 100, middle 200, last 300; the host needs 124."""
    return Script(
        lambda s: (
            s.work(100),
            s.launch(100, kernel="first"),
            s.launch(200, kernel="middle"),
            s.launch(300, kernel="last"),
        )
    ).replay()


@pytest.fixture
def host_bound() -> Replay:
    """Three operators with a kernel of 10 each and 100 of Python before each; nothing waits."""
    return Script(
        lambda s: (
            s.work(100),
            s.launch(10, op="aten::first", kernel="first"),
            s.work(100),
            s.launch(10, op="aten::middle", kernel="middle"),
            s.work(100),
            s.launch(10, op="aten::last", kernel="last"),
        )
    ).replay()


def test_fused_launches_run_once_in_the_place_of_the_last(device_bound):
    first, middle = rows_named(device_bound, "first"), rows_named(device_bound, "middle")
    groups = [np.array(pair) for pair in zip(first.tolist(), middle.tolist(), strict=True)]

    assert us(device_bound.step_ns([Fuse(groups, exactly(150_000.0))])) == approx(150 + 300 + 2)
    each = np.full(len(groups), 50_000.0)
    assert us(device_bound.step_ns([Fuse(groups, exactly(each))])) == approx(50 + 300 + 2)


def test_fusing_takes_the_hosts_part_of_all_but_the_last(host_bound):
    first, middle = rows_named(host_bound, "first"), rows_named(host_bound, "middle")
    groups = [np.array(pair) for pair in zip(first.tolist(), middle.tolist(), strict=True)]

    # THEN one operator goes, with the usual Python before an operator
    assert us(host_bound.step_ns([Fuse(groups, exactly(1_000.0))])) == approx(324 - 108)
    assert us(host_bound.step_ns([Fuse(groups, exactly(1_000.0), with_host=False)])) == approx(324)
    # AND what the fused one costs besides is added
    assert us(host_bound.step_ns([Fuse(groups, exactly(1_000.0), host_ns=30_000.0)])) == approx(
        324 - 108 + 30
    )


def test_launches_may_take_longer_too(device_bound):
    assert us(device_bound.step_ns([Retime(rows_named(device_bound, "last"), exactly(500_000.0))])) == approx(
        803
    )


def test_removing_beats_fusing_which_beats_another_time(device_bound):
    middle, last = (rows_named(device_bound, name) for name in ("middle", "last"))
    fuse = Fuse(
        [np.array(pair) for pair in zip(middle.tolist(), last.tolist(), strict=True)], exactly(250_000.0)
    )
    shorter = Retime(last, exactly(10_000.0))

    # WHEN a launch is fused and takes another time THEN the fused time holds
    assert us(device_bound.step_ns([shorter, fuse])) == approx(100 + 250 + 2)
    assert us(device_bound.step_ns([fuse, shorter])) == approx(100 + 250 + 2)
    # WHEN the whole group is removed as well THEN nothing of it is left
    gone = Remove(np.concatenate([middle, last]))
    assert us(device_bound.step_ns([fuse, gone])) == approx(100 + OP)
    # WHEN two times are given THEN the shorter
    assert us(
        device_bound.step_ns([Retime(last, exactly(50_000.0)), Retime(last, exactly(90_000.0))])
    ) == approx(353)


def test_of_groups_that_share_a_launch_the_one_that_saves_more_is_fused(device_bound):
    first, middle, last = (rows_named(device_bound, name).tolist() for name in ("first", "middle", "last"))
    small = Fuse([np.array(pair) for pair in zip(first, middle, strict=True)], exactly(290_000.0))
    large = Fuse([np.array(pair) for pair in zip(middle, last, strict=True)], exactly(100_000.0))

    alone = device_bound.step_ns([large])

    assert device_bound.step_ns([small, large]) == pytest.approx(alone)
    assert device_bound.step_ns([large, small]) == pytest.approx(alone)


def test_what_edits_take_away_twice_goes_once(host_bound):
    first = rows_named(host_bound, "first")
    once = host_bound.step_ns([Remove(first)])

    assert us(once) == approx(324 - 108)
    assert host_bound.step_ns([Remove(first), Remove(first)]) == pytest.approx(once)
    same = HostTime(ops_named(host_bound, "first"), exactly(0.0))
    assert host_bound.step_ns([Remove(first), same]) == pytest.approx(once)


def test_an_operator_that_still_launches_something_keeps_its_host_time():
    # GIVEN an operator around two launches
    def step(s: Script) -> None:
        start = s.now
        s.launch(10, op="aten::inner", kernel="one")
        s.launch(10, op="aten::inner", kernel="two")
        s.now += 84
        s._emit("op", "aten::outer", start, 100)

    replay = Script(step).replay()
    one, two = rows_named(replay, "one"), rows_named(replay, "two")

    # WHEN one goes THEN only its own operator does; WHEN both go THEN the one around them too
    assert us(replay.step_ns()) == approx(100)
    assert us(replay.step_ns([Remove(one)])) == approx(100 - OP)
    assert us(replay.step_ns([Remove(one), Remove(two)])) == approx(0)
    assert us(replay.step_ns([Remove(one, with_host=False), Remove(two)])) == approx(100 - OP)


def test_a_new_launch_takes_device_time_or_host_time(device_bound, host_bound):
    after = rows_named(device_bound, "first")
    assert us(device_bound.step_ns([Insert(after, exactly(70_000.0))])) == approx(603 + 71)
    assert us(device_bound.step_ns([Insert(after, exactly(70_000.0), host_ns=900_000.0)])) == approx(
        124 + 900
    )
    after = rows_named(host_bound, "first")
    assert us(host_bound.step_ns([Insert(after, exactly(5_000.0), host_ns=40_000.0)])) == approx(324 + 40)


def test_a_dropped_wait_lets_host_and_device_overlap():
    # GIVEN a host that waits for a kernel of 300 and then works for 200
    replay = Script(lambda s: (s.work(92), s.launch(300), s.sync(), s.work(200))).replay()
    assert us(replay.step_ns()) == approx(95 + 5 + 300 + RETURN + 200)

    dropped = DropSync(calls_named(replay, "Synchronize"))

    # THEN the slower of the two is left, with the call's own cost
    assert us(replay.step_ns([dropped])) == pytest.approx(300 + SYNC, abs=4)
    faster = Retime(rows_named(replay, "gemm"), exactly(1_000.0))
    assert us(replay.step_ns([dropped, faster])) == pytest.approx(300 + SYNC, abs=4)


def test_a_wait_goes_with_the_operator_that_makes_it():
    # GIVEN an operator that copies a number back and waits for it
    def step(s: Script) -> None:
        s.launch(300)
        start = s.now
        s.launch(2, op="aten::_local_scalar_dense", kernel="back")
        s.sync()
        s._emit("op", "aten::item", start, s.now - start)
        s.work(200)

    replay = Script(step).replay()
    assert us(replay.step_ns()) > 500

    assert us(replay.step_ns([Remove(rows_named(replay, "back"))])) == approx(301)


def test_operators_with_another_share_of_their_host_time():
    replay = Script(lambda s: (s.op(400, "aten::slow"), s.work(100), s.launch(10))).replay()

    assert us(replay.step_ns([HostTime(ops_named(replay, "slow"), exactly(0.25))])) == approx(208)
    assert us(replay.step_ns([HostTime(ops_named(replay, "slow"), exactly(2.0))])) == approx(908)


def test_where_such_operators_nest_the_outermost_counts():
    def step(s: Script) -> None:
        start = s.now
        s.now += 100
        s.op(300, "aten::inner")
        s._emit("op", "aten::outer", start, 400)
        s.launch(10)

    replay = Script(step).replay()
    outer, inner = ops_named(replay, "outer"), ops_named(replay, "inner")
    factor = np.concatenate([np.full(len(outer), 0.5), np.full(len(inner), 0.1)])

    assert us(replay.step_ns([HostTime(np.concatenate([outer, inner]), exactly(factor))])) == approx(208)


def test_a_stretch_of_host_time_goes(host_bound):
    # GIVEN the 100 µs of Python before each middle operator
    ops = host_bound.graph.analysis.timeline.trace.ops
    middle = ops_named(host_bound, "middle")
    end = ops.ts_ns[middle]

    edit = HostRemove(end - 100_000, end, ops.track[middle])
    assert us(host_bound.step_ns([edit])) == approx(224)
    # AND half of it where only half is named
    half = HostRemove(end - 50_000, end, ops.track[middle])
    assert us(host_bound.step_ns([half])) == approx(274)
    # AND half of it where half of it may have to stay
    kept = HostRemove(end - 100_000, end, ops.track[middle], left=Estimate(1.0, 0.5, 0.0))
    assert us(host_bound.step_ns([kept])) == approx(274)
    assert us(host_bound.step_ns([kept], "pessimistic")) == approx(324)
    # AND nothing where another thread is
    other = HostRemove(end - 100_000, end, ops.track[middle] + 1)
    assert us(host_bound.step_ns([other])) == approx(324)


def test_a_copy_beside_the_computation_costs_nothing_while_it_is_the_shorter():
    # GIVEN a blocking copy of 300 before kernels of 400, and 50 of Python
    steps = Script(lambda s: (s.copy(300, blocking=True), s.work(50), s.launch(400)))
    replay = steps.replay()
    copies = rows_named(replay, "Memcpy")
    # THEN nothing overlaps
    assert us(replay.step_ns()) == approx(steps.period_us) == approx(300 + 50 + 400 + 16)

    assert us(replay.step_ns([Overlap(copies, exactly(300_000.0))])) == approx(401)
    assert us(replay.step_ns([Overlap(copies, exactly(500_000.0))])) == approx(501)
    slower = Retime(rows_named(replay, "gemm"), exactly(10_000.0))
    assert us(replay.step_ns([Overlap(copies, exactly(250_000.0)), slower])) == approx(251)


@pytest.fixture
def capturable() -> Replay:
    """An operator of 100 that launches nothing, then three that do, with 100 of Python between them."""
    return Script(
        lambda s: (
            s.op(100, "aten::outside"),
            s.launch(10, op="aten::first", kernel="first"),
            s.work(100),
            s.launch(10, op="aten::middle", kernel="middle"),
            s.work(100),
            s.launch(10, op="aten::last", kernel="last"),
        )
    ).replay()


def test_launching_as_a_graph_leaves_one_call_and_the_kernels(capturable):
    assert us(capturable.step_ns()) == approx(324)
    rows = rows_named(capturable, "")

    # THEN the Python between the launches goes with them; what is before the first stays
    one_call = LaunchAsGraph(rows, host_ns=exactly(20_000.0))
    assert us(capturable.step_ns([one_call])) == approx(100 + 20)
    # AND when the kernels take longer than that, they set the pace, a gap of 1 µs apart
    costly = Insert(rows, exactly(50_000.0), host_ns=0.0)
    assert us(capturable.step_ns([one_call, costly])) == approx(3 * 62)


def test_a_graph_keeps_the_host_work_of_launches_outside_it(capturable):
    outer = np.concatenate([rows_named(capturable, "first"), rows_named(capturable, "last")])

    # WHEN the middle operator stays outside THEN it keeps its time; the Python around it is captured
    found = us(capturable.step_ns([LaunchAsGraph(outer, host_ns=exactly(20_000.0))]))
    assert found == approx(100 + 20 + OP)


def test_a_stall_of_the_device_stays_in_a_graph():
    # GIVEN a kernel that begins 2 ms after the one before it for no reason in the trace
    builder, at = Builder(), 1_000.0
    for step in range(3):
        begin = at
        for number, start in enumerate((20.0, 130.0, 2_060.0)):
            correlation = 10 * step + number + 1
            builder.op("aten::mm", at, OP)
            builder.call(at + 3, correlation=correlation, dur=2)
            builder.work("gemm", begin + start, 15, correlation=correlation)
            at += OP + 100
        builder.call(at, correlation=9_000 + step, name="cudaDeviceSynchronize", dur=begin + 2_080 - at)
        at = begin + 2_090
        builder.step(step, begin, at - begin)
    replay = Replay(analyse_timeline(builder.join()))

    in_graph = LaunchAsGraph(rows_named(replay, "gemm"), host_ns=exactly(5_000.0))

    assert us(replay.step_ns([in_graph])) > 1_800


def test_of_two_ways_to_fetch_the_faster_holds_as_a_whole():
    replay = Script(lambda s: (s.fetch(1_000, workers=False), s.launch(50))).replay()
    slow = Input(exactly(1_500_000.0), exactly(0.0))
    workers = Input(exactly(100_000.0), exactly(400_000.0))

    # THEN neither the host time of one with the period of the other, nor the one that comes last
    alone = us(replay.step_ns([workers]))
    assert alone == approx(400)
    assert us(replay.step_ns([slow, workers])) == approx(alone)
    assert us(replay.step_ns([workers, slow])) == approx(alone)


def test_cases_of_an_estimate_order_the_outcome(device_bound):
    edit = Retime(rows_named(device_bound, "last"), Estimate(200_000.0, 100_000.0, 50_000.0))

    cases = [us(device_bound.step_ns([edit], case)) for case in ("pessimistic", "likely", "optimistic")]

    assert cases == [approx(503), approx(403), approx(353)]


def test_an_edit_of_no_launches_changes_nothing(device_bound):
    none = np.zeros(0, np.int64)
    edits = [
        Retime(none, exactly(0.0)),
        Remove(none),
        Fuse([], exactly(np.zeros(0))),
        Insert(none, exactly(0.0)),
        DropSync(none),
        HostTime(none, exactly(0.0)),
        HostRemove(none, none, none),
        Overlap(none, exactly(0.0)),
        LaunchAsGraph(none, exactly(0.0)),
    ]
    assert device_bound.step_ns(edits) == pytest.approx(device_bound.step_ns())


def test_rows_may_be_given_as_a_mask(device_bound):
    rows = rows_named(device_bound, "last")
    mask = np.zeros(len(device_bound.graph.analysis.timeline.launches), bool)
    mask[rows] = True

    assert device_bound.step_ns([Remove(mask)]) == device_bound.step_ns([Remove(rows)])
