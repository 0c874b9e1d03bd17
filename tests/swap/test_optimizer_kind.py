"""An optimizer is told to fuse its step, keeps its state and schedule, and can be told not to again."""

import copy
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advisor.swap import decide as deciding
from advisor.swap.decide import decide
from advisor.swap.journal import Journal
from advisor.swap.kinds import optimizer as kind
from advisor.swap.kinds.optimizer import OptimizerFinder, fused_change, twin, unfit
from advisor.swap.measure import ORIGINAL
from advisor.swap.session import Swapper
from tests.swap.planted import ToldClock, terms

FUSED = "torch.optim.AdamW(fused=True)"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(4, 6, generator=generator)).square().sum().backward()
    optimizer.step()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    return [*(p.detach().clone() for p in model.parameters()), *(t.clone() for t in state)]


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        torch.optim.AdamW,
        lambda p: torch.optim.AdamW(p, amsgrad=True, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
    ],
)
def test_a_fused_step_goes_on_from_the_state_that_is_there(make) -> None:
    # GIVEN two equal runs of three steps
    a, b = net(), net()
    left, right = make(a.parameters()), make(b.parameters())
    for i in range(3):
        step(a, left, i)
        step(b, right, i)
    # WHEN one is fused for three more
    with Journal() as journal:
        journal.make(fused_change("optimizer 0", right))
        assert all(g["fused"] for g in right.param_groups)
        for i in range(3, 6):
            step(a, left, i)
            step(b, right, i)
    # THEN both are where rounding lets them be, and both go on alike unfused
    step(a, left, 6)
    step(b, right, 6)
    torch.testing.assert_close(values(b, right), values(a, left))
    assert [g["fused"] for g in right.param_groups] == [g["fused"] for g in left.param_groups]
    assert [g["foreach"] for g in right.param_groups] == [g["foreach"] for g in left.param_groups]


def test_fusing_and_restoring_without_a_step_leaves_everything_to_the_bit() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    before, attributes = values(model, optimizer), set(vars(optimizer))
    saved = copy.deepcopy(optimizer.state_dict())
    with Journal() as journal:
        journal.make(fused_change("optimizer 0", optimizer))
    assert all(torch.equal(a, b) for a, b in zip(values(model, optimizer), before, strict=True))
    assert set(vars(optimizer)) == attributes
    assert optimizer.state_dict()["param_groups"] == saved["param_groups"]


def test_a_step_count_that_is_no_tensor_comes_back_as_what_it_was() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    for state in optimizer.state.values():
        state["step"] = 1.0
    with Journal() as journal:
        journal.make(fused_change("optimizer 0", optimizer))
        step(model, optimizer, 1)
        saved = copy.deepcopy(optimizer.state_dict()["state"])
    for steps in ([s["step"] for s in saved.values()], [s["step"] for s in optimizer.state.values()]):
        assert {(type(s), s) for s in steps} == {(float, 2.0)}


def test_a_schedule_and_new_learning_rates_reach_the_fused_step() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    step(model, optimizer)
    with Journal() as journal:
        journal.make(fused_change("optimizer 0", optimizer))
        schedule.step()
        before = values(model, optimizer)[0]
        step(model, optimizer, 1)
        assert torch.equal(model[0].weight, before)


def test_a_checkpoint_of_a_fused_optimizer_is_one_of_the_original() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    with Journal() as journal:
        journal.make(fused_change("optimizer 0", optimizer))
        step(model, optimizer, 1)
        saved = copy.deepcopy(optimizer.state_dict())
        assert optimizer.param_groups[0]["fused"] is True
    assert saved["param_groups"][0]["fused"] is None
    assert {str(s["step"].device) for s in saved["state"].values()} == {"cpu"}
    assert optimizer.state_dict()["param_groups"] == saved["param_groups"]


