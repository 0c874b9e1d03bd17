"""The fastest right candidate is taken, if its gain is beyond the noise and costs no memory."""

import math

import pytest

from advisor.swap.decide import Terms, decide
from advisor.swap.site import Outcome
from tests.swap import planted
from tests.swap.planted import candidate, site, terms

MIB = 2**20


def only(outcomes: list[Outcome]) -> Outcome:
    (outcome,) = outcomes
    return outcome


def test_the_fastest_of_the_right_ones_is_taken_and_named() -> None:
    made = site(planted.wrong_value, candidate(planted.right, "good"), candidate(planted.right, "better"))
    times = {"original": 90e3, "good": 60e3, "better": 50e3, "wrong_value": 1.0}
    outcome = only(decide([made], terms(times)))
    assert outcome.chosen is made.candidates[2]
    assert outcome.reason == "1.80 times as fast"
    assert [bool(t.refused) for t in outcome.trials] == [True, False, False]
    assert outcome.trials[2].time_ns == 50e3
    assert outcome.trials[2].original_ns == 90e3


@pytest.mark.parametrize(
    ("times", "options", "words"),
    [
        ({"original": 50e3, "right": 60e3}, {}, "slower: takes 1.20 times as long"),
        ({"original": 50e3, "right": 49.5e3}, {}, "no faster beyond the noise"),
        ({"original": 50e3, "right": 40e3}, {"spread": 0.5}, "no faster beyond the noise"),
        ({"original": 3e3, "right": 1.5e3}, {}, "saves 1.5 µs a step, too little"),
    ],
)
def test_what_is_no_gain_is_refused(times, options, words: str) -> None:
    outcome = only(decide([site(planted.right)], terms(times, **options)))
    assert outcome.chosen is None
    assert words in outcome.reason


def test_a_small_gain_counts_if_there_are_many_calls() -> None:
    made = site(planted.right, calls_per_step=24)
    assert only(decide([made], terms({"original": 3e3, "right": 1.5e3}))).chosen is not None


@pytest.mark.parametrize(
    ("peak", "options", "taken"),
    [
        (10 * MIB, {}, True),
        (10.5 * MIB, {}, True),
        (12 * MIB, {}, False),
        (12 * MIB, {"allow_memory": True}, True),
        (8 * MIB, {}, True),
    ],
)
def test_memory_must_not_grow_unless_that_is_allowed(peak, options, taken: bool) -> None:
    told = terms({"original": 90e3, "right": 50e3}, {"original": 10 * MIB, "right": int(peak)}, **options)
    outcome = only(decide([site(planted.right)], told))
    assert (outcome.chosen is not None) == taken
    if not taken:
        assert outcome.reason == "needs 2.0 MiB more memory than the original"


@pytest.mark.parametrize(
    ("run_mib", "calls", "taken"), [(None, 1, False), (16_000, 1, True), (16_000, 24, False), (500, 1, False)]
)
def test_what_a_site_needs_more_is_held_against_the_runs_peak(run_mib, calls, taken: bool) -> None:
    # GIVEN 5.3 MiB more, over and over what the site itself may grow by
    peaks = {"original": 48 * MIB, "right": int(53.3 * MIB)}
    run = None if run_mib is None else run_mib * MIB
    told = terms({"original": 90e3, "right": 50e3}, peaks, run_peak_bytes=run)
    # THEN all calls of it together may take half a percent of what the run has at its peak
    assert (only(decide([site(planted.right, calls_per_step=calls)], told)).chosen is not None) == taken


def test_memory_that_the_backward_holds_on_to_is_found_on_the_cpu() -> None:
    def holds(module, x):
        big = x[..., None].expand(*x.shape, 4096) * x[..., None].detach().expand(*x.shape, 4096)
        return planted.right(module, x) + 0 * big.sigmoid()[..., 0]

    made = site(candidate(holds))
    outcome = only(decide([made], Terms(min_gain=-1e9, measure_s=0.0)))
    assert outcome.chosen is None
    assert outcome.trials[0].memory_bytes > outcome.trials[0].original_memory_bytes + MIB


def test_when_the_time_is_up_the_sites_that_are_left_stay_as_they_are() -> None:
    now = iter([0.0, 1.0, 11.0, 12.0])
    told = terms({"original": 90e3, "right": 50e3}, now_s=lambda: next(now), budget_s=10.0)
    first, second, third = decide([site(planted.right) for _ in range(3)], told)
    assert first.chosen is not None
    assert second.reason == third.reason == "not tried: the 10 s for trying were used up"


def test_progress_is_told_before_each_site() -> None:
    told: list[tuple[int, int, str]] = []
    sites = [site(planted.right), site(planted.raising)]
    decide(sites, terms({"original": 9e4, "right": 5e4}), lambda *at: told.append(at))
    assert told == [(0, 2, "norm: SlowNorm"), (1, 2, "norm: SlowNorm")]


def test_a_fault_at_one_site_is_its_reason_and_leaves_the_others() -> None:
    def lost(candidate):
        raise RuntimeError("the device is lost")

    broken = site(planted.right, prove=lost)
    fine = site(planted.right)
    first, second = decide([broken, fine], terms({"original": 9e4, "right": 5e4}))
    assert first.chosen is None
    assert first.reason == "could not be tried: raises RuntimeError: the device is lost"
    assert second.chosen is not None


def test_each_refusal_is_named_where_there_are_several() -> None:
    outcome = only(decide([site(planted.raising, planted.writes_input)], terms({"original": 1.0})))
    assert "raising: raises RuntimeError" in outcome.reason
    assert "writes_input: writes to its input 1" in outcome.reason
    assert all(t.time_ns is None or not math.isnan(t.time_ns) for t in outcome.trials)


@pytest.mark.parametrize(
    ("host", "options", "taken"),
    [(100e3, {}, True), (150e3, {}, False), (150e3, {"host_counts": False}, True)],
)
def test_what_the_device_saves_must_not_cost_the_host_more_than_it_may_have_to_spare(
    host: float, options, taken: bool
) -> None:
    # GIVEN 20 µs that are saved on the device
    told = terms({"original": 50e3, "right": 30e3}, hosts_ns={"original": 60e3, "right": host}, **options)
    outcome = only(decide([site(planted.right)], told))
    assert (outcome.chosen is not None) == taken
    if not taken:
        assert outcome.reason == "saves the device 20 µs and costs the host 90 µs more to launch"


def test_of_two_that_the_device_takes_about_equally_long_for_the_one_is_taken_that_the_host_launches_faster():
    made = site(candidate(planted.right, "busy"), candidate(planted.right, "calm"))
    times, hosts = {"original": 90e3, "busy": 50e3, "calm": 51e3}, {"original": 9e4, "busy": 9e4, "calm": 4e4}
    assert only(decide([made], terms(times, hosts_ns=hosts))).chosen.name == "calm"
    assert only(decide([made], terms(times, hosts_ns=hosts, host_counts=False))).chosen.name == "busy"
