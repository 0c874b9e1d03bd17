"""The situations of a Lightning run that the callback meets, each in a real Trainer on the CPU."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from advisor import TrainingAdvisor
from advisor.capture.output import Files
from advisor.capture.ranges import OpenRanges
from advisor.capture.rivals import another_profiler
from advisor.capture.session import Session
from advisor.capture.window import Window
from advisor.errors import UsageError

from .tiny import make_model, make_trainer, names, read_trace, rows

STEP = ["input", "input", "forward", "backward", "optimizer"]


def advisor(**options):
    return TrainingAdvisor(**{"warmup_steps": 4, "report": False, **options})


def phases(trace):
    """Phases in order of time; a step has two input ranges, the fetch and the transfer."""
    return [name.rpartition(":")[2] for name in names(trace, "advisor::phase::")]


def no_trace_left(model, trainer):
    """Nothing of ours is on the model, the strategy, the optimizers or in the profiler."""
    assert another_profiler() is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert "training_step" not in vars(trainer.strategy)
    assert "batch_to_device" not in vars(trainer.strategy)
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in trainer.optimizers)


class Raises:
    """Makes a training step raise at one batch."""

    def __init__(self, error, at):
        self.error, self.at = error, at

    def patch(self, model):
        original = model.training_step

        def training_step(batch, batch_idx):
            if batch_idx == self.at:
                raise self.error
            return original(batch, batch_idx)

        model.training_step = training_step


def test_a_fit_is_recorded_and_its_losses_are_bit_equal_to_those_without_us(light, tmp_path):
    # GIVEN the same run with and without the callback
    plain = make_model(light)
    make_trainer(light, tmp_path).fit(plain, rows(40))
    model, callback = make_model(light), advisor()
    trainer = make_trainer(light, tmp_path, callback)

    # WHEN the second is recorded
    trainer.fit(model, rows(40))

    # THEN the losses are the same to the last bit, and the trace holds the steps, marks and context
    assert model.losses == plain.losses
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert callback.trace_path == tmp_path / "advisor" / "step_4" / "rank0.pt.trace.json.gz"
    trace = read_trace(callback.trace_path)
    assert names(trace, "ProfilerStep#") == [f"ProfilerStep#{n}" for n in (1, 2, 3, 4)]
    assert phases(trace) == STEP * 4
    assert names(trace, "advisor::module::")[:4] == [f"advisor::module::net.{n}" for n in range(4)]
    context = trace["training_advisor"]
    assert context["versions"]["lightning_package"] == light.__name__.partition(".")[0]
    assert context["versions"]["lightning"]
    assert context["strategy"] == "SingleDeviceStrategy"
    assert context["precision"] == "32-true"
    assert context["loader"]["batch_size"] == 2
    assert context["batch"] == [[[2, 8], "fp32", "cpu"], [[2], "int64", "cpu"]]
    assert context["optimizers"][0]["class"] == "AdamW"
    assert context["modules"]["net.1"] == "Dropout"
    assert context["global_step"] == 4
    no_trace_left(model, trainer)


def test_the_callback_may_be_passed_bare(light, tmp_path):
    callback = advisor()
    trainer = light.Trainer(
        callbacks=callback, max_epochs=1, logger=False, accelerator="cpu", enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, default_root_dir=str(tmp_path),
    )  # fmt: skip

    trainer.fit(make_model(light), rows(20))

    assert isinstance(callback, light.Callback)
    assert callback.trace_path is not None


def test_optimizer_and_forward_ranges_hold_what_their_names_say(pl, tmp_path):
    callback = advisor()
    make_trainer(pl, tmp_path, callback).fit(make_model(pl), rows(20))

    events = [e for e in read_trace(callback.trace_path)["traceEvents"] if e.get("ph") == "X"]
    inside = {
        phase: {
            e["name"]
            for e in events
            for p in events
            if p["name"] == f"advisor::phase::{phase}"
            and p["ts"] <= e["ts"]
            and e["ts"] + e["dur"] <= p["ts"] + p["dur"]
        }
        for phase in ("forward", "backward", "optimizer")
    }
    assert "aten::cross_entropy_loss" in inside["forward"]
    assert "aten::addcdiv_" in inside["optimizer"] or "aten::_foreach_addcdiv_" in inside["optimizer"]
    assert any(name.startswith("autograd::engine") for name in inside["backward"])
    assert not any(name.startswith("autograd::engine") for name in inside["forward"] | inside["optimizer"])


def test_accumulated_gradients_are_recorded_in_whole_cycles(pl, tmp_path):
    callback = advisor()
    make_trainer(pl, tmp_path, callback, accumulate_grad_batches=4).fit(make_model(pl), rows(60))

    trace = read_trace(callback.trace_path)
    assert trace["training_advisor"]["accumulate_grad_batches"] == 4
    assert trace["training_advisor"]["window"]["capture_steps"] == 4
    # The thrown-away batch ends a cycle, then comes a whole one.
    assert phases(trace) == [*STEP, *STEP[:4] * 3, *STEP]


def test_manual_optimization_with_two_optimizers_is_recorded(light, tmp_path):
    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = self._loss(batch)
            self.manual_backward(loss)
            optimizer.step()
        self.losses.append(loss.item())

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 3)]

    def fresh():
        model = make_model(light, training_step=training_step, configure_optimizers=configure_optimizers)
        model.automatic_optimization = False
        return model

    plain, model, callback = fresh(), fresh(), advisor()
    light.seed_everything(3, verbose=False)
    make_trainer(light, tmp_path).fit(plain, rows(30))
    light.seed_everything(3, verbose=False)
    model.load_state_dict(fresh().state_dict())
    trainer = make_trainer(light, tmp_path, callback)
    light.seed_everything(3, verbose=False)
    trainer.fit(model, rows(30))

    trace = read_trace(callback.trace_path)
    assert model.losses == plain.losses
    assert phases(trace) == ["input", "input", "forward", *["backward", "optimizer"] * 2] * 4
    assert [o["class"] for o in trace["training_advisor"]["optimizers"]] == ["SGD", "SGD"]
    no_trace_left(model, trainer)


def test_a_gradient_scaler_that_skips_steps_closes_the_optimizer_range_after_its_update(pl, tmp_path):
    # GIVEN mixed precision whose gradients overflow at every other batch
    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        return loss * float("inf") if batch_idx % 2 else loss

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    model, callback = make_model(pl, training_step=training_step), advisor()

    # WHEN it is recorded
    trainer = make_trainer(pl, tmp_path, callback, plugins=[plugin])
    trainer.fit(model, rows(30))

    # THEN each step has one optimizer range, closed within it, and the scaler is as it was
    trace = read_trace(callback.trace_path)
    assert phases(trace) == STEP * 4
    assert "update" not in vars(scaler)
    steps = [e for e in trace["traceEvents"] if e.get("name", "").startswith("ProfilerStep#")]
    ranges = [e for e in trace["traceEvents"] if e.get("name") == "advisor::phase::optimizer"]
    for step, mark in zip(
        sorted(steps, key=lambda e: e["ts"]), sorted(ranges, key=lambda e: e["ts"]), strict=True
    ):
        assert step["ts"] <= mark["ts"]
        assert mark["ts"] + mark["dur"] <= step["ts"] + step["dur"]
    no_trace_left(model, trainer)


def test_a_step_that_skips_the_backward_pass_is_survived(pl, tmp_path, ours):
    def training_step(self, batch, batch_idx):
        return None if batch_idx % 3 == 0 else self._loss(batch)

    callback = advisor()
    make_trainer(pl, tmp_path, callback).fit(make_model(pl, training_step=training_step), rows(30))

    assert callback.trace_path is not None
    assert ours() == []


def test_validation_inside_the_window_is_marked_and_left_out_of_the_baseline(pl, tmp_path):
    # GIVEN validation after every second batch, which no window can avoid
    callback = advisor(warmup_steps=9)
    make_trainer(pl, tmp_path, callback, val_check_interval=2, limit_val_batches=2).fit(
        make_model(pl), rows(40), rows(4)
    )

    # THEN its runs are marked, and half of the distances between batches are not in the baseline
    trace = read_trace(callback.trace_path)
    assert phases(trace).count("validation") == 2
    assert trace["training_advisor"]["baseline"]["n"] == 4


def test_a_window_waits_for_validation_to_pass(pl, tmp_path):
    callback = advisor(warmup_steps=7)
    make_trainer(pl, tmp_path, callback, val_check_interval=10, limit_val_batches=2).fit(
        make_model(pl), rows(40), rows(4)
    )

    trace = read_trace(callback.trace_path)
    assert "validation" not in phases(trace)
    assert trace["training_advisor"]["window"]["first_step"] == 10


def test_the_sanity_check_is_not_recorded(pl, tmp_path):
    callback = advisor(stages=["fit", "validate"])
    make_trainer(pl, tmp_path, callback, num_sanity_val_steps=20).fit(make_model(pl), rows(20), rows(20))

    assert read_trace(callback.trace_path)["training_advisor"]["stage"] == "fit"
    assert read_trace(callback.trace_path)["training_advisor"]["global_step"] == 4


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_stages_are_recorded_where_asked_for(light, tmp_path, stage):
    callback = advisor(stages=[stage])
    trainer = make_trainer(light, tmp_path, callback)

    getattr(trainer, stage)(make_model(light), rows(30), **({"verbose": False} if stage != "predict" else {}))

    trace = read_trace(callback.trace_path)
    assert phases(trace)[-1] == "forward"
    assert phases(trace).count("forward") == 4
    assert trace["training_advisor"]["stage"] == stage
    assert trace["training_advisor"]["optimizers"] == []
    assert not any(name.endswith("_step") for name in vars(trainer.strategy))


def test_a_stage_that_was_not_asked_for_is_left_alone(pl, tmp_path, ours):
    callback = advisor(stages=["test"])
    make_trainer(pl, tmp_path, callback).fit(make_model(pl), rows(20))

    assert callback.trace_path is None
    assert not (tmp_path / "advisor").exists()
    assert ours() == []


def test_fast_dev_run_records_nothing_and_says_so_without_a_warning(pl, tmp_path, ours, capsys):
    callback = advisor()
    make_trainer(pl, tmp_path, callback, fast_dev_run=True).fit(make_model(pl), rows(20))

    assert callback.trace_path is None
    assert "fast_dev_run" in capsys.readouterr().err
    assert ours() == []


@pytest.mark.parametrize(
    ("limits", "trained"), [({"limit_train_batches": 0}, 0), ({"max_steps": 2}, 2), ({"max_steps": 0}, 0)]
)
def test_zero_or_too_few_steps_cost_at_most_one_warning(pl, tmp_path, ours, limits, trained):
    model, callback = make_model(pl), advisor()
    make_trainer(pl, tmp_path, callback, **limits).fit(model, rows(20))

    assert len(model.losses) == trained
    assert callback.trace_path is None
    assert len(ours()) == 1
    assert f"after {trained} batches" in ours()[0]


@pytest.mark.parametrize(
    ("limits", "captured"),
    [({"max_steps": 6}, 3), ({"max_steps": 5}, 2), ({"max_steps": 4}, 1), ({"limit_train_batches": 4}, 1)],
)
def test_a_window_is_clamped_to_the_steps_that_exist(pl, tmp_path, ours, limits, captured):
    callback = advisor(warmup_steps=100)
    make_trainer(pl, tmp_path, callback, **limits).fit(make_model(pl), rows(50))

    assert read_trace(callback.trace_path)["training_advisor"]["window"]["capture_steps"] == captured
    assert ours() == []


def test_short_epochs_keep_the_window_inside_one(pl, tmp_path):
    callback = advisor(warmup_steps=12)
    make_trainer(pl, tmp_path, callback, max_epochs=6).fit(make_model(pl), rows(7))

    window = read_trace(callback.trace_path)["training_advisor"]["window"]
    assert window["capture_steps"] == 3
    assert window["first_step"] % 7 in (1, 2)


@pytest.mark.parametrize(("batches", "captured"), [(60, 3), (8, 2)])
def test_a_loader_of_unknown_length_is_recorded_and_an_epoch_that_ends_inside_is_survived(
    pl, tmp_path, ours, batches, captured
):
    callback = advisor()
    make_trainer(pl, tmp_path, callback).fit(make_model(pl), rows(batches, stream=True))

    trace = read_trace(callback.trace_path)
    assert trace["training_advisor"]["window"]["capture_steps"] == captured
    assert len(names(trace, "ProfilerStep#")) == captured + 1
    assert ours() == []


def test_a_resumed_run_counts_on_from_where_it_was(light, tmp_path):
    first = make_trainer(light, tmp_path, max_epochs=1)
    first.fit(make_model(light), rows(10))
    first.save_checkpoint(tmp_path / "a.ckpt")
    callback = advisor()
    second = make_trainer(light, tmp_path, callback, max_epochs=3)

    second.fit(make_model(light), rows(10), ckpt_path=tmp_path / "a.ckpt", **_weights_only(light))

    assert read_trace(callback.trace_path)["training_advisor"]["global_step"] == 14


def _weights_only(light):
    version = tuple(int(part) for part in light.__version__.split(".")[:2])
    return {"weights_only": False} if version >= (2, 6) else {}


def test_a_checkpoint_knows_nothing_of_us(pl, tmp_path):
    callback = advisor()
    trainer = make_trainer(pl, tmp_path, callback)
    trainer.fit(make_model(pl), rows(20))

    assert trainer._checkpoint_connector.dump_checkpoint()["callbacks"] == {}


@pytest.mark.parametrize("at", [6, 20])
def test_an_exception_in_training_passes_through_and_leaves_nothing_behind(light, tmp_path, ours, at):
    model, callback = make_model(light), advisor()
    Raises(ValueError("mine"), at).patch(model)
    trainer = make_trainer(light, tmp_path, callback)

    with pytest.raises(ValueError, match="mine"):
        trainer.fit(model, rows(40))

    no_trace_left(model, trainer)
    assert ours() == []


def test_ctrl_c_inside_the_window_stops_training_as_ever(light, tmp_path, monkeypatch, ours):
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    model, callback = make_model(light), advisor()
    Raises(KeyboardInterrupt(), 6).patch(model)
    trainer = make_trainer(light, tmp_path, callback)

    with pytest.raises(SystemExit):
        trainer.fit(model, rows(40))

    no_trace_left(model, trainer)
    assert len(model.losses) == 6
    assert not list((tmp_path / "advisor").glob("*/*"))
    assert ours() == []


def test_ctrl_c_in_the_middle_of_our_own_work_is_not_swallowed(pl, tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *args: None)

    def interrupted(self, path):
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "write", interrupted)
    model = make_model(pl)
    trainer = make_trainer(pl, tmp_path, advisor())

    with pytest.raises(SystemExit):
        trainer.fit(model, rows(40))

    no_trace_left(model, trainer)


@pytest.mark.parametrize(
    ("part", "name"),
    [(OpenRanges, "drain"), (Window, "_forget_loop"), (Session, "close"), (Files, "discard")],
)
def test_ctrl_c_while_we_switch_off_leaves_nothing_behind(pl, tmp_path, monkeypatch, part, name):
    # GIVEN an interrupt that comes while a fault of ours is being cleaned up
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    original = getattr(part, name)
    interrupts = [KeyboardInterrupt()]

    def interrupted(self):
        if interrupts:
            raise interrupts.pop()
        original(self)

    def broken(self, path):
        monkeypatch.setattr(part, name, interrupted)
        raise RuntimeError("broken")

    monkeypatch.setattr(Session, "write", broken)
    model = make_model(pl)
    trainer = make_trainer(pl, tmp_path, advisor())

    with pytest.raises(SystemExit):
        trainer.fit(model, rows(40))

    assert not interrupts
    no_trace_left(model, trainer)
    assert "TEARDOWN_CUPTI" not in os.environ
    assert not list((tmp_path / "advisor").glob("*/.rank*"))


def test_a_fault_in_switching_off_itself_does_not_reach_the_training(pl, tmp_path, monkeypatch, ours):
    plain = make_model(pl)
    make_trainer(pl, tmp_path).fit(plain, rows(30))

    def broken(self):
        raise RuntimeError("broken")

    monkeypatch.setattr("advisor.capture.window.Window._take_down", broken)
    model = make_model(pl)
    callback = advisor()
    make_trainer(pl, tmp_path, callback).fit(model, rows(30))
    monkeypatch.undo()
    callback._window.interrupt()

    assert model.losses == plain.losses
    assert len(ours()) <= 1


def test_a_fit_of_the_same_callback_inside_the_recorded_run_ends_the_recording(pl, tmp_path):
    # GIVEN a callback that fits another model with the same callbacks in the middle of the window
    shared = advisor()

    class Nested(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if shared._window is not None and shared._window.recording:
                make_trainer(pl, tmp_path, shared).fit(make_model(pl), rows(4))

    model = make_model(pl)
    trainer = make_trainer(pl, tmp_path, Nested(), shared)
    trainer.fit(model, rows(30))

    assert len(model.losses) == 30
    no_trace_left(model, trainer)


@pytest.mark.parametrize(
    "hook", ["on_fit_start", "on_train_batch_start", "on_train_batch_end", "on_before_backward", "teardown"]
)
def test_a_fault_in_any_hook_costs_one_warning_and_not_a_bit_of_the_training(
    light, tmp_path, ours, monkeypatch, hook
):
    plain = make_model(light)
    make_trainer(light, tmp_path).fit(plain, rows(30))
    inner = {
        "on_fit_start": "_begin",
        "on_train_batch_start": "_note",
        "on_train_batch_end": "_busy",
        "on_before_backward": "_phase",
    }

    def broken(*args, **kwargs):
        raise RuntimeError("broken")

    callback = advisor()
    if hook in inner:
        monkeypatch.setattr(TrainingAdvisor, inner[hook], broken)
    else:
        monkeypatch.setattr("advisor.capture.window.Window.close", broken)
    model = make_model(light)
    trainer = make_trainer(light, tmp_path, callback)

    trainer.fit(model, rows(30))

    assert model.losses == plain.losses
    assert len(ours()) <= 1
    no_trace_left(model, trainer)


def test_a_trainer_with_pytorch_profiler_keeps_it_and_gets_one_warning(light, tmp_path, ours):
    profilers = sys.modules[f"{light.__name__}.profilers"]
    callback = advisor()
    trainer = make_trainer(light, tmp_path, callback, profiler=profilers.PyTorchProfiler(dirpath=tmp_path))

    trainer.fit(make_model(light), rows(20))

    assert callback.trace_path is None
    assert len(ours()) == 1
    assert "PyTorchProfiler" in ours()[0]


def test_a_callback_that_holds_a_profiler_of_its_own_is_left_in_peace(pl, tmp_path, ours):
    class Theirs(pl.Callback):
        def __init__(self):
            self.profiler = torch.profiler.profile(
                schedule=torch.profiler.schedule(wait=5, warmup=1, active=2)
            )

    callback = advisor()
    make_trainer(pl, tmp_path, callback, Theirs()).fit(make_model(pl), rows(20))

    assert callback.trace_path is None
    assert len(ours()) == 1
    assert "Theirs holds a torch.profiler" in ours()[0]


def test_a_second_fit_in_one_process_records_nothing_and_says_so(pl, tmp_path, ours, capsys):
    callback = advisor()
    make_trainer(pl, tmp_path, callback).fit(make_model(pl), rows(20))
    first = callback.trace_path

    make_trainer(pl, tmp_path, callback).fit(make_model(pl), rows(20))

    assert first is not None
    assert callback.trace_path is None
    assert "recorded a window before" in capsys.readouterr().err
    assert ours() == []


def test_two_advisors_in_one_trainer_record_once(pl, tmp_path, ours):
    first, second = advisor(), advisor()
    trainer = make_trainer(pl, tmp_path, first, second)
    model = make_model(pl)

    trainer.fit(model, rows(30))

    assert first.trace_path is not None
    assert second.trace_path is None
    assert ours() == []
    no_trace_left(model, trainer)


def test_ranks_that_do_not_exist_are_said_to(pl, tmp_path, capsys):
    callback = advisor(ranks=[5])
    make_trainer(pl, tmp_path, callback).fit(make_model(pl), rows(20))

    assert callback.trace_path is None
    assert "none of ranks=[5]" in capsys.readouterr().err


def test_a_read_only_folder_costs_one_warning(pl, tmp_path, ours):
    (tmp_path / "results").touch()
    model = make_model(pl)

    make_trainer(pl, tmp_path, advisor(dirpath=tmp_path / "results")).fit(model, rows(20))

    assert len(model.losses) == 20
    assert len(ours()) == 1
    assert "cannot write to" in ours()[0]


def test_dirpath_and_the_loggers_folder_decide_where_the_files_go(pl, tmp_path):
    logger = pl.loggers.CSVLogger(tmp_path, name="run")
    callback = advisor()
    make_trainer(pl, tmp_path, callback, logger=logger).fit(make_model(pl), rows(20))
    assert callback.trace_path.parent == Path(logger.log_dir) / "advisor" / "step_4"

    callback = advisor(dirpath=tmp_path / "mine", allow_repeat=True)
    make_trainer(pl, tmp_path, callback, logger=logger).fit(make_model(pl), rows(20))
    assert callback.trace_path.parent == tmp_path / "mine" / "step_4"


def test_the_report_is_made_printed_and_handed_to_the_loggers(pl, tmp_path, capsys, ours):
    # GIVEN a run with two loggers
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = pl.loggers.TensorBoardLogger(tmp_path, name="board")
    csv = pl.loggers.CSVLogger(tmp_path, name="csv")
    callback = advisor(report=True)

    # WHEN it ends
    make_trainer(pl, tmp_path, callback, logger=[board, csv]).fit(make_model(pl), rows(40))

    # THEN the report lies beside the trace, its path is printed, and TensorBoard shows it
    folder = Path(board.log_dir) / "advisor" / "step_4"
    assert callback.report_path == folder / "report.html"
    assert f"report: {folder / 'report.html'}" in capsys.readouterr().out
    assert sorted(p.name for p in folder.iterdir()) == [
        "rank0.pt.trace.json.gz", "report.html", "report.json", "report.md",
    ]  # fmt: skip
    report = json.loads((folder / "report.json").read_text())
    assert report["environment"]["strategy"] == "SingleDeviceStrategy"
    events = event_accumulator.EventAccumulator(str(board.log_dir)).Reload()
    assert "training_advisor/text_summary" in events.Tags()["tensors"]
    assert ours() == []


def test_an_analysis_that_fails_costs_one_warning_and_keeps_the_trace(pl, tmp_path, ours, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    callback = advisor(report=True)

    make_trainer(pl, tmp_path, callback).fit(make_model(pl), rows(40))

    assert callback.report_path is None
    assert len(ours()) == 1
    assert "analysis failed" in ours()[0]
    assert (tmp_path / "advisor" / "step_4" / ".rank0.raw.json").exists()


def test_training_does_not_wait_for_the_analysis_longer_than_asked(pl, tmp_path, ours, capsys, monkeypatch):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(slow))
    callback = advisor(report=True, report_timeout_s=0.05)

    make_trainer(pl, tmp_path, callback).fit(make_model(pl), rows(40))

    assert "the analysis goes on" in capsys.readouterr().err
    assert ours() == []
    callback._window._worker._process.kill()


def test_a_model_compiled_as_a_whole_has_no_module_ranges_and_is_not_compiled_anew(pl, tmp_path):
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = make_model(pl, training_step=lambda self, batch, batch_idx: self._loss(batch))
    callback = advisor()

    make_trainer(pl, tmp_path, callback).fit(torch.compile(model, backend=backend), rows(20))

    trace = read_trace(callback.trace_path)
    assert len(compiles) >= 1
    assert len(compiles) == _compiles_without_us(pl, tmp_path)
    assert names(trace, "advisor::module::") == []
    assert phases(trace) == STEP * 4
    assert trace["training_advisor"]["compiled_modules"] == [""]
    torch._dynamo.reset()


def _compiles_without_us(pl, tmp_path):
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = make_model(pl, training_step=lambda self, batch, batch_idx: self._loss(batch))
    make_trainer(pl, tmp_path).fit(torch.compile(model, backend=backend), rows(20))
    return len(compiles)


def test_modules_and_batches_can_be_freed_once_the_window_is_over(pl, tmp_path):
    seen = {}

    class Probe(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx in (6, 20):
                seen[batch_idx] = weakref.ref(batch[0])

    callback, model = advisor(), make_model(pl)
    trainer = make_trainer(pl, tmp_path, callback, Probe())
    trainer.fit(model, rows(40))
    assert seen[6]() is None
    model_ref, window = weakref.ref(model), callback._window

    del model, trainer, callback  # Lightning gives each callback the model's log method
    gc.collect()

    assert window.trace_path is not None
    assert model_ref() is None


def test_the_callback_pickles_and_copies_as_its_settings_alone(pl, tmp_path):
    callback = advisor(capture_steps=2, ranks=[0])
    make_trainer(pl, tmp_path, callback).fit(make_model(pl), rows(20))

    for twin in (pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)):
        assert (twin.capture_steps, twin.ranks, twin.trace_path) == (2, [0], None)
    assert callback.trace_path is not None


@pytest.mark.parametrize(
    "options",
    [
        {"stages": "fit"},
        {"stages": ["train"]},
        {"ranks": "last"},
        {"ranks": []},
        {"capture_steps": 0},
        {"warmup_steps": -1},
    ],
)
def test_settings_out_of_range_are_refused_at_once(options):
    with pytest.raises(UsageError, match=next(iter(options))):
        TrainingAdvisor(**options)


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        TrainingAdvisor("here", 5)


def test_without_lightning_the_callback_names_its_package():
    code = """
