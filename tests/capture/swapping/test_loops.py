"""Loops of many kinds, replayed in a live Trainer: they train as without, to the bit, whatever they do."""

from __future__ import annotations

from types import SimpleNamespace as Plain

import pytest
import torch
from torch import nn

from advisor.capture.swapping import run as swapping
from tests.capture.tiny import Rows, make_trainer, rows

from .planted import replayed_on_cpu
from .test_patterns import BATCHES, WIDTH, advisor, make_model, result

#: A batch after the verdict, at which loops begin to do something else, and how many there are.
LATER, LONG = BATCHES + 1, BATCHES + 20


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """Recorders that were made."""
    return replayed_on_cpu(monkeypatch)


def both(pl, folder, change=lambda model: None, batches=LONG, callback=None, **options):
    """The model trained without and with replay, and what was told; `change` makes the model what it is."""
    found = []
    for swap in (False, True):
        torch._dynamo.reset()
        model = make_model(pl)
        model.seen = []
        type(model).log = lambda self, *_, **__: None  # which would cut the step in two
        change(model)
        callbacks = [*([callback()] if callback else []), *([advisor(swap=["replay"])] if swap else [])]
        data = batches if isinstance(batches, torch.utils.data.DataLoader) else rows(batches)
        make_trainer(pl, folder, *callbacks, **options).fit(model, data)
        found.append(model)
    return Plain(plain=found[0], model=found[1], told=result(folder))


def assert_same(ran, **close):
    close = close or {"rtol": 0, "atol": 0}
    for (name, mine), theirs in zip(
        ran.model.state_dict().items(), ran.plain.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **close, msg=lambda text, name=name: f"{name}: {text}")
    assert ran.model.seen == ran.plain.seen


def wrapped(change):
    """Makes `change(loss, model, i)` of the loss that the step gives."""

    def install(model):
        step = type(model).training_step
        type(model).training_step = lambda self, batch, i: change(step(self, batch, i), self, i)

    return install


def with_optimizer(make):
    def install(model):
        type(model).configure_optimizers = lambda self: make(self.parameters())

    return install


class Sharp(torch.optim.SGD):
    """Steps by the gradient of where the gradient leads, as sharpness-aware minimization does."""

    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            moves = [0.05 * p.grad for p in parameters]
            torch._foreach_add_(parameters, moves)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
        super().step()
        return loss


class Keeping(torch.optim.SGD):
    """Keeps the first gradients uncopied while the second ones are computed."""

    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        first = [p.grad for p in parameters]
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, g in zip(parameters, first, strict=True):
                p.grad.add_(g)
        super().step()
        return loss


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.LBFGS(p, lr=0.05, max_iter=4),
        lambda p: torch.optim.LBFGS(p, lr=0.01, max_iter=3, line_search_fn="strong_wolfe"),
        lambda p: Sharp(p, lr=0.05),
    ],
    ids=["lbfgs", "lbfgs with line search", "sharpness-aware"],
)
def test_a_step_that_is_made_several_times_a_batch_is_replayed(pl, tmp_path, made, make):
    ran = both(pl, tmp_path, with_optimizer(make), BATCHES)
    assert_same(ran)
    assert ran.told["kept"] is True, ran.told
    assert made[0].replays > BATCHES + 5


def test_an_optimizer_that_keeps_gradients_uncopied_is_seen_before_they_are_written_over(pl, tmp_path, made):
    ran = both(pl, tmp_path, with_optimizer(lambda p: Keeping(p, lr=0.05)), BATCHES)
    assert_same(ran)
    assert (
        ran.told["verdict"]
        == "nothing was swapped: the step is not replayed: gradients are kept beyond the step"
    )


def _second(model, loss):
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()


def _twice_over(model, loss):
    keep = {"create" + "_graph": True}
    found = torch.autograd.grad(loss, list(model.parameters()), **keep)
    (loss + 0.1 * sum(g.square().sum() for g in found)).backward()


