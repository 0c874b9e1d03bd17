"""What a step's time is made of along its critical path."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from advisor.advice.edits import DropSync, Estimate, Remove, Retime
from advisor.advice.replay import Replay
from advisor.roofline.analysis import analyse_timeline
from advisor.trace.link import load
from tests.advice.scripted import LATENCY, RETURN, Script, rows_named, us

exactly = Estimate.exactly


def approx(value: float) -> object:
    return pytest.approx(value, rel=0.01, abs=2)


def test_host_and_kernels_that_wait_for_each_other_share_the_step():
    # GIVEN 95 µs of host work up to the call, a kernel of 300, and 200 of host work after waiting for it
    replay = Script(lambda s: (s.work(92), s.launch(300), s.sync(), s.work(200))).replay()

    path = replay.critical_path(profiled=True)

    assert us(path.host_ns) == approx(295)
    assert us(path.compute_ns) == approx(300)
    assert us(path.launch_ns) == approx(LATENCY + RETURN)
    assert (path.communication_ns, path.copy_ns, path.input_ns) == (0, 0, 0)
    assert path.step_ns == pytest.approx(replay.profiled_ns)


def test_of_two_that_overlap_only_the_longer_is_on_the_path():
    device = Script(lambda s: (s.work(50), s.launch(300))).replay().critical_path()
    assert (us(device.compute_ns), us(device.host_ns)) == (approx(300), approx(0))

    host = Script(lambda s: (s.work(500), s.launch(300))).replay().critical_path()
    assert (us(host.compute_ns), us(host.host_ns)) == (approx(0), approx(508))


def test_workers_that_set_the_pace_are_all_of_the_path():
    replay = Script(lambda s: (s.fetch(20), s.work(100), s.launch(300)), workers_us=900).replay()

    path = replay.critical_path()

    assert us(path.input_ns) == approx(900)
    assert us(path.compute_ns + path.host_ns) == approx(0)


def test_copies_and_collectives_are_told_from_kernels():
    def step(s: Script) -> None:
        s.copy(200, blocking=True)
        s.launch(300, kernel="ncclDevKernel_AllReduce_Sum_f32")
        s.launch(100)
        s.sync()

    path = Script(step).replay().critical_path()

    assert us(path.copy_ns) == approx(200)
    assert us(path.communication_ns) == approx(300)
    assert us(path.compute_ns) == approx(100)


def test_the_path_may_change_with_edits():
    replay = Script(lambda s: (s.work(200), s.launch(300))).replay()

    path = replay.critical_path([Retime(rows_named(replay, "gemm"), exactly(10_000.0))])
    assert us(path.host_ns) == approx(208)
    assert us(path.compute_ns) == approx(0)
    nothing = replay.critical_path([Remove(rows_named(replay, "gemm")), DropSync(rows_named(replay, "none"))])
    assert nothing.compute_ns == 0


def test_the_path_at_real_speed_adds_up_to_the_baseline():
    steps = Script(lambda s: (s.work(40), s.launch(300), s.sync(), s.work(40)))
    replay = steps.replay(baseline_step_ms=0.35)

    path = replay.critical_path()

    assert path.step_ns == pytest.approx(350_000)
    assert path.host_ns < replay.critical_path(profiled=True).host_ns


def test_holistic_trace_analysis_sees_the_same_path(shared, tmp_path):
    pytest.importorskip("hta")
    trace = shared / "truth/payoff/pad_vocab.json.gz"
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "advisor.cli", "analyze", str(trace), "--hta", "--json", str(out), "-o"]
    subprocess.run([*command, str(tmp_path / "report.html"), "--quiet"], check=True)
    checks = json.loads(out.read_text())["cross_checks"]
    theirs = {
        c["figure"].rpartition(": ")[2]: c["theirs"] for c in checks if "critical path of step" in c["figure"]
    }

    path = Replay(analyse_timeline(load(trace))).critical_path(profiled=True)

    # HTA takes one step with its own start and end, not the period of successive ones.
    share = {part: 100 * getattr(path, f"{part}_ns") / path.step_ns for part in ("host", "compute", "launch")}
    assert share["compute"] == pytest.approx(theirs["compute kernels"], abs=6)
    assert share["host"] == pytest.approx(theirs["host work"], abs=6)
    assert share["launch"] == pytest.approx(theirs["gaps between kernels"], abs=2)
