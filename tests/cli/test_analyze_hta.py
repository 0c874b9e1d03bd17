"""`advisor analyze --hta`."""

from __future__ import annotations

import importlib.util
import json

import pytest

from advisor.cli import main
from advisor.report import hta
from tests.tiny_trace import write_tiny_trace


@pytest.mark.skipif(importlib.util.find_spec("hta") is None, reason="the extra hta is not installed")
def test_the_json_on_stdout_has_both_columns_and_nothing_of_htas_own(tmp_path, capfd):
    trace = write_tiny_trace(tmp_path / "t.json")

    main(["analyze", str(trace), "--hta", "--json", "-"])

    # THEN stdout is one JSON document, and stderr, which is no terminal here, has no spinner
    said = capfd.readouterr()
    checks = {check["figure"]: check for check in json.loads(said.out)["cross_checks"]}
    assert checks["compute time"]["theirs"] == pytest.approx(checks["compute time"]["ours"])
    assert said.err == ""


def test_without_the_extra_it_ends_at_once_with_one_line(tmp_path, capfd, monkeypatch):
    # GIVEN an installation without HTA
    monkeypatch.setattr(hta.importlib.util, "find_spec", lambda name: None)
    trace = write_tiny_trace(tmp_path / "t.json")

    with pytest.raises(SystemExit) as stop:
        main(["analyze", str(trace), "--hta", "-o", str(tmp_path / "r.html")])

    # THEN the line names the command that installs it, and no report was written
    assert stop.value.code == 2
    [line] = capfd.readouterr().err.splitlines()
    assert "pip install traceinsight 'pandas<3'" in line
    assert not (tmp_path / "r.html").exists()
