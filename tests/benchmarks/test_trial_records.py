"""Stored trials of launch parameters tell where, when and how they were measured."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.kernels.record import command, record, write

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("tune_*.json")), ids=lambda path: path.stem)
def test_what_is_stored_names_device_versions_date_and_command(path):
    stored = json.loads(path.read_text())
    assert stored["device"]
    assert stored["versions"].keys() >= {"torch", "triton"}
    assert stored["date"].startswith("20")
    assert stored["command"].startswith("python -m benchmarks.kernels.tune_")
    assert all(trial["ms"] > 0 for trial in stored["trials"])
    assert stored["trials"]


def test_a_record_has_the_keys_of_those_that_are_stored(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(sys, "argv", ["tune_x.py", "--rows", "1"])
    path = tmp_path / "tune_x.json"

    write(path, record("benchmarks.kernels.tune_x", [{"ms": 0.5}], 4e12))

    stored = json.loads(path.read_text())
    known = json.loads((RESULTS / "tune_rows.json").read_text())
    assert list(stored) == list(known)
    assert list(stored["versions"]) == list(known["versions"])
    assert (stored["device"], stored["trials"]) == ("a GPU", [{"ms": 0.5}])
    assert stored["command"] == "python -m benchmarks.kernels.tune_x --rows 1"
    assert list(tmp_path.iterdir()) == [path]


def test_a_command_is_told_without_the_files_name():
    assert (
        command("m", ["--output", "/home/me/x.json", "--rows", "1"]) == "python -m m --output FILE --rows 1"
    )
    assert command("m", ["--output=/home/x.json"]) == "python -m m --output=FILE"
    assert command("m", ["--only", "a b"]) == "python -m m --only 'a b'"
