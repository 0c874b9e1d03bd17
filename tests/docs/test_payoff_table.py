"""The table of predicted and realised savings says what was measured."""

from __future__ import annotations

import re

import pytest

from advisor.advice.rule import all_rules

PAGE = "Before.\n<!-- payoff: from here -->\nold\n<!-- payoff: to here -->\nAfter.\n"


@pytest.fixture(scope="module")
def generator(load_generator):
    return load_generator("generate_payoff")


def _case(**changes):
    case = {"rule": "a.fault", "title": "a fault", "fix": "x | y", "range_only": "", "before_ms": 20.0}
    return {**case, "after_ms": 15.0, **changes}


def _found(**changes):
    found = {"silent": False, "predicted": 30.0, "realised": 25.0, "low": 20.0, "high": 35.0, "inside": True}
    return {**found, **changes}


def _results(**cases):
    return {
        "command": "python -m benchmarks.payoff",
        "date": "2020-02-02",
        "device": "Toy",
        "versions": {"torch": "2.0", "lightning": "2.4"},
        "figures": [
            {"name": "pairs", "value": 2, "goal": "≥ 16", "reached": False},
            {"name": "worst error, points", "value": 5.0, "goal": "≤ 20", "reached": True},
        ],
        "cases": cases,
    }


def test_the_stored_page_is_in_step_with_the_results(generator):
    stored = generator.TARGET.read_text(encoding="utf-8")
    assert stored == generator.render(stored, generator.load()), "run: python docs/generate_payoff.py"


def test_without_results_the_page_says_that_nothing_was_measured(generator):
    page = generator.render(PAGE, None)
    assert "Not yet measured" in page
    assert page.startswith("Before.\n")
    assert page.endswith("\nAfter.\n")
    assert "old" not in page


def test_a_pair_shows_what_was_predicted_and_what_came(generator):
    page = generator.render(PAGE, _results(slow=_case(verdict=_found())))
    assert (
        "| `slow` | a fault | x \\| y | [`a.fault`](rules.md#afault) | 20.00 → 15.00 | 25.0 | 30.0 "
        "| 20.0 to 35.0 |  |" in page
    )
    assert "Measured on 2020-02-02 on Toy with torch 2.0, Lightning 2.4" in page


def test_what_was_missed_is_marked(generator):
    page = generator.render(
        PAGE,
        _results(
            outside=_case(verdict=_found(inside=False)),
            silent=_case(verdict=_found(silent=True, predicted=0.0)),
            another=_case(range_only="another fix", verdict=_found(inside=False)),
        ),
    )
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert rows["outside"].endswith("| outside |")
    assert "| silent |  |" in rows["silent"]
    assert rows["another"].endswith("| range only, outside |")
    assert "Range only: another fix." in page
    assert "| pairs | 2 | ≥ 16 | **not reached** |" in page
    assert "| worst error, points | 5 | ≤ 20 | reached |" in page


def test_well_tuned_loops_show_their_alarms(generator):
    calm = _case(rule="", title="calm", verdict={"alarms": []})
    loud = _case(rule="", title="loud", verdict={"alarms": [{"rule": "x.y", "points": 3.5}]})
    page = generator.render(PAGE, _results(calm=calm, loud=loud))
    assert "| calm | 20.00 | none |" in page
    assert "| loud | 20.00 | `x.y` 3.5 |" in page


def test_a_second_rendering_changes_nothing(generator):
    once = generator.render(PAGE, _results(slow=_case(verdict=_found())))
    assert generator.render(once, _results(slow=_case(verdict=_found()))) == once


def test_a_page_without_its_marks_is_refused(generator):
    with pytest.raises(ValueError, match="payoff: from here"):
        generator.render("no marks", None)


def test_every_rule_that_the_page_names_exists(generator):
    page = generator.TARGET.read_text(encoding="utf-8")
    named = set(re.findall(r"advisor explain ([a-z_]+(?:\.[a-z_]+)?)\b", page))
    ids = {rule.id for rule in all_rules()} | {rule.family for rule in all_rules()}
    assert named
    assert named <= ids
