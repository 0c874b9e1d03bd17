"""The zoo's cases build and run; what they give is cut down to what agrees in both runs."""

import csv
import gzip

import pytest

from advisor.roofline.counters import Counted, read_counters
from benchmarks.counters import windows, zoo


def _event(cat, name, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}


def _launched(kernel, number, at):
    return [
        _event("cpu_op", f"aten::{kernel}", at, 5, **{"Input Dims": [[4]], "Ev Idx": number}),
        _event("cuda_runtime", "cudaLaunchKernel", at + 1, 1, correlation=number),
        _event("cuda_runtime", "cudaEventRecord", at + 2, 1, correlation=100 + number),
        _event("kernel", kernel, at + 3, 2, correlation=number, grid=[1, 1, 1], block=[32, 1, 1]),
    ]


FIRST = [*(f"fill_{i}" for i in range(8)), "gemm"]


@pytest.fixture
def trace():
    events = _launched("setup", 1, 0)
    for place, (case, kernels) in enumerate({"a": FIRST, "b": ["gemm"], "c": ["sort"]}.items()):
        start = 1000 * (place + 1)
        events.append(_event("user_annotation", f"zoo::{case}", start, 900))
        for k, kernel in enumerate(kernels):
            events += _launched(kernel, 10 * (place + 1) + k, start + 10 * (k + 1))
    return {"schemaVersion": 1, "secret": "host name", "traceEvents": events}


def test_every_case_has_a_name_of_its_own_and_families_take_turns():
    cases = zoo.all_cases()
    ordered = zoo.interleaved(cases)

    assert sorted(c.name for c in ordered) == sorted({c.name for c in cases})
    assert len({c.family for c in ordered[:20]}) >= 10


@pytest.mark.parametrize("family", ["norm", "optimizer", "recurrent"])
def test_cases_run_on_tiny_inputs(family):
    cases = [c for c in zoo.all_cases() if c.family == family and not c.cuda_only]

    assert cases
    assert zoo.run_cases(cases, zoo.Maker("cpu", tiny=True)) == {}


def test_a_case_that_fails_is_named_and_the_others_go_on():
    cases = [
        zoo.Case("x.bad", lambda m: m.forward(lambda: 1 / 0)),
        zoo.Case("x.good", lambda m: m.forward(lambda: 1)),
    ]
    seen = []

    left_out = zoo.run_cases(cases, zoo.Maker("cpu", tiny=True), progress=seen.append)

    assert left_out == {"x.bad": "ZeroDivisionError: division by zero"}
    assert seen == ["x.bad", "x.good"]


def test_windows_hold_what_was_launched_inside_them(trace):
    found = windows.windows_of(trace)

    assert [w.name for w in found] == ["a", "b", "c"]
    assert [[k["name"] for k in w.kernels] for w in found] == [FIRST, ["gemm"], ["sort"]]


def test_a_case_with_other_kernels_in_the_counted_run_is_left_out(trace, capsys):
    found = windows.windows_of(trace)
    counted = [Counted(name) for name in ("void fill_0<int>(int)", *FIRST[1:], "other_gemm", "sort")]

    good = windows.agreeing(found, counted)

    assert [w.name for w in good] == ["a", "c"]
    assert [w.counted for w in good] == [[*range(9)], [10]]
    assert "not joined: b" in capsys.readouterr().out


def test_the_cut_trace_keeps_launches_shapes_and_one_step_and_drops_the_rest(trace):
    cut = windows.cut_down(trace, windows.windows_of(trace))

    names = [e["name"] for e in cut["traceEvents"]]
    assert names[0] == "ProfilerStep#0"
    assert "setup" not in names
    assert "cudaEventRecord" not in names
    assert names.count("cudaLaunchKernel") == 11
    assert "secret" not in cut
    (gemm, *_) = [e for e in cut["traceEvents"] if e["name"] == "aten::gemm"]
    assert gemm["args"] == {"Input Dims": [[4]]}


def test_the_written_table_is_read_back_as_it_was(trace, tmp_path):
    found = windows.windows_of(trace)
    counted = [
        Counted(
            kernel,
            time_ns=2000.0,
            bytes_read=64e6,
            bytes_written=1e6,
            instructions={"ffma": 3.0},
            tensor_flops={"bf16": 2e9, "fp8": 0.0},
            tensor_instructions=5.0,
            dram_pct=12.5,
        )
        for kernel in (*FIRST, "gemm", "sort")
    ]
    path = tmp_path / "counters.csv.gz"

    windows.write_counters(path, found, counted)

    assert read_counters(path).launches == counted
    with gzip.open(path, "rt") as file:
        assert [row["case"] for row in csv.DictReader(file)] == ["a"] * 9 + ["b", "c"]
