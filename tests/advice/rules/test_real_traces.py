"""The model-side rules over real traces: none breaks, and what they promise came true where that is known."""

import json
from functools import cache
from pathlib import Path

import pytest

from advisor.advice.advise import advise
from advisor.advice.finding import Advised
from advisor.advice.rule import all_rules
from advisor.roofline.analysis import analyse_timeline
from advisor.trace.link import load

FAMILIES = ("attention", "fusion", "kernel", "layout", "loss", "precision", "shape")
LOOPS = ("gpt_compiled_bf16", "gpt_naive_fp32", "llama_eager_bf16", "resnet50_amp16", "ddp2_gpt_rank0")


@cache
def said(path: Path, baseline_ms: float | None = None) -> Advised:
    analysis = analyse_timeline(load(path), baseline_step_ms=baseline_ms)
    return advise(analysis, [one for one in all_rules() if one.family in FAMILIES])


def payoff(shared: Path, name: str) -> tuple[Advised, dict]:
    folder = shared / "truth" / "payoff"
    case = json.loads((folder / "payoff.json").read_text())["cases"][name]
    return said(folder / f"{name}.json.gz", case["before_ms"]), case


@pytest.mark.parametrize("name", LOOPS)
def test_no_rule_breaks_on_a_loop(shared, name):
    assert said(shared / "traces" / "h200" / f"{name}.json.gz").failed == []


def test_no_rule_breaks_on_traces_of_other_devices_and_ages(shared):
    paths = sorted((shared / "traces" / "public").glob("*.json*"), key=lambda path: path.stat().st_size)
    broken = {path.name: said(path).failed for path in paths[:12]}
    assert {name: failed for name, failed in broken.items() if failed} == {}


@pytest.mark.parametrize(
    ("name", "rule"), [("naive_attention", "attention.explicit"), ("pad_vocab", "shape.alignment")]
)
def test_saving_that_was_measured_is_the_one_told(shared, name, rule):
    advised, case = payoff(shared, name)
    first = advised.advice[0]
    assert first.rule == rule
    realised_ns = (case["before_ms"] - case["after_ms"]) * 1e6
    assert abs(first.saving.likely_ns - realised_ns) < 0.03 * case["before_ms"] * 1e6


def test_nothing_is_promised_to_a_loop_that_waits_for_input(shared):
    advised, case = payoff(shared, "bias_gelu_layernorm")
    assert [one.rule for one in advised.advice] == ["fusion.chain"]
    assert advised.advice[0].saving.likely_ns < 0.05 * case["before_ms"] * 1e6


def test_written_out_parts_of_a_llama_are_all_found(shared):
    found = {one.rule for one in said(shared / "traces" / "h200" / "llama_eager_bf16.json.gz", 30.0).advice}
    assert {"attention.explicit", "fusion.norm", "fusion.rope", "shape.alignment"} <= found