import sys
sys.modules.update({"lightning": None, "pytorch_lightning": None})
from advisor import TrainingAdvisor
from advisor.errors import MissingExtraError
try:
    TrainingAdvisor()
except MissingExtraError as error:
    assert str(error).endswith(": pip install pytorch-lightning")
else:
    raise SystemExit("no error")
"""

    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=False)

    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("order", ["advisor first", "lightning first", "one, then the other"])
def test_the_callback_belongs_to_each_package_whatever_is_imported_first(order):
    code = {
        "advisor first": "from advisor import TrainingAdvisor as T; "
        "import lightning.pytorch, pytorch_lightning;",
        "lightning first": "import lightning.pytorch; from advisor import TrainingAdvisor as T; "
        "import sys; assert 'pytorch_lightning' not in sys.modules; import pytorch_lightning;",
        "one, then the other": "import pytorch_lightning; from advisor import TrainingAdvisor as T; T(); "
        "import lightning.pytorch;",
    }[order]
    code += "t = T(); assert isinstance(t, lightning.pytorch.Callback); "
    code += "assert isinstance(t, pytorch_lightning.Callback); assert isinstance(t, T)"

    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=False)

    assert done.returncode == 0, done.stderr.decode()


def test_lightning_cli_builds_the_callback_from_a_config(light, tmp_path):
    pytest.importorskip("jsonargparse")
    cli_module = __import__(f"{light.__name__}.cli", fromlist=["LightningCLI"])
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n  callbacks:\n    - class_path: advisor.TrainingAdvisor\n      init_args:\n"
        "        warmup_steps: 7\n        capture_steps: 2\n        ranks: [0, 1]\n"
        "        stages: [fit, test]\n"
        f"        dirpath: {tmp_path / 'out'}\n  logger: false\n  accelerator: cpu\n"
    )
    light.seed_everything(1, verbose=False)

    cli = cli_module.LightningCLI(
        type(make_model(light)), run=False, save_config_callback=None, args=["--config", str(config)]
    )

    callback = next(c for c in cli.trainer.callbacks if isinstance(c, TrainingAdvisor))
    assert (callback.warmup_steps, callback.capture_steps) == (7, 2)
    assert (callback.ranks, callback.stages) == ([0, 1], ("fit", "test"))
    assert callback.dirpath == str(tmp_path / "out")


def test_lightning_cli_takes_the_callback_on_the_command_line(light):
    pytest.importorskip("jsonargparse")
    cli_module = __import__(f"{light.__name__}.cli", fromlist=["LightningCLI"])
    arguments = ["--trainer.callbacks+=advisor.TrainingAdvisor", "--trainer.callbacks.warmup_steps=auto"]
    arguments += ["--trainer.logger=false", "--trainer.accelerator=cpu"]

    cli = cli_module.LightningCLI(
        type(make_model(light)), run=False, save_config_callback=None, args=arguments
    )

    callback = next(c for c in cli.trainer.callbacks if isinstance(c, TrainingAdvisor))
    assert callback.warmup_steps == "auto"


def test_the_log_directory_is_asked_for_on_ranks_that_do_not_record(pl, tmp_path):
    # GIVEN a rank that does not record
    asked = []

    class Trainer:
        fast_dev_run, global_rank, world_size, is_global_zero = False, 1, 2, False
        default_root_dir = str(tmp_path)

        @property
        def log_dir(self):
            asked.append(1)

    callback = advisor()

    # WHEN it is set up
    callback.setup(Trainer(), None, "fit")

    # THEN it took part in the broadcast, and records nothing
    assert asked == [1]
    assert callback._stage is None


def test_the_process_environment_is_as_it_was(pl, tmp_path):
    model = make_model(pl)
    before = dict(os.environ)
    make_trainer(pl, tmp_path, advisor()).fit(model, rows(30))

    assert dict(os.environ) == before
