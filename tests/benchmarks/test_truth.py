"""The model agrees with hardware counters on captures of operators."""

import pytest

from benchmarks import truth

OWN = list(truth.own_captures())


def _assert_reached(outcome):
    figures = {goal.name: getattr(outcome.agreement, goal.attribute) for goal in truth.GOALS}
    assert outcome.joined == outcome.kernels
    assert outcome.short_of() == [], figures


def test_the_goals_are_reached_on_the_reference_capture(shared):
    folder = shared / "truth"
    _assert_reached(truth.judge(folder / "ops_h200.json.gz", folder / "ops_h200_counters.csv.gz"))


@pytest.mark.skipif(not OWN, reason="no capture in tests/data")
@pytest.mark.parametrize(("trace", "counters"), OWN, ids=[trace.name for trace, _ in OWN])
def test_the_goals_are_reached_on_the_projects_own_captures(trace, counters):
    _assert_reached(truth.judge(trace, counters))
