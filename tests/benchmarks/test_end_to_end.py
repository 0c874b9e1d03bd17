"""The benchmark of whole runs: its judging, and that a tiny one runs through and is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("pytorch_lightning")

from benchmarks import end_to_end, end_to_end_run

SCRIPT = Path(end_to_end.__file__)


def run(out: Path, *words: str) -> str:
    command = [
        sys.executable,
        str(SCRIPT),
        "--tiny",
        "--quick",
        "--timed",
        "3",
        "--curve",
        "0",
        "--out",
        str(out),
    ]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_tiny_run_writes_figures_that_a_second_one_keeps(tmp_path: Path) -> None:
    out = tmp_path / "results" / "end_to_end.json"

    said = run(out, "--only", "mixer", "--variants", "eager", "swap", "liger")

    record = json.loads(out.read_text())
    variants = record["models"]["mixer"]["variants"]
    assert variants["eager"]["step_ms"] > 0
    assert len(variants["eager"]["rounds_ms"]) == 2  # at the start and at the end
    assert variants["eager"]["steps"] == 6
    assert variants["swap"]["swaps"]["kept"] is False
    assert "liger" not in variants  # quick: for the first model alone
    assert record["versions"]["torch"]
    assert record["command"].startswith("python benchmarks/end_to_end.py --tiny")
    assert "mixer      swap" in said
    # AND one variant that is measured anew leaves the others as they are
    run(out, "--only", "mixer", "--variants", "eager", "--again")
    anew = json.loads(out.read_text())["models"]["mixer"]["variants"]
    assert anew["swap"] == variants["swap"]
    assert anew["eager"]["rounds_ms"] != variants["eager"]["rounds_ms"]
    record = json.loads(out.read_text())
    # AND a later call on this machine begins with them, and one of other sizes without
    assert end_to_end.start_record(Namespace(out=out, tiny=True))["models"] == record["models"]
    assert end_to_end.start_record(Namespace(out=out, tiny=False))["models"] == {}


def test_without_a_gpu_a_run_of_large_models_ends_at_once_and_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--quick", "--out", str(tmp_path / "out.json")])

    with pytest.raises(SystemExit) as ended:
        end_to_end.main()

    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "end_to_end.py: there is no GPU here: --tiny trains small models on the CPU"
    ]
    assert not said.out
    assert not (tmp_path / "out.json").exists()


def test_help_says_the_whole_of_what_the_benchmark_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--help"])
    with pytest.raises(SystemExit) as ended:
        end_to_end.main()
    assert ended.value.code == 0
    assert "with PyTorch's own attention written into the model." in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="a process's children are read from /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_killed_takes_its_child_along(tmp_path: Path, number: int) -> None:
    # GIVEN a run whose child would train for hours
    words = ["--tiny", "--only", "mixer", "--variants", "eager", "--curve", "0", "--timed", "10000000"]
    parent = subprocess.Popen(
        [sys.executable, str(SCRIPT), *words, "--out", str(tmp_path / "out.json")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    child = None
    try:
        waited_for(lambda: _children(parent.pid))
        (child,) = _children(parent.pid)

        # WHEN it is killed
        parent.send_signal(number)

        # THEN both end
        assert parent.wait(30) != 0
        waited_for(lambda: not _command(child))
    finally:
        parent.kill()
        parent.wait()
        if child and _command(child):
            os.kill(child, signal.SIGKILL)


def waited_for(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Return once it is true."""
    end_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    """Those that train; a parent asks `uname`, too."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(pid) for pid in pids if "--child" in _command(int(pid))]


def _command(pid: int) -> str:
    """The process's command line; of one that is gone, or that nobody waits for any more, nothing."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_swapped_curve_is_held_against_two_seeds() -> None:
    eager = [10.0 - 0.02 * n for n in range(300)]
    other = [loss + 0.1 for loss in eager]

    near = end_to_end.curve(eager, other, [loss + 0.05 for loss in eager])
    far = end_to_end.curve(eager, other, [loss + 0.3 for loss in eager])

    assert near["within"] is True
    assert near["distance"] == pytest.approx(0.05)
    assert near["first_difference"] == pytest.approx(0.05)
    assert far["within"] is False
    assert far["spread"] == pytest.approx(0.1)


def test_torchs_own_attention_has_its_place_in_the_curve_and_losses_are_kept() -> None:
    eager = [10.0 - 0.02 * n for n in range(300)]
    runs = (eager, [loss + 0.1 for loss in eager], [loss + 0.05 for loss in eager])

    plain = end_to_end.curve(*runs)
    found = end_to_end.curve(*runs, [loss + 2.0 for loss in eager])

    assert "sdpa" not in plain
    assert found["sdpa"]["distance"] == pytest.approx(2.0)
    assert found["sdpa"]["last_loss"] == pytest.approx(found["last_losses"][0] + 2.0)
    assert found["losses"]["sdpa"] == pytest.approx([loss + 2.0 for loss in eager[::10]])
    assert {name: len(losses) for name, losses in plain["losses"].items()} == {
        "eager": 30, "other_seed": 30, "swap": 30,
    }  # fmt: skip


