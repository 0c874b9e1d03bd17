from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pytest

from advisor.capture import worker
from advisor.capture.output import Files, Worker


def test_packing_puts_the_context_block_at_the_front_and_keeps_the_rest_byte_for_byte(tmp_path):
    raw, trace = tmp_path / "raw.json", tmp_path / "rank0.pt.trace.json.gz"
    body = b'\n  "schemaVersion": 1, "traceEvents": [{"name": "\xff\\"}]\n}'
    raw.write_bytes(b"{" + body)

    worker.pack(raw, trace, {"schema": 1, "device": None})

    text = gzip.decompress(trace.read_bytes())
    assert text == b'{"training_advisor":{"schema": 1, "device": null},' + body
    assert {path.name for path in tmp_path.iterdir()} == {"raw.json", trace.name}


def test_packing_crosses_the_chunks_it_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "_CHUNK_BYTES", 16)
    raw, trace = tmp_path / "raw.json", tmp_path / "t.gz"
    raw.write_text(json.dumps({"traceEvents": list(range(500))}))

    worker.pack(raw, trace, {"schema": 1})

    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] == list(range(500))


def test_what_is_no_trace_is_refused_and_leaves_no_file(tmp_path):
    raw = tmp_path / "raw.json"
    raw.write_text("[]")

    with pytest.raises(ValueError, match="not a trace"):
        worker.pack(raw, tmp_path / "t.gz", {})

    assert list(tmp_path.iterdir()) == [raw]


def test_other_ranks_are_waited_for_while_they_are_still_packing(tmp_path, monkeypatch):
    # GIVEN two ranks: one finished, one whose raw file is still there
    ranks = [Files(tmp_path, rank) for rank in (0, 1)]
    ranks[0].trace.touch()
    ranks[1].raw.touch()
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            ranks[1].trace.touch()

    monkeypatch.setattr(worker.time, "sleep", nap)

    # WHEN they are waited for, with no patience for silence
    found = worker.wait_for_ranks([f.trace for f in ranks], limit_s=60, silent_s=0)

    # THEN both are there
    assert found == [f.trace for f in ranks]
    assert len(naps) == 3


def test_a_rank_that_gives_no_sign_is_left_out(tmp_path, capsys):
    here = Files(tmp_path, 0)
    here.trace.touch()

    found = worker.wait_for_ranks([here.trace, Files(tmp_path, 1).trace], limit_s=60, silent_s=0)

    assert found == [here.trace]
    assert "rank1.pt.trace.json.gz" in capsys.readouterr().out


def test_the_worker_imports_no_torch_and_sees_no_gpu(tmp_path):
    code = "import sys, advisor.capture.worker; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_finished_job_that_said_nothing_leaves_only_the_trace(tmp_path):
    files = Files(tmp_path / "step_1", 3)
    files.prepare()
    files.raw.write_text('{"traceEvents": []}')
    running = Worker(files)

    running.start({"schema": 1}, report=False, ranks=[3])

    assert running.wait(60) == 0
    assert sorted(p.name for p in files.folder.iterdir()) == ["rank3.pt.trace.json.gz"]


def test_a_failed_job_keeps_the_raw_recording_and_says_why(tmp_path):
    files = Files(tmp_path, 0)
    files.prepare()
    files.raw.write_text("nonsense")
    running = Worker(files)

    running.start({}, report=True, ranks=[0])

    assert running.wait(60) == 1
    assert "not a trace" in running.last_line()
    assert files.log.exists()
    assert files.raw.exists()


def test_a_folder_that_cannot_be_written_is_noticed_before_recording(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(OSError, match="file"):
        Files(tmp_path / "file" / "step_1", 0).prepare()


def test_discarding_removes_leftovers_and_the_empty_folder_but_nothing_else(tmp_path):
    files = Files(tmp_path / "step_1", 0)
    files.prepare()
    files.raw.touch()
    files.discard()
    assert not files.folder.exists()

    files.prepare()
    files.trace.touch()
    files.discard()
    assert files.trace.exists()
