"""Of which runs the rewritten step is replayed, and where gradients are added up."""

from __future__ import annotations

from types import SimpleNamespace as Plain

import pytest
import torch
from torch import nn

from advisor.capture.swapping.limits import adds_up, looks_at_gradients, optimized_by, why_no_replay


def trainer(strategy="SingleDeviceStrategy", ranks=1, accumulate=1, callbacks=(), base=object, module=None):
    kind = type(strategy, (base,), {})
    return Plain(
        strategy=kind(), world_size=ranks, accumulate_grad_batches=accumulate, callbacks=list(callbacks),
        lightning_module=module,
    )  # fmt: skip


def test_one_process_is_replayed_whatever_the_strategy_and_the_norm():
    assert why_no_replay(trainer("AnyStrategy"), nn.SyncBatchNorm(4)) == ""


@pytest.mark.parametrize("base", [object, type("DDPStrategy", (), {})])
def test_several_ranks_are_where_only_their_gradients_are_exchanged(base):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert why_no_replay(trainer("DDPStrategy", 2), model) == ""
    assert bool(why_no_replay(trainer("MyStrategy", 2, base=base), model)) is (base is object)
    model.append(nn.SyncBatchNorm(4))
    assert "SyncBatchNorm has ranks talk within the step" in why_no_replay(trainer("DDPStrategy", 2), model)


def test_gradients_are_added_up_now_or_in_an_epoch_to_come(pl):
    schedule = pl.callbacks.GradientAccumulationScheduler
    assert not adds_up(lambda: trainer(callbacks=[schedule({0: 1}), pl.Callback()]))
    assert adds_up(lambda: trainer(callbacks=[schedule({0: 1, 4: 2})]))
    assert adds_up(lambda: trainer(accumulate=2))
    assert not adds_up(lambda: None)


def test_gradients_are_needed_beyond_a_step_where_a_hook_looks_at_them_after_the_next_forward(pl):
    class Looks(pl.Callback):
        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            pass

    class Model(pl.LightningModule):
        pass

    class Looking(Model):
        def on_before_zero_grad(self, optimizer):
            pass

    class Keeping(Model):
        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            pass

    def needed(model, *callbacks):
        return adds_up(lambda: trainer(callbacks=callbacks, module=model))

    assert not needed(Model(), pl.Callback())
    assert needed(Model(), Looks())
    assert needed(Model(), pl.callbacks.LambdaCallback(on_before_zero_grad=lambda *_: None))
    assert needed(Looking())
    assert needed(Keeping())


def test_gradients_are_added_to_by_a_step_that_a_hook_makes_and_of_what_no_optimizer_has_any_more(pl):
    model = pl.LightningModule()
    model.layer = nn.Linear(2, 2)
    held = trainer(module=model)
    held.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    first = optimized_by(held.optimizers)
    for hook, expected in ((None, False), ("training_step", False), ("on_train_batch_end", True)):
        model._current_fx_name = hook
        assert adds_up(lambda: held, optimized=first) is expected
    model._current_fx_name = "training_step"
    held.optimizers[0].param_groups[0]["params"].pop()
    assert adds_up(lambda: held, optimized=first)


def _norms(model):
    return [float(p.grad.norm()) for p in model.parameters()]


def test_a_model_whose_code_names_gradients_where_a_step_may_call_it_looks_at_them(pl):
    class Plain(pl.LightningModule):
        def training_step(self, batch, batch_idx):
            return batch.requires_grad_().sum()

        def on_after_backward(self):
            self.norms = [p.grad.norm() for p in self.parameters()]

    class Part(nn.Module):
        def norm(self):
            return sum(p.grad.norm() for p in self.parameters())

    class Reads(Plain):
        def training_step(self, batch, batch_idx):
            return getattr(batch, "grad")  # noqa: B009

    class Calls(Plain):
        def training_step(self, batch, batch_idx):
            return _norms(self)

    class Has(Plain):
        @property
        def norms(self):
            return _norms(self)

    whole = Plain()
    assert not looks_at_gradients(whole)
    whole.part = Part()
    assert looks_at_gradients(whole)
    assert looks_at_gradients(Reads())
    assert looks_at_gradients(Calls())
    assert looks_at_gradients(Has())
    assert adds_up(lambda: trainer(module=whole), looked_at=True)