def test_trying_an_optimizer_out_leaves_it_as_it_is() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    before, rng = values(model, optimizer), torch.get_rng_state()
    grads = [p.grad.clone() for p in model.parameters()]
    (site,) = OptimizerFinder([optimizer]).sites()
    (outcome,) = decide([site], terms({ORIGINAL: 900e3, FUSED: 100e3}))
    assert outcome.chosen is not None
    assert outcome.trials[0].error < 1e-6
    assert all(torch.equal(a, b) for a, b in zip(values(model, optimizer), before, strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)
    assert optimizer.param_groups[0]["fused"] is None


def test_an_optimizer_without_gradients_and_state_is_tried_on_random_ones() -> None:
    (site,) = OptimizerFinder([torch.optim.AdamW(net().parameters())]).sites()
    (outcome,) = decide([site], terms({ORIGINAL: 900e3, FUSED: 100e3}))
    assert outcome.chosen is not None


def test_a_fused_step_that_is_wrong_is_refused(monkeypatch) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    from advisor.swap.kinds import optimizer as kind

    def wrong(made: torch.optim.Optimizer) -> torch.optim.Optimizer:
        copied = twin(made)
        copied.param_groups[0]["eps"] = 1e-3
        return copied

    monkeypatch.setattr(kind, "_fused_twin", wrong)
    (site,) = OptimizerFinder([optimizer]).sites()
    (outcome,) = decide([site], terms({ORIGINAL: 900e3, FUSED: 100e3}))
    assert outcome.chosen is None
    assert outcome.reason.startswith("parameter 0: ")


def test_copies_stop_at_the_cap_but_never_at_nothing() -> None:
    optimizer = torch.optim.AdamW(net().parameters())
    whole, part = twin(optimizer), twin(optimizer, cap_bytes=6 * 8 * 4 * 4)
    assert [p.shape for g in whole.param_groups for p in g["params"]] == [
        p.shape for g in optimizer.param_groups for p in g["params"]
    ]
    assert [p.shape for g in part.param_groups for p in g["params"]] == [torch.Size([8, 6])]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), "is fused already"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "is differentiable"),
        (lambda p: torch.optim.RMSprop(p), "is none of torch's"),
        (lambda p: Mine(p), "is none of torch's"),
    ],
)
def test_optimizers_that_cannot_fuse_are_left_alone_with_the_reason(make, reason) -> None:
    optimizer = make(list(net().parameters()))
    assert unfit(optimizer).startswith(reason)
    finder = OptimizerFinder([optimizer])
    assert finder.sites() == []
    assert finder.skipped[0].where == "optimizer 0"


class Mine(torch.optim.AdamW):
    """Might do anything in its step."""


def test_in_a_session_the_optimizer_object_stays_the_same() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    told = terms({}, clock=ToldClock({ORIGINAL: 900e3, FUSED: 100e3}))
    swapper = Swapper(model, [optimizer], "optimizer", terms=told, allow_cpu=True)
    with swapper.watch():
        step(model, optimizer)
    swapper.decide()
    swapper.apply()
    assert optimizer.param_groups[0]["fused"]
    step(model, optimizer, 1)
    swapper.toggle(False)
    assert not optimizer.param_groups[0]["fused"]
    step(model, optimizer, 2)
    swapper.toggle(True)
    step(model, optimizer, 3)
    swapper.restore()
    # THEN it is where an optimizer is that was never fused
    other = net()
    plain = torch.optim.AdamW(other.parameters())
    for i in range(4):
        step(other, plain, i)
    torch.testing.assert_close(values(model, optimizer), values(other, plain))


def test_parameters_with_sparse_gradients_are_left_alone_whether_they_have_one_now_or_not() -> None:
    # GIVEN a layer that asks for sparse gradients, and one that gets them by a function
    asks = nn.Embedding(6, 3, sparse=True)
    gets = nn.Parameter(torch.randn(6, 3))
    nn.functional.embedding(torch.tensor([1, 2]), gets, sparse=True).sum().backward()
    for model, params in ((asks, [*asks.parameters()]), (None, [gets])):
        finder = OptimizerFinder([torch.optim.SGD(params, lr=0.1)], model)
        # THEN neither optimizer is a site: fused, its step would raise
        assert finder.sites() == []
        assert "sparse" in finder.skipped[0].reason


def test_a_group_that_comes_while_it_is_toggled_off_is_put_back_too() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model[0].parameters())
    with Journal() as journal:
        journal.make(fused_change("optimizer 0", optimizer))
        journal.toggle(False)
        optimizer.add_param_group({"params": list(model[2].parameters())})
        journal.toggle(True)
        assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    assert [group["fused"] for group in optimizer.param_groups] == [None, None]
    assert [group["foreach"] for group in optimizer.param_groups] == [None, None]


def test_copies_that_an_optimizer_was_tried_on_are_let_go_of_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # GIVEN copies of parameters, gradients and state, of which no garbage is collected
    copies: list[weakref.ref[Tensor]] = []

    def noted(*args: Any, **options: Any) -> torch.optim.Optimizer:
        made = twin(*args, **options)
        for p in (p for group in made.param_groups for p in group["params"]):
            copies.extend(weakref.ref(t) for t in [p, p.grad, *made.state[p].values()])
        return made

    monkeypatch.setattr(kind, "twin", noted)
    monkeypatch.setattr(deciding, "gc", SimpleNamespace(collect=lambda *_: 0))
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    gc.disable()
    try:
        # WHEN they have been proven and timed
        (outcome,) = decide(OptimizerFinder([optimizer]).sites(), terms({ORIGINAL: 900e3, FUSED: 100e3}))
        # THEN none of them is left
        assert outcome.trials
        assert len(copies) > 20
        assert [ref() for ref in copies if ref() is not None] == []
    finally:
        gc.enable()
