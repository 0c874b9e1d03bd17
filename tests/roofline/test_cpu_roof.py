"""The CPU's roof is measured, plausible, quick, and says what it is."""

from pathlib import Path

from advisor.roofline import cpu_roof


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
