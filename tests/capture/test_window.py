from __future__ import annotations

import gc
import statistics
import warnings
import weakref

import pytest
import torch

from advisor.capture import Ahead, Window, notify
from advisor.capture.rivals import another_profiler
from advisor.capture.session import Session
from advisor.capture.window import State

from .tiny import names, read_trace


class Loop:
    """A plain PyTorch loop over a tiny model."""

    def __init__(self):
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def window(self, folder, **options):
        options = {"warmup_steps": 4, "report": False, **options}
        return Window(folder, model=self.model, optimizers=[self.optimizer], **options)

    def run(self, window, batches, ahead=None):
        for i in range(batches):
            batch = torch.ones(2, 4)
            window.note_batch(batch)
            with window.phase("forward"):
                loss = self.model(batch).sum()
            with window.phase("backward"):
                loss.backward()
            with window.phase("optimizer"):
                self.optimizer.step()
                self.optimizer.zero_grad()
            window.step(ahead(i) if ahead else None)


def leave(window, loop, batches, error):
    """Leave the loop by an exception after some batches."""
    with window:
        loop.run(window, batches)
        raise error


@pytest.fixture
def loop():
    return Loop()


def test_a_plain_loop_is_recorded_with_its_phases_modules_and_context(loop, tmp_path):
    with loop.window(tmp_path) as window:
        loop.run(window, 40)

    trace = read_trace(window.trace_path)
    assert window.trace_path == tmp_path / "step_4" / "rank0.pt.trace.json.gz"
    assert names(trace, "ProfilerStep#") == [f"ProfilerStep#{n}" for n in (1, 2, 3, 4)]
    assert (
        names(trace, "advisor::phase::")
        == [
            "advisor::phase::forward",
            "advisor::phase::backward",
            "advisor::phase::optimizer",
        ]
        * 4
    )
    assert names(trace, "advisor::module::") == [f"advisor::module::{n}" for n in (0, 1, 2)] * 4
    context = trace["training_advisor"]
    assert context["window"].pop("pause_ms") > 0
    assert context["window"] == {"warmup_steps": 4, "capture_steps": 3, "first_step": 4}
    assert context["batch"] == [[[2, 4], "fp32", "cpu"]]
    assert context["parameters"][0] == {"shape": [8, 4], "dtype": "fp32", "count": 1}
    assert context["baseline"]["n"] == 3
    assert context["after"]["median_ms"] > 0
    assert len(context["after"]["step_ms"]) == 12


def test_automatic_warm_up_measures_a_baseline_before_it_records(loop, tmp_path):
    with loop.window(tmp_path, warmup_steps="auto") as window:
        loop.run(window, 240)

    baseline = read_trace(window.trace_path)["training_advisor"]["baseline"]
    assert baseline["n"] >= 10
    assert baseline["median_ms"] == pytest.approx(statistics.median(baseline["step_ms"]), abs=1e-3)


def test_several_recording_ranks_warm_up_for_a_fixed_number_of_batches(loop, tmp_path):
    window = loop.window(tmp_path, warmup_steps="auto", ranks=(0, 1))
    loop.run(window, 49)
    assert not window.recording
    loop.run(window, 1)
    assert window.recording
    window.interrupt()


def test_nothing_of_the_loop_is_held_after_the_window(loop, tmp_path):
    window = loop.window(tmp_path)
    loop.run(window, 20)
    assert window.state is State.CHECKING
    model, optimizer = weakref.ref(loop.model), weakref.ref(loop.optimizer)

    del loop.model, loop.optimizer
    gc.collect()

    assert model() is None
    assert optimizer() is None
    window.interrupt()


def test_an_epoch_that_ends_inside_the_window_gives_what_was_recorded(loop, tmp_path):
    window = loop.window(tmp_path, capture_steps=10)
    loop.run(window, 8)
    window.end_epoch()
    window.close()

    assert read_trace(window.trace_path)["training_advisor"]["window"]["capture_steps"] == 2


def test_an_epoch_that_ends_with_its_announced_last_batch_leaves_no_unfinished_step(loop, tmp_path):
    window = loop.window(tmp_path, capture_steps=10)
    loop.run(window, 8, ahead=lambda i: Ahead(left_in_epoch=0) if i == 7 else Ahead())
    window.close()

    assert names(read_trace(window.trace_path), "ProfilerStep#") == [f"ProfilerStep#{n}" for n in (1, 2, 3)]


def test_an_epoch_that_ends_before_a_step_was_recorded_gives_one_warning(loop, tmp_path, ours):
    window = loop.window(tmp_path)
    loop.run(window, 5)
    window.end_epoch()
    window.close()

    assert len(ours()) == 1
    assert "epoch ended" in ours()[0]
    assert another_profiler() is None
    assert list(tmp_path.iterdir()) == []


