"""What a case is, and the registry that cases enter by a decorator."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")

#: Families of rules that shorten what the device does, and what a loop that waits for input gains nothing by.
DEVICE_SIDE = ("attention", "fusion", "kernel", "layout", "loss", "memory", "optimizer", "precision", "shape")
BEHIND_INPUT = (*DEVICE_SIDE, "host")


class Scale(NamedTuple):
    """Picks sizes: `n(4096, 16)` is 4096 on the GPU, and 16 where a case is only tried on a CPU."""

    tiny: bool = False

    def __call__(self, full: T, tiny: T) -> T:
        return tiny if self.tiny else full

    @property
    def device(self) -> str:
        """Where batches lie that are made on the device."""
        return "cuda" if torch.cuda.is_available() else "cpu"

    def compile(self, function: T, **options: Any) -> T:
        """`torch.compile`; tiny, the graph is traced and run as it is, since code generation takes long."""
        if self.tiny:
            options = {"backend": "eager"}
        if isinstance(function, torch.nn.Module):
            function.compile(**options)
            return function
        return torch.compile(function, **options)  # type: ignore[call-overload, no-any-return]


@dataclass
class Loop:
    """A training loop, ready for `Trainer.fit`.

    Attributes:
        module: the LightningModule.
        batches: endless for practical purposes.
        precision: the Trainer's.
        trainer: its other arguments.
        around: entered while the loop trains, for what is set for the whole process.
    """

    module: Any
    batches: Iterable[Any]
    precision: str = "32-true"
    trainer: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Case:
    """A pair of loops that differ in one fault; or, with no rule, one loop that is as it should be.

    Attributes:
        name: also the trace's.
        rule: the rule that should see the fault; empty for a well-tuned loop.
        title: the fault.
        fix: what is changed.
        build: the loop with (False) or without (True) the fault.
        on_device: whether batches lie on the device, so that input plays no part.
        gains: whether the fix is expected to make the step shorter.
        nothing_from: rules or families of rules that must promise nothing here.
        tolerance: by which the losses of the two may differ, relative: by rounding, or by the precision.
        range_only: why the likely saving is not compared, only the range; empty where it is.
        warmup: steps before timing starts, in each fit.
        interpreter: on a CPU the fixed loop needs Triton's interpreter.
    """

    name: str
    rule: str
    title: str
    fix: str
    build: Callable[[bool, Scale], Loop]
    on_device: bool = True
    gains: bool = True
    nothing_from: tuple[str, ...] = ()
    tolerance: float = 1e-5
    range_only: str = ""
    warmup: int = 10
    interpreter: bool = False

    def about(self) -> dict[str, Any]:
        """What a verdict needs to know of the case."""
        keys = ("rule", "title", "fix", "on_device", "gains", "nothing_from", "range_only")
        return {key: getattr(self, key) for key in keys}


_CASES: dict[str, Case] = {}


def pair(rule: str, *, title: str, fix: str, **options: Any) -> Callable[[Callable[..., Loop]], Any]:
    """Register a loop that `build(fixed, n)` builds with and without its fault."""

    def register(build: Callable[[bool, Scale], Loop]) -> Callable[[bool, Scale], Loop]:
        _enter(Case(build.__name__, rule, title, fix, build, **options))
        return build

    return register


def well_tuned(title: str, **options: Any) -> Callable[[Callable[[Scale], Loop]], Any]:
    """Register a loop that `build(n)` builds, in which there should be next to nothing to find."""

    def register(build: Callable[[Scale], Loop]) -> Callable[[Scale], Loop]:
        _enter(Case(build.__name__, "", title, "", lambda _fixed, n: build(n), **options))
        return build

    return register


def _enter(case: Case) -> None:
    if case.name in _CASES:
        raise ValueError(f"two cases are called {case.name}")
    _CASES[case.name] = case


def all_cases() -> dict[str, Case]:
    """Every case by its name, family by family."""
    cases = importlib.import_module("benchmarks.payoff.cases")
    for module in sorted(m.name for m in pkgutil.iter_modules(cases.__path__)):
        importlib.import_module(f"{cases.__name__}.{module}")
    return dict(_CASES)
