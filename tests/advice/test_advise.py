"""Rules are asked, their savings played, and what is worth nothing is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from advisor.advice.advise import advise, saving_of
from advisor.advice.edits import Edit, Estimate, Insert, Remove, Retime
from advisor.advice.finding import Finding
from advisor.advice.loop import Loop
from advisor.advice.rule import NotApplicable, Rule
from advisor.roofline.analysis import Analysis
from tests.advice.scripted import Script, rows_named, us

exactly = Estimate.exactly


@pytest.fixture
def analysis() -> Analysis:
    """Kernels "long" of 600 µs and "short" of 400, one after the other; the host needs 116."""
    script = Script(lambda s: (s.work(100), s.launch(600, kernel="long"), s.launch(400, kernel="short")))
    return script.replay(baseline_step_ms=1.002).graph.analysis


def a_rule(id: str, edits: Callable[[Loop], list[Edit]], note: str = "", wrong: bool = False) -> Rule:
    def audit(loop: Loop) -> Iterator[Finding]:
        yield Finding(title=id, evidence=[], edits=edits(loop), fix="", note=note, wrong=wrong)

    return Rule(id, "", "", "", "", audit)


def shorter(kernel: str, by_us: float) -> Callable[[Loop], list[Edit]]:
    def edits(loop: Loop) -> list[Edit]:
        rows = rows_named(loop.replay, kernel)
        return [Retime(rows, exactly(loop.rows.dur_ns[rows] - by_us * 1e3))]

    return edits


def test_findings_come_with_the_largest_saving_first_and_together(analysis):
    found = advise(
        analysis, [a_rule("a.small", shorter("short", 100)), a_rule("a.large", shorter("long", 300))]
    )

    assert [advice.rule for advice in found.advice] == ["a.large", "a.small"]
    savings = [us(advice.saving.likely_ns) for advice in found.advice]
    assert savings == [pytest.approx(300, abs=2), pytest.approx(100, abs=2)]
    together, rules = found.together
    assert us(together.likely_ns) == pytest.approx(400, abs=2)
    assert rules == ["a.large", "a.small"]


def test_wrong_results_come_before_any_saving_and_take_nothing_from_it(analysis):
    rules = [a_rule("a.large", shorter("long", 300)), a_rule("z.wrong", lambda loop: [], wrong=True)]
    found = advise(analysis, rules)

    assert [advice.rule for advice in found.advice] == ["z.wrong", "a.large"]
    assert found.advice[0].saving is None
    together, told = found.together
    assert told == ["a.large"]
    assert us(together.likely_ns) == pytest.approx(300, abs=2)


def test_savings_of_the_same_launches_do_not_add_up(analysis):
    def gone(loop: Loop) -> list[Edit]:
        return [Remove(rows_named(loop.replay, "long"))]

    found = advise(analysis, [a_rule("a.gone", gone), a_rule("a.shorter", shorter("long", 300))])

    together, _ = found.together
    assert together.likely_ns == pytest.approx(found.advice[0].saving.likely_ns)


def test_what_saves_next_to_nothing_is_told_only_if_it_has_something_to_say(analysis):
    quiet, talking = (
        a_rule("a.quiet", shorter("long", 1)),
        a_rule("a.talking", shorter("long", 1), note="why"),
    )

    found = advise(analysis, [quiet, talking])

    assert [advice.rule for advice in found.advice] == ["a.talking"]
    assert found.passed == ["a.quiet"]
    assert found.together is None


def test_a_rule_without_its_subject_and_one_that_breaks_cost_nothing_else(analysis):
    def lacking(_: Loop) -> list[Edit]:
        raise NotApplicable("no subject")

    def broken(_: Loop) -> list[Edit]:
        raise ZeroDivisionError("odd trace")

    rules = [a_rule("a.lacking", lacking), a_rule("a.broken", broken), a_rule("a.fine", shorter("long", 300))]
    found = advise(analysis, rules)

    assert found.not_applicable == ["a.lacking"]
    assert found.failed == [("a.broken", "ZeroDivisionError: odd trace")]
    assert [advice.rule for advice in found.advice] == ["a.fine"]


def test_a_saving_below_what_two_runs_differ_by_says_so(analysis):
    rules = [a_rule("a.lost", shorter("long", 10)), a_rule("a.clear", shorter("long", 300))]
    rules += [a_rule("a.talking", shorter("long", 10), note="why")]

    notes = {advice.rule: advice.finding.note for advice in advise(analysis, rules).advice}

    # THEN nine in ten times two measurements of 1 ms agree to 18 µs
    assert notes["a.lost"] == "within this loop's noise: two runs of it may differ by 18.0 µs"
    assert notes["a.talking"] == f"{notes['a.lost']}; why"
    assert notes["a.clear"] == ""


def test_a_range_holds_the_estimates_and_what_measurements_differ_by(analysis):
    replay = Script(lambda s: (s.work(100), s.launch(1000))).replay(baseline_step_ms=1.001)
    rows = rows_named(replay, "gemm")

    sure = saving_of([Retime(rows, exactly(500_000.0))], replay)
    unsure = saving_of([Retime(rows, Estimate(800_000.0, 500_000.0, 400_000.0))], replay)

    # THEN about a percent of either measurement, nine in ten times, around what is sure
    assert us(sure.likely_ns) == pytest.approx(500, abs=2)
    assert us(sure.high_ns - sure.likely_ns) == pytest.approx(1.28 * 11.2, rel=0.05)
    assert us(sure.likely_ns - sure.low_ns) == pytest.approx(1.28 * 11.2, rel=0.05)
    assert us(unsure.low_ns) == pytest.approx(200 - 14, abs=3)
    assert us(unsure.high_ns) == pytest.approx(600 + 14, abs=3)


def test_without_a_baseline_a_saving_on_the_host_may_be_nothing():
    # GIVEN 1200 µs of host work as profiled, and 880 of kernels in every other launch
    def step(s: Script) -> None:
        for number in range(40):
            s.work(22)
            s.launch(1 if number % 2 else 43, kernel="tiny" if number % 2 else "large", op="aten::mm")

    replay = Script(step).replay()
    saving = saving_of([Remove(rows_named(replay, "tiny"))], replay)

    # THEN at the profiled speed the host's time is won until the kernels take longer
    assert us(saving.likely_ns) == pytest.approx(1200 - 880, rel=0.05)
    # AND at the speed that hosts usually have without a profiler the kernels always do
    assert us(saving.low_ns) < 40
    assert us(saving.high_ns) < us(saving.likely_ns) + 1.28 * 0.05 * 1200


def test_what_adds_nothing_to_the_findings_before_it_is_not_named_with_them(analysis):
    def gone(loop: Loop) -> list[Edit]:
        return [Remove(rows_named(loop.replay, "long"))]

    rules = [
        a_rule("a.gone", gone),
        a_rule("a.other", shorter("short", 100)),
        a_rule("a.part", shorter("long", 300)),
    ]
    found = advise(analysis, rules)

    together, names = found.together
    assert names == ["a.gone", "a.other"]
    assert together.likely_ns >= max(advice.saving.likely_ns for advice in found.advice)


def test_what_takes_from_anothers_saving_is_left_out_of_both_together(analysis):
    def much_host(loop: Loop) -> list[Edit]:
        rows = rows_named(loop.replay, "short")
        return [Remove(rows), Insert(rows_named(loop.replay, "long"), exactly(1_000.0), host_ns=800_000.0)]

    found = advise(analysis, [a_rule("a.large", shorter("long", 500)), a_rule("a.greedy", much_host)])

    alone = max(advice.saving.likely_ns for advice in found.advice)
    assert found.together[0].likely_ns >= alone


def test_a_change_that_likely_costs_time_is_no_advice(analysis):
    def slower(loop: Loop) -> list[Edit]:
        rows = rows_named(loop.replay, "long")
        now = loop.rows.dur_ns[rows].astype(float)
        return [Retime(rows, Estimate(now * 1.3, now * 1.1, now * 0.5))]

    assert advise(analysis, [a_rule("a.slower", slower)]).passed == ["a.slower"]
    # WHEN the rule has something to say of it THEN it is told
    assert len(advise(analysis, [a_rule("a.slower", slower, note="why")]).advice) == 1


def test_no_saving_is_more_than_the_whole_step():
    replay = Script(lambda s: s.launch(1000)).replay(baseline_step_ms=1.001)
    saving = saving_of([Retime(rows_named(replay, "gemm"), exactly(0.0))], replay)
    assert saving.likely_ns <= saving.high_ns <= replay.step_ns()
