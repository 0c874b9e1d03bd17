"""The headline figures."""

from advisor.report import metrics, model


def by_label(report):
    return {metric.label: metric for metric in metrics.metrics(report)}


def test_both_step_times_are_told_with_what_they_are(rich_report):
    # GIVEN a step of 42.6 ms that takes 1.52 times as long under the profiler
    rich_report.summary.baseline_step_ms = 40.0
    rich_report.summary.step_time_ms.p50 = 60.0
    # WHEN
    found = by_label(rich_report)
    # THEN
    assert found["Step time, as it really runs"].value == "40.0 ms"
    assert "1.50×" in found["Step time, as it really runs"].note
    assert found["Step time, as profiled"].value == "60.0 ms"


def test_a_baseline_longer_than_the_profiled_step_is_no_stretching(rich_report):
    rich_report.summary.baseline_step_ms = 60.0
    rich_report.summary.step_time_ms.p50 = 40.0
    assert by_label(rich_report)["Step time, as it really runs"].note == "without the profiler"


def test_utilisation_of_a_step_without_matrix_work_asks_for_no_shapes(rich_report):
    rich_report.summary.mfu = None
    rich_report.summary.bound_time_fraction = model.BoundTimeFraction(memory=1.0, unknown=0.0)
    assert "no matrix product" in by_label(rich_report)["Model FLOPs utilisation"].remedy
    rich_report.summary.bound_time_fraction = model.BoundTimeFraction(memory=0.5, unknown=0.5)
    assert "record_shapes" in by_label(rich_report)["Model FLOPs utilisation"].remedy


def test_every_missing_figure_says_how_to_get_it(unknown_report):
    found = metrics.metrics(unknown_report)
    assert len(found) == 8
    assert all(metric.value is None and metric.remedy for metric in found)


def test_a_busy_share_without_a_baseline_is_called_a_lower_bound(rich_report):
    rich_report.summary.baseline_step_ms = None
    assert "lower bound" in by_label(rich_report)["GPU busy"].note


def test_roofs_of_an_unknown_cpu_are_to_be_had_where_the_trace_was_made(unknown_report):
    assert "(--device)" in by_label(unknown_report)["Fraction of the roof"].remedy
    unknown_report.summary.cpu_only = True
    remedy = by_label(unknown_report)["Fraction of the roof"].remedy
    assert remedy.endswith("analyse the trace on the machine that made it")
    assert "--device" not in remedy


def test_zero_is_a_figure_and_not_missing(rich_report):
    rich_report.summary.mfu = 0.0
    assert by_label(rich_report)["Model FLOPs utilisation"].value == "0.0%"


def test_shares_of_a_step_in_which_nothing_was_classified_are_not_told_as_zero(rich_report):
    rich_report.summary.bound_time_fraction = model.BoundTimeFraction(memory=0.0, compute=0.0, unknown=1.0)
    assert by_label(rich_report)["Memory- / compute-bound"].value is None
    rich_report.summary.bound_time_fraction = model.BoundTimeFraction(memory=0.0, compute=0.0, unknown=0.1)
    assert by_label(rich_report)["Memory- / compute-bound"].value == "0.0% / 0.0%"


def test_one_step_has_no_spread(rich_report):
    rich_report.summary.steps = 1
    assert by_label(rich_report)["Step time, as profiled"].note == "median of 1 step"


def test_utilisation_names_the_peak_that_it_is_of(rich_report):
    assert by_label(rich_report)["Model FLOPs utilisation"].note == "of 989 TFLOP/s bf16 tensor"


def test_a_cpu_run_shows_operator_time(rich_report):
    rich_report.summary.cpu_only = True
    rich_report.summary.operator_time_ms_per_step = 12.0
    rich_report.summary.kernel_time_ms_per_step = 0.0
    assert by_label(rich_report)["Operator time per step"].value == "12.0 ms"
    assert by_label(rich_report)["Fraction of the roof"].note.endswith("of operator time costed")


def test_only_roofs_that_kernels_run_under_are_used_busiest_first(rich_report):
    # GIVEN a device with a TF32 roof that no kernel of the step runs under
    assert {peak.pipe for peak in rich_report.device.peaks} == {"tensor_bf16", "tensor_tf32", "vector_fp32"}
    # THEN
    assert [peak.pipe for peak in metrics.peaks_used(rich_report)] == ["tensor_bf16", "vector_fp32"]


def test_a_difference_over_two_percent_is_marked(rich_report):
    assert [metrics.differs(check) for check in rich_report.cross_checks] == [False, True, False]
