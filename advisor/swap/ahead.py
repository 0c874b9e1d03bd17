"""Triton's compiler, run for all candidates side by side before any is tried."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress

import torch

from advisor.swap import adversaries
from advisor.swap.guard import kept_state, unwarned
from advisor.swap.play import play, reasons
from advisor.swap.rewrite.record import let_go_of_workspaces
from advisor.swap.site import Candidate, Example, Site
from advisor.swap.tensors import devices_of

_MOST_THREADS = 8


class Ahead:
    """Runs each bundled candidate once on a GPU, each in a thread: their compilers hold no lock.

    What comes of it is passed over: a candidate that fails here fails again when it is tried. Use as a
    context: at its end what is still being compiled is waited for, since it runs on the device too once it
    is ready.

    Args:
        sites: whose.

    Attributes:
        begun: how many candidates were begun; fewer than two are left to the trying.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        self._todo = tasks(sites)
        self.begun = len(self._todo) if len(self._todo) > 1 else 0
        self._devices = {d for _, e in self._todo for d in devices_of((e.args, dict(e.kwargs)))}
        self._runs: dict[int, Future[None]] = {}
        self._undo = ExitStack()

    def __enter__(self) -> Ahead:
        if self.begun:
            threads = ThreadPoolExecutor(_threads(self.begun), thread_name_prefix="advisor-swap")
            # For as long as a thread runs: it draws random numbers, and may do so last of all.
            self._undo.enter_context(kept_state(self._devices))
            self._undo.callback(let_go_of_workspaces)
            self._undo.callback(threads.shutdown, wait=True, cancel_futures=True)
            self._runs = {id(one[0]): threads.submit(_run, *one) for one in self._todo}
        return self

    def __exit__(self, *_: object) -> None:
        with unwarned():
            self._undo.close()

    def wait(self, seconds: float) -> None:
        """Wait until all are compiled, but no longer than this."""
        with unwarned():
            wait(self._runs.values(), timeout=max(seconds, 0.0))

    def late(self, site: Site) -> list[Candidate]:
        """The site's candidates that are being compiled; those not begun yet are left to the trying."""
        runs = [(c, self._runs.get(id(c))) for c in site.candidates]
        return [c for c, run in runs if run is not None and not run.cancel() and not run.done()]


def tasks(sites: Sequence[Site]) -> list[tuple[Candidate, Example]]:
    """The bundled candidates that a GPU is to run, each with a call that shows what is to be compiled."""
    return [
        (candidate, example)
        for site in sites
        for example in site.examples[:1]
        for candidate in site.candidates
        if candidate.source == "bundled" and _on_gpu(example)
    ]


def narrower(example: Example) -> list[Example]:
    """The call in fewer rows, as hard values come: some kernels are compiled anew for it; if it differs."""
    few = adversaries.narrowed(example)
    return [] if few is example else [few]


def _threads(tasks: int) -> int:
    return max(1, min(tasks, _MOST_THREADS, (os.cpu_count() or 2) - 1))


def _on_gpu(example: Example) -> bool:
    return {d.type for d in devices_of((example.args, dict(example.kwargs)))} == {"cuda"}


def _run(candidate: Candidate, example: Example) -> None:
    with suppress(Exception):
        if reasons(candidate, example):
            return
        device = next(iter(devices_of((example.args, dict(example.kwargs)))))
        with torch.cuda.device(device):
            play(candidate.call, example)
            for few in narrower(example):
                play(candidate.call, few)
