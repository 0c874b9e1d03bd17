"""A model with a slow layer, and candidates for it that are planted: right and fast, wrong, raising, slow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from advisor.capture.swapping import engine as swapping_engine
from advisor.capture.swapping import limits as swapping_limits
from advisor.capture.swapping import run as swapping
from advisor.capture.swapping import steps as swapping_steps
from advisor.capture.swapping.engine import ALLOW_CPU
from advisor.swap import decide
from advisor.swap.kinds import registry
from advisor.swap.site import Candidate
from tests.capture.tiny import make_model
from tests.swap.rewrite.recorder import OnCpu

#: Additions of nought, each a pass over memory: what a planted candidate saves.
WASTE = 240
WIDTH = 256


class SlowScale(nn.Module):
    """``x * weight``, the long way round."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        for _ in range(WASTE):
            y = y + 0.0
        return y


def scale(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x * module.weight


def fast(name: str = "planted.fast", call: Callable[..., Any] = scale, **fields: Any) -> Candidate:
    return Candidate(name, call, "bundled", "from planted import Scale\nself.scale = Scale(width)", **fields)


def wrong(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x * module.weight * 1.01


def nan(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x * module.weight * float("nan")


def raising(module: Any, x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("planted fault")


def out_of_memory(module: Any, x: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("planted")


def slow(module: Any, x: torch.Tensor) -> torch.Tensor:
    return SlowScale.forward(module, SlowScale.forward(module, x) - x * module.weight + x)


def be_sure(monkeypatch: Any) -> None:
    """Whatever is right wins, alone and in whole steps: timings on a busy machine are luck."""
    monkeypatch.setattr(decide, "slower", lambda *_: "")
    monkeypatch.setattr(swapping, "objection", lambda *_: "")
    monkeypatch.setattr(swapping_engine, "Terms", functools.partial(decide.Terms, measure_s=0.02))


def plant(monkeypatch: Any, *candidates: Candidate, sure: bool = True) -> None:
    """Offer these for each `SlowScale`, and nothing for anything else; on the CPU.

    Args:
        candidates: what to offer.
        sure: see `be_sure`.
    """
    if sure:
        be_sure(monkeypatch)
    made = registry.ModuleKind(
        "norm",
        lambda module: isinstance(module, SlowScale),
        lambda _module, _example: registry.Offer(list(candidates)),
    )
    registry.module_kinds(())  # the bundled ones register themselves once
    monkeypatch.setattr(registry, "_REGISTERED", {"planted": made})
    monkeypatch.setattr(swapping_limits, "why_no_patterns", lambda *_: "patterns are left out of this test")
    monkeypatch.setenv(ALLOW_CPU, "1")


def slow_model(light: Any, **methods: Any) -> Any:
    """The tiny model with two slow layers."""
    model = make_model(light, **methods)
    torch.manual_seed(11)
    model.net = nn.Sequential(
        nn.Linear(8, WIDTH),
        SlowScale(WIDTH),
        nn.Dropout(0.2),
        nn.ReLU(),
        SlowScale(WIDTH),
        nn.Linear(WIDTH, 2),
    )
    torch.manual_seed(12)
    return model


def records_with(monkeypatch, made, kind):
    """Steps are recorded with recorders of this kind, which are put into `made`."""

    def recorder(*_, adds_up, **__):
        made.append(kind())
        made[-1].adds_up = adds_up
        return made[-1]

    monkeypatch.setattr(swapping_engine, "CudaRecorder", recorder)


def replayed_on_cpu(monkeypatch):
    """Live steps are swapped in and replayed without a GPU, after short comparisons; the recorders made."""
    made = []
    monkeypatch.setattr(swapping_steps, "MOST", 5)
    monkeypatch.setenv(ALLOW_CPU, "1")
    be_sure(monkeypatch)
    monkeypatch.setattr(swapping_engine, "RECORDABLE", ("cpu",))
    records_with(monkeypatch, made, OnCpu)
    return made
