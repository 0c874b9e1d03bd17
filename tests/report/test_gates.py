"""Gates read the figures that the report has, and can tell nothing where it has none."""

from __future__ import annotations

import pytest

from advisor.errors import UsageError
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


def test_what_is_below_any_noise_holds_though_no_noise_is_known():
    # GIVEN two traces of one step each, the second longer by half a percent
    before, after = report_of(steps=1), report_of(steps=1)
    after.summary.step_time_ms.p50 *= 1.005
    (within,) = check_changes(after, before, ["step_time:+0%"])
    assert within.held is True
    assert "within the noise of 10.0%" in within.reason
    # WHEN it is longer by a fifth THEN nothing tells whether that is noise
    after.summary.step_time_ms.p50 *= 1.2
    (unknown,) = check_changes(after, before, ["step_time:+0%"])
    assert unknown.held is None


def test_a_share_without_a_percent_sign_is_a_fraction_and_40_is_none():
    report = reports.rich()
    (bare,) = check_limits(report, [], ["gpu_busy=0.8"])
    (percent,) = check_limits(report, [], ["gpu_busy=80%"])
    assert bare.held is percent.held is True
    with pytest.raises(UsageError, match=r"0\.8 or 80%"):
        check_limits(report, [], ["mfu=40"])


def test_what_is_counted_has_no_noise_and_idle_time_has_as_much_as_the_step():
    before, after = slices(reports.rich(), idle=1.0), slices(reports.rich(), idle=1.2)
    assert before.summary.kernels_per_step
    after.summary.kernels_per_step = before.summary.kernels_per_step + 1
    step_ms = before.summary.baseline_step_ms or 0.0
    for side in before, after:
        side.summary.step_time_ms.all = [step_ms] * 5
    # GIVEN one launch more, and a fifth more of idle time, which is half a percent of the step
    assert 0.2 / step_ms < 0.01
    launches, idle = check_changes(after, before, ["launches:+0%", "idle:+5%"])
    assert launches.held is False
    assert idle.held is True
    assert idle.reason.endswith("within the noise of 2.0% of the step")
    # WHEN it is more than the step's noise THEN it counts
    slices(after, idle=1.0 + 0.1 * step_ms)
    assert check_changes(after, before, ["idle:+5%"])[0].held is False


def test_figures_of_unlike_steps_are_not_held_against_each_other():
    # GIVEN one side whose step time without the profiler is not known
    before, after = reports.rich(), reports.rich()
    after.summary.baseline_step_ms = None
    for name in ("gpu_busy", "mfu", "idle"):
        (outcome,) = check_changes(after, before, [f"{name}:+5%"])
        assert outcome.held is None
        assert "profiled one on the other" in outcome.reason
    # THEN kernels can be told all the same, and a limit says what it is of
    assert check_changes(after, before, ["kernel_time:+5%"])[0].held is True
    assert ", as profiled, asked for" in check_limits(after, ["step_time=1s"], [])[0].reason
    assert "as profiled" not in check_limits(before, ["step_time=1s"], [])[0].reason


@pytest.mark.parametrize(
    "text", ["step_time=-5ms", "step_time=1e400ms", "gpu_busy=200%", "gpu_busy=-1", "launches=-3"]
)
def test_a_limit_that_no_run_can_miss_or_none_can_meet_is_refused(text):
    with pytest.raises(UsageError, match="is no value of this metric"):
        check_limits(reports.rich(), [text], [])
    with pytest.raises(UsageError, match="is no value of this metric"):
        check_limits(reports.rich(), [], [text])
