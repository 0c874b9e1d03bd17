"""Remarks on how far the figures can be trusted: each one when it applies, and only then."""

from __future__ import annotations

import pytest

from advisor.report.groups import kernel_groups
from advisor.report.model import Quality
from advisor.report.quality import data_quality
from advisor.report.summary import summarise
from advisor.roofline.devices import Device
from advisor.trace.events import Loss
from advisor.trace.link import join
from tests.report.loops import SQUARE, analyse, loop
from tests.trace.builder import Builder


def remarks(builder: Builder, **options) -> dict[str, Quality]:
    analysis = analyse(builder, **options)
    found = data_quality(analysis, summarise(analysis, kernel_groups(analysis)))
    assert len({remark.code for remark in found}) == len(found)
    return {remark.code: remark for remark in found}


def test_a_sound_capture_with_its_baseline_draws_no_remark() -> None:
    assert remarks(loop(), baseline_step_ms=1.0) == {}


def test_what_was_lost_in_reading_is_told_with_its_count() -> None:
    from advisor.roofline.analysis import analyse_timeline

    trace = loop().trace()
    trace.losses.append(Loss("truncated", 1234, "the file breaks off"))
    analysis = analyse_timeline(join(trace), baseline_step_ms=1)
    (remark,) = data_quality(analysis, summarise(analysis, []))
    assert (remark.code, remark.level) == ("read.truncated", "warning")
    assert "1,234" in remark.message


def test_a_trace_without_steps_says_what_per_step_means() -> None:
    found = remarks(Builder().op("aten::mm", 0, 5, dims=[SQUARE, SQUARE]).launch("k", 1, at=10, dur=5))
    assert "in the whole trace" in found["steps.none"].message
    assert "baseline.unknown" not in found


def test_inferred_steps_are_said_to_be() -> None:
    builder = Builder()
    for i in range(5):
        builder.range("enumerate(DataLoader)#x", 100 * i, 5).launch("k", 100 * i + 50, at=100 * i + 60, dur=5)
    assert "DataLoader" in remarks(builder)["steps.inferred"].message


def test_steps_left_out_are_counted() -> None:
    builder = loop(steps=5)
    for k in range(50):
        builder.launch("eval", 12_300 + k, at=12_400 + k, dur=1)
    assert remarks(builder)["steps.irregular"].message.startswith("1 step")


def test_a_single_steady_step_shows_no_spread() -> None:
    assert "steps.single" in remarks(loop(steps=2), baseline_step_ms=1)


def test_accumulated_gradients_are_mentioned() -> None:
    assert "2 batches" in remarks(loop().context(accumulate_grad_batches=2))["steps.accumulated"].message


def test_an_unknown_device_comes_with_the_way_out() -> None:
    remark = remarks(loop(Builder(device="Abacus 3000")))["device.unknown"]
    assert "Abacus 3000" in remark.message
    assert "--device" in remark.message


@pytest.mark.parametrize(
    ("given", "told"),
    [(None, False), ("h100-sxm", False), ("h100", False), ("h200", True), ("a100-sxm-80gb", True)],
)
def test_a_device_given_against_the_traces_own_word_is_told(given, told) -> None:
    assert ("device.contradicted" in remarks(loop(), device=given)) is told
    # GIVEN a trace whose device is not known THEN the user's word contradicts nothing
    assert "device.contradicted" not in remarks(loop(Builder(device="Abacus 3000")), device=given)


def test_without_a_baseline_figures_of_the_host_are_upper_bounds() -> None:
    remark = remarks(loop())["baseline.unknown"]
    assert remark.level == "warning"
    assert "--baseline-step-ms" in remark.message


def test_without_a_baseline_a_busy_device_is_less_in_doubt() -> None:
    assert remarks(loop(mm_us=930))["baseline.unknown"].level == "info"


def test_inflation_by_the_profiler_is_told() -> None:
    assert "2.00×" in remarks(loop(), baseline_step_ms=0.5)["baseline.inflated"].message