@pytest.mark.parametrize(
    ("differentiate", "why", "close"),
    [
        (_second, "more than one backward goes through it", {}),
        (_twice_over, "gradients of its gradients are taken", {"rtol": 1e-4, "atol": 1e-6}),
    ],
)
def test_a_loop_that_begins_to_differentiate_a_step_again_goes_on_unreplayed_and_says_so(
    pl, tmp_path, made, monkeypatch, capsys, differentiate, why, close
):
    monkeypatch.setattr(swapping.notify, "warn", lambda line: pytest.fail(line))

    def change(model):
        def backward(self, loss):
            differentiate(self, loss) if self.global_step in (LATER, LATER + 4) else loss.backward()

        type(model).backward = backward

    ran = both(pl, tmp_path, change)
    assert_same(ran, **close)
    assert made[0].replays > 14
    assert made[0].closed
    verdict = f"nothing was swapped: taken back later, since the step is not replayed any more: {why}"
    assert ran.told["verdict"] == verdict
    assert capsys.readouterr().err.count(why) == 1


def test_what_else_was_swapped_stays_where_the_step_is_not_replayed_any_more(pl, tmp_path, made, monkeypatch):
    def change(model):
        def backward(self, loss):
            _second(self, loss) if self.global_step == LATER else loss.backward()

        type(model).backward = backward

    asked = advisor
    monkeypatch.setitem(globals(), "advisor", lambda swap: asked(swap=["optimizer", *swap]))
    ran = both(pl, tmp_path, change)
    assert_same(ran, rtol=1e-4, atol=1e-6)
    assert ran.told["kept"] is True
    assert {site["kind"]: bool(site["chosen"]) for site in ran.told["sites"]} == {
        "optimizer": True,
        "replay": False,
    }
    assert ran.told["verdict"].startswith("1 of 2 sites swapped")


class Validates:
    """A validation that makes a training step, without gradients, in the middle of epochs."""

    def __call__(self, model):
        type(model).validation_step = lambda self, batch, i: self.seen.append(
            float(self.training_step(batch, i))
        )
        type(model).val_dataloader = lambda self: rows(3)
        model.head = nn.Sequential(nn.BatchNorm1d(WIDTH), model.head)


def drop_of_groups(optimizer, model):
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][2:]


def add_to_groups(optimizer, model):
    optimizer.add_param_group({"params": list(model.late.parameters()), "lr": 0.02})


def with_late(model):
    model.late = nn.Linear(2, 2)
    wrapped(lambda loss, self, i: loss + self.late.weight.square().sum())(model)
    type(model).configure_optimizers = lambda self: torch.optim.SGD(self.embed.parameters(), lr=0.01)


def scaled(model):
    wrapped(lambda loss, self, i: loss * self.scale)(model)
    model.scale = 1.0


def by_tensor(model):
    wrapped(lambda loss, self, i: loss * self.scale)(model)
    model.register_buffer("scale", torch.tensor(1.0))


def by_epoch(model):
    def change(loss, self, i):
        return loss * (1 + self.current_epoch) if self.current_epoch % 2 else loss

    wrapped(change)(model)


def reading(model):
    def change(loss, self, i):
        value = loss.item()
        return loss * 2 if value < 0.6 else loss + value

    wrapped(change)(model)


def returning_none(model):
    wrapped(lambda loss, self, i: None if i % 5 == 4 else loss)(model)


def nothing(model):
    pass


def at(batch, do):
    """A callback that does it before this batch and each one after it where `do` takes a number."""

    def make(pl):
        class Does(pl.Callback):
            def on_train_batch_start(self, trainer, pl_module, _, batch_idx):
                if batch_idx >= batch:
                    do(trainer, pl_module, batch_idx - batch)

        return Does

    return make


def once(do):
    return at(LATER, lambda trainer, model, i: None if i else do(trainer, model))


def freeze(trainer, model, i):
    model.attention[0].requires_grad_(i not in range(10))


def evaluate(trainer, model, i):
    model.eval() if i < 8 else model.train()


def move(trainer, model):
    for p in model.parameters():
        p.data = p.data * 0.9


def exchange_head(trainer, model):
    torch.manual_seed(1)
    model.head = nn.Linear(WIDTH, 2)
    trainer.optimizers[0].param_groups[0]["params"] = list(model.parameters())


def hook_module(trainer, model):
    model.head.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


def hook_backward(trainer, model):
    model.head.register_full_backward_hook(lambda module, given, got: (given[0] * 2,))


def smaller_last():
    return torch.utils.data.DataLoader(Rows(2 * 25 + 1), batch_size=2)


