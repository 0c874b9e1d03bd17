"""`advisor analyze`, run as a user runs it."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from advisor import cli
from advisor.report import build
from tests.tiny_trace import tiny_trace, write_tiny_trace


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a trace in it."""
    write_tiny_trace(tmp_path / "trace.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder: Path, capfdbinary: pytest.CaptureFixture[bytes]):
    """Runs `advisor analyze` in this process: exit code, stdout, stderr."""

    def call(*args: str) -> tuple[int, str, str]:
        code = 0
        try:
            cli.main(["analyze", *args])
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capfdbinary.readouterr()
        return code, captured.out.decode(), captured.err.decode()

    return call


def start(*args: str, **kwargs) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "advisor.cli", "analyze", *args], **kwargs)


def test_a_trace_gives_a_page_and_a_summary(run, folder: Path) -> None:
    code, out, err = run("trace.json")
    assert (code, err) == (0, "")
    assert "report.html" in out
    assert "<html" in (folder / "report.html").read_text()


def test_quiet_says_nothing_at_all(run, folder: Path) -> None:
    assert run("trace.json", "--quiet", "--launches", "l.csv", "--json", "r.json") == (0, "", "")
    assert {p.name for p in folder.iterdir()} == {"trace.json", "report.html", "l.csv", "r.json"}


def test_json_to_stdout_is_nothing_but_json_and_writes_no_page(run, folder: Path) -> None:
    code, out, err = run("trace.json", "--json", "-")
    assert (code, err) == (0, "")
    assert json.loads(out)["summary"]["steps"] == 2
    assert [p.name for p in folder.iterdir()] == ["trace.json"]


def test_markdown_to_stdout_with_a_page_besides(run, folder: Path) -> None:
    code, out, _ = run("trace.json", "--markdown", "-", "-o", "page.html")
    assert code == 0
    assert out.startswith("#")
    assert (folder / "page.html").is_file()


def test_the_baseline_of_the_command_line_wins(run) -> None:
    _, out, _ = run("trace.json", "--json", "-", "--baseline-step-ms", "0.5")
    summary = json.loads(out)["summary"]
    assert summary["baseline_step_ms"] == 0.5
    assert summary["gpu_busy_fraction"] > summary["gpu_busy_fraction_profiled"]


def test_the_device_of_the_command_line_wins(run) -> None:
    _, out, _ = run("trace.json", "--json", "-", "--device", "a100-sxm-40gb")
    assert json.loads(out)["device"]["matched"].startswith("a100")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("trace.json", "--json", "-", "--markdown", "-"), "cannot both go to stdout"),
        (("trace.json", "--json", "a.json", "--markdown", "./a.json"), "two outputs have the same name"),
        (("trace.json", "-o", "nowhere/report.html"), "no folder nowhere"),
        (("trace.json", "--json", ".", "--force"), "is a folder"),
        (("trace.json", "--json", "trace.json", "--force"), "would be overwritten"),
        ((".", "--json", "trace.json", "--force"), "would be overwritten"),
        (("trace.json", "--launches", "l.xlsx"), ".csv or .parquet"),
        (("trace.json", "--device", "abacus"), "abacus"),
        (("trace.json", "--baseline-step-ms", "0"), "baseline-step-ms"),
        ((), "PATH"),
    ],
)
def test_what_cannot_be_done_is_refused_with_exit_code_2_and_nothing_is_written(
    run, folder: Path, args, says
) -> None:
    before = (folder / "trace.json").read_bytes()
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err
    assert [p.name for p in folder.iterdir()] == ["trace.json"]
    assert (folder / "trace.json").read_bytes() == before


def test_an_existing_output_is_kept_unless_forced(run, folder: Path) -> None:
    (folder / "report.html").write_text("mine")
    code, _, err = run("trace.json")
    assert code == 2
    assert "--force" in err
    assert (folder / "report.html").read_text() == "mine"
    assert run("trace.json", "--force", "-q")[0] == 0
    assert (folder / "report.html").read_text() != "mine"


def test_reports_of_its_own_are_replaced_without_being_forced(run, folder: Path) -> None:
    # GIVEN the reports of an earlier analysis
    targets = ("trace.json", "--json", "r.json", "--markdown", "r.md", "-q")
    assert run(*targets)[0] == 0
    # WHEN the same command is pasted again THEN it works
    assert run(*targets) == (0, "", "")


@pytest.mark.parametrize(
    ("name", "option", "content"),
    [
        ("r.html", "-o", "<!doctype html><html><head></head><body>training-advisor</body></html>"),
        ("r.json", "--json", '{"schema_version": "1.0", "mine": 1}'),
        ("r.md", "--markdown", "# Notes\n\n<sub>training-advisor 0.1.0</sub>\n"),
        ("l.csv", "--launches", "ts_ns,dur_ns\n"),
    ],
)
def test_files_that_only_look_like_reports_are_kept(run, folder: Path, name, option, content) -> None:
    (folder / name).write_text(content)
    assert run("trace.json", option, name)[0] == 2
    assert (folder / name).read_text() == content


@pytest.mark.parametrize("content", [b"", b"not json", b'{"loss": 1}', b"\x1f\x8bbroken"])
def test_input_that_is_no_trace_ends_with_one_line_and_exit_code_3(run, folder: Path, content) -> None:
    (folder / "odd.json").write_bytes(content)
    code, out, err = run("odd.json")
    assert (code, out) == (3, "")
    assert err.startswith("advisor: odd.json")
    assert err.count("\n") == 1
    assert not (folder / "report.html").exists()


