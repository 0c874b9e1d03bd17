"""Of what candidates were tried on nothing is left, whatever came of them, before garbage is collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from advisor.swap import clocks, decide
from advisor.swap.kinds.optimizer import OptimizerFinder
from advisor.swap.measure import ORIGINAL
from advisor.swap.rewrite.wrap import StepRewrite
from advisor.swap.site import Site
from tests.swap import planted
from tests.swap.planted import candidate, random_site, right, site, terms


class Allocated(TorchDispatchMode):
    """What operations allocate, by the operations that did."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.numel() and t.untyped_storage().data_ptr() not in given:
                storage = t.untyped_storage()
                self._known[storage.data_ptr()] = (StorageWeakRef(storage), str(func))
        return result

    @property
    def count(self) -> int:
        return len(self._known)

    def left(self) -> list[str]:
        return [name for storage, name in self._known.values() if not storage.expired()]


@pytest.fixture(autouse=True)
def _never_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by us, once all has been tried."""
    for module in (decide, clocks):
        monkeypatch.setattr(module, "gc", SimpleNamespace(collect=lambda *_: 0))


@contextmanager
def allocated() -> Iterator[Allocated]:
    gc.collect()
    gc.disable()
    try:
        with Allocated() as seen:
            yield seen
    finally:
        gc.enable()


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        raise RuntimeError("in the backward")


def fails_in_backward(module: nn.Module, x: Tensor) -> Tensor:
    return _Fails.apply(right(module, x))


def dropped(x: Tensor) -> Tensor:
    return x * (torch.rand_like(x) > 0.2) / 0.8


def undropped(x: Tensor) -> Tensor:
    return x * 1.0


CALLS = ("right", "wrong_value", "wrong_gradient", "raising", "out_of_memory", "writes_input")


@pytest.mark.parametrize(
    "made",
    [
        *(lambda name=name: site(getattr(planted, name)) for name in CALLS),
        lambda: site(fails_in_backward),
        lambda: site(*(candidate(getattr(planted, name)) for name in CALLS)),
        lambda: random_site(dropped),
        lambda: random_site(undropped),
    ],
)
def test_a_modules_copies_are_let_go_of_whatever_its_candidates_do(made) -> None:
    one: Site = made()
    times = {ORIGINAL: 900e3, **{c.name: 100e3 for c in one.candidates}}
    with allocated() as seen:
        outcomes = decide.decide([one], terms(times))
        assert seen.left() == []
    assert outcomes[0].trials
    assert seen.count > 3


@pytest.mark.parametrize("error", [None, RuntimeError, torch.OutOfMemoryError])
def test_an_optimizers_copies_are_let_go_of_when_their_step_fails(monkeypatch, error) -> None:
    model = nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 16)).sum().backward()
    optimizer.step()
    (one,) = OptimizerFinder([optimizer]).sites()
    step = torch.optim.AdamW.step

    def planted_step(self: Any, *args: Any) -> Any:
        if error is not None and self.param_groups[0].get("fused"):
            raise error("planted")
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", planted_step)
    with allocated() as seen:
        (outcome,) = decide.decide([one], terms({ORIGINAL: 900e3, one.candidates[0].name: 100e3}))
        assert seen.left() == []
    assert bool(outcome.chosen) is (error is None)
    assert seen.count > 10


def test_a_patterns_copies_are_let_go_of() -> None:
    # GIVEN a pattern of a graph, with what it was given
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.GELU(), nn.LayerNorm(8))
    x = torch.randn(4, 8)
    rewrite = StepRewrite(model, "forward")
    assert rewrite.install() == ""
    with rewrite.collecting():
        model(x)
    (one,) = rewrite.sites()
    rewrite.close()
    # The bundled kernels' interpreter, on a CPU, leaves garbage of its own.
    one.candidates[:] = [
        candidate(one.original, "plain"),
        candidate(lambda *args: 1.01 * one.original(*args), "wrong"),
        candidate(lambda *args: _Fails.apply(one.original(*args)), "failing"),
    ]
    with allocated() as seen:
        (outcome,) = decide.decide([one], terms({ORIGINAL: 900e3, **{c.name: 100e3 for c in one.candidates}}))
        assert seen.left() == []
    assert [bool(trial.refused) for trial in outcome.trials] == [False, True, True]
    assert seen.count > 10
