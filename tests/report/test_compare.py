"""Two reports beside each other: the verdict weighs the change against the noise."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path

import pytest
from rich.console import Console

import advisor
from advisor.report import model
from advisor.report.compare import Comparison, compare
from advisor.report.compare_view import markdown, render
from advisor.report.files import to_json
from tests.report import reports


def made(step_ms: list[float], *, baseline: list[float] | None = None, **of_summary: float) -> model.Report:
    """The rich report with other step times, of a loop that the device limits."""
    report = reports.rich()
    report.summary.gpu_busy_fraction = report.summary.gpu_busy_fraction_profiled = 0.95
    report.summary.step_time_ms = model.StepTime(
        p50=sorted(step_ms)[len(step_ms) // 2] if step_ms else None, p95=None, all=step_ms
    )
    report.summary.baseline_step_ms = sorted(baseline)[len(baseline) // 2] if baseline else None
    report.environment = {"baseline": {"step_ms": baseline}} if baseline else {}
    for name, value in of_summary.items():
        setattr(report.summary, name, value)
    return report


def test_a_change_beyond_the_spread_of_the_steps_is_one() -> None:
    found = compare(made([30.0, 30.2, 29.9, 30.1, 30.0]), made([17.4, 17.5, 17.3, 17.4, 17.4]))
    assert found.outcome == "faster"
    assert found.step_change_fraction == pytest.approx((17.4 - 30.0) / 30.0)
    assert "(−42.0%)" in found.verdict


def test_a_run_on_the_cpu_is_compared_by_its_operators_and_not_by_kernels_it_has_none_of() -> None:
    # GIVEN two runs on a CPU
    sides = [made([30.0] * 3), made([20.0] * 3)]
    for side, operators_ms in zip(sides, (28.0, 18.0), strict=True):
        side.summary.kernel_time_ms_per_step = side.summary.kernels_per_step = None
        side.summary.operator_time_ms_per_step = operators_ms
    # WHEN they are compared THEN no figure is told as 0
    out = io.StringIO()
    render(compare(*sides), Console(file=out, width=80))
    assert "operators" in out.getvalue()
    assert not [line for line in out.getvalue().splitlines() if line.startswith(("kernels", "launches"))]


def test_the_public_compare_takes_reports_and_paths_alike(tmp_path: Path) -> None:
    before, after = made([30.0] * 3), made([20.0] * 3)
    path = tmp_path / "before.json"
    path.write_text(to_json(before))
    assert advisor.compare(path, after).verdict == advisor.compare(before, after).verdict
    assert advisor.compare(str(path), after).outcome == "faster"


def test_names_give_way_on_a_narrow_terminal_and_figures_do_not() -> None:
    before, after = made([30.0] * 3), made([20.0] * 3)
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    after.kernels[0].op, after.kernels[0].module = name, "blocks.*.attention.projection"
    out = io.StringIO()
    render(compare(before, after), Console(file=out, width=80))
    (row,) = [line for line in out.getvalue().splitlines() if line.startswith("_scaled_dot")]
    assert len(row) <= 80
    assert row.rstrip().endswith("appeared")
    assert "…" not in row.split(after.kernels[0].phase, 1)[1]


def test_a_change_too_small_to_matter_is_not_listed() -> None:
    before, after = made([30.0] * 3), made([30.0] * 3)
    before.kernels[-1].op, before.kernels[-1].time_ms_per_step = "aten::arange", 0.001
    after.kernels[-1].op, after.kernels[-1].time_ms_per_step = "aten::arange", 0.002
    found = compare(before, after)
    assert "arange" not in markdown(found)
    assert any(kernel.op == "aten::arange" and kernel.change == "slower" for kernel in found.kernels)


def test_a_change_within_the_spread_is_none() -> None:
    found = compare(made([30.0, 33.0, 27.0, 36.0, 25.0]), made([29.0, 32.0, 26.0, 35.0, 24.0]))
    assert found.noise_fraction is not None
    assert found.noise_fraction > 1 / 30
    assert found.outcome == "same"


def test_steady_runs_still_differ_by_the_floor() -> None:
    found = compare(made([30.0] * 5), made([30.2] * 5))
    assert found.noise_fraction == pytest.approx(0.02)
    assert found.outcome == "same"


def test_runs_that_the_host_limits_differ_by_more_and_that_is_said() -> None:
    # GIVEN a change of 5 % between steady runs
    device = made([30.0] * 5), made([28.5] * 5)
    host = made([30.0] * 5), made([28.5] * 5, gpu_busy_fraction=0.3, gpu_busy_fraction_profiled=0.3)
    # THEN it is one where the device sets the pace, and noise where the host does on one side
    assert compare(*device).outcome == "faster"
    found = compare(*host)
    assert (found.outcome, found.noise_fraction) == ("same", pytest.approx(0.1))
    assert any("the host limits the second" in remark for remark in found.remarks)
    # BUT not for somebody who knows the machine
    assert compare(*host, noise_floor=0.03).outcome == "faster"
    assert compare(*device, noise_floor=0.06).outcome == "same"
    assert not any("host limits" in remark for remark in compare(*host, noise_floor=0.03).remarks)


def test_kernels_do_not_hide_in_the_noise_of_a_late_host() -> None:
    # GIVEN a matrix product that takes 4 % less in a loop whose steps differ by 20 %
    before, after = made([30.0, 24.0, 36.0, 27.0, 33.0]), made([30.0, 24.0, 36.0, 27.0, 33.0])
    after.kernels[0].time_ms_per_step *= 0.96
    (changed,) = [kernel for kernel in compare(before, after).kernels if kernel.change != "same"]
    assert changed.change == "faster"
    # BUT operators on the CPU are the host's own work
    before.summary.cpu_only = after.summary.cpu_only = True
    assert {kernel.change for kernel in compare(before, after).kernels} == {"same"}


def test_a_step_time_that_was_given_has_the_noise_of_the_profiled_steps() -> None:
    # GIVEN single figures for the steps without the profiler
    before, after = made([40.0, 40.1, 39.9]), made([22.0, 22.1, 21.9])
    before.summary.baseline_step_ms, after.summary.baseline_step_ms = 35.0, 18.0
    # THEN the verdict is not left open
    found = compare(before, after)
    assert (found.basis, found.outcome) == ("baseline", "faster")
    assert found.before.step_error_fraction == pytest.approx(0.1 / 3**0.5 / 40.0)


def test_what_cannot_be_set_side_by_side_is_remarked_upon() -> None:
    stacks = model.Finding(rule="capture.stacks", title="Stacks were recorded")
    before, after = made([40.0] * 5, baseline=[30.0] * 5), made([44.0] * 5)
    after.findings = [stacks]
    said = " ".join(compare(before, after).remarks)
    assert "known of one side only" in said
    assert "stacks were recorded on one side only" in said
    before.findings, before.summary.baseline_step_ms = [stacks], None
    said = " ".join(compare(before, after).remarks)
    assert "one side only" not in said


def test_steps_too_unlike_to_tell_anything_are_remarked_upon() -> None:
    wild = made([30.0, 60.0, 20.0]), made([30.0, 55.0, 25.0])
    assert any("quieter machine" in remark for remark in compare(*wild).remarks)
    assert not any("quieter" in remark for remark in compare(made([30.0] * 5), made([20.0] * 5)).remarks)


def test_two_programs_are_told_from_two_runs_of_one() -> None:
    before, after = made([30.0] * 3), made([20.0] * 3)
    assert not any("one program" in remark for remark in compare(before, after).remarks)
    for kernel in after.kernels:
        kernel.op = f"other::{kernel.op}"
    assert any("one program" in remark for remark in compare(before, after).remarks)


def test_the_table_leaves_out_what_is_nothing_and_says_what_it_cuts() -> None:
    before, after = made([30.0] * 3), made([30.0] * 3)
    for kernel in before.kernels + after.kernels:
        kernel.module = None
    for kernel in after.kernels:
        kernel.time_ms_per_step *= 1.5
    for part in before.breakdown.step + after.breakdown.step:
        part.time_ms_per_step = 0.0 if part.name == "exposed communication" else part.time_ms_per_step
    out = io.StringIO()
    found = compare(before, after)
    render(found, Console(file=out, width=120))
    assert "module" not in out.getvalue()
    for shown in (out.getvalue(), markdown(found)):
        assert "exposed communication" not in shown
        assert " smaller changes, in the JSON" in shown


def test_one_step_a_side_tells_no_noise() -> None:
    found = compare(made([30.0]), made([20.0]))
    assert found.noise_fraction is None
    assert found.outcome == "unknown"


def test_a_run_of_one_step_is_the_same_as_itself() -> None:
    found = compare(made([30.0]), made([30.0]))
    assert found.outcome == "same"
    assert found.noise_fraction is None
    assert found.verdict.startswith("No change beyond the noise of 2.0%: a step takes 30.0 ms")


@pytest.mark.parametrize("count", [3, 9])
def test_steps_of_no_length_tell_no_noise(count: int) -> None:
    found = compare(made([0.0] * count), made([0.0] * count))
    assert (found.outcome, found.noise_fraction) == ("unknown", None)


def test_without_steps_there_is_nothing_to_compare() -> None:
    found = compare(made([]), made([20.0, 20.0]))
    assert found.step_change_fraction is None
    assert found.verdict == "The step times cannot be compared: the first marks no steps."
    assert "the second marks no steps" in compare(made([20.0, 20.0]), made([])).verdict
    assert "neither marks steps" in compare(made([]), made([])).verdict


def test_the_steps_without_the_profiler_are_compared_where_both_sides_have_them() -> None:
    # GIVEN a run that looks slower under the profiler and is faster without it
    before, after = made([40.0] * 5, baseline=[30.0] * 5), made([44.0] * 5, baseline=[20.0] * 5)
    # THEN the un-profiled steps decide
    assert compare(before, after).basis == "baseline"
    assert compare(before, after).outcome == "faster"
    # AND with one of them missing the profiled ones do, and that is said
    found = compare(before, made([44.0] * 5))
    assert (found.basis, found.outcome) == ("profiled", "slower")
    assert any("as profiled" in remark for remark in found.remarks)


def test_kernels_are_matched_by_operator_module_and_phase_not_by_kernel_name() -> None:
    before, after = made([30.0] * 3), made([30.0] * 3)
    keys = [(k.op, k.module, k.phase) for k in before.kernels]
    heavy = next(k for k in before.kernels if keys.count((k.op, k.module, k.phase)) == 1)
    other = next(
        k for k in after.kernels if (k.op, k.module, k.phase) == (heavy.op, heavy.module, heavy.phase)
    )
    other.name, other.time_ms_per_step = "a_better_kernel", heavy.time_ms_per_step / 2
    changed = [change for change in compare(before, after).kernels if change.change != "same"]
    assert [(c.op, c.module, c.phase) for c in changed] == [(heavy.op, heavy.module, heavy.phase)]
    assert changed[0].change == "faster"
    assert changed[0].kernels == [heavy.name, "a_better_kernel"]


def test_what_is_on_one_side_alone_appeared_or_vanished() -> None:
    before, after = made([30.0] * 3), made([30.0] * 3)
    gone = before.kernels[0]
    after.kernels = [
        k for k in after.kernels if (k.op, k.module, k.phase) != (gone.op, gone.module, gone.phase)
    ]
    assert compare(before, after).kernels[0].change == "vanished"
    assert compare(after, before).kernels[0].change == "appeared"


def test_modules_are_left_out_where_one_side_has_none() -> None:
    # GIVEN the same loop recorded with and without module ranges
    before, after = made([30.0] * 3), made([30.0] * 3)
    for kernel in after.kernels:
        kernel.module = None
    # THEN nothing appeared or vanished
    assert {change.change for change in compare(before, after).kernels} == {"same"}


def test_swapping_the_sides_turns_the_change_round() -> None:
    one, other = made([30.0, 31.0, 30.5]), made([20.0, 21.0, 20.5])
    assert compare(one, other).outcome == "faster"
    assert compare(other, one).outcome == "slower"
    assert compare(one, other).noise_fraction == pytest.approx(compare(other, one).noise_fraction)


def test_other_devices_are_remarked_upon() -> None:
    other = made([30.0] * 3)
    other.device = copy.copy(other.device)
    other.device.name = "NVIDIA L4"
    assert any("different devices" in remark for remark in compare(made([30.0] * 3), other).remarks)


@pytest.mark.parametrize("report", [reports.rich(), reports.unknown(), reports.hostile()])
def test_any_report_can_be_compared_with_itself_and_shown(report: model.Report) -> None:
    found = compare(report, report)
    assert isinstance(found, Comparison)
    assert found.step_change_fraction is None or math.isclose(found.step_change_fraction, 0)
    out = io.StringIO()
    render(found, Console(file=out, width=100))
    for text in (out.getvalue(), markdown(found)):
        assert "\x1b" not in text
        assert "<script" not in text
