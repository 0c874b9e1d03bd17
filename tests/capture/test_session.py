from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch

from advisor.capture import session
from advisor.capture.rivals import another_profiler
from advisor.capture.session import CaptureError, Session, is_spent


@pytest.fixture
def running():
    opened = Session()
    opened.start()
    yield opened
    opened.close()


def work():
    torch.ones(4, 4) @ torch.ones(4, 4)


def test_a_session_records_the_steps_after_the_one_that_arms_it(running, tmp_path):
    for _ in range(3):
        work()
        running.step()
    work()
    running.stop()
    running.write(tmp_path / "raw.json")

    events = json.loads((tmp_path / "raw.json").read_text())["traceEvents"]
    steps = [e["name"] for e in events if e.get("name", "").startswith("ProfilerStep")]
    assert sorted(steps) == ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"]
    products = [e for e in events if e.get("name") == "aten::mm"]
    assert len(products) == 3
    assert products[0]["args"]["Input Dims"][0] == [4, 4]


def test_a_process_has_one_session(running):
    assert is_spent()


def test_a_forked_child_has_a_session_of_its_own(running, monkeypatch):
    monkeypatch.setattr(session.os, "getpid", lambda: -1)

    assert not is_spent()


def test_releasing_lets_go_of_the_results_without_the_garbage_collector():
    opened = Session()
    opened.start()
    opened.step()
    work()
    opened.stop()
    profiler = weakref.ref(opened._profiler)
    results = opened._profiler.profiler
    gc.disable()
    try:
        opened.close()
        assert profiler() is None
    finally:
        gc.enable()
    assert results.kineto_results is None


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_session_can_be_closed_at_any_point_and_leaves_no_profiler_on(steps):
    opened = Session()
    opened.start()
    for _ in range(steps):
        work()
        opened.step()
    opened.close()
    opened.close()

    assert another_profiler() is None
    with torch.profiler.profile() as profile:
        work()
    assert any(e.key == "aten::mm" for e in profile.key_averages())


def test_the_last_steps_range_ends_with_the_step_and_not_with_the_profiler(running, tmp_path, monkeypatch):
    # GIVEN that looking for open ranges takes as long as it does with millions of objects
    def look():
        work()
        with torch.profiler.record_function("while stopping"):
            work()

    monkeypatch.setattr(session, "end_open_ranges", look)
    running.step()
    work()
    running.step()
    work()

    running.stop()

    running.write(tmp_path / "raw.json")
    events = json.loads((tmp_path / "raw.json").read_text())["traceEvents"]
    last, stopping = (
        next(e for e in events if e["name"] == name) for name in ("ProfilerStep#2", "while stopping")
    )
    assert last["ts"] + last["dur"] < stopping["ts"]


def test_a_trace_cut_short_is_noticed_since_kineto_says_nothing(running, tmp_path, monkeypatch):
    running.step()
    work()
    running.stop()

    def short(path):
        with open(path, "w") as file:
            file.write('{"traceEvents": [{"ph": "X"')

    monkeypatch.setattr(running._profiler, "export_chrome_trace", short)

    with pytest.raises(CaptureError, match="disk full"):
        running.write(tmp_path / "raw.json")


def test_a_trace_that_was_not_written_at_all_is_noticed(running, tmp_path, monkeypatch):
    running.step()
    running.stop()
    monkeypatch.setattr(running._profiler, "export_chrome_trace", lambda path: None)

    with pytest.raises(CaptureError, match=r"raw\.json"):
        running.write(tmp_path / "raw.json")


def test_a_running_profiler_of_the_users_is_seen():
    assert another_profiler() is None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert another_profiler()
    with torch.autograd.profiler.profile():
        assert another_profiler()
    assert another_profiler() is None