def test_too_few_steps_give_one_warning_with_their_number(loop, tmp_path, ours):
    with loop.window(tmp_path) as window:
        loop.run(window, 2)

    assert len(ours()) == 1
    assert "after 2 batches" in ours()[0]
    assert list(tmp_path.iterdir()) == []


def test_a_second_window_in_a_process_records_nothing_and_says_so_without_a_warning(
    loop, tmp_path, ours, capsys
):
    for _ in range(2):
        with loop.window(tmp_path) as window:
            loop.run(window, 30)

    assert window.trace_path is None
    assert "recorded a window before" in capsys.readouterr().err
    assert ours() == []


def test_a_second_window_records_where_that_is_asked_for(loop, tmp_path):
    for name in ("a", "b"):
        with loop.window(tmp_path / name, allow_repeat=True) as window:
            loop.run(window, 30)
        assert window.trace_path is not None


def test_another_profiler_is_left_in_peace(loop, tmp_path, ours):
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as theirs, loop.window(tmp_path) as window:
        loop.run(window, 20)

    assert len(ours()) == 1
    assert "another torch profiler" in ours()[0]
    assert sum(e.name == "aten::addmm" for e in theirs.events()) == 40


def test_a_folder_that_cannot_be_written_costs_one_warning_and_no_profiling(
    loop, tmp_path, ours, monkeypatch
):
    started = []
    monkeypatch.setattr(Session, "start", lambda self: started.append(1))
    (tmp_path / "file").touch()

    with loop.window(tmp_path / "file") as window:
        loop.run(window, 20)

    assert len(ours()) == 1
    assert "set dirpath" in ours()[0]
    assert started == []


def test_a_full_disk_costs_one_warning_and_leaves_no_files(loop, tmp_path, ours, monkeypatch):
    def short(self, path):
        with open(path, "w") as file:
            file.write('{"traceEvents": [')

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", short)

    with loop.window(tmp_path) as window:
        loop.run(window, 30)

    assert len(ours()) == 1
    assert "disk full" in ours()[0]
    assert list(tmp_path.iterdir()) == []
    assert another_profiler() is None
    assert not any(module._forward_hooks for module in loop.model.modules())


def test_a_disk_that_fills_up_under_the_profiler_costs_one_warning(loop, tmp_path, ours):
    # GIVEN a limit on file sizes, which cuts Kineto's output short as a full disk does
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    window = loop.window(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        # WHEN the loop runs
        with window:
            loop.run(window, 30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    # THEN there is one warning and no file
    assert len(ours()) == 1
    assert "disk full" in ours()[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["start", "step", "stop", "write", "release"])
def test_a_fault_anywhere_in_the_profiler_costs_one_warning_and_the_loop_goes_on(
    loop, tmp_path, ours, monkeypatch, method
):
    real = getattr(Session, method)

    def broken(self, *args):
        monkeypatch.setattr(Session, method, real)
        raise RuntimeError("CUPTI_ERROR")

    monkeypatch.setattr(Session, method, broken)

    with loop.window(tmp_path) as window:
        loop.run(window, 30)

    assert [text for text in ours() if "CUPTI_ERROR" in text] == ours()
    assert len(ours()) == 1
    assert window.done
    assert another_profiler() is None


def test_an_exception_inside_the_window_passes_through_and_everything_is_taken_down(loop, tmp_path):
    window = loop.window(tmp_path)

    with pytest.raises(KeyboardInterrupt):
        leave(window, loop, 6, KeyboardInterrupt())

    assert another_profiler() is None
    assert list(tmp_path.iterdir()) == []
    assert not any(module._forward_hooks for module in loop.model.modules())


def test_an_exception_after_the_window_keeps_the_recording(loop, tmp_path):
    window = loop.window(tmp_path)

    with pytest.raises(ValueError, match="mine"):
        leave(window, loop, 12, ValueError("mine"))

    window.close(60)
    assert read_trace(window.trace_path)["training_advisor"]["after"]["verified"] is None


def test_warnings_turned_into_errors_do_not_stop_the_loop(loop, tmp_path, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with loop.window(tmp_path) as window:
            loop.run(window, 2)

    assert "after 2 batches" in capsys.readouterr().err


def test_a_closed_stderr_does_not_stop_the_loop(monkeypatch):
    class Closed:
        def write(self, text):
            raise ValueError("I/O operation on closed file")

        def flush(self):
            pass

    monkeypatch.setattr("sys.stderr", Closed())

    notify.info("x")


def test_a_loop_that_changes_its_working_directory_keeps_its_recording(loop, tmp_path, monkeypatch, ours):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    with loop.window("relative") as window:
        loop.run(window, 9)
        monkeypatch.chdir(elsewhere)
        loop.run(window, 20)

    assert ours() == []
    assert window.trace_path is not None
    assert window.trace_path.is_relative_to(tmp_path / "relative")
