"""A step in which nothing is replaced, replayed as it is where its launches take longer than its work."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from advisor.capture.swapping import engine as swapping_engine
from advisor.capture.swapping import run as swapping
from advisor.swap.rewrite.record import Unrecordable
from tests.capture.tiny import make_trainer, rows
from tests.swap.rewrite.recorder import OnCpu

from .planted import records_with, replayed_on_cpu
from .test_patterns import BATCHES, WIDTH, advisor, make_model, result


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """Recorders that were made."""
    return replayed_on_cpu(monkeypatch)


def trained(pl, folder, batches, *callbacks, **options):
    model = make_model(pl)
    make_trainer(pl, folder, *callbacks, **options).fit(model, rows(batches))
    return model


def assert_same(model, plain):
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("every", [1, 2])
def test_it_is_a_site_of_its_own_and_trains_the_same_way(pl, tmp_path, made, every):
    options = {"accumulate_grad_batches": every}
    plain = trained(pl, tmp_path, every * BATCHES, **options)
    model = trained(pl, tmp_path, every * BATCHES, advisor(swap=["replay"]), **options)
    found = result(tmp_path)
    assert found["kept"] is True, found
    (site,) = found["sites"]
    assert (site["kind"], site["chosen"], site["where"]) == ("replay", "CUDA graphs", ["training_step"])
    told = "the host launches it in 2.00 ns, replayed it takes 1.00 ns"
    assert f"training_step: it is replayed as a CUDA graph; {told}" in found["remarks"]
    assert made[0].replays > 14
    assert made[0].closed
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_loop_that_begins_to_accumulate_in_a_later_epoch_trains_the_same_way(pl, tmp_path, made):
    class Later(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.accumulate_grad_batches = 1 + 2 * trainer.current_epoch

    plain = trained(pl, tmp_path, BATCHES, Later(), max_epochs=2)
    model = trained(pl, tmp_path, BATCHES, Later(), advisor(swap=["replay"]), max_epochs=2)
    assert result(tmp_path)["kept"] is True
    assert made[0].replays > 2 * BATCHES - 20
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_running_statistics_go_the_same_way(pl, tmp_path, made, monkeypatch):
    make = make_model

    def model_with_statistics(light):
        model = make(light)
        model.head = torch.nn.Sequential(torch.nn.BatchNorm1d(WIDTH), model.head)
        return model

    monkeypatch.setitem(globals(), "make_model", model_with_statistics)
    plain = trained(pl, tmp_path, BATCHES)
    model = trained(pl, tmp_path, BATCHES, advisor(swap=["replay"]))
    found = result(tmp_path)
    assert found["kept"] is True, found
    assert made[0].replays > 14
    assert int(model.head[0].num_batches_tracked) == BATCHES
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


def test_gradients_that_a_hook_looks_at_after_the_next_forward_are_those_of_the_step_before(
    pl, tmp_path, made
):
    class Looks(pl.Callback):
        def __init__(self):
            self.sums = []

        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            self.sums.append(
                [None if p.grad is None else float(p.grad.sum()) for p in pl_module.parameters()]
            )

    plain, looks = Looks(), Looks()
    trained(pl, tmp_path, BATCHES, plain)
    trained(pl, tmp_path, BATCHES, looks, advisor(swap=["replay"]))
    assert made[0].replays > 14
    assert looks.sums == plain.sums


def test_gradients_that_untraced_code_of_the_step_reads_are_those_of_the_step_before(
    pl, tmp_path, made, monkeypatch
):
    make, norms = make_model, []

    def model_that_reads(light):
        model = make(light)
        original = type(model).training_step

        @torch._dynamo.disable
        def norm(self):
            return sum(float(p.grad.norm()) for p in self.parameters() if p.grad is not None)

        def training_step(self, batch, batch_idx):
            loss = original(self, batch, batch_idx)
            norms.append(self.norm())
            return loss

        type(model).training_step, type(model).norm = training_step, norm
        return model

    monkeypatch.setitem(globals(), "make_model", model_that_reads)
    trained(pl, tmp_path, BATCHES)
    trained(pl, tmp_path, BATCHES, advisor(swap=["replay"]))
    assert made[0].replays > 14
    assert norms[:BATCHES] == norms[BATCHES:]


def test_a_step_that_reads_gradients_of_the_step_before_is_not_replayed(pl, tmp_path, made, monkeypatch):
    make = make_model

    def model_that_reads(light):
        model = make(light)
        original = type(model).training_step

        def training_step(self, batch, batch_idx):
            loss = original(self, batch, batch_idx)
            before = self.head.weight.grad
            return loss if before is None else loss + 0.01 * before.norm()

        type(model).training_step = training_step
        return model

    monkeypatch.setitem(globals(), "make_model", model_that_reads)
    plain = trained(pl, tmp_path, BATCHES)
    model = trained(pl, tmp_path, BATCHES, advisor(swap=["replay"]))
    assert "it reads gradients of the step before" in result(tmp_path)["verdict"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_where_something_is_replaced_in_it_the_step_is_no_site_of_its_own(pl, tmp_path, made, monkeypatch):
    from advisor.swap import decide
    from advisor.swap.site import Trial

    monkeypatch.setattr(
        decide, "verify", lambda _, c, **__: Trial(c.name, refused="" if c.source == "torch" else "planted")
    )
    trained(pl, tmp_path, BATCHES, advisor(swap=["attention", "replay"]))
    found = result(tmp_path)
    assert [site["kind"] for site in found["sites"]] == ["attention"]
    assert found["kept"] is True
    assert made[0].replays > 14


class DeviceBound(OnCpu):
    def __init__(self):
        super().__init__(launch_ns=0.5)


class Waiting(OnCpu):
    def rehearse(self, run):
        raise Unrecordable("the host waits for the device within it")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (DeviceBound, "the host launches it in"),
        (Waiting, "the host waits for the device within it"),
    ],
)
def test_what_gains_nothing_by_it_or_cannot_be_is_left_alone_without_a_warning(
    pl, tmp_path, made, monkeypatch, kind, why
):
    records_with(monkeypatch, made, kind)
    monkeypatch.setattr(swapping.notify, "warn", lambda line: pytest.fail(line))
    plain = trained(pl, tmp_path, BATCHES)
    model = trained(pl, tmp_path, BATCHES, advisor(swap=["replay"]))
    found = result(tmp_path)
    assert found["verdict"].startswith(f"nothing was swapped: the step is not replayed: {why}")
    (site,) = found["sites"]
    assert site["chosen"] is None
    assert site["reason"].startswith(f"not kept: {why}")
    assert not hasattr(type(model), "_advisor_base")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_fault_in_making_what_runs_leaves_the_step_as_it_is(pl, tmp_path, made, monkeypatch):
    class Faulty(OnCpu):
        def __init__(self):
            raise RuntimeError("planted")

    records_with(monkeypatch, made, Faulty)
    plain = trained(pl, tmp_path, BATCHES)
    with pytest.warns(UserWarning, match="it could not be rewritten: RuntimeError: planted"):
        model = trained(pl, tmp_path, BATCHES, advisor(swap=["replay"]))
    assert result(tmp_path)["kept"] is False
    assert not hasattr(type(model), "_advisor_base")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_what_else_was_chosen_is_compared_without_it(pl, tmp_path, made, monkeypatch):
    records_with(monkeypatch, made, DeviceBound)
    monkeypatch.setattr(swapping.notify, "warn", lambda line: pytest.fail(line))
    trained(pl, tmp_path, BATCHES + 8, advisor(swap=["optimizer", "replay"]))
    found = result(tmp_path)
    assert found["kept"] is True, found
    assert {site["kind"]: bool(site["chosen"]) for site in found["sites"]} == {
        "optimizer": True,
        "replay": False,
    }
    assert found["verdict"].startswith("1 of 2 sites swapped")
    assert not any("CUDA graph" in remark for remark in found["remarks"])


def test_whole_steps_that_do_not_gain_put_it_back(pl, tmp_path, made, monkeypatch):
    monkeypatch.setattr(swapping, "objection", lambda *_: "whole steps gain nothing: planted")
    plain = trained(pl, tmp_path, BATCHES)
    model = trained(pl, tmp_path, BATCHES, advisor(swap=["replay"]))
    found = result(tmp_path)
    assert found["kept"] is False
    assert made[0].closed
    assert found["sites"][0]["reason"] == "not kept: whole steps gain nothing: planted"
    assert_same(model, plain)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
@pytest.mark.parametrize(
    ("first", "other", "kept"),
    [
        (OnCpu, OnCpu, ["optimizer", "replay"]),
        (OnCpu, DeviceBound, ["optimizer", "replay"]),
        (DeviceBound, OnCpu, ["optimizer"]),
    ],
)
def test_of_several_ranks_the_first_measures(pl, tmp_path, made, monkeypatch, first, other, kept):
    monkeypatch.setattr(swapping, "MEETING", 8)

    def recorder(*_, **__):
        made.append((other if torch.distributed.get_rank() else first)())
        return made[-1]

    monkeypatch.setattr(swapping_engine, "CudaRecorder", recorder)

    class Notes(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            (tmp_path / f"rank{trainer.global_rank}").write_text(str(made[0].replays if made else -1))
            trainer.save_checkpoint(tmp_path / f"{'swapped' if made else 'plain'}.ckpt")

    for callbacks in ([], [advisor(swap=["optimizer", "replay"])]):
        trained(pl, tmp_path, 200, *callbacks, Notes(), devices=2, strategy="ddp_fork")
    found = result(tmp_path)
    assert found["kept"] is True, found
    assert sorted(site["kind"] for site in found["sites"] if site["chosen"]) == kept
    replays = [int((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]
    # A rank on which it is no gain goes on as it is, and the others replay.
    assert [count > 14 for count in replays] == [first is OnCpu, other is OnCpu]
    plain, swapped = (torch.load(tmp_path / f"{n}.ckpt", weights_only=False) for n in ("plain", "swapped"))
    for name, value in swapped["state_dict"].items():
        torch.testing.assert_close(value, plain["state_dict"][name], rtol=1e-3, atol=1e-5)


def test_nothing_of_the_run_is_held_once_it_has_ended(pl, tmp_path, made):
    callback = advisor(swap=["replay"])
    trainer = make_trainer(pl, tmp_path, callback)
    trainer.fit(make_model(pl), rows(BATCHES))
    assert made[0].replays
    made.clear()
    for name in ("log", "log_dict"):  # Lightning's own, bound to the module
        vars(callback).pop(name, None)
    held = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert held() is None
