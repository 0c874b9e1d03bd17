"""Rules over traces of real loops: none breaks or speaks in another's name, and a known fix is foretold."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from advisor.advice.advise import advise
from advisor.advice.finding import Advised
from advisor.advice.rule import all_rules
from advisor.roofline.analysis import Analysis, analyse_timeline
from advisor.trace.link import load

SHARED = Path(__file__).parents[4] / "shared"
#: The largest say no more than the others.
TRACES = [
    path
    for part in ("traces/h200", "traces/public", "truth/payoff")
    for path in sorted((SHARED / part).glob("*.json.gz"))
    if path.stat().st_size < 1_100_000
]
FAMILIES = ("input", "host", "optimizer", "memory", "communication", "generation", "capture")
#: What only one family may say of itself in ids and titles, since readers search for it.
OWN_WORDS = {
    "dataloader": "input",
    "optimizer": "optimizer",
    "pageable": "input",
    "launch": "host",
    "sync": "host",
}

pytestmark = pytest.mark.skipif(not TRACES, reason="no shared traces beside this checkout")


@cache
def analysis_of(path: Path) -> Analysis:
    baseline = None
    if path.parent.name == "payoff":
        baseline = payoff()[path.name.removesuffix(".json.gz")]["before_ms"]
    return analyse_timeline(load(path), baseline_step_ms=baseline)


@cache
def advised(path: Path) -> Advised:
    return advise(analysis_of(path), [rule for rule in all_rules() if rule.family in FAMILIES])


def payoff() -> dict:
    return json.loads((SHARED / "truth/payoff/payoff.json").read_text())["cases"]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_no_rule_breaks_and_none_speaks_in_anothers_name(path):
    found = advised(path)

    assert found.failed == []
    for advice in found.advice:
        said = f"{advice.rule} {advice.finding.title}".lower()
        family = advice.rule.partition(".")[0]
        assert [word for word, owner in OWN_WORDS.items() if word in said and owner != family] == []
        assert advice.finding.fix
        assert all(advice.finding.evidence)


@pytest.mark.parametrize(
    ("case", "family", "at_most"),
    # Neither is bound by its launches, its waits or its optimizer, and neither waits for input.
    [("naive_attention", FAMILIES, 0.05), ("pad_vocab", FAMILIES, 0.05)],
)
def test_nothing_much_is_promised_where_the_fault_is_another(case, family, at_most):
    path = SHARED / f"truth/payoff/{case}.json.gz"
    step_ns = payoff()[case]["before_ms"] * 1e6

    for advice in advised(path).advice:
        if advice.saving and advice.rule.partition(".")[0] in family:
            assert advice.saving.likely_ns < at_most * step_ns, advice.rule


def test_what_workers_bring_is_foretold():
    case = payoff()["dataloader_workers"]
    found = {
        advice.rule: advice for advice in advised(SHARED / "truth/payoff/dataloader_workers.json.gz").advice
    }

    saving = found["input.dataloader"].saving

    realised_ns = (case["before_ms"] - case["after_ms"]) * 1e6
    assert abs(saving.likely_ns - realised_ns) < 0.08 * case["before_ms"] * 1e6
    assert saving.low_ns <= realised_ns <= saving.high_ns


def test_the_same_loop_with_and_without_workers_bears_the_forecast_out():
    # GIVEN a ResNet-50 on a V100, captured with workers and without
    without, with_workers = (SHARED / f"traces/public/v100_resnet50_workers{n}.json.gz" for n in (0, 4))
    before_ns, after_ns = (analysis_of(path).profiled_step_ns for path in (without, with_workers))

    found = {advice.rule: advice.saving for advice in advised(without).advice}

    assert abs(found["input.dataloader"].likely_ns - (before_ns - after_ns)) < 0.08 * before_ns
    assert "input.dataloader" not in {advice.rule for advice in advised(with_workers).advice}
