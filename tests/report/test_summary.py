"""Headline figures: as profiled and as it really runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from advisor.report.groups import kernel_groups
from advisor.report.model import Breakdown, Summary
from advisor.report.summary import break_down, summarise
from advisor.roofline import cpu_roof
from advisor.roofline.analysis import Analysis
from advisor.roofline.devices import Device
from tests.report.loops import MM_FLOPS, SQUARE, analyse, loop
from tests.trace.builder import Builder


def summary_of(analysis: Analysis) -> Summary:
    return summarise(analysis, kernel_groups(analysis))


def breakdown_of(analysis: Analysis) -> Breakdown:
    return break_down(analysis, kernel_groups(analysis))


def test_figures_as_profiled_without_a_baseline() -> None:
    summary = summary_of(analyse(loop()))
    assert summary.steps == 2
    assert summary.step_time_ms.all == [1.0, 1.0]
    assert (summary.step_time_ms.p50, summary.step_time_ms.p95) == (1.0, 1.0)
    assert summary.baseline_step_ms is None
    assert summary.gpu_busy_fraction == summary.gpu_busy_fraction_profiled == pytest.approx(0.34)
    assert summary.kernel_time_ms_per_step == pytest.approx(0.34)
    assert summary.kernels_per_step == 2


def test_the_captures_baseline_takes_the_profilers_share_out() -> None:
    analysis = analyse(loop().context(baseline={"median_ms": 0.4, "n": 20}))
    summary = summary_of(analysis)
    assert analysis.baseline_source == "capture"
    assert summary.baseline_step_ms == pytest.approx(0.4)
    assert summary.gpu_busy_fraction == pytest.approx(0.34 / 0.4)
    assert summary.gpu_busy_fraction_profiled == pytest.approx(0.34)
    assert summary.step_time_ms.p50 == 1.0


def test_the_users_baseline_wins_over_the_captures() -> None:
    builder = loop().context(baseline={"median_ms": 0.4})
    analysis = analyse(builder, baseline_step_ms=0.5)
    assert analysis.baseline_source == "user"
    assert summary_of(analysis).baseline_step_ms == pytest.approx(0.5)


@pytest.mark.parametrize(
    "block",
    [
        None,
        {},
        {"median_ms": None},
        {"median_ms": 0},
        {"median_ms": "fast"},
        [1],
        {"median_ms": True},
        {"median_ms": 1e300},
    ],
)
def test_a_baseline_that_is_no_number_is_not_known(block) -> None:
    assert summary_of(analyse(loop().context(baseline=block))).baseline_step_ms is None


@pytest.mark.parametrize("baseline_ms", [None, 5.0, 0.36, 0.34, 0.2])
def test_the_steps_breakdown_adds_up_to_the_real_step(baseline_ms) -> None:
    builder = loop()
    # GIVEN besides, exposed communication and an exposed copy in each step
    for i in range(3):
        start = 10_000 + 1000 * i
        builder.launch("ncclDevKernel_AllReduce", start + 100, at=start + 500, dur=50)
        builder.launch(
            "Memcpy HtoD (Pinned -> Device)", start + 110, at=start + 600, dur=20, cat="gpu_memcpy"
        )
    analysis = analyse(builder, baseline_step_ms=baseline_ms)
    parts = {part.name: part for part in breakdown_of(analysis).step}
    assert sum(p.time_ms_per_step for p in parts.values()) == pytest.approx(baseline_ms or 1.0)
    assert sum(p.fraction for p in parts.values()) == pytest.approx(1.0)
    assert all(p.time_ms_per_step >= 0 for p in parts.values())
    assert parts["compute"].time_ms_per_step == pytest.approx(min(0.34, baseline_ms or 1))
    assert 0 < summary_of(analysis).gpu_busy_fraction <= 1


def test_communication_that_overlaps_compute_is_not_exposed() -> None:
    builder = loop()
    for i in range(3):
        start = 10_000 + 1000 * i
        builder.launch("ncclDevKernel_AllReduce", start + 100, at=start + 300, dur=150, stream=20)
    parts = {part.name: part.time_ms_per_step for part in breakdown_of(analyse(builder)).step}
    # Kernels work from 50 to 350 and from 360 to 400 µs into the step, the collective from 300 to 450.
    assert parts["exposed communication"] == pytest.approx(0.06)
    assert parts["compute"] == pytest.approx(0.34)


def test_a_host_that_runs_ahead_does_not_hide_a_busy_device() -> None:
    # GIVEN steps of 100 µs on the host, each with 340 µs of kernels that queue up
    builder = Builder()
    for i in range(4):
        builder.step(i, 1000 + 100 * i, 100)
        builder.op("aten::mm", 1000 + 100 * i, 50, dims=[SQUARE, SQUARE])
        builder.launch("gemm", 1010 + 100 * i, at=1020 + 340 * i, dur=340)
    analysis = analyse(builder)
    summary = summary_of(analysis)
    assert analysis.busier_side == "device"
    assert summary.step_time_ms.p50 == pytest.approx(0.34)
    assert summary.gpu_busy_fraction == pytest.approx(1.0)


def test_shares_by_bound_add_up_to_one() -> None:
    builder = loop()
    for i in range(3):
        builder.launch("mystery", 10_200 + 1000 * i, at=10_600 + 1000 * i, dur=10)
    bound = summary_of(analyse(builder)).bound_time_fraction
    shares = [getattr(bound, name) for name in bound.__struct_fields__]
    assert sum(shares) == pytest.approx(1.0)
    assert bound.compute == pytest.approx(300 / 350)
    assert bound.unknown == pytest.approx(10 / 350)


def test_breakdowns_by_phase_and_family_cover_all_device_time() -> None:
    found = breakdown_of(analyse(loop()))
    for slices in (found.phase, found.family):
        assert sum(part.fraction for part in slices) == pytest.approx(1.0)
        assert sum(part.time_ms_per_step for part in slices) == pytest.approx(0.34)


def test_coverage_counts_costed_attributed_and_orphaned_time() -> None:
    builder = loop().work("left over", 9_000, 113, correlation=None)
    for i in range(3):
        builder.launch("mystery", 10_200 + 1000 * i, at=10_600 + 1000 * i, dur=60)
    coverage = summary_of(analyse(builder)).coverage
    everything = 3 * 400 + 113
    assert coverage.costed_time_fraction == pytest.approx(340 / 400)
    assert coverage.attributed_time_fraction == pytest.approx(3 * 340 / everything)
    assert coverage.orphan_time_fraction == pytest.approx(113 / everything)


def test_costs_are_known_even_where_the_roofs_are_not() -> None:
    summary = summary_of(analyse(loop(Builder(device="Abacus 3000"))))
    assert summary.coverage.costed_time_fraction == pytest.approx(1.0)
    assert summary.bound_time_fraction.unknown == pytest.approx(1.0)
    assert summary.flops_per_step >= MM_FLOPS
    assert summary.mfu is None
    assert "roofs are not known" in summary.verdict


def test_utilisation_is_matrix_flops_over_the_peak_and_the_real_step() -> None:
    analysis = analyse(loop(), baseline_step_ms=0.5)
    peak = analysis.device.peak("tensor_bf16")
    assert summary_of(analysis).mfu == pytest.approx(MM_FLOPS / peak / 0.5e-3)


def test_accumulated_batches_are_averaged_not_medianed() -> None:
    # GIVEN a cycle of two batches, of which the second steps the optimizer
    builder = Builder().context(accumulate_grad_batches=2)
    start = 0
    for i, length in enumerate((100, 100, 300, 100, 300)):
        builder.step(i, start, length).launch("k", start + 5, at=start + 10, dur=5)
        start += length
    analysis = analyse(builder)
    assert analysis.step_count == 4
    assert analysis.profiled_step_ns == pytest.approx(200_000)


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ({"before": 5, "in_window": 9}, 9),
        ({"before": None, "in_window": 7}, 7),
        ({}, None),
        (None, None),
        (3, None),
    ],
)
def test_peak_memory_is_the_greater_of_before_and_in_the_window(peaks, expected) -> None:
    assert summary_of(analyse(loop().context(peak_memory_bytes=peaks))).peak_memory_bytes == expected


def test_the_verdict_of_a_host_bound_loop_hedges_without_a_baseline() -> None:
    assert "as profiled" in summary_of(analyse(loop())).verdict
    assert "as profiled" not in summary_of(analyse(loop(), baseline_step_ms=0.9)).verdict


@pytest.mark.parametrize(
    ("busy_us", "baseline_ms", "said"),
    [
        (860, None, "its kernels limit this loop"),
        # GIVEN a step that the profiler may have made twice as long
        (800, None, "either host or kernels may limit this loop"),
        (440, None, "either host or kernels may limit this loop"),
        (410, None, "the host limits this loop"),
        (800, 1.0, "the host limits this loop"),
        (800, 0.9, "its kernels limit this loop"),
    ],
)
def test_the_verdict_blames_the_host_only_where_the_profiler_cannot_be_the_cause(
    busy_us, baseline_ms, said
) -> None:
    builder = Builder()
    for i in range(3):
        start = 1000 * i
        builder.step(i, start, 1000).op("aten::mm", start, 5, dims=[SQUARE, SQUARE])
        builder.launch("gemm", start + 1, at=start + 10, dur=busy_us)
    assert said in summary_of(analyse(builder, baseline_step_ms=baseline_ms)).verdict


@pytest.mark.parametrize(("mm_us", "said"), [(250, "arithmetic sets the pace"), (600, "of that roof")])
def test_the_verdict_says_where_kernels_are_far_from_the_roof_that_bounds_them(mm_us, said) -> None:
    # GIVEN a product that an H100 could do in about 139 µs
    verdict = summary_of(analyse(loop(mm_us=mm_us))).verdict
    assert "compute-bound" in verdict
    assert said in verdict


def test_the_verdict_names_the_kernels_where_the_device_is_busy() -> None:
    verdict = summary_of(analyse(loop(), baseline_step_ms=0.35)).verdict
    assert "its kernels limit this loop" in verdict
    assert "compute-bound" in verdict


def test_on_the_cpu_operators_stand_in_and_no_gpu_figure_is_made_up() -> None:
    builder = Builder(device=None)
    for i in range(3):
        builder.step(i, 1000 * i, 1000).op("aten::mm", 1000 * i + 10, 600, dims=[SQUARE, SQUARE])
    analysis = analyse(builder)
    summary = summary_of(analysis)
    assert summary.cpu_only
    assert (summary.gpu_busy_fraction, summary.gpu_busy_fraction_profiled, summary.gpu_busy_ms_per_step) == (
        None, None, None,
    )  # fmt: skip
    assert summary.operator_time_ms_per_step == pytest.approx(0.6)
    assert (summary.kernel_time_ms_per_step, summary.kernels_per_step) == (None, None)
    assert breakdown_of(analysis).step == []
    assert "ran on the CPU" in summary.verdict


@pytest.mark.parametrize(("at_us", "known_ms"), [(5_000, None), (10, 0.6)])
def test_work_outside_the_steps_leaves_theirs_unknown_and_not_nothing(at_us, known_ms) -> None:
    # GIVEN one operator, within the first step or far behind the last
    builder = Builder(device=None).step(0, 0, 1000).step(1, 1000, 1000)
    builder.op("aten::mm", at_us, 600, dims=[SQUARE, SQUARE])

    assert summary_of(analyse(builder)).operator_time_ms_per_step == known_ms


def test_without_work_of_a_device_that_is_there_the_verdict_does_not_say_that_the_cpu_did_it_all() -> None:
    # GIVEN a trace that names a device whose events it does not hold, or not as kernels
    builder = Builder(device="ARTEMIS").step(1, 0, 1000).op("aten::mm", 10, 600, dims=[SQUARE, SQUARE])
    summary = summary_of(analyse(builder))
    assert summary.verdict.startswith("The trace has no device work, so operators stand in")


def test_a_trace_without_anything_says_so() -> None:
    summary = summary_of(analyse(Builder().step(1, 0, 10)))
    assert summary.verdict == "No device work was recorded, so there is nothing to classify."
    assert summary.bound_time_fraction.memory is None
    assert summary.coverage.costed_time_fraction is None


def test_the_verdict_on_a_trace_without_steps_speaks_of_the_trace() -> None:
    analysis = analyse(Builder().op("aten::mm", 0, 5, dims=[SQUARE, SQUARE]).launch("gemm", 1, at=10, dur=90))
    assert summary_of(analysis).verdict.startswith("The GPU works 90% of the trace")


def test_a_cpu_measured_under_load_is_no_slower_than_what_the_trace_reached(monkeypatch) -> None:
    # GIVEN a roof of 50 GFLOP/s, measured beside the training, and a product that ran at 137
    cpu = Device("This CPU", roofs="measured", peaks={"vector_fp32": 50e9}, bandwidth_bytes_per_s=10e9, sms=2)
    cpu = replace(cpu, peak_sources={"vector_fp32": "measured here"})
    monkeypatch.setattr(cpu_roof, "measure_cpu", lambda: cpu)
    monkeypatch.setattr(cpu_roof, "cpu_name", lambda: "This CPU")
    builder = Builder(device=None).context(device={"name": "This CPU"})
    for i in range(3):
        start = 2_000_000 * i
        builder.step(i, start, 2_000_000).op("aten::mm", start + 10, 1_000_000, dims=[SQUARE, SQUARE])
    # WHEN it is analysed
    analysis = analyse(builder)
    groups = kernel_groups(analysis)
    # THEN the product is on its roof, which says that it is a lower limit
    assert groups[0].efficiency == pytest.approx(1.0)
    assert groups[0].flags == []
    assert analysis.device.peak_sources["vector_fp32"].startswith("at least")
