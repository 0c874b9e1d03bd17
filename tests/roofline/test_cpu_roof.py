"""The CPU's roof is measured, plausible, quick, and says what it is."""

from pathlib import Path

import numpy as np
import pytest

from advisor.roofline import cpu_roof
from advisor.roofline.analysis import analyse_timeline
from advisor.roofline.devices import Device
from tests.trace.builder import Builder

MS = 1_000_000


def cpu(**fields) -> Device:
    """Two cores of 50 GFLOP/s and 10 GB/s, with a cache of 1 MB."""
    known = {
        "peaks": {"vector_fp32": 100e9, "vector_fp64": 50e9},
        "peak_sources": {"vector_fp32": "measured", "vector_fp64": "measured"},
        "bandwidth_bytes_per_s": 10e9,
        "bandwidth_source": "measured",
        "llc_bytes": 1_000_000,
        "sms": 2,
    }
    return Device("CPU", roofs="measured", **{**known, **fields})


def raised(device: Device, *work: tuple[str, str, float, float, int]) -> Device:
    """With operators given as (name, pipe, FLOPs, bytes, ns)."""
    pipes = ["vector_fp32", "vector_fp64"]
    return cpu_roof.at_least_reached(
        device,
        flops=np.array([row[2] for row in work]),
        bytes_moved=np.array([row[3] for row in work]),
        dur_ns=np.array([row[4] for row in work]),
        pipe=np.array([pipes.index(row[1]) for row in work]),
        pipes=pipes,
        name=np.arange(len(work)),
        names=[row[0] for row in work],
    )


def test_the_measured_roof_is_plausible_and_measured_once() -> None:
    device = cpu_roof.measure_cpu()
    assert (device.roofs, device.matched, device.name) == ("measured", None, cpu_roof.cpu_name())
    assert 0.5e9 < (device.bandwidth_bytes_per_s or 0) < 2e12
    assert 1e9 < device.peaks["vector_fp32"] < 50e12
    assert set(device.peaks) == set(device.peak_sources) == {"vector_fp32", "vector_fp64"}
    assert device.peak("tensor_bf16") is None
    assert device.peaks["vector_fp32"] >= device.peaks["vector_fp64"]
    assert cpu_roof.measure_cpu() is device


def test_measuring_takes_the_best_of_few_runs(monkeypatch) -> None:
    # GIVEN a clock that makes the runs take 50, 20, 30 and 150 ms, with which the budget is spent
    ticks = iter([0.0, 0.05, 1.0, 1.02, 2.0, 2.03, 3.0, 3.15])
    monkeypatch.setattr(cpu_roof.time, "perf_counter", lambda: next(ticks))
    calls = []
    # WHEN the work is timed
    best = cpu_roof._best_s(lambda: calls.append(None))
    # THEN one run warms up, four are timed, and other work that slowed some of them does not count
    assert len(calls) == 5
    assert abs(best - 0.02) < 1e-9


def test_fast_work_is_timed_a_limited_number_of_times(monkeypatch) -> None:
    monkeypatch.setattr(cpu_roof.time, "perf_counter", lambda: 0.0)
    calls = []
    cpu_roof._best_s(lambda: calls.append(None))
    assert len(calls) == 1 + cpu_roof._MAX_RUNS


def test_a_slow_machine_is_timed_fewer_times(monkeypatch) -> None:
    ticks = iter([0.0, 0.3])
    monkeypatch.setattr(cpu_roof.time, "perf_counter", lambda: next(ticks))
    assert abs(cpu_roof._best_s(lambda: None) - 0.3) < 1e-9


def test_the_largest_cache_counts_and_unreadable_sizes_do_not(tmp_path: Path) -> None:
    for index, size in enumerate(["32K", "1024K", "16M", "odd"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert cpu_roof.last_level_cache_bytes(tmp_path) == 16 << 20
    assert cpu_roof.last_level_cache_bytes(tmp_path / "none") is None


def test_a_roof_is_at_least_what_the_trace_reached_and_says_so() -> None:
    # GIVEN a roof measured while training used the cores, and operators below and above it
    found = raised(
        cpu(),
        ("aten::mm", "vector_fp32", 80e6, 1e3, MS),
        ("aten::convolution_backward", "vector_fp32", 269e6, 1e3, MS),
    )
    # THEN it rises to the fastest of them, and the source tells which and what was measured
    assert found.peaks["vector_fp32"] == pytest.approx(269e9)
    source = found.peak_sources["vector_fp32"]
    assert source.startswith("at least: reached by aten::convolution_backward")
    assert "100 GFLOP/s measured" in source
    # AND the others stay
    assert (found.peaks["vector_fp64"], found.peak_sources["vector_fp64"]) == (50e9, "measured")
    assert found.bandwidth_bytes_per_s == 10e9


def test_a_roof_that_nothing_reached_stays() -> None:
    device = cpu()
    assert raised(device, ("aten::mm", "vector_fp32", 80e6, 1e3, MS)) == device


def test_what_the_cache_may_have_served_does_not_raise_the_memory_roof() -> None:
    # GIVEN 2 MB in and out of a cache of 1 MB, and 30 MB of which 2 MB may have come from it
    cached = raised(cpu(), ("aten::copy_", "vector_fp32", 0.0, 2e6, MS // 10))
    beyond = raised(cpu(), ("aten::copy_", "vector_fp32", 0.0, 30e6, MS))
    assert cached.bandwidth_bytes_per_s == 10e9
    assert beyond.bandwidth_bytes_per_s == pytest.approx(28e9)
    assert beyond.bandwidth_source.startswith("at least: reached by aten::copy_")


@pytest.mark.parametrize(
    ("flops", "dur_ns"),
    [(5e9, MS), (10e6, 5_000)],
    ids=["5 TFLOP/s on two cores", "5 µs"],
)
def test_rates_that_cannot_be_believed_do_not_raise_a_roof(flops, dur_ns) -> None:
    assert raised(cpu(), ("aten::mm", "vector_fp32", flops, 1e3, dur_ns)).peaks["vector_fp32"] == 100e9


def test_single_precision_is_no_slower_than_double() -> None:
    found = raised(cpu(), ("aten::mm", "vector_fp64", 150e6, 1e3, MS))
    assert found.peaks["vector_fp64"] == found.peaks["vector_fp32"] == pytest.approx(150e9)
    assert found.peak_sources["vector_fp32"].startswith("at least")


def test_unknown_costs_raise_nothing() -> None:
    assert raised(cpu(), ("aten::mm", "vector_fp32", np.nan, np.nan, MS)) == cpu()


@pytest.mark.parametrize("name", [1.5, ["x"], {"is": "x"}, True, ""])
def test_a_name_of_the_cpu_that_is_no_text_is_not_taken(name):
    timeline = Builder(device=None).context(device={"name": name}).op("aten::mm", 0, 50).join()
    assert analyse_timeline(timeline).device.name == "CPU"
