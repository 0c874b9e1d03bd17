"""Holistic Trace Analysis beside us: the same figures, and what happens when it cannot."""

from __future__ import annotations

import gzip
import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from advisor.errors import MissingExtraError
from advisor.report import hta
from advisor.report.build import analyze, analyze_files
from advisor.report.hta import add_hta, difference
from advisor.report.hta_basis import COMPUTE, IDLE, NON_COMPUTE, OVERLAP, SPAN
from advisor.report.model import CrossCheck, Report
from tests.tiny_trace import tiny_trace, write_tiny_trace

needs_hta = pytest.mark.skipif(
    importlib.util.find_spec("hta") is None, reason="the extra hta is not installed"
)
#: Real traces on which the two differ, the figures, and why; `CLEANED` shows that the reason is right.
WAITS = "HTA takes waits for events (category cuda_sync) for device work"
HOST_OPS = "HTA takes host operators of Triton kernels for device work, since they carry a stream"
EXCEPTIONS = {
    "a100_event_sync_streams": ({NON_COMPUTE}, WAITS),
    "mi300x_inductor_triton": ({IDLE}, HOST_OPS),
    "gpt_compiled_bf16": ({IDLE, COMPUTE, NON_COMPUTE}, HOST_OPS),
}
SMALL = [
    "public/a100_event_sync_streams", "public/a100_nccl_noshapes", "public/b200_llm_inference",
    "public/h100_vit_inference", "public/mi210_gpu_only", "public/mi250_tiny_train",
    "public/mi300x_bert_inference", "public/mi300x_hipgraph_decode", "public/mi300x_inductor_triton",
    "public/mi300x_norms_fwd_bwd", "h200/gpt_compiled_bf16", "h200/gpt_naive_fp32",
]  # fmt: skip
LARGE = [
    "public/a100_tensorlist_cudagraph", "public/a100_training_control", "public/rtx2080ti_resnet_extid",
    "public/v100_large_noshapes", "public/v100_resnet50_workers0", "public/v100_resnet50_workers4",
    "h200/gpt_naive_bf16", "h200/gpt_sdpa_bf16_stack", "h200/llama_eager_bf16", "h200/resnet50_amp16",
]  # fmt: skip


def _checks(report: Report) -> dict[str, CrossCheck]:
    return {check.figure: check for check in report.cross_checks}


def _failures(report: Report) -> list[str]:
    return [remark.message for remark in report.data_quality if remark.code == "hta.failed"]


def _write(path: Path, document: dict[str, Any]) -> Path:
    path.write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    return path


@needs_hta
def test_both_find_the_same_device_time(tmp_path):
    # GIVEN three steps of a 250 us product and a 40 us addition 50 us after it, 1 ms apart
    report = analyze(write_tiny_trace(tmp_path / "t.json"), hta=True)

    # THEN the hand-made figures are in both columns
    checks = _checks(report)
    expected = {SPAN: 2.340, IDLE: 2.340 - 3 * 0.290, COMPUTE: 3 * 0.290, NON_COMPUTE: 0.0}
    for figure, ms in expected.items():
        assert (checks[figure].unit, checks[figure].ours) == ("ms", pytest.approx(ms))
        assert checks[figure].theirs == pytest.approx(ms)
        assert checks[figure].difference_fraction == pytest.approx(0, abs=1e-9)
    assert not _failures(report)


@needs_hta
def test_what_only_hta_has_is_there_without_ours_and_its_path_beside_the_replays(tmp_path):
    report = analyze(write_tiny_trace(tmp_path / "t.json"), hta=True)

    # THEN a kernel waits at most once the next is launched, and the second step's critical path is there
    checks = _checks(report)
    assert checks["queue length on stream 7, longest"].theirs == 1.0
    path = checks["critical path of step 6"]
    assert path.theirs is not None
    assert 0 < path.theirs <= 1.0
    # AND the replay plays steps of 1 ms, one after the other, that the host alone sets the pace of
    assert path.ours == pytest.approx(1.0, rel=0.03)
    assert path.difference_fraction == pytest.approx((path.ours - path.theirs) / path.theirs)
    host = checks["critical path of step 6: host work"]
    assert host.ours == pytest.approx(100, abs=5)
    assert checks["queue length on stream 7, longest"].ours is None
    # AND there is no communication whose overlap could be told
    assert OVERLAP not in checks


