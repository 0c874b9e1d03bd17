"""Kernel to launch to operator to step."""

from __future__ import annotations

import gzip
import json
import time
from collections import defaultdict
from pathlib import Path

import pytest

from advisor.trace.link import CPU_OP, join, load
from advisor.trace.steps import step_times_ns
from tests.trace.builder import BACKWARD, MAIN, Builder


def ops_of(timeline) -> list[str | None]:
    return [timeline.op_name(op) for op in timeline.launches.op.tolist()]


def names_of(timeline) -> list[str]:
    return [timeline.trace.names[i] for i in timeline.launches.name.tolist()]


def test_a_kernel_belongs_to_the_innermost_operator_around_its_launch() -> None:
    timeline = (
        Builder()
        .op("aten::linear", 0, 100)
        .op("aten::addmm", 10, 50)
        .launch("gemm", 20, at=500, dur=9)
        .join()
    )
    assert ops_of(timeline) == ["aten::addmm"]
    parent = timeline.op_parent[timeline.launches.op[0]]
    assert timeline.op_name(parent) == "aten::linear"


def test_external_ids_that_equal_the_correlation_lead_nowhere() -> None:
    # GIVEN a trace that numbers the external id by the correlation, and an unrelated operator of that number
    timeline = (
        Builder()
        .op("aten::unrelated", 0, 5, **{"External id": 77})
        .op("aten::mm", 10, 20, **{"External id": 12})
        .call(15, correlation=77)
        .work("gemm", 100, 9, correlation=77, **{"External id": 77})
        .join()
    )
    assert ops_of(timeline) == ["aten::mm"]


def test_a_launch_on_another_thread_takes_an_operator_of_that_thread() -> None:
    timeline = (
        Builder()
        .on(MAIN).op("aten::main", 0, 100)
        .on(BACKWARD).op("aten::back", 0, 100).launch("k", 50, at=60, dur=5)
        .join()
    )  # fmt: skip
    assert ops_of(timeline) == ["aten::back"]


def test_runtime_and_driver_calls_both_launch() -> None:
    timeline = (
        Builder()
        .op("aten::mm", 0, 10).call(2, correlation=1).work("gemm", 30, 5, correlation=1)
        .op("triton_poi_fused_add", 10, 10).call(12, correlation=2, name="cuLaunchKernelEx")
        .work("triton_poi_fused_add", 40, 5, correlation=2)
        .join()
    )  # fmt: skip
    assert ops_of(timeline) == ["aten::mm", "triton_poi_fused_add"]


def test_kernels_of_a_graph_share_one_launch() -> None:
    builder = Builder().step(1, 0, 100).op("graph", 10, 50).call(20, correlation=5, name="cudaGraphLaunch")
    for i in range(4):
        builder.work(f"k{i}", 200 + 10 * i, 9, correlation=5)
    timeline = builder.join()
    assert ops_of(timeline) == ["graph"] * 4
    assert timeline.launches.step.tolist() == [0] * 4
    assert timeline.orphan_time_fraction == 0


def test_of_several_calls_with_one_number_the_last_before_the_work_launched_it() -> None:
    # GIVEN a number that is used twice
    timeline = (
        Builder()
        .op("first", 0, 10).call(5, correlation=1).work("a", 20, 5, correlation=1)
        .op("second", 100, 10).call(105, correlation=1).work("b", 120, 5, correlation=1)
        .join()
    )  # fmt: skip
    assert ops_of(timeline) == ["first", "second"]


def test_work_that_seems_to_start_before_its_launch_still_has_it() -> None:
    timeline = (
        Builder().op("aten::mm", 10, 10).call(15, correlation=1).work("k", 14.999, 5, correlation=1).join()
    )
    assert ops_of(timeline) == ["aten::mm"]


@pytest.mark.parametrize("correlation", [None, -1, 99])
def test_work_without_a_call_is_an_orphan_and_belongs_to_no_step(correlation) -> None:
    timeline = (
        Builder()
        .step(1, 0, 1000).op("aten::mm", 0, 100).call(5, correlation=1).work("k", 20, 30, correlation=1)
        .work("left over", 60, 10, correlation=correlation)
        .join()
    )  # fmt: skip
    assert ops_of(timeline) == ["aten::mm", None]
    assert timeline.launches.step.tolist() == [0, -1]
    assert timeline.launches.launch_ts_ns[1] == -1
    assert timeline.orphan_time_fraction == pytest.approx(0.25)


def test_a_kernel_that_runs_in_the_next_step_belongs_to_the_step_that_launched_it() -> None:
    timeline = Builder().step(1, 0, 100).step(2, 100, 100).launch("late", 90, at=150, dur=80).join()
    assert timeline.launches.step.tolist() == [0]


def test_a_launch_of_the_backward_thread_belongs_to_the_step_by_time() -> None:
    timeline = (
        Builder().step(1, 0, 100).step(2, 100, 100).on(BACKWARD).launch("grad", 140, at=150, dur=8).join()
    )
    assert timeline.launches.step.tolist() == [1]


def test_busy_time_of_a_step_counts_overlapping_kernels_once_even_on_one_stream() -> None:
    timeline = (
        Builder()
        .step(1, 0, 100).launch("a", 1, at=10, dur=50).launch("b", 2, at=40, dur=50)
        .launch("c", 3, at=200, dur=10)
        .join()
    )  # fmt: skip
    end, busy = timeline.device_work_of_steps()
    assert busy.tolist() == [90_000]
    assert end.tolist() == [210_000]


