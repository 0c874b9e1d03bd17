"""Gates read the figures that the report has, and can tell nothing where it has none."""

from __future__ import annotations

import pytest

from advisor.report import model
from advisor.report.build import build_report
from advisor.report.compare import compare
from advisor.report.gates import METRICS, check_changes, check_limits
from advisor.roofline.analysis import analyse_timeline
from tests.report import reports
from tests.trace.builder import Builder


def report_of(*, steps: int, reduce_us: float = 0) -> model.Report:
    """Steps of 1 ms with 300 µs of computation, and a collective after it."""
    build = Builder()
    for number in range(max(steps, 1)):
        start = 1_000.0 + 1_000 * number
        for place, (kernel, us) in enumerate((("gemm", 300), ("ncclDevKernel_AllReduce_Sum_f32", reduce_us))):
            if us:
                at = start + 10 + 350 * place
                build.launch(kernel, start + 5 + 20 * place, at=at, dur=us, stream=7 + place)
        if steps:
            build.step(number, start, 1_000)
    return build_report(analyse_timeline(build.join()))


def slices(report: model.Report, **ms: float) -> model.Report:
    for part in report.breakdown.step:
        part.time_ms_per_step = ms.get(part.name.replace(" ", "_"), part.time_ms_per_step)
    return report


def test_exposed_collectives_are_what_the_report_shows_of_them():
    report = report_of(steps=3, reduce_us=200)

    assert METRICS["communication"].read(report) == pytest.approx(0.2, rel=0.01)
    assert METRICS["idle"].read(report) == pytest.approx(0.5, rel=0.05)
    (outcome,) = check_limits(report, ["communication=0.1ms"], [])
    assert outcome.held is False


def test_what_was_nothing_before_is_known_and_any_more_is_worse():
    before = slices(reports.rich(), exposed_communication=0.0)
    after = slices(reports.rich(), exposed_communication=5.0)

    (worse,) = check_changes(after, before, ["communication:+10%"])
    (same,) = check_changes(before, before, ["communication:+10%"])

    assert worse.held is False
    assert "from 0 ms to 5.00 ms (worse)" in worse.reason
    assert same.held is True


def test_a_trace_that_marks_no_steps_has_no_step_time():
    whole, stepped = report_of(steps=0), report_of(steps=4)

    (outcome,) = check_limits(whole, ["step_time=1s"], [])
    assert outcome.held is None
    # AND is not compared with one that has
    assert compare(whole, stepped).outcome == "unknown"
    assert compare(stepped, stepped).outcome == "same"


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_of_a_full_report_is_known_and_of_an_empty_one_is_not(name):
    full, unknown = reports.rich(), reports.unknown()
    full.summary.operator_time_ms_per_step = 1.0

    assert METRICS[name].read(full) is not None
    assert METRICS[name].read(unknown) is None
