"""Rules over traces of real loops: none breaks or speaks in another's name; what was measured is foretold."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from advisor.advice.advise import advise
from advisor.advice.finding import Advice, Advised
from advisor.roofline.analysis import Analysis, analyse_timeline
from advisor.swap.site import KINDS
from advisor.trace.link import load
from tests.advice.rules.models import MODEL

SHARED = Path(__file__).parents[4] / "shared"
PAYOFF = SHARED / "truth" / "payoff"
#: The largest say no more than the others.
TRACES = [
    path
    for part in ("traces/h200", "traces/public", "truth/payoff")
    for path in sorted((SHARED / part).glob("*.json.gz"))
    if path.stat().st_size < 1_100_000
]
#: Families that look at the loop around the device's work.
LOOP = ("input", "host", "optimizer", "memory", "communication", "generation", "capture")
#: What only one of them may say of itself in ids and titles, since readers search for it.
OWN_WORDS = {
    "dataloader": "input",
    "optimizer": "optimizer",
    "pageable": "input",
    "launch": "host",
    "sync": "host",
}

pytestmark = pytest.mark.skipif(not TRACES, reason="no shared traces beside this checkout")


@cache
def measured() -> dict:
    return json.loads((PAYOFF / "payoff.json").read_text())["cases"]


@cache
def analysis_of(path: Path, baseline_ms: float | None = None) -> Analysis:
    if path.parent == PAYOFF:
        baseline_ms = measured()[path.name.removesuffix(".json.gz")]["before_ms"]
    return analyse_timeline(load(path), baseline_step_ms=baseline_ms)


@cache
def advised(path: Path, baseline_ms: float | None = None) -> Advised:
    return advise(analysis_of(path, baseline_ms))


def said(families: tuple[str, ...], path: Path, baseline_ms: float | None = None) -> list[Advice]:
    """What the rules of these families say, the most worthwhile first."""
    return [one for one in advised(path, baseline_ms).advice if one.rule.partition(".")[0] in families]


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_no_rule_breaks_and_none_speaks_in_anothers_name(path):
    assert advised(path).failed == []

    for advice in advised(path).advice:
        assert advice.finding.fix
        assert all(advice.finding.evidence)
        assert advice.finding.swap in (None, *KINDS)
    for advice in said(LOOP, path):
        words = f"{advice.rule} {advice.finding.title}".lower()
        family = advice.rule.partition(".")[0]
        assert [word for word, owner in OWN_WORDS.items() if word in words and owner != family] == []


@pytest.mark.parametrize(
    ("case", "rule"), [("naive_attention", "attention.explicit"), ("pad_vocab", "shape.alignment")]
)
def test_a_saving_that_was_measured_is_the_one_told(case, rule):
    found, (first, *_) = measured()[case], said(MODEL, PAYOFF / f"{case}.json.gz")

    assert first.rule == rule
    realised_ns = (found["before_ms"] - found["after_ms"]) * 1e6
    assert abs(first.saving.likely_ns - realised_ns) < 0.03 * found["before_ms"] * 1e6


@pytest.mark.parametrize("case", ["naive_attention", "pad_vocab"])
def test_nothing_much_is_promised_where_the_fault_is_another(case):
    # GIVEN loops bound neither by their launches, their waits nor their optimizer, which wait for no input
    step_ns = measured()[case]["before_ms"] * 1e6

    for advice in said(LOOP, PAYOFF / f"{case}.json.gz"):
        if advice.saving:
            assert advice.saving.likely_ns < 0.05 * step_ns, advice.rule


def test_nothing_is_promised_to_the_work_of_a_loop_that_waits_for_input():
    (advice,) = said(MODEL, PAYOFF / "bias_gelu_layernorm.json.gz")

    assert advice.rule == "fusion.chain"
    assert advice.saving.likely_ns < 0.05 * measured()["bias_gelu_layernorm"]["before_ms"] * 1e6


def test_written_out_parts_of_a_llama_are_all_found():
    found = {advice.rule for advice in said(MODEL, SHARED / "traces/h200/llama_eager_bf16.json.gz", 30.0)}

    assert {"attention.explicit", "fusion.norm", "fusion.rope", "shape.alignment"} <= found


def test_what_workers_bring_is_foretold():
    case = measured()["dataloader_workers"]
    found = {advice.rule: advice for advice in said(LOOP, PAYOFF / "dataloader_workers.json.gz")}

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
