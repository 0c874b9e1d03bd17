"""Kernels are compiled ahead on a GPU alone, and nothing that goes wrong there shows."""

from __future__ import annotations

import threading

import torch

from advisor.swap import ahead
from advisor.swap.ahead import compile_ahead
from advisor.swap.site import Candidate, Example
from tests.swap.planted import candidate, right, site


def test_on_a_cpu_nothing_is_compiled_ahead() -> None:
    assert compile_ahead([site(right), site(right)], 1.0) == 0


def test_each_bundled_candidate_runs_once_in_a_thread_and_faults_are_passed_over(monkeypatch) -> None:
    monkeypatch.setattr(ahead, "_on_gpu", lambda example: True)
    ran: list[str] = []

    def noted(module, x):
        ran.append(threading.current_thread().name)
        torch.manual_seed(3)
        return right(module, x)

    def fails(module, x):
        ran.append("fails")
        raise RuntimeError("no kernel image is available")

    theirs = Candidate("torch F", noted, "torch")
    sites = [site(noted), site(fails, theirs)]
    state = torch.get_rng_state()
    monkeypatch.setattr(ahead.torch.cuda, "device", lambda _: torch.no_grad())
    assert compile_ahead(sites, 30.0) == 2
    assert sorted(name[:12] for name in ran) == ["advisor-swap", "fails"]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_compiler_that_takes_too_long_is_not_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(ahead, "_on_gpu", lambda example: True)
    monkeypatch.setattr(ahead.torch.cuda, "device", lambda _: torch.no_grad())
    released = threading.Event()

    def slow(module, x):
        released.wait(20)
        return right(module, x)

    assert compile_ahead([site(slow), site(slow)], 0.01) == 2
    assert not released.is_set()
    released.set()


def test_each_thread_asks_and_runs_under_the_calls_own_autocast(monkeypatch) -> None:
    monkeypatch.setattr(ahead, "_on_gpu", lambda example: True)
    monkeypatch.setattr(ahead.torch.cuda, "device", lambda _: torch.no_grad())
    ran: list[bool] = []

    def autocast() -> bool:
        return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16

    def noted(module, x):
        ran.append(autocast())
        return right(module, x)

    def only_there(example: Example) -> list[str]:
        return [] if autocast() else ["dtypes differ outside autocast"]

    sites = [site(candidate(noted, unsupported=only_there)) for _ in range(2)]
    for made in sites:
        made.examples[0] = Example(made.examples[0].args, autocast=torch.bfloat16)
    assert compile_ahead(sites, 30.0) == 2
    # THEN each ran, and under autocast; a second time in fewer rows
    assert len(ran) >= 2
    assert all(ran)
