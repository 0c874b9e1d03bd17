"""Other profilers of the same process: two at once end it with a segmentation fault, so ours makes way."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.profiler import profile, schedule

from advisor import TrainingAdvisor
from advisor.capture.rivals import Watch, another_profiler
from advisor.capture.session import CaptureError, Session
from tests.capture.tiny import make_model, make_trainer, rows


def work():
    torch.ones(4, 4) @ torch.ones(4, 4)


def test_a_profiler_that_is_warming_up_is_seen_and_one_that_is_over_is_not():
    warming = profile(schedule=schedule(wait=0, warmup=2, active=1))
    warming.start()
    assert another_profiler() is not None
    warming.step()
    warming.step()
    warming.stop()
    over = profile()
    over.start()
    over.stop()
    assert another_profiler() is None


def test_the_watch_calls_once_before_another_profiler_begins_and_leaves_torch_as_it_was():
    module = torch.autograd.profiler
    before = module._prepare_profiler, module._enable_profiler
    calls: list[bool] = []
    watch = Watch(lambda: calls.append(torch.autograd._profiler_enabled()))
    watch.install()
    with watch.ours(), profile():
        work()
    assert calls == []
    with profile() as theirs:
        work()
    assert calls == [False]
    assert any(event.key == "aten::mm" for event in theirs.key_averages())
    watch.remove()
    assert (module._prepare_profiler, module._enable_profiler) == before


def test_a_fault_while_making_way_does_not_reach_the_other_profiler():
    def fault():
        raise RuntimeError("boom")

    watch = Watch(fault)
    watch.install()
    try:
        with profile() as theirs:
            work()
    finally:
        watch.remove()
    assert theirs.key_averages()


def test_a_session_that_something_else_has_ended_is_neither_stopped_nor_read(tmp_path):
    session = Session()
    session.start()
    session.step()
    torch.autograd._disable_profiler()
    torch.autograd.profiler._is_profiler_enabled = False

    with pytest.raises(CaptureError, match="another profiler"):
        session.stop()
    session.close()


@pytest.mark.parametrize("begins", ["theirs", "ours"])
def test_a_range_that_outlives_its_profiler_writes_into_nobodys_memory(begins):
    # GIVEN, in a process of its own, ranges that are open while one profiler ends and the next begins
    code = f"""
import contextlib, ctypes
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from advisor.capture.session import Session

calloc = ctypes.CDLL(None).calloc
calloc.restype, calloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_size_t]
first = Session()
then = dict(theirs=profile(activities=[ProfilerActivity.CPU]), ours=Session())["{begins}"]
first.start()
first.step()
with contextlib.ExitStack() as ranges:
    for _ in range(2000):
        ranges.enter_context(record_function("step"))
    if "{begins}" == "ours":
        first.close()
    # WHEN memory that the first has let go serves the loop, and the ranges end
    held = [calloc(1, 1000) for _ in range(10_000)]
    then.start()
    then.step()
    held += [calloc(1, 1000) for _ in range(10_000)]
then.stop()
# THEN that memory is as the loop left it
print("in", len(held), "pieces", sum(any(ctypes.string_at(piece, 1000)) for piece in held), "written to")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )

    assert done.stdout == "in 20000 pieces 0 written to\n", done.stderr


def _profiling(where):
    """A training step that profiles itself from within the window to this batch."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 12:
            self.held = [profile()]  # out of sight of a look at the module's attributes
            self.held[0].start()
        loss = self._loss(batch)
        if batch_idx == where:
            self.held[0].stop()
            self.seen = len(self.held[0].events())
        self.losses.append(loss.item())
        return loss

    return training_step


@pytest.mark.parametrize("end", [12, 20])
def test_a_loop_that_profiles_itself_in_the_window_keeps_its_profile_and_every_bit(pl, tmp_path, ours, end):
    alone = make_model(pl, training_step=_profiling(end))
    make_trainer(pl, tmp_path).fit(alone, rows(30))
    watched = make_model(pl, training_step=_profiling(end))
    advisor = TrainingAdvisor(tmp_path / "advisor", warmup_steps=10, report=False)
    make_trainer(pl, tmp_path, advisor).fit(watched, rows(30))

    assert watched.losses == alone.losses
    assert watched.seen == alone.seen > 0
    assert advisor.trace_path is None
    assert len(ours()) == 1
    assert "its profiler goes first" in ours()[0]