@needs_hta
def test_nanoseconds_are_not_rounded_away(tmp_path):
    # GIVEN kernels of 0.6 us, which HTA makes 0 or 1 us when it rounds
    document = tiny_trace()
    for event in document["traceEvents"]:
        if event["cat"] == "kernel":
            event["dur"] = 0.6
    report = analyze(_write(tmp_path / "t.json.gz", document), hta=True)

    assert _checks(report)[COMPUTE].theirs == pytest.approx(6 * 0.0006)
    assert _checks(report)[COMPUTE].difference_fraction == pytest.approx(0, abs=1e-9)


@needs_hta
def test_a_difference_is_told(tmp_path):
    # GIVEN a host operator that carries a stream, which HTA takes for 100 us of device work
    document = tiny_trace()
    triton = {**document["traceEvents"][1], "name": "triton_poi_0", "ts": 1_000_600.0, "dur": 100.0}
    triton["args"] = {"stream": 7}
    document["traceEvents"].append(triton)
    report = analyze(_write(tmp_path / "t.json.gz", document), hta=True)

    # THEN compute time differs: ours 0.87 ms, theirs 0.97
    check = _checks(report)[COMPUTE]
    assert check.difference_fraction == pytest.approx((0.87 - 0.97) / 0.97, rel=1e-6)


@needs_hta
def test_a_file_that_only_we_can_read_costs_the_section_alone(tmp_path):
    # GIVEN a trace that breaks off
    text = json.dumps(tiny_trace())
    path = tmp_path / "cut.json"
    path.write_text(text[: int(len(text) * 0.8)])

    # WHEN analysed with HTA
    report = analyze(path, hta=True)

    # THEN our report is there, with ours alone and one remark that gives HTA's reason
    assert report.kernels
    assert not any(check.theirs is not None for check in report.cross_checks)
    [message] = _failures(report)
    assert "reading: JSONDecodeError" in message


@needs_hta
def test_one_of_several_files_that_fails_leaves_the_others(tmp_path):
    # GIVEN two ranks, one broken off
    write_tiny_trace(tmp_path / "rank0.json")
    text = json.dumps(tiny_trace())
    (tmp_path / "rank1.json").write_text(text[: int(len(text) * 0.8)])

    report = analyze(tmp_path, hta=True)

    # THEN rank 0 is checked and rank 1 is told
    assert _checks(report)[f"rank 0: {COMPUTE}"].difference_fraction == pytest.approx(0, abs=1e-9)
    [message] = _failures(report)
    assert "rank 1: reading" in message
    assert "rank 0" not in message


@needs_hta
def test_a_run_on_the_cpu_is_told_in_one_line(tmp_path):
    document = {"traceEvents": [e for e in tiny_trace()["traceEvents"] if e["cat"] != "kernel"]}
    report = analyze(_write(tmp_path / "t.json.gz", document), hta=True)

    assert not report.cross_checks
    [message] = _failures(report)
    assert "no device work" in message


@needs_hta
def test_any_file_name_will_do(tmp_path):
    # GIVEN gzip under a name without an ending, which HTA refuses
    path = _write(tmp_path / "trace.bin", tiny_trace())
    report, analysis = analyze_files([str(path)])

    add_hta(report, analysis)

    assert _checks(report)[COMPUTE].difference_fraction == pytest.approx(0, abs=1e-9)


@needs_hta
def test_nothing_is_printed_and_nothing_left_behind(tmp_path, capfd, monkeypatch):
    # GIVEN a folder of traces, and one for temporary files
    traces, temporary = tmp_path / "traces", tmp_path / "tmp"
    traces.mkdir()
    temporary.mkdir()
    path = write_tiny_trace(traces / "t.json")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.chdir(traces)

    analyze(path, hta=True)

    # THEN HTA's log, warnings and files are nowhere
    assert capfd.readouterr() == ("", "")
    assert [p.name for p in traces.iterdir()] == ["t.json"]
    assert not list(temporary.iterdir())


@needs_hta
def test_hta_is_stopped_when_it_takes_too_long(tmp_path):
    report, analysis = analyze_files([str(write_tiny_trace(tmp_path / "t.json"))])

    add_hta(report, analysis, timeout_s=0.001)

    [message] = _failures(report)
    assert "stopped after 0.001 s" in message


