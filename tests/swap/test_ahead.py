"""Kernels are compiled ahead on a GPU alone, and nothing that goes wrong there shows."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch

from advisor.swap import ahead
from advisor.swap.ahead import Ahead
from advisor.swap.decide import LATE, decide
from advisor.swap.site import Candidate, Example
from tests.swap.planted import candidate, right, site, terms


def compile_ahead(sites, seconds: float) -> int:
    with Ahead(sites) as made:
        made.wait(seconds)
        return made.begun


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


def test_a_compiler_that_takes_too_long_is_not_waited_for_and_its_candidate_is_out(monkeypatch) -> None:
    monkeypatch.setattr(ahead, "_on_gpu", lambda example: True)
    monkeypatch.setattr(ahead.torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(ahead, "_threads", lambda tasks: tasks)
    released, order = threading.Event(), []

    def slow(module, x):
        if threading.current_thread().name.startswith("advisor-swap"):
            released.wait(20)
            torch.manual_seed(3)
        order.append("slow")
        return right(module, x)

    def quick(module, x):
        order.append("quick")
        return right(module, x)

    # WHEN the site whose kernel is slow to compile comes first, beside a candidate of torch's
    sites = [site(slow, Candidate("torch F", right, "torch")), site(quick)]
    given = replace(terms({"original": 50e3, "torch F": 20e3, "advisor.kernels.right": 10e3}), budget_s=1.0)

    def progress(done, total, what):
        order.append(done)
        if done == 1:
            threading.Timer(2.0, released.set).start()

    state = torch.get_rng_state()
    late, other = decide(sites, given, progress)
    # THEN the other site is tried first, torch's candidate is taken, and the late one is said to be late
    assert order.index(1) > order.index("quick")
    assert late.chosen is not None
    assert late.chosen.name == "torch F"
    assert [t.refused for t in late.trials if t.candidate != "torch F"] == [LATE]
    assert other.site is sites[1]
    # AND nothing is left running, nor shows in the loop's random numbers
    assert torch.equal(torch.get_rng_state(), state)
    assert not [t for t in threading.enumerate() if t.name.startswith("advisor-swap")]


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
