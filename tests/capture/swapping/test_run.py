"""Swap in a Trainer on the CPU, with planted candidates: kept where whole steps gain, else all as before."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref

import pytest
import torch

from advisor import TrainingAdvisor
from advisor.capture.swapping import steps as swapping_steps
from advisor.capture.swapping.run import State
from advisor.capture.swapping.start import Idle
from advisor.errors import UsageError
from advisor.swap.modules import MARK
from tests.capture.tiny import make_model, make_trainer, rows

from . import planted
from .planted import SlowScale, plant, slow_model

#: Batches until one step has been watched and the shortest comparison is over.
BATCHES = 46
#: The same with a recording and its check before.
RECORDED = 64


def advisor(**options):
    return TrainingAdvisor(**{"warmup_steps": 4, "report": False, "swap": ["norm"], **options})


def only_swap(**options):
    """Without a recording, which would take the place of half the batches."""
    return advisor(**{"stages": ("validate",), "warmup_steps": 6, **options})


def is_swapped(model):
    return [hasattr(type(module), MARK) for module in model.modules() if isinstance(module, SlowScale)]


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(swapping_steps, "MOST", 5)


def result(folder):
    (path,) = folder.rglob("swaps.json")
    return json.loads(path.read_text())


def plain_run(light, folder, batches=BATCHES, **options):
    model = slow_model(light)
    make_trainer(light, folder, **options).fit(model, rows(batches))
    return model


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_without_gpu_there_is_one_line_and_the_same_losses(light, tmp_path, capsys, ours):
    plain = make_model(light)
    make_trainer(light, tmp_path).fit(plain, rows(30))
    model = make_model(light)

    make_trainer(light, tmp_path, advisor(swap="auto")).fit(model, rows(30))

    assert model.losses == plain.losses
    assert same(model, plain)
    lines = [line for line in capsys.readouterr().err.splitlines() if "swap" in line]
    assert len(lines) == 1
    assert "nothing can be swapped here" in lines[0]
    assert result(tmp_path)["verdict"].startswith("nothing can be swapped here")
    assert ours() == []


def test_a_gain_is_kept_until_the_run_ends_and_told(light, tmp_path, monkeypatch, capsys):
    # GIVEN slow layers, and a candidate that gives the same bits in a fraction of the time
    plain = plain_run(light, tmp_path, RECORDED)
    plant(monkeypatch, planted.fast(), sure=False)
    model, callback, swapped = slow_model(light), advisor(), []

    class Seen(light.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            swapped.append(is_swapped(pl_module))

    # WHEN it trains
    make_trainer(light, tmp_path, callback, Seen()).fit(model, rows(RECORDED))

    # THEN the layers were swapped at the end of it and are none any more, and no bit of the training differs
    assert swapped[-1] == [True, True]
    assert swapped[5] == [False, False]
    assert is_swapped(model) == [False, False]
    assert model.losses == plain.losses
    assert same(model, plain)
    # AND what was done lies beside the trace and has been said
    found = result(tmp_path)
    assert found["kept"] is True
    assert (tmp_path / "advisor" / "step_4" / "swaps.json").exists()
    (site,) = found["sites"]
    assert site["chosen"] == "planted.fast"
    assert site["where"] == ["net.1", "net.4"]
    assert site["calls_per_step"] == 2
    assert site["swapped_ms_per_step"] < site["eager_ms_per_step"]
    assert site["step_fraction"] > 0
    assert "+self.scale = Scale(width)" in site["permanent"]
    assert found["steps"]["saving_ms"]["low"] > 0
    assert len(found["steps"]["eager_ms"]) == len(found["steps"]["swapped_ms"]) == 10
    assert found["pause_s"] < 10
    assert "1 of 1 site swapped: a step takes" in capsys.readouterr().err


def test_the_report_tells_what_was_swapped_after_it_was_written(pl, tmp_path, monkeypatch):
    plant(monkeypatch, planted.fast())
    callback = advisor(report=True)

    make_trainer(pl, tmp_path, callback).fit(slow_model(pl), rows(RECORDED))

    assert "planted.fast" in callback.report_path.read_text()
    assert json.loads(callback.report_path.with_suffix(".json").read_text())["swaps"]["kept"] is True


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (planted.wrong, ""),
        (planted.nan, ""),
        (planted.raising, "planted fault"),
        (planted.out_of_memory, "out of memory"),
        (planted.slow, "slower"),
    ],
)
def test_a_bad_candidate_is_refused_by_name_and_training_is_as_without(
    pl, tmp_path, monkeypatch, ours, call, told
):
    plain = plain_run(pl, tmp_path)
    plant(monkeypatch, planted.fast("planted.bad", call), sure=False)
    model = slow_model(pl)

    make_trainer(pl, tmp_path, only_swap()).fit(model, rows(BATCHES))

    assert model.losses == plain.losses
    assert is_swapped(model) == [False, False]
    found = result(tmp_path)
    assert found["kept"] is False
    assert "none of 1 site" in found["verdict"]
    (trial,) = found["sites"][0]["trials"]
    assert trial["candidate"] == "planted.bad"
    assert trial["refused"]
    assert told in trial["refused"]
    assert ours() == []


def test_beside_bad_candidates_the_good_one_is_kept(pl, tmp_path, monkeypatch):
    plant(
        monkeypatch,
        planted.fast("bad", planted.wrong),
        planted.fast(),
        planted.fast("worse", planted.raising),
    )
    make_trainer(pl, tmp_path, only_swap()).fit(slow_model(pl), rows(BATCHES))

    (site,) = result(tmp_path)["sites"]
    assert site["chosen"] == "planted.fast"
    assert [bool(trial["refused"]) for trial in site["trials"]] == [True, False, True]


def test_what_gains_by_itself_and_not_in_whole_steps_is_put_back(pl, tmp_path, monkeypatch):
    # GIVEN a candidate that is fast when it is timed, and slow in the loop
    trying = []

    def moody(module, x):
        return planted.scale(module, x) if trying else planted.slow(module, x)

    plant(monkeypatch, planted.fast("planted.moody", moody), sure=False)
    from advisor.capture.swapping.engine import Engine

    decide = Engine.decide

    def noted(self, progress):
        trying.append(True)
        try:
            return decide(self, progress)
        finally:
            trying.clear()

    monkeypatch.setattr(Engine, "decide", noted)
    model = slow_model(pl)
    make_trainer(pl, tmp_path, only_swap()).fit(model, rows(BATCHES))

    found = result(tmp_path)
    assert found["kept"] is False
    assert "gain nothing beyond the noise" in found["verdict"]
    assert found["sites"][0]["chosen"] is None
    assert "by itself, not kept" in found["sites"][0]["reason"]
    assert found["steps"]["swapped_p50_ms"] > found["steps"]["eager_p50_ms"]
    assert is_swapped(model) == [False, False]


def test_an_interruption_in_the_middle_of_verification_leaves_the_model_as_it_was(pl, tmp_path, monkeypatch):
    def interrupting(module, x):
        raise KeyboardInterrupt

    plant(monkeypatch, planted.fast("planted.interrupting", interrupting))
    model = slow_model(pl)
    state = torch.get_rng_state

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        make_trainer(pl, tmp_path, only_swap()).fit(model, rows(BATCHES))

    assert is_swapped(model) == [False, False]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.is_grad_enabled()
    assert state is torch.get_rng_state
    assert "interrupted" in result(tmp_path)["verdict"]


def test_an_exception_while_swapped_puts_everything_back(pl, tmp_path, monkeypatch):
    plant(monkeypatch, planted.fast())
    model, at = slow_model(pl), []
    original = model.training_step

    def training_step(batch, batch_idx):
        if batch_idx == BATCHES - 2:
            at.append(is_swapped(model))
            raise RuntimeError("the user's own")
        return original(batch, batch_idx)

    model.training_step = training_step
    with pytest.raises(RuntimeError, match="the user's own"):
        make_trainer(pl, tmp_path, only_swap()).fit(model, rows(BATCHES))

    assert at == [[True, True]]
    assert is_swapped(model) == [False, False]
    assert result(tmp_path)["kept"] is True


def test_swap_keep_leaves_the_model_swapped(pl, tmp_path, monkeypatch):
    plant(monkeypatch, planted.fast())
    model = slow_model(pl)

    make_trainer(pl, tmp_path, only_swap(swap_keep=True)).fit(model, rows(BATCHES))

    assert is_swapped(model) == [True, True]
    assert is_swapped(pickle.loads(pickle.dumps(model.net))) == [False, False]


def test_restore_puts_everything_back_while_training_goes_on(pl, tmp_path, monkeypatch):
    plant(monkeypatch, planted.fast())
    model, callback, seen = slow_model(pl), only_swap(), []

    class Asks(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == BATCHES - 5:
                seen.append(is_swapped(pl_module))
                callback.restore()
                seen.append(is_swapped(pl_module))

    make_trainer(pl, tmp_path, callback, Asks()).fit(model, rows(BATCHES))

    assert seen == [[True, True], [False, False]]
    assert len(model.losses) == BATCHES


def test_a_run_that_ends_while_steps_are_compared_puts_everything_back(pl, tmp_path, monkeypatch):
    plant(monkeypatch, planted.fast())
    model = slow_model(pl)
    trainer = make_trainer(pl, tmp_path, only_swap())
    stop_at = 20

    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == stop_at

    trainer.callbacks.append(Stops())
    trainer.fit(model, rows(BATCHES))

    assert len(model.losses) == stop_at + 1
    assert is_swapped(model) == [False, False]
    found = result(tmp_path)
    assert found["kept"] is False
    assert "ended before whole steps were compared" in found["verdict"]


def test_with_too_few_batches_nothing_begins(pl, tmp_path, monkeypatch):
    plant(monkeypatch, planted.fast("never tried", planted.raising))
    model = slow_model(pl)

    make_trainer(pl, tmp_path, only_swap()).fit(model, rows(20))

    assert "too few to compare whole steps" in result(tmp_path)["verdict"]


def test_a_model_without_sites_says_so(pl, tmp_path, monkeypatch):
    plant(monkeypatch, planted.fast())
    plain = make_model(pl)
    make_trainer(pl, tmp_path).fit(plain, rows(BATCHES))
    model = make_model(pl)

    make_trainer(pl, tmp_path, only_swap(swap=["norm"])).fit(model, rows(BATCHES))

    assert "nothing that a faster kernel is known for" in result(tmp_path)["verdict"]
    assert model.losses == plain.losses


def test_accumulated_gradients_and_validation_go_on_as_before(pl, tmp_path, monkeypatch):
    options = {"accumulate_grad_batches": 2, "val_check_interval": 20}
    plain = slow_model(pl)
    make_trainer(pl, tmp_path, **options).fit(plain, rows(90), rows(2))
    plant(monkeypatch, planted.fast())
    model, callback = slow_model(pl), only_swap()

    make_trainer(pl, tmp_path, callback, **options).fit(model, rows(90), rows(2))

    assert model.losses == plain.losses
    assert same(model, plain)
    assert result(tmp_path)["kept"] is True
    assert len(result(tmp_path)["steps"]["swapped_ms"]) >= 8


def test_later_validate_test_and_predict_run_the_plain_model(pl, tmp_path, monkeypatch):
    plant(monkeypatch, planted.fast())
    model = slow_model(pl)
    trainer = make_trainer(pl, tmp_path, only_swap())
    trainer.fit(model, rows(BATCHES))

    trainer.validate(model, rows(2), verbose=False)
    trainer.test(model, rows(2), verbose=False)
    trainer.predict(model, rows(2))

    assert is_swapped(model) == [False, False]


def test_checkpoints_of_a_swapped_run_are_those_of_a_plain_one(pl, tmp_path, monkeypatch):
    # GIVEN a run that saves while it is swapped, the optimizer too
    def run(folder, *callbacks):
        model = slow_model(pl)

        class Saves(pl.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                if batch_idx == BATCHES - 5:
                    folder.mkdir(parents=True, exist_ok=True)
                    self.swapped = is_swapped(pl_module), trainer.optimizers[0].param_groups[0].get("fused")
                    trainer.save_checkpoint(folder / "last.ckpt")

        saves = Saves()
        make_trainer(pl, folder, *callbacks, saves).fit(model, rows(BATCHES))
        return model, saves.swapped, torch.load(folder / "last.ckpt", weights_only=False)

    _, _, plain_saved = run(tmp_path / "plain")
    plant(monkeypatch, planted.fast())
    _, swapped, saved = run(tmp_path / "swapped", only_swap(swap="auto"))

    # THEN it was swapped, and its checkpoint has the same keys, and, as the planted layer is exact, weights
    assert swapped == ([True, True], True)
    assert list(saved["state_dict"]) == list(plain_saved["state_dict"])
    for name, value in plain_saved["state_dict"].items():
        torch.testing.assert_close(saved["state_dict"][name], value, rtol=1e-4, atol=1e-6)
    before, after = plain_saved["optimizer_states"][0], saved["optimizer_states"][0]
    assert after["param_groups"] == before["param_groups"]
    # AND it loads into a plain model, and a plain one's loads while it is swapped, bit for bit
    fresh = slow_model(pl)
    fresh.load_state_dict(saved["state_dict"])
    assert all(torch.equal(fresh.state_dict()[k], v) for k, v in saved["state_dict"].items())
    resumed = slow_model(pl)
    make_trainer(pl, tmp_path, max_epochs=2).fit(
        resumed, rows(BATCHES), ckpt_path=tmp_path / "swapped" / "last.ckpt"
    )
    assert len(resumed.losses) == BATCHES + 4


def test_a_copy_that_is_kept_beside_the_model_follows_it(pl, tmp_path, monkeypatch):
    plant(monkeypatch, planted.fast())
    model = slow_model(pl)

    class Average(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == BATCHES - 5:
                self.net = copy.deepcopy(pl_module.net)
            elif batch_idx > BATCHES - 5:
                for mean, now in zip(self.net.parameters(), pl_module.net.parameters(), strict=True):
                    mean.data.lerp_(now.data, 0.5)

    average = Average()
    make_trainer(pl, tmp_path, only_swap(), average).fit(model, rows(BATCHES))

    assert is_swapped(average.net) == [False, False]
    x = torch.randn(2, 8)
    average.net.eval()
    average.net[1].weight.data.zero_()
    assert not torch.equal(average.net(x), model.net.eval()(x))


def test_stochastic_weight_averaging_ends_as_without_us(pl, tmp_path, monkeypatch):
    def run(*callbacks):
        model = slow_model(pl)
        averaging = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
        make_trainer(pl, tmp_path, *callbacks, averaging, max_epochs=3).fit(model, rows(30))
        return model

    plain = run()
    plant(monkeypatch, planted.fast())
    model = run(only_swap())

    assert result(tmp_path)["kept"] is True
    assert same(model, plain)


def test_gradient_checkpointing_goes_on(pl, tmp_path, monkeypatch):
    from torch.utils.checkpoint import checkpoint

    def loss(self, batch):
        return torch.nn.functional.cross_entropy(
            checkpoint(self.net, batch[0], use_reentrant=False), batch[1]
        )

    plain = slow_model(pl, _loss=loss)
    make_trainer(pl, tmp_path).fit(plain, rows(BATCHES))
    plant(monkeypatch, planted.fast())
    model = slow_model(pl, _loss=loss)

    make_trainer(pl, tmp_path, only_swap()).fit(model, rows(BATCHES))

    assert model.losses == plain.losses


def test_a_deterministic_run_takes_no_candidate_that_may_differ(pl, tmp_path, monkeypatch):
    plant(monkeypatch, planted.fast("planted.random", deterministic=False))
    try:
        make_trainer(pl, tmp_path, only_swap(), deterministic=True).fit(slow_model(pl), rows(BATCHES))
    finally:
        torch.use_deterministic_algorithms(False)

    (trial,) = result(tmp_path)["sites"][0]["trials"]
    assert "deterministic" in trial["refused"]


def test_nothing_is_swapped_under_fast_dev_run(pl, tmp_path, monkeypatch, capsys):
    plant(monkeypatch, planted.fast())

    make_trainer(pl, tmp_path, advisor(), fast_dev_run=3).fit(slow_model(pl), rows(BATCHES))

    assert "nothing is swapped under fast_dev_run" in capsys.readouterr().err
    assert list(tmp_path.rglob("swaps.json")) == []


@pytest.mark.parametrize("place", ["watch", "unwatch", "sites", "decide", "choices", "apply", "toggle"])
def test_a_fault_of_our_own_is_one_warning_and_training_is_as_without(pl, tmp_path, monkeypatch, ours, place):
    from advisor.capture.swapping.engine import Engine

    plain = plain_run(pl, tmp_path)
    plant(monkeypatch, planted.fast())
    calls = []

    def broken(self, *args):
        calls.append(place)
        raise ValueError("our own fault")

    monkeypatch.setattr(Engine, place, broken)
    model, callback = slow_model(pl), only_swap()

    make_trainer(pl, tmp_path, callback).fit(model, rows(BATCHES))

    assert calls
    assert model.losses == plain.losses
    assert is_swapped(model) == [False, False]
    assert [text for text in ours() if "our own fault" in text and "training goes on" in text]
    assert callback._swapping.state is State.DONE
    assert result(tmp_path)["kept"] is False


def test_without_memory_for_copies_nothing_begins(pl, tmp_path, monkeypatch):
    from advisor.capture.swapping import engine as swapping_engine

    plant(monkeypatch, planted.fast())
    monkeypatch.setattr(swapping_engine, "headroom_bytes", lambda _kind: 10**9)

    make_trainer(pl, tmp_path, only_swap()).fit(slow_model(pl), rows(BATCHES))

    assert "too little device memory is free" in result(tmp_path)["verdict"]
    assert "(1.0 GB)" in result(tmp_path)["verdict"]


def test_off_by_default_and_bound_to_no_run(pl, tmp_path):
    callback = TrainingAdvisor(warmup_steps=4, report=False)
    make_trainer(pl, tmp_path, callback).fit(make_model(pl), rows(20))

    assert isinstance(callback._swapping, Idle)
    assert list(tmp_path.rglob("swaps.json")) == []


def test_the_callback_can_be_copied_and_pickled_with_its_settings():
    callback = advisor(swap=["norm", "loss"], swap_keep=True, swap_max_memory_growth=0.2)
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert (twin.swap, twin.swap_keep, twin.swap_max_memory_growth) == (["norm", "loss"], True, 0.2)
        assert isinstance(twin._swapping, Idle)


@pytest.mark.parametrize(
    "options",
    [
        {"swap": True},
        {"swap": "norms"},
        {"swap": []},
        {"swap": ["norm", 3]},
        {"swap": ["norm", "everything"]},
        {"swap_max_memory_growth": -0.1},
        {"swap_max_memory_growth": float("nan")},
        {"swap_max_memory_growth": "much"},
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(options):
    with pytest.raises(UsageError, match="swap"):
        advisor(**options)


def test_of_two_callbacks_that_ask_the_first_one_swaps_and_all_is_put_back(pl, tmp_path, monkeypatch, capsys):
    plain = plain_run(pl, tmp_path)
    plant(monkeypatch, planted.fast())
    model, callbacks = slow_model(pl), [only_swap(dirpath=tmp_path / name) for name in ("first", "second")]

    make_trainer(pl, tmp_path, *callbacks).fit(model, rows(BATCHES))

    assert result(tmp_path / "first")["kept"] is True
    assert not (tmp_path / "second").exists()
    assert "a second callback" in capsys.readouterr().err
    assert is_swapped(model) == [False, False]
    assert model.losses == plain.losses


def test_a_model_that_cannot_be_looked_at_is_recorded_all_the_same(pl, tmp_path, monkeypatch, ours):
    from advisor.capture.swapping.engine import Engine

    def broken(self):
        raise ValueError("an odd class")

    monkeypatch.setattr(Engine, "unable", broken)
    model, callback = make_model(pl), advisor()

    make_trainer(pl, tmp_path, callback).fit(model, rows(30))

    assert callback.trace_path is not None
    assert [text for text in ours() if "swap is off" in text and "an odd class" in text]
    assert "an odd class" in result(tmp_path)["verdict"]


def test_an_ended_run_is_held_by_nothing_of_ours(pl, tmp_path, monkeypatch):
    plant(monkeypatch, planted.fast())
    model, callback = slow_model(pl), only_swap()
    trainer = make_trainer(pl, tmp_path, callback)
    trainer.fit(model, rows(BATCHES))
    assert result(tmp_path)["kept"] is True

    gone = [weakref.ref(model), weakref.ref(trainer)]
    for name in ("log", "log_dict"):  # Lightning's own, bound to the module
        vars(callback).pop(name, None)
    del model, trainer
    gc.collect()

    assert [reference() for reference in gone] == [None, None]
    callback.restore()


def test_what_is_kept_stays_through_later_runs_until_it_is_asked_back(pl, tmp_path, monkeypatch):
    plant(monkeypatch, planted.fast())
    model, callback = slow_model(pl), advisor(swap_keep=True)
    trainer = make_trainer(pl, tmp_path, callback)
    trainer.fit(model, rows(RECORDED))

    trainer.validate(model, rows(2), verbose=False)
    assert is_swapped(model) == [True, True]
    callback.restore()
    assert is_swapped(model) == [False, False]


def test_what_an_earlier_run_left_is_taken_back_before_another_begins(pl, tmp_path, monkeypatch):
    plant(monkeypatch, planted.fast())
    model, callback, first = slow_model(pl), only_swap(swap_keep=True), []

    class Seen(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 0:
                first.append(is_swapped(pl_module))

    for _ in range(2):
        make_trainer(pl, tmp_path, callback, Seen()).fit(model, rows(BATCHES))

    assert first == [[False, False], [False, False]]
    assert is_swapped(model) == [True, True]
    callback.restore()
    assert is_swapped(model) == [False, False]


def test_a_run_within_the_run_takes_everything_back_first(pl, tmp_path, monkeypatch):
    # GIVEN a callback that validates with another Trainer, and the same advisor, while the model is swapped
    plant(monkeypatch, planted.fast())
    model, callback, before = slow_model(pl), only_swap(stages=("test",)), []

    class Within(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == BATCHES - 4:
                before.append(is_swapped(pl_module))
                make_trainer(pl, tmp_path, callback).validate(slow_model(pl), rows(1), verbose=False)

    make_trainer(pl, tmp_path, callback, Within()).fit(model, rows(BATCHES))

    assert before == [[True, True]]
    assert is_swapped(model) == [False, False]