def test_a_worker_that_dies_is_told_with_what_it_had_written(tmp_path, monkeypatch):
    # GIVEN a worker that writes one figure and half a line, then ends badly
    class Died:
        returncode = -9

    def run(command: list[str], **_options: Any) -> Died:
        line = json.dumps({"file": 0, "figure": COMPUTE, "unit": "ms", "value": 0.87})
        Path(command[-1]).write_text(line + '\n{"file": 0, "fig')
        return Died()

    monkeypatch.setattr(hta.subprocess, "run", run)
    monkeypatch.setattr(hta, "require_hta", lambda: None)
    report, analysis = analyze_files([str(write_tiny_trace(tmp_path / "t.json"))])

    add_hta(report, analysis)

    assert _checks(report)[COMPUTE].difference_fraction == pytest.approx(0, abs=1e-9)
    assert "status -9" in _failures(report)[0]


def test_without_the_extra_the_command_that_installs_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(hta.importlib.util, "find_spec", lambda name: None)

    # THEN before any trace is read
    with pytest.raises(MissingExtraError, match=r"--hta needs .*pip install traceinsight 'pandas<3'$"):
        analyze(tmp_path / "no such file", hta=True)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (1.02, 1.0, 0.02),
        (0.98, 1.0, -0.02),
        (0.0, 0.0, 0.0),
        (0.1, 0.0, 1.0),
        (None, 1.0, None),
        (1.0, None, None),
    ],
)
def test_a_difference_is_a_fraction_of_theirs(ours, theirs, expected):
    assert difference(ours, theirs) == (None if expected is None else pytest.approx(expected))


def _compare(shared: Path, names: list[str]) -> dict[str, CrossCheck]:
    """By "file: figure", of figures that both have, on real traces read by one run of HTA."""
    files = [str(shared / "traces" / f"{name}.json.gz") for name in names]
    report = analyze(files, hta=True)
    found = {f: c for f, c in _checks(report).items() if c.ours is not None and "critical path" not in f}
    assert len(found) >= 4 * len(files)
    return found


def _differing(checks: dict[str, CrossCheck]) -> set[tuple[str, str]]:
    return {
        (figure.partition(".json.gz: ")[0], figure.partition(".json.gz: ")[2])
        for figure, check in checks.items()
        if check.difference_fraction is None or abs(check.difference_fraction) > 0.02
    }


def _expected(names: list[str]) -> set[tuple[str, str]]:
    stems = {Path(name).name for name in names}
    return {
        (stem, figure) for stem, (figures, _) in EXCEPTIONS.items() if stem in stems for figure in figures
    }


@needs_hta
def test_real_traces_agree_within_two_percent_but_for_known_exceptions(shared):
    assert _differing(_compare(shared, SMALL)) == _expected(SMALL)


@needs_hta
@pytest.mark.slow
def test_large_real_traces_agree_within_two_percent(shared):
    assert _differing(_compare(shared, LARGE)) == _expected(LARGE)


@needs_hta
@pytest.mark.parametrize("folder", ["public/ranks_dlrm", "h200/ddp2_gpt_rank*"])
def test_each_rank_of_a_job_agrees(shared, folder):
    # GIVEN all ranks of one job
    report = analyze(str(shared / "traces" / (folder + ".json.gz" if "*" in folder else folder)), hta=True)

    # THEN all five figures of each rank are told apart and the same
    both = {f: c for f, c in _checks(report).items() if c.ours is not None and "critical path" not in f}
    assert len(both) == 5 * len(report.trace.files)
    assert not _differing(both)


def _without_waits(event: dict[str, Any]) -> bool:
    return event.get("cat") != "cuda_sync"


def _without_streams_on_the_host(event: dict[str, Any]) -> bool:
    if event.get("cat") == "cpu_op":
        event.get("args", {}).pop("stream", None)
    return True


CLEANED: dict[str, Callable[[dict[str, Any]], bool]] = {
    WAITS: _without_waits,
    HOST_OPS: _without_streams_on_the_host,
}


@needs_hta
def test_the_known_exceptions_vanish_without_the_events_they_come_from(shared, tmp_path):
    # GIVEN the traces on which we differ, rid of the events that the reason names
    for folder in ("public", "h200"):
        for stem, (_, why) in EXCEPTIONS.items():
            path = shared / "traces" / folder / f"{stem}.json.gz"
            if path.exists():
                document = json.loads(gzip.decompress(path.read_bytes()))
                document["traceEvents"] = [e for e in document["traceEvents"] if CLEANED[why](e)]
                _write(tmp_path / path.name, document)

    # THEN nothing differs any more
    report = analyze(tmp_path, hta=True)
    both = {f: c for f, c in _checks(report).items() if c.ours is not None and "critical path" not in f}
    assert len(both) >= 4 * len(EXCEPTIONS)
    assert not _differing(both)