def test_a_baseline_shorter_than_the_devices_work_is_doubted() -> None:
    found = remarks(loop(), baseline_step_ms=0.2)
    assert found["baseline.too_short"].level == "warning"
    assert "baseline.inflated" not in found


@pytest.mark.parametrize(("baseline_ms", "told"), [(1.1, False), (1.2, True), (40, True)])
def test_a_baseline_longer_than_the_profiled_step_is_doubted(baseline_ms, told) -> None:
    assert ("baseline.too_long" in remarks(loop(), baseline_step_ms=baseline_ms)) is told


@pytest.mark.parametrize(("verified", "told"), [(False, True), (True, False), (None, False)])
def test_steps_that_stay_slower_after_the_capture_are_told(verified, told) -> None:
    builder = loop().context(after={"ratio": 1.3, "verified": verified})
    assert ("capture.lingering" in remarks(builder, baseline_step_ms=1)) is told


def test_on_the_cpu_slower_steps_after_the_capture_say_nothing() -> None:
    builder = Builder(device=None).context(after={"ratio": 7.0, "verified": False})
    assert "capture.lingering" not in remarks(builder.op("aten::mm", 0, 9, dims=[SQUARE, SQUARE]))


@pytest.mark.parametrize(("orphaned_us", "level"), [(0, None), (10, "info"), (200, "warning")])
def test_work_launched_before_the_trace_is_told_by_its_share(orphaned_us, level) -> None:
    builder = loop()
    if orphaned_us:
        builder.work("left over", 1, orphaned_us, correlation=None)
    found = remarks(builder, baseline_step_ms=1)
    assert (found["join.orphans"].level if "join.orphans" in found else None) == level


@pytest.mark.parametrize(("outside_us", "told"), [(10, False), (200, True)])
def test_work_launched_outside_the_steps_is_told_once_it_matters(outside_us, told) -> None:
    builder = loop().launch("after", 20_000, at=20_100, dur=outside_us)
    assert ("steps.outside" in remarks(builder, baseline_step_ms=1)) is told


def test_uncosted_time_says_whether_shapes_are_missing() -> None:
    without = Builder()
    for i in range(3):
        without.step(i, 1000 * i, 1000).op("aten::mm", 1000 * i, 50).launch(
            "k", 1000 * i + 9, at=1000 * i + 99, dur=9
        )
    assert "record_shapes" in remarks(without)["cost.coverage"].message
    partly = loop()
    for i in range(3):
        partly.launch("mystery", 10_200 + 1000 * i, at=10_600 + 1000 * i, dur=90)
    message = remarks(partly)["cost.coverage"].message
    assert message.startswith("21%")
    assert "record_shapes" not in message


def test_uncosted_time_names_the_operators_that_hold_most_of_it() -> None:
    builder = loop()
    for i in range(3):
        start = 10_000 + 1000 * i
        for place, (name, dur) in enumerate((("my::big", 90), ("my::small", 60), ("my::tiny", 1))):
            at = start + 200 + 100 * place
            builder.op(name, at, 50, dims=[SQUARE]).launch(f"k{place}", at + 5, at=at + 300, dur=dur)
    message = remarks(builder)["cost.coverage"].message
    assert message.endswith(": no formula, or too little recorded, for my::big 18%, my::small 12%")


def test_kernels_replayed_from_a_graph_are_told_and_numbers_used_twice_are_not() -> None:
    graph = loop().call(12_300, correlation=900, name="cudaGraphLaunch")
    for k in range(3):
        graph.work("replayed", 12_600 + 20 * k, 10, correlation=900)
    assert "join.graphs" in remarks(graph)
    twice = loop()
    for start in (11_300, 12_300):
        twice.call(start, correlation=900).work("k", start + 300, 30, correlation=900)
    assert "join.graphs" not in remarks(twice)


