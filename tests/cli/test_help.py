"""The command line answers at once and loads only what a verb needs."""

import os
import resource
import statistics
import subprocess
import sys

import pytest

from advisor.cli import cli

HEAVY = ["hta", "jinja2", "lightning", "msgspec", "numpy", "pandas", "pytorch_lightning", "rich", "torch"]


def advisor(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "advisor.cli", *args], capture_output=True, text=True)


def processor_seconds() -> float:
    """Processor time of all child processes so far: unlike the clock, it holds still on a busy machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_answers_within_a_quarter_of_a_second() -> None:
    times = []
    for _ in range(5):
        before = processor_seconds()
        advisor("--help")
        times.append(processor_seconds() - before)
    assert statistics.median(times) < 0.25


@pytest.mark.parametrize("args", [["--help"], ["--version"]], ids=" ".join)
def test_help_and_version_load_nothing_heavy(args: list[str]) -> None:
    code = (
        "import sys\n"
        "from advisor.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print('loaded:', *sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "loaded:", run.stdout + run.stderr


def test_help_lists_every_verb() -> None:
    verbs = cli.list_commands(None)  # type: ignore[arg-type]
    listed = advisor("--help").stdout
    assert verbs
    assert [verb for verb in verbs if f"\n  {verb} " not in listed] == []


@pytest.mark.parametrize("verb", cli.list_commands(None))  # type: ignore[arg-type]
def test_each_verb_explains_itself_without_loading_torch(verb: str) -> None:
    code = (
        "import sys\n"
        "from advisor.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "print('loaded:', *sorted({'numpy', 'jinja2', 'torch'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code, verb, "--help"], capture_output=True, text=True)
    assert f"Usage: advisor {verb}" in run.stdout, run.stderr
    assert run.stdout.splitlines()[-1] == "loaded:", run.stdout


def test_an_unknown_verb_is_a_usage_error() -> None:
    run = advisor("analyse-this")
    assert run.returncode == 2
    assert "analyse-this" in run.stderr


@pytest.mark.parametrize("verb", [["explain"], ["devices"]], ids=["click", "rich"])
def test_a_reader_that_leaves_ends_it_quietly_and_not_as_a_failed_gate(verb: list[str]) -> None:
    # GIVEN a pipe whose reading end is closed
    reading, writing = os.pipe()
    os.close(reading)
    # WHEN a verb prints into it
    line = [sys.executable, "-m", "advisor.cli", *verb]
    done = subprocess.run(line, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    # THEN it says nothing, and ends as a program that SIGPIPE ends
    assert (done.returncode, done.stderr) == (141, "")