def test_a_path_where_nothing_is_ends_with_exit_code_3(run) -> None:
    for path in ("missing.json", "empty*", "missing/folder"):
        code, _, err = run(path)
        assert code == 3
        assert path in err


def test_an_empty_folder_says_what_was_looked_for(run, folder: Path) -> None:
    (folder / "empty").mkdir()
    code, _, err = run("empty")
    assert code == 3
    assert "*.json" in err


def test_a_folder_of_ranks_is_one_report(run, folder: Path) -> None:
    for rank in (1, 0, 2):
        (folder / "ranks").mkdir(exist_ok=True)
        document = tiny_trace() | {"distributedInfo": {"rank": rank, "world_size": 4}}
        (folder / "ranks" / f"r{rank}.json").write_text(json.dumps(document))
    (folder / "ranks" / "broken.json").write_text("{")
    code, out, _ = run("ranks", "--json", "-")
    report = json.loads(out)
    assert code == 0
    assert [r["rank"] for r in report["ranks"]] == [0, 1, 2]
    assert report["trace"]["rank"] == 0
    codes = {q["code"]: q["level"] for q in report["data_quality"]}
    assert codes["read.file"] == "error"
    assert "ranks.missing" in codes


def test_unrelated_traces_are_told_to_be_unclear(run, folder: Path) -> None:
    write_tiny_trace(folder / "other.json")
    _, out, _ = run("trace.json", "other.json", "--json", "-")
    assert "ranks.unclear" in {q["code"] for q in json.loads(out)["data_quality"]}


def test_launches_as_csv_have_a_row_each_in_time_order(run, folder: Path) -> None:
    run("trace.json", "-q", "--launches", "l.csv")
    rows = list(csv.DictReader(io.StringIO((folder / "l.csv").read_text())))
    assert len(rows) == 6
    times = [int(row["ts_ns"]) for row in rows]
    assert times == sorted(times)
    assert rows[0]["op"] == "aten::mm"


def test_a_trace_comes_in_through_stdin(folder: Path) -> None:
    with (folder / "trace.json").open("rb") as trace:
        process = start("-", "--json", "-", stdin=trace, stdout=subprocess.PIPE)
        out, _ = process.communicate()
    assert process.returncode == 0
    assert json.loads(out)["trace"]["path"] == "-"


def test_a_reader_that_leaves_early_meets_no_traceback(folder: Path) -> None:
    # GIVEN a pipe whose reader is gone before anything is written
    process = start("trace.json", "--json", "-", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.wait()


def test_an_error_that_should_not_happen_is_one_line(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args, **kwargs):
        raise KeyError("surprise")

    monkeypatch.setattr(build, "analyze_files", explode)
    monkeypatch.delenv(cli.DEBUG_VARIABLE, raising=False)
    code, out, err = run("trace.json")
    assert (code, out) == (1, "")
    assert "surprise" in err
    assert "test_analyze.py" in err
    assert cli.DEBUG_VARIABLE in err
    assert err.count("\n") == 1


def test_with_the_debug_variable_it_shows_its_traceback(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*args, **kwargs):
        raise KeyError("surprise")

    monkeypatch.setattr(build, "analyze_files", explode)
    monkeypatch.setenv(cli.DEBUG_VARIABLE, "1")
    with pytest.raises(KeyError, match="surprise"):
        run("trace.json")


def test_ctrl_c_ends_with_exit_code_130_and_leaves_no_half_written_file(
    run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "build_report", interrupt)
    code, _, err = run("trace.json")
    assert code == 130
    assert "interrupted" in err
    assert [p.name for p in folder.iterdir()] == ["trace.json"]


def test_reports_on_all_ranks_of_a_real_job(run, shared: Path) -> None:
    code, out, _ = run(str(shared / "traces/public/ranks_dlrm"), "--json", "-")
    assert code == 0
    assert [r["rank"] for r in json.loads(out)["ranks"]] == list(range(8))


def test_a_file_name_cannot_steer_the_terminal(run, folder: Path) -> None:
    code, _, err = run("no\x1b[31m\u202esuch\x07.json")
    assert code == 3
    assert "no\ufffd[31m\ufffdsuch\ufffd.json" in err


def test_too_little_memory_is_one_line(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(build, "analyze_files", exhausted)
    code, out, err = run("trace.json")
    assert (code, out, err.count("\n")) == (3, "", 1)


@pytest.mark.parametrize("option", ["--baseline-step-ms", "--max-gb"])
@pytest.mark.parametrize("value", ["nan", "inf", "1e300", "-1", "0"])
def test_a_figure_that_is_none_is_a_usage_error(run, option: str, value: str) -> None:
    code, out, err = run("trace.json", f"{option}={value}")
    assert (code, out) == (2, "")
    assert value in err or "1e+300" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("options", [[], ["--json", "-"]])
def test_a_full_disk_behind_stdout_is_one_line(folder: Path, options: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        process = start("trace.json", *options, stdout=full, stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err.count(b"\n")) == (1, 1)
    assert b"No space left" in err


def test_a_closed_stdout_is_no_error(folder: Path) -> None:
    command = [sys.executable, "-m", "advisor.cli", "analyze", "trace.json"]
    process = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, timeout=60, check=False
    )
    assert (process.returncode, process.stderr) == (0, b"")
    assert (folder / "report.html").exists()