def test_with_several_devices_busy_time_is_that_of_the_busiest() -> None:
    timeline = (
        Builder()
        .step(1, 0, 100).launch("a", 1, at=10, dur=50).launch("b", 2, at=10, dur=80, device=1)
        .join()
    )  # fmt: skip
    assert timeline.main_device == 1
    assert timeline.device_work_of_steps()[1].tolist() == [80_000]


def test_a_validation_run_inside_a_step_takes_it_out_of_the_figures() -> None:
    # GIVEN four steps, the last of which begins with a short validation run
    builder = Builder()
    for i in range(4):
        builder.step(i, i * 100, 100)
        for k in range(4):
            builder.launch("k", i * 100 + 50 + k, at=i * 100 + 60 + k, dur=1)
    builder.range("advisor::phase::validation", 305, 20).launch("eval", 310, at=315, dur=5)
    assert builder.join().steady.tolist() == [False, True, True, False]


def test_a_trace_without_device_work_has_its_operators_as_rows() -> None:
    timeline = Builder(device=None).op("aten::mm", 0, 100).op("aten::add", 200, 50).join()
    assert timeline.cpu_only
    assert timeline.launches.kind.tolist() == [CPU_OP] * 2
    assert names_of(timeline) == ["aten::mm", "aten::add"]


def test_a_trace_of_kernels_alone_can_be_joined() -> None:
    timeline = Builder().work("k", 0, 10, correlation=3).join()
    assert ops_of(timeline) == [None]
    assert timeline.orphan_time_fraction == 1


def traces() -> list[Path]:
    folder = Path(__file__).parents[3] / "shared" / "traces"
    return sorted(folder.glob("*/*.json.gz")) + sorted(folder.glob("*/ranks_dlrm/rank[05].json.gz"))


@pytest.mark.parametrize("path", traces(), ids=lambda p: p.name)
def test_real_traces_agree_with_a_plain_reading(path: Path) -> None:
    """Kernel time and busy time per step, and the number of steps, without any of our code."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spans: dict[int, tuple[float, float]] = {}
    called: dict[int, float] = {}
    for e in events:
        cat, name = e.get("cat"), str(e.get("name"))
        if cat in ("user_annotation", "cpu_op", "Operator") and name.startswith("ProfilerStep#"):
            number, span = int(name[13:]), (float(e["ts"]), float(e["ts"]) + e["dur"])
            if number not in spans or span[1] - span[0] > spans[number][1] - spans[number][0]:
                spans[number] = span
        elif str(cat).endswith(("_runtime", "_driver", "Runtime")) and "correlation" in (e.get("args") or {}):
            called.setdefault(e["args"]["correlation"], float(e["ts"]))
    kernel_us: dict[int, float] = defaultdict(float)
    work: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for e in events:
        kind = str(e.get("cat")).lower().removeprefix("gpu_")
        if kind not in ("kernel", "memcpy", "memset") or "dur" not in e:
            continue
        ts = called.get((e.get("args") or {}).get("correlation"), -1.0)
        step = next((n for n, (start, end) in spans.items() if start <= ts < end), None)
        if step is None:
            continue
        if kind == "kernel":
            kernel_us[step] += e["dur"]
        work[e["args"]["device"], step].append((float(e["ts"]), float(e["ts"]) + e["dur"]))  # type: ignore[index]

    timeline = load(path)

    if not spans:
        assert timeline.steps.source != "profiler"
        return
    assert sorted(spans) == timeline.steps.number.tolist()
    rows = timeline.launches
    busy = timeline.device_work_of_steps()[1]
    for i, number in enumerate(timeline.steps.number.tolist()):
        if timeline.cpu_only:
            continue
        ours = rows.dur_ns[(rows.step == i) & (rows.kind == 0)].sum() / 1e3
        assert ours == pytest.approx(kernel_us[number], rel=1e-6, abs=0.01)
        covered, reach = 0.0, float("-inf")
        for start, end in sorted(work.get((timeline.main_device, number), [])):  # type: ignore[call-overload]
            covered += max(end - max(start, reach), 0.0)
            reach = max(reach, end)
        assert busy[i] / 1e3 == pytest.approx(covered, rel=1e-4, abs=0.1)
    times, _ = step_times_ns(timeline.steps, timeline.steady, *timeline.device_work_of_steps())
    assert len(times) == timeline.steady.sum() >= 1
    assert (times > 0).all()


def test_a_timeline_prints_as_one_line_however_long_the_trace() -> None:
    builder = Builder().step(1, 0, 100)
    for i in range(1000):
        builder.launch("k", i, at=2000 + i, dur=1)
    assert repr(builder.join()) == "<Timeline of built.json: 1,000 launches, 1 steps>"


def test_a_number_that_every_call_carries_takes_no_quadratic_time() -> None:
    n = 30_000
    builder = Builder()
    for i in range(n):
        builder.call(10 * i, correlation=7).work("k", 10 * i + 5, 1, correlation=7)
    trace = builder.trace()
    begun = time.process_time()
    timeline = join(trace)
    assert time.process_time() - begun < 3
    assert (timeline.launches.launch_ts_ns == timeline.launches.ts_ns - 5000).all()
