"""Kernels are compiled while the loop trains on, which sees nothing of it; then candidates are tried."""

from __future__ import annotations

import functools
import json
import threading
import time

import pytest
import torch

from advisor import TrainingAdvisor
from advisor.capture.swapping import engine as swapping_engine
from advisor.capture.swapping import patience as swapping_patience
from advisor.capture.swapping import run as swapping
from advisor.capture.swapping import steps as swapping_steps
from advisor.capture.swapping.engine import Engine
from advisor.capture.swapping.patience import Patience
from advisor.capture.swapping.run import State
from advisor.swap import decide
from tests.capture.tiny import make_trainer, rows
from tests.swap.compiled import Kernel, as_if_on_a_gpu, compilers, offered

from .planted import plant, slow_model
from .test_run import is_swapped, result, same

pytest.importorskip("triton", reason="this is about Triton's compiler")

BATCHES = 150
#: Batches that the compiler takes; swap begins to watch after this one.
TAKES, WARMUP = 12, 6


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    monkeypatch.setattr(swapping_steps, "MOST", 5)
    as_if_on_a_gpu(monkeypatch)
    yield
    assert compilers() == []


class Compiler:
    """Is done when the loop has trained on so many batches, as the callback's hook tells it."""

    def __init__(self, light, batches=TAKES):
        self.released, compiler = threading.Event(), self
        self.kernel = Kernel(lambda: self.released.wait(60))
        self.states = []

        class Trains(light.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                state = compiler.swap._swapping.state
                compiler.states.append(state)
                if compiler.states.count(State.COMPILING) == batches:
                    compiler.released.set()
                    # So that the next batch finds it done.
                    while compilers() and not compiler.swap._swapping._engine._background.done:
                        time.sleep(0.01)

        self.swap = TrainingAdvisor(stages=("validate",), warmup_steps=WARMUP, swap=["norm"])
        self.callbacks = [self.swap, Trains()]

    def count(self, state=State.COMPILING):
        return self.states.count(state)


def begin(monkeypatch, light, batches=TAKES):
    compiler = Compiler(light, batches)
    plant(monkeypatch, offered(compiler.kernel))
    return compiler


def slow_time(monkeypatch, budget_s=1.0):
    """Little time for trying."""
    terms = functools.partial(decide.Terms, measure_s=0.02, budget_s=budget_s)
    monkeypatch.setattr(swapping_engine, "Terms", terms)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
def test_the_loop_trains_on_as_without_us_and_then_has_the_kernel(pl, tmp_path, monkeypatch, capsys, options):
    # GIVEN a loop of its own, and the random numbers that it ends with
    plain = slow_model(pl)
    make_trainer(pl, tmp_path, **options).fit(plain, rows(BATCHES))
    after = torch.get_rng_state()

    # WHEN a candidate's kernel takes twelve batches to compile
    compiler = begin(monkeypatch, pl)
    model = slow_model(pl)
    make_trainer(pl, tmp_path, *compiler.callbacks, **options).fit(model, rows(BATCHES))

    # THEN it was compiled once, in a thread, while the loop trained on, and was swapped in after that
    assert compiler.count() == TAKES
    assert compiler.states.index(State.COMPARING) > TAKES
    assert [name[:21] for name in compiler.kernel.compiled_in][:1] == ["advisor-swap-compiler"]
    assert result(tmp_path)["kept"] is True
    assert result(tmp_path)["sites"][0]["chosen"] == "planted.compiled"
    # AND no bit of the training differs, though random numbers were drawn in between
    assert model.losses == plain.losses
    assert same(model, plain)
    assert torch.equal(torch.get_rng_state(), after)
    said = capsys.readouterr().err
    assert "compiling 1 kernel for 1 site while" in said or options.get("precision")
    assert said.index("while training goes on (at most 30 s)") < said.index("between two steps")


def test_the_pause_is_short_where_the_compiler_is_slow(pl, tmp_path, monkeypatch):
    # GIVEN a compiler that takes two seconds
    kernel = Kernel(lambda: time.sleep(2.0))
    plant(monkeypatch, offered(kernel))
    advisor = functools.partial(TrainingAdvisor, stages=("validate",), warmup_steps=WARMUP, swap=["norm"])
    patient = tmp_path / "patient"
    make_trainer(pl, patient, advisor()).fit(slow_model(pl), rows(2000))

    # AND the same where the loop may not train on meanwhile
    kernel.table.clear()
    monkeypatch.setattr(swapping_patience, "LIMIT_S", 0.0)
    impatient = tmp_path / "impatient"
    make_trainer(pl, impatient, advisor()).fit(slow_model(pl), rows(200))

    # THEN training is held for those seconds in the one, and not in the other
    held = [result(folder)["pause_s"] for folder in (patient, impatient)]
    assert [result(folder)["kept"] for folder in (patient, impatient)] == [True, True]
    assert held[1] > 1.6
    assert held[0] < held[1] - 0.8


def test_what_takes_longer_than_the_loop_may_go_on_is_tried_as_ever_and_named(pl, tmp_path, monkeypatch):
    # GIVEN a compiler that is never done while the run has batches to spare, nor within the time for trying
    compiler = begin(monkeypatch, pl, batches=10**9)
    plant(monkeypatch, offered(compiler.kernel), offered(Kernel(), "planted.quick"))
    slow_time(monkeypatch)
    plain = slow_model(pl)
    make_trainer(pl, tmp_path).fit(plain, rows(BATCHES))
    model, decided = slow_model(pl), Engine.decide

    def released_later(self, progress):
        threading.Timer(2.0, compiler.released.set).start()
        return decided(self, progress)

    monkeypatch.setattr(Engine, "decide", released_later)
    make_trainer(pl, tmp_path, *compiler.callbacks).fit(model, rows(BATCHES))

    # THEN half of the batches to spare were waited for
    needed = WARMUP + 1 + 31  # steady, watched, compared
    assert compiler.count() == (BATCHES - needed) // 2
    (site,) = result(tmp_path)["sites"]
    assert [trial["refused"] for trial in site["trials"]] == [decide.LATE, ""]
    assert site["chosen"] == "planted.quick"
    assert model.losses == plain.losses


@pytest.mark.parametrize("ending", ["interrupt", "exception", "stop", "restore", "fault"])
def test_whatever_ends_it_leaves_no_thread_and_nothing_changed(pl, tmp_path, monkeypatch, ours, ending):
    compiler = begin(monkeypatch, pl, batches=10**9)
    model, at, state = slow_model(pl), WARMUP + 6, []
    original = model.training_step

    def training_step(batch, batch_idx):
        if batch_idx == at:
            state.append(compiler.swap._swapping.state)
            threading.Timer(0.3, compiler.released.set).start()
            if ending == "interrupt":
                raise KeyboardInterrupt
            if ending == "exception":
                raise RuntimeError("the user's own")
            if ending == "restore":
                compiler.swap.restore()
            if ending == "fault":
                monkeypatch.setattr(Engine, "compiling", property(lambda self: 1 / 0))
            model.trainer.should_stop = ending == "stop"
        return original(batch, batch_idx)

    model.training_step = training_step
    trainer = make_trainer(pl, tmp_path, *compiler.callbacks)
    if ending in ("interrupt", "exception"):
        with pytest.raises((KeyboardInterrupt, SystemExit, RuntimeError)):
            trainer.fit(model, rows(BATCHES))
    else:
        trainer.fit(model, rows(BATCHES))

    assert state == [State.COMPILING]
    assert compilers() == []
    assert is_swapped(model) == [False, False]
    assert compiler.kernel.launches == 0
    assert compiler.swap._swapping.state is State.DONE
    verdict = {
        "interrupt": "the run was interrupted",
        "exception": "the run was interrupted",
        "stop": "the run ended while kernels were being compiled",
        "restore": "taken back on request",
        "fault": "ZeroDivisionError",
    }[ending]
    assert verdict in result(tmp_path)["verdict"]
    assert len(model.losses) == {"stop": at + 1, "restore": BATCHES, "fault": BATCHES}.get(ending, at)


def test_copies_are_let_go_of_where_it_ends(pl, tmp_path, monkeypatch):
    import gc
    import weakref

    compiler = begin(monkeypatch, pl, batches=10**9)
    model, copies = slow_model(pl), []
    sites = Engine.sites

    def noted(self):
        found = sites(self)
        copies.extend(weakref.ref(site.examples[0].args[1]) for site in found)
        return found

    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == WARMUP + 6:
                assert copies[0]() is not None
                compiler.released.set()
                compiler.swap.restore()

    monkeypatch.setattr(Engine, "sites", noted)
    make_trainer(pl, tmp_path, *compiler.callbacks, Stops()).fit(model, rows(BATCHES))
    gc.collect()
    assert [copy() for copy in copies] == [None]


def test_where_memory_is_scarce_beside_the_copies_the_loop_does_not_go_on(pl, tmp_path, monkeypatch):
    compiler = begin(monkeypatch, pl)
    compiler.released.set()
    slow = Kernel(lambda: time.sleep(0.3))
    plant(monkeypatch, offered(slow))
    free = iter([10**13, 10**13])  # before anything is copied
    monkeypatch.setattr(swapping_engine, "headroom_bytes", lambda _kind: next(free, 10**9))

    make_trainer(pl, tmp_path, *compiler.callbacks).fit(slow_model(pl), rows(BATCHES))

    assert compiler.count() == 0
    assert result(tmp_path)["kept"] is True


def test_without_anything_to_compile_no_batch_is_waited_for(pl, tmp_path, monkeypatch):
    compiler = begin(monkeypatch, pl)
    compiler.released.set()
    plant(monkeypatch, offered(compiler.kernel))
    monkeypatch.setattr("advisor.swap.ahead._on_gpu", lambda example: False)

    make_trainer(pl, tmp_path, *compiler.callbacks).fit(slow_model(pl), rows(BATCHES))

    assert compiler.count() == 0
    assert compiler.kernel.compiled_in == ["MainThread"]
    assert result(tmp_path)["kept"] is True


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_two_processes_of_ddp_train_on_alike_while_the_first_compiles(pl, tmp_path, monkeypatch):
    # GIVEN two forked processes, of which the first compiles for a while
    monkeypatch.setattr(swapping, "MEETING", 8)
    kernel = Kernel(lambda: time.sleep(0.3))
    plant(monkeypatch, offered(kernel))
    callback = TrainingAdvisor(stages=("validate",), warmup_steps=WARMUP, swap=["norm"])

    class Notes(pl.Callback):
        def __init__(self):
            self.states = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.states.append(callback._swapping.state.name)

        def on_train_end(self, trainer, pl_module):
            told = {
                "states": self.states,
                "swapped": is_swapped(pl_module),
                "in": kernel.compiled_in,
            }
            (tmp_path / f"rank{trainer.global_rank}.json").write_text(json.dumps(told))

    trainer = make_trainer(pl, tmp_path, callback, Notes(), devices=2, strategy="ddp_fork")
    trainer.fit(slow_model(pl), rows(1200))

    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["swapped"] == second["swapped"] == [True, True]
    assert first["states"] == second["states"]
    assert first["states"].count("COMPILING") % swapping.COMPILING_MEETING == 0
    assert "COMPILING" in first["states"]
    # AND each compiled for itself, the second where it launched it
    assert first["in"][0].startswith("advisor-swap-compiler")
    assert second["in"][0] == "MainThread"


def test_patience_ends_with_time_or_with_half_the_batches_to_spare():
    now = [100.0]
    endless, short = Patience(None, lambda: now[0]), Patience(41, lambda: now[0])
    assert not endless.lasts(0)
    for patience in (endless, short):
        patience.start(7)
    assert (short.lasts(27), short.lasts(28), endless.lasts(10**6)) == (True, False, True)
    now[0] += swapping_patience.LIMIT_S
    assert not short.lasts(8)
    assert not endless.lasts(8)