def test_several_devices_are_told_but_an_unnumbered_one_is_none() -> None:
    two = loop().launch("k", 11_300, at=11_600, dur=10, device=1)
    assert "2 devices" in remarks(two)["device.several"].message
    unnumbered = loop().launch("k", 11_300, at=11_600, dur=10, device=-1)
    assert "device.several" not in remarks(unnumbered)


def test_processes_merged_into_one_file_are_told() -> None:
    # GIVEN a second process, whose launch has the number of one of the first's
    merged = loop().call(11_300, correlation=1)
    assert "join.processes" not in remarks(merged)
    merged.events[-1]["pid"] = 2
    assert "2 processes" in remarks(merged)["join.processes"].message


def test_a_gpu_machine_without_device_work_is_a_warning_and_a_cpu_machine_is_not() -> None:
    for device, level in (("NVIDIA H100 80GB HBM3", "warning"), (None, "info")):
        builder = Builder(device=device).op("aten::mm", 0, 100, dims=[SQUARE, SQUARE])
        remark = remarks(builder)["device.none"]
        assert remark.level == level
        assert "give no advice" in remark.message
        assert device is None or device in remark.message


@pytest.mark.parametrize(("dur_us", "told"), [(1000, False), (60, True)])
def test_a_cpu_whose_operators_are_far_above_its_roofs_is_said_to_be_estimated(
    dur_us, told, monkeypatch
) -> None:
    # GIVEN a CPU of 10 GB/s, with a cache of 8 MB, and an operator that moves 3 MB
    cpu = Device(
        "CPU", roofs="measured", peaks={"vector_fp32": 100e9}, bandwidth_bytes_per_s=10e9, llc_bytes=8 << 20
    )
    monkeypatch.setattr("advisor.roofline.cpu_roof.measure_cpu", lambda: cpu)
    monkeypatch.setattr("advisor.roofline.cpu_roof.cpu_name", lambda: "A CPU")
    builder = Builder(device=None).context(device={"name": "A CPU"})
    builder.op("aten::add", 0, dur_us, dims=[[512, 512], [512, 512], []], dtype="float")

    found = remarks(builder)

    assert ("device.cpu_roofs" in found) == told
    if told:
        assert "100.0% of the time" in found["device.cpu_roofs"].message
        assert "an estimate: measured in about a second" in found["device.cpu_roofs"].message


def test_a_cpu_that_was_not_measured_here_has_roofs_of_another(tmp_path) -> None:
    figures = tmp_path / "slow.toml"
    figures.write_text(
        "[device.slow]\nlike = 'h100-sxm'\nbandwidth_bytes_per_s = 1e9\n"
        "[device.slow.peaks]\nvector_fp32 = 1e9\n"
    )
    builder = Builder(device=None)
    builder.op("aten::add", 0, 60, dims=[[512, 512], [512, 512], []], dtype="float")

    message = remarks(builder, device=str(figures))["device.cpu_roofs"].message

    assert message.endswith("an estimate: they are given, those of slow, and were not measured here")


def test_an_unknown_cpu_is_to_be_analysed_where_the_trace_was_made() -> None:
    builder = Builder(device=None).op("aten::mm", 0, 9, dims=[SQUARE, SQUARE])
    message = remarks(builder)["device.unknown"].message
    assert message.endswith("on the machine that made the trace; analyse it there")
    assert "--device" not in message


def test_times_in_remarks_have_the_unit_that_suits_them() -> None:
    message = remarks(loop(), baseline_step_ms=5644.0)["baseline.too_long"].message
    assert "less than the 5.64 s that" in message


def test_remarks_come_worst_first() -> None:
    builder = loop(Builder(device="Abacus 3000"), steps=2).work("left over", 1, 5, correlation=None)
    levels = [remark.level for remark in remarks(builder, baseline_step_ms=1).values()]
    assert levels == sorted(levels, key=["error", "warning", "info"].index)
    assert set(levels) == {"warning", "info"}
