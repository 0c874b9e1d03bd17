"""`advisor demo` trains, reports and says where, or says in one line why it cannot."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from advisor.cli.demo import _describe, _from_here, command
from advisor.errors import AdvisorError, MissingExtraError


def demo(*args: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "advisor.cli", "demo", "--no-open", *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ({"torch"}, "torch"),
        ({"pytorch_lightning", "lightning"}, "pytorch-lightning"),
        ({"torch", "pytorch_lightning", "lightning"}, "torch pytorch-lightning"),
    ],
    ids=["torch", "lightning", "both"],
)
def test_a_missing_package_is_one_line_that_names_it(
    missing: set[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else real(name))
    with pytest.raises(MissingExtraError, match=f"pip install {named}$"):
        command.main(["--no-open"], standalone_mode=False)


def test_a_loop_that_dies_is_named_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(AdvisorError, match=rf"gpt loop in {tmp_path}"):
        command.main(["--model", "gpt", "--no-open", "-o", str(tmp_path)], standalone_mode=False)


@pytest.mark.parametrize("args", [["--steps", "3"], ["--model", "mlp"]], ids=" ".join)
def test_an_impossible_option_is_a_usage_error(args: list[str]) -> None:
    assert CliRunner().invoke(command, args).exit_code == click.UsageError.exit_code


def test_the_first_advice_is_told_with_what_it_saves() -> None:
    # GIVEN a loop with a fault, as a GPU shows it
    saving = {"low": 9.6, "likely": 10.3, "high": 18.3}
    finding = {"rule": "attention.explicit", "title": "Attention by hand", "saving_ms": saving}
    row = {
        "model": "gpt", "device": "NVIDIA H200", "report": "r.html", "kernels": [],
        "summary": {"verdict": "v", "baseline_step_ms": 41.3},
        "findings": [{**finding, "saving_fraction": 0.249}],
    }  # fmt: skip
    # WHEN it is described
    text = _describe(row)
    # THEN
    assert "what to change first:\n  Attention by hand: saves 10.3 ms a step (24.9%)" in text
    assert "what to change" not in _describe({**row, "findings": []})


def test_a_report_in_the_current_directory_is_named_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, outside = tmp_path / "here" / "logs" / "report.html", tmp_path / "there" / "report.html"
    inside.parent.mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert _from_here(inside) == Path("logs/report.html")
    assert _from_here(outside) == outside


@pytest.mark.slow
def test_it_prints_the_verdict_and_the_page_of_the_gpt(tmp_path: Path) -> None:
    done = demo("--model", "gpt", "--steps", "20", "-o", tmp_path)
    assert done.returncode == 0, done.stderr
    (page,) = tmp_path.rglob("report.html")
    report = json.loads(page.with_suffix(".json").read_text())
    assert f"report: {page}" in done.stdout
    assert report["summary"]["verdict"] in done.stdout
    assert "Traceback" not in done.stderr
    # Attention written out shows up as what it is: matrix products over a softmax.
    assert {"aten::bmm", "aten::_softmax"} <= {kernel["op"] for kernel in report["kernels"]}


@pytest.mark.slow
def test_its_json_is_the_whole_of_stdout(tmp_path: Path) -> None:
    done = demo("--model", "convnet", "--steps", "20", "-o", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["model"] == "convnet"
    assert row["summary"]["steps"] >= 1
    assert all(Path(row[key]).is_file() for key in ("report", "report_json"))
    assert any("conv" in kernel["op"] for kernel in row["kernels"])
