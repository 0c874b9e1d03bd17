"""The GPU session's driver: order, budget, and that being cut off loses nothing."""

import importlib.util
import json
import os
import select
import sys
from pathlib import Path

import pytest

from benchmarks.kernels.session import Step, run, steps


def python(name, code, limit_s=30.0):
    return Step(name, (sys.executable, "-c", code), limit_s)


def outcomes(out):
    return {entry["step"]: entry["outcome"] for entry in json.loads((out / "session.json").read_text())}


def test_what_each_step_says_and_how_it_ended_is_written(tmp_path, capsys):
    run([python("first one", "print('hello')"), python("second", "print('oh'); exit(3)")], 60, tmp_path)
    assert outcomes(tmp_path) == {"first one": "done", "second": "failed (3)"}
    assert (tmp_path / "first_one.log").read_text() == "hello\n"
    assert "    oh" in capsys.readouterr().out


def test_a_step_that_takes_too_long_is_ended_with_what_it_started_and_its_log_is_kept(tmp_path):
    # GIVEN a step whose own child holds a pipe open for as long as it lives
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    opened = f"open({str(tmp_path / 'pipe')!r}, 'w')"
    child = f"import time; held = {opened}; print('so far', flush=True); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    # WHEN it is cut off, at the first of these limits that leaves it the time to begin
    for limit_s in (1, 5, 25):
        (entry,) = run([python("slow", code, limit_s)], 60, tmp_path)
        assert entry["outcome"] == "cut off"
        if entry["tail"]:
            break
    assert entry["tail"] == ["so far"]
    # THEN the child is gone, and its end of the pipe with it
    select.select([pipe], [], [], 30)
    assert os.read(pipe, 1) == b""
    os.close(pipe)


def test_steps_beyond_the_budget_are_not_begun_but_named(tmp_path):
    run([python("never", "open('x', 'w')")], 0.0, tmp_path)
    assert outcomes(tmp_path) == {"never": "no time left"}


def test_what_was_done_is_written_before_the_next_step_begins(tmp_path):
    see = f"import json; print(len(json.load(open({str(tmp_path / 'session.json')!r}))))"
    run([python("first", ""), python("second", see)], 60, tmp_path)
    assert (tmp_path / "second.log").read_text() == "1\n"


def test_correctness_comes_first_and_full_tables_last(tmp_path):
    names = [step.name for step in steps(tmp_path, ["norm", "attention", "rope"])]
    assert names[:2] == ["tests", "check"]
    assert names[2:6] == ["ahead quick", "quick attention", "quick norm", "quick rope"]
    assert names[6] == "grid"
    assert names[-4:] == ["ahead full", "full attention", "full norm", "full rope"]
    assert names.index("sanitize") < names.index("ahead full")


def test_tables_find_compiled_what_a_step_before_them_compiled(tmp_path):
    for kind in ("quick", "full"):
        ahead, *tables = [step for step in steps(tmp_path, ["norm", "rope"]) if kind in step.name.split()]
        assert [table.name for table in tables] == [f"{kind} norm", f"{kind} rope"]
        assert ahead.command[2] == "benchmarks.kernels.ahead"
        for table in tables:
            assert table.command[3] in ahead.command
            assert ("--quick" in table.command) == ("--quick" in ahead.command) == (kind == "quick")
            assert table.command[table.command.index("--jobs") + 1] == "0"
        # AND its own budget ends it before its limit does
        assert float(ahead.command[ahead.command.index("--budget-s") + 1]) < ahead.limit_s


def test_all_but_the_full_tables_fit_into_25_minutes(tmp_path):
    from advisor.kernels.bench.run import timed_families

    plan = steps(tmp_path, timed_families())
    assert sum(step.limit_s for step in plan if "full" not in step.name.split()) < 25 * 60


@pytest.mark.parametrize("step", steps(Path("out"), ["norm"]), ids=lambda step: step.name)
def test_a_step_runs_a_module_that_exists(step):
    assert step.command[1] == "-m"
    assert importlib.util.find_spec(step.command[2])