@pytest.mark.parametrize(
    ("change", "callback", "options"),
    [
        (nothing, None, {"gradient_clip_val": 0.1}),
        (nothing, None, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (Validates(), None, {"val_check_interval": 7}),
        (nothing, None, {"batches": smaller_last, "max_epochs": 4}),
        (nothing, at(LATER, freeze), {}),
        (nothing, at(5, freeze), {}),
        (Validates(), at(LATER, evaluate), {}),
        (nothing, once(lambda trainer, model: drop_of_groups(trainer.optimizers[0], model)), {}),
        (with_late, once(lambda trainer, model: add_to_groups(trainer.optimizers[0], model)), {}),
        (nothing, once(move), {}),
        (nothing, once(exchange_head), {}),
        (scaled, at(0, lambda trainer, model, i: setattr(model, "scale", 1.0 - 0.01 * i)), {}),
        (scaled, at(0, lambda trainer, model, i: setattr(model, "scale", 1.0 - 0.1 * (i // 30))), {}),
        (by_tensor, at(0, lambda trainer, model, i: model.scale.mul_(0.99)), {}),
        (by_tensor, at(0, lambda trainer, model, i: setattr(model, "scale", model.scale * 0.99)), {}),
        (by_epoch, None, {"batches": 30, "max_epochs": 4}),
        (reading, None, {}),
        (returning_none, None, {}),
        (nothing, once(hook_module), {}),
        (nothing, once(hook_backward), {}),
        (nothing, once(lambda trainer, model: model.head.weight.register_hook(lambda g: g * 1.5)), {}),
    ],
    ids=[
        "clipped", "clipped by value", "validated", "smaller last batch", "frozen", "frozen at first",
        "evaluated", "taken from the optimizer", "given to the optimizer", "other memory", "another layer",
        "annealed by a number", "another number", "annealed by a buffer", "another buffer each time",
        "by epoch", "reads its loss", "skips", "a module's hook", "a module's backward hook",
        "a parameter's hook",
    ],
)  # fmt: skip
def test_a_loop_trains_as_without(pl, tmp_path, made, change, callback, options):
    options = dict(options)
    batches = options.pop("batches", LONG)
    ran = both(
        pl,
        tmp_path,
        change,
        batches() if callable(batches) else batches,
        callback and callback(pl),
        **options,
    )
    assert_same(ran)
    assert made


def test_a_hook_of_all_modules_is_called_though_a_step_was_recorded_without(pl, tmp_path, made):
    handles = []

    class Hooks(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == LATER:
                handles.append(
                    nn.modules.module.register_module_forward_hook(
                        lambda module, args, out: out * 1.5 if module is pl_module.head else None
                    )
                )

        def on_train_end(self, trainer, pl_module):
            handles.pop().remove()

    assert_same(both(pl, tmp_path, callback=Hooks))
    assert made[0].replays > 14


def test_a_hook_that_makes_a_step_of_its_own_adds_to_the_gradients_that_are_there(pl, tmp_path, made):
    class Noise(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx % 3 == 0:
                pl_module.training_step(batch, batch_idx).backward()
                pl_module.seen.append(float(pl_module.head.weight.grad.norm()))

    ran = both(pl, tmp_path, callback=Noise)
    assert_same(ran)
    assert len(ran.model.seen) > 20
    assert made[0].replays > BATCHES


def test_what_is_exchanged_now_and_then_is_recorded_anew_as_what_varies(pl, tmp_path, made):
    def exchange(trainer, model, i):
        if i >= LATER and i % 10 == 0:
            model.scale = model.scale * 0.9

    ran = both(pl, tmp_path, by_tensor, LATER + 40, at(0, exchange)(pl))
    assert_same(ran)
    assert ran.told["kept"] is True
    assert [recorder.recordings for recorder in made] == [1, 1]
    # All but those after the first exchange that were unlike, and recorded and proven anew.
    assert made[1].replays > 25


def test_a_recording_makes_room_where_another_graph_of_the_step_comes_in_its_place(pl, tmp_path, made):
    both(pl, tmp_path, callback=at(LATER, freeze)(pl))
    # Recorded as all of it was trained, then without a layer, then whole again.
    assert [recorder.recordings for recorder in made] == [1, 1, 1]
    assert made[0].replays > 14
    assert [recorder.closed for recorder in made[:2]] == [True, True]


def test_a_last_batch_that_alone_is_smaller_is_not_recorded(pl, tmp_path, made):
    both(pl, tmp_path, batches=smaller_last(), max_epochs=4)
    assert sorted(recorder.recordings for recorder in made) == [0, 1]
