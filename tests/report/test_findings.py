"""Advice in the report: what the rules say becomes findings, and every renderer tells them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from advisor.report import findings_view, html, markdown, model, terminal
from advisor.report.build import analyze
from advisor.report.findings import _sentence
from tests.report import reports

DATA = Path(__file__).parents[1] / "data"


def test_a_saving_is_told_with_its_share_and_range() -> None:
    saving = model.Saving(low=1.0, likely=2.0, high=3.0)
    finding = model.Finding(rule="a.b", title="t", saving_ms=saving, saving_fraction=0.1)
    assert findings_view.gain(finding) == "saves 2.00 ms a step (10.0%)"
    assert findings_view.between(saving) == "between 1.00 ms and 3.00 ms"


def test_a_saving_that_may_be_a_loss_says_so() -> None:
    saving = model.Saving(low=-2.0, likely=0.0, high=0.5)
    finding = model.Finding(rule="a.b", title="t", saving_ms=saving, saving_fraction=0.0)
    assert findings_view.gain(finding) == "likely saves nothing"
    assert findings_view.between(saving) == "between 2.00 ms slower and 500 µs faster"


def test_a_saving_too_small_to_see_is_told_as_none_everywhere(rich_report: model.Report) -> None:
    # GIVEN a likely saving of a thousandth of the step
    saving = model.Saving(low=-1.0, likely=0.05, high=1.0)
    finding = model.Finding(rule="a.b", title="t", saving_ms=saving, saving_fraction=0.001)
    rich_report.findings, rich_report.together = [finding], None
    # WHEN it is told on the terminal THEN it reads as on the page: nothing
    out = io.StringIO()
    terminal.render(rich_report, Console(file=out, width=120))
    assert findings_view.gain(finding) == "likely saves nothing"
    assert "50.0 µs" not in out.getvalue()


@pytest.mark.parametrize(
    ("title", "told"),
    [
        ("cross-entropy over 8192 x 50257", "Cross-entropy over 8192 x 50257"),
        ("launch-bound: the device idles", "Launch-bound: the device idles"),
        ("bf16 would do", "bf16 would do"),
        ("zero_grad fills gradients", "zero_grad fills gradients"),
        ("AdamW steps by small kernels", "AdamW steps by small kernels"),
        ("3 syncs a step", "3 syncs a step"),
    ],
)
def test_a_title_begins_with_a_capital_unless_with_a_name(title: str, told: str) -> None:
    assert _sentence(title) == told


def test_an_unknown_saving_is_not_nought() -> None:
    assert findings_view.gain(model.Finding(rule="a.b", title="t")) == "saving not known"


def test_a_known_fault_is_found_with_its_saving(shared: Path) -> None:
    # GIVEN a loop with explicit attention, whose step takes 35.2 ms without the profiler
    report = analyze(shared / "truth/payoff/naive_attention.json.gz", baseline_step_ms=35.248)
    # THEN the advice is there, with a saving told against that step
    found = next(finding for finding in report.findings if finding.rule == "attention.explicit")
    assert report.replay is not None
    assert report.replay.step_ms == pytest.approx(35.248)
    assert report.replay.replayed_ms == pytest.approx(report.replay.observed_ms, rel=0.03)
    assert found.saving_ms is not None
    assert 0 < found.saving_ms.low <= found.saving_ms.likely <= found.saving_ms.high < 35.248
    assert found.saving_fraction == pytest.approx(found.saving_ms.likely / 35.248)
    assert found.fix
    assert report.findings[0].saving_ms is not None
    assert report.together is not None
    assert report.together.saving_ms.likely >= report.findings[0].saving_ms.likely - 1e-6


def test_a_baseline_that_does_not_fit_the_trace_is_remarked_upon(shared: Path) -> None:
    # GIVEN a loop whose device work alone takes 31 ms a step
    trace = shared / "truth/payoff/naive_attention.json.gz"
    # WHEN a step without the profiler is said to take a third of that
    codes = [remark.code for remark in analyze(trace, baseline_step_ms=11.0).data_quality]
    # THEN that is remarked upon, and not where it fits
    assert "baseline.misfit" in codes
    assert "baseline.misfit" not in [
        remark.code for remark in analyze(trace, baseline_step_ms=35.248).data_quality
    ]


def test_findings_come_largest_first_and_no_rule_broke(shared: Path) -> None:
    report = analyze(shared / "traces/h200/resnet50_amp16.json.gz")
    likely = [finding.saving_ms.likely if finding.saving_ms else 0.0 for finding in report.findings]
    assert likely == sorted(likely, reverse=True)
    assert not [remark for remark in report.data_quality if remark.code == "advice.failed"]
    told = {finding.rule for finding in report.findings}
    assert not told & {passed.rule for passed in report.passed}
    assert not told & set(report.not_applicable)


def test_every_renderer_tells_change_note_and_what_passed(rich_report: model.Report) -> None:
    out = io.StringIO()
    terminal.render(rich_report, Console(file=out, width=120))
    on_terminal, page, text = out.getvalue(), html.render(rich_report), markdown.render(rich_report)
    for shown in (on_terminal, page):
        assert "waits for its input" in shown
        assert "advisor explain shapes.vocabulary" in on_terminal
    assert "likely saves nothing" in page
    assert "400 µs slower" in page
    assert "Without Lightning" in page
    assert "torch.nn.Linear(768, 50304" in page
    assert "1 check passed, 1 did not apply" in page
    assert "fp32 matrix products run in TF32" in page
    assert "The first 2 made together" in page
    assert "waits for its input" in text
    assert "1 check passed" in text


def test_a_report_without_advice_has_no_such_section() -> None:
    assert "What to change" not in html.render(reports.unknown())
