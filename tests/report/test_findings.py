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
    assert findings_view.spread(finding) == "between 1.00 ms and 3.00 ms"


def test_a_saving_that_may_be_a_loss_says_so() -> None:
    saving = model.Saving(low=-2.0, likely=0.0, high=0.5)
    finding = model.Finding(rule="a.b", title="t", saving_ms=saving, saving_fraction=0.0)
    assert findings_view.between(saving) == "between 2.00 ms slower and 500 µs faster"
    # BUT where nothing is likely, only the best case is worth a word
    assert findings_view.gain(finding) == "likely saves nothing"
    assert findings_view.spread(finding) == "at best 500 µs"


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
    assert findings_view.gain(model.Finding(rule="a.b", title="t")) == "no saving told"


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
    assert "at best 300 µs" in page
    assert "Without Lightning" in page
    assert "torch.nn.Linear(768, 50304" in page
    assert "1 check passed, 1 did not apply" in page
    assert "fp32 matrix products run in TF32" in page
    assert "The first 2 made together" in page
    assert "waits for its input" in text
    assert "1 check passed" in text


def saves(rule: str, likely: float) -> model.Finding:
    saving = model.Saving(low=likely - 0.5, likely=likely, high=likely + 0.5)
    return model.Finding(rule=rule, title=rule, saving_ms=saving, saving_fraction=likely / 40)


def common(*rules: str) -> model.Together:
    saving = model.Saving(low=12.0, likely=13.0, high=14.0)
    return model.Together(rules=list(rules), saving_ms=saving, saving_fraction=0.3)


def made(report: model.Report) -> tuple[str, str]:
    told = findings_view.combined(report)
    assert told is not None
    return told.made, told.besides


def test_what_was_made_together_is_told_as_it_was() -> None:
    report = reports.rich()
    report.findings = [saves("a.a", 8.0), saves("b.b", 6.0), saves("c.c", 4.0)]
    # GIVEN the first two of three, the third adding nothing THEN that is said
    report.together = common("a.a", "b.b")
    assert made(report) == ("the first 2 made together", "on top of that, c.c would add nothing")
    # AND where one in the middle adds nothing, these are not "the first"
    report.together.rules = ["a.a", "c.c"]
    assert made(report) == ("2 of these made together", "on top of that, b.b would add nothing")
    # AND where one does it all, that is told too
    report.together.rules = ["a.a"]
    assert made(report) == ("the first alone", "on top of that, b.b and c.c would add nothing")
    # AND what comes after as many as are ever made together was not tried
    report.findings += [saves(f"e.{place}", 1.0) for place in range(3)]
    report.together.rules = ["a.a", "b.b", "c.c", "e.0", "e.1"]
    assert made(report) == ("the first 5 made together", "")


def test_wrong_results_are_told_as_such_before_all_savings() -> None:
    report = reports.rich()
    wrong = model.Finding(
        rule="z.wrong", title="Gradients are garbage", wrong=True, evidence=["seen"], confidence="modelled"
    )
    # GIVEN more findings than the terminal shows
    savings = [saves(f"a.{place}", 9.0 - place / 10) for place in range(terminal.TOP_FINDINGS)]
    report.findings, report.together = [wrong, *savings], common("a.0", "a.1")
    out = io.StringIO()
    terminal.render(report, Console(file=out, width=120))
    page, text = html.render(report), markdown.render(report)
    for shown in (out.getvalue(), page, text):
        assert "wrong" in shown.split("Gradients are garbage")[0][-400:] + shown.split("garbage")[1][:200]
        assert shown.index("Gradients are garbage") < shown.index("a.0")
    assert "results are wrong" in page
    assert "results are wrong" in text
    # AND what is only likely is told so
    assert findings_view.gain(model.Finding(rule="z", title="z", wrong=True)) == "results are likely wrong"
    # AND those that were played together are not the first ones of the list
    assert made(report)[0] == "2 of these made together"
    report.together.rules = ["a.0"]
    assert made(report)[0] == "one of these alone"


def test_one_finding_has_no_common_saving() -> None:
    report = reports.rich()
    remark = model.Finding(rule="b.remark", title="b.remark")
    report.findings, report.together = [saves("a.a", 8.0), saves("c.nothing", 0.0), remark], common("a.a")
    assert findings_view.combined(report) is None


def test_more_than_the_sum_of_the_savings_is_explained() -> None:
    report = reports.rich()
    report.findings, report.together = [saves("a.a", 8.0), saves("b.b", 6.0)], common("a.a", "b.b")
    assert "do not add up" in html.render(report)
    report.together.saving_ms.likely = 20.0
    assert "more than the sum" in html.render(report)
    assert "do not add up" not in html.render(report)


def test_what_likely_saves_nothing_comes_last_and_folded() -> None:
    report = reports.rich()
    remark = model.Finding(rule="d.remark", title="d.remark")
    report.findings, report.together = [saves("a.a", 8.0), saves("b.nothing", 0.0), remark], None
    page, text = html.render(report), markdown.render(report)
    out = io.StringIO()
    terminal.render(report, Console(file=out, width=120))
    for shown in (out.getvalue(), page, text):
        assert shown.index("a.a") < shown.index("d.remark") < shown.index("b.nothing")
    for shown in (page, text):
        assert (
            shown.index("d.remark")
            < shown.index("1 more, likely without a saving")
            < shown.index("b.nothing")
        )


def test_what_would_only_repeat_or_say_nothing_is_left_out() -> None:
    report = reports.rich()
    # GIVEN a change that is the same without Lightning, and a remark without a saving
    same = saves("a.a", 8.0)
    same.confidence, same.fix, same.fix_torch = "modelled", "model.compile()", "model.compile()"
    remark = model.Finding(rule="b.b", title="b.b", confidence="heuristic")
    report.findings = [same, remark]
    out = io.StringIO()
    terminal.render(report, Console(file=out, width=120))
    for shown in (out.getvalue(), html.render(report), markdown.render(report)):
        assert "Without Lightning" not in shown
        # THEN it is not told how a saving is known that is not told
        assert "heuristic" not in shown


def test_evidence_that_is_cut_says_so() -> None:
    report = reports.rich()
    report.findings[0].evidence = [f"line {number}" for number in range(12)]
    assert "and 7 more in the JSON report" in markdown.render(report)
    assert "and 4 more in the JSON report" in html.render(report)


def test_findings_of_a_rank_that_waits_for_another_say_so() -> None:
    report = reports.rich()
    for rank, waiting_ms in zip(report.ranks, (9.0, 0.0), strict=True):
        rank.step_time_ms, rank.communication_ms_per_step, rank.waiting_ms_per_step = (
            40.0,
            2.0 + waiting_ms,
            waiting_ms,
        )
    report.trace.rank = report.ranks[0].rank
    late = report.ranks[1].rank
    out = io.StringIO()
    terminal.render(report, Console(file=out, width=200))
    for shown in (out.getvalue(), html.render(report), markdown.render(report)):
        assert f"which waits for rank {late}" in shown
    # AND the one that is waited for does not wait
    report.trace.rank = late
    assert findings_view.caveat(report) == ""


def test_a_report_without_advice_has_no_such_section() -> None:
    assert "What to change" not in html.render(reports.unknown())
