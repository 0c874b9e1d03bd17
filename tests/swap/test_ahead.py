"""Kernels are compiled ahead on a GPU alone, and nothing that goes wrong there shows."""

from __future__ import annotations

import threading

import torch

from advisor.swap import ahead
from advisor.swap.ahead import compile_ahead
from advisor.swap.site import Candidate
from tests.swap.planted import right, site


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