def test_with_torchs_own_attention_the_model_computes_the_same() -> None:
    import torch

    from benchmarks.end_to_end_models import tasks

    task = tasks(tiny=True)["gpt2"]
    written_out, fused = task.build(), task.sdpa()
    fused.load_state_dict(written_out.state_dict())
    batch = task.batch(torch.Generator().manual_seed(0))
    losses = []
    for model in (written_out, fused):
        losses.append(task.loss(model, batch))
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1])
    for mine, theirs in zip(fused.parameters(), written_out.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert end_to_end._cannot(task, "sdpa") == ""
    assert end_to_end._cannot(tasks(tiny=True)["mixer"], "sdpa")


def test_what_is_slower_with_swaps_is_named_beyond_the_noise_alone() -> None:
    def model(**times: float | None) -> dict:
        return {"variants": {variant: {"step_ms": ms} for variant, ms in times.items()}}

    found = end_to_end.slower(
        {
            "a": model(eager=10.0, swap=10.1),
            "b": model(eager=10.0, swap=10.5, compile=5.0, swap_compile=5.4),
            "c": model(eager=None, swap=1.0),
            "d": {"variants": {"eager": {"skipped": "no package"}}},
        }
    )

    assert [line.split(" takes")[0] for line in found] == ["b: swap", "b: swap_compile"]


def test_a_summary_takes_the_median_over_all_rounds() -> None:
    rounds = [
        {"step_ms": [1.0, 2.0, 3.0], "peak_bytes": 5, "seconds": 1.0},
        {"step_ms": [9.0], "peak_bytes": 7, "seconds": 2.0},
    ]
    found = end_to_end.summary(rounds)
    assert (found["step_ms"], found["rounds_ms"], found["peak_bytes"]) == (2.5, [2.0, 9.0], 7)
    assert end_to_end.summary([{"step_ms": [], "peak_bytes": None, "seconds": 0.1}])["step_ms"] is None


def test_what_graphs_hold_is_told_beside_what_is_allocated() -> None:
    # GIVEN a pool of a graph's, of whose 100 bytes 30 are tensors, which the allocator's peak counts
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 1000, "allocated_size": 10},
        {"segment_pool_id": (0, 3), "total_size": 100, "allocated_size": 30},
        {"total_size": 500, "allocated_size": 0},
    ]
    assert end_to_end_run.pooled(segments) == 70
    rounds = [{"step_ms": [1.0], "peak_bytes": 270, "graph_bytes": n, "seconds": 1.0} for n in (70, 60)]
    found = end_to_end.summary(rounds)
    assert (found["peak_bytes"], found["graph_bytes"]) == (270, 70)
    assert "(3.00 of them its graphs')" in end_to_end._line({**found, "graph_bytes": 3 * 10**9})


def test_a_quick_run_gives_all_variants_and_the_curve_to_the_first_model_alone() -> None:
    args = Namespace(
        variants=list(end_to_end.VARIANTS), quick=True, rounds=1, timed=30, curve=300, tiny=False
    )
    first, other = (end_to_end.command(args, name, 600.0) for name in ("gpt2", "bert"))
    assert first[first.index("--variants") + 1 :] == list(end_to_end.VARIANTS)
    assert first[first.index("--curve") + 1] == "300"
    assert other[other.index("--variants") + 1 :] == list(end_to_end.QUICK)
    assert other[other.index("--curve") + 1] == "0"


def test_a_line_that_is_no_result_is_passed_through(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict = {"variants": {}}
    end_to_end.take(found, "gpt2", "a warning of some package\n")
    end_to_end.take(found, "gpt2", json.dumps({"skipped": "timm not installed"}))
    assert found == {"variants": {}, "skipped": "timm not installed"}
    assert "a warning of some package" in capsys.readouterr().out


def test_a_run_that_ends_before_a_step_is_timed_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    ended = {"step_ms": [], "host_ms": [], "peak_bytes": None, "seconds": 3.0}
    found: dict[str, dict[str, object]] = {"variants": {}}
    end_to_end.take(found, "mixer", json.dumps({"variant": {"swap": end_to_end.summary([ended])}}))
    assert found["variants"]["swap"]["step_ms"] is None
    assert "ended before a step was timed" in capsys.readouterr().out
