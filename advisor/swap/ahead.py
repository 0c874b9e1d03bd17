"""Triton's compiler, run for all candidates side by side before any is tried."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import torch

from advisor.swap import adversaries
from advisor.swap.guard import kept_state, unwarned
from advisor.swap.play import play, reasons
from advisor.swap.rewrite.record import let_go_of_workspaces
from advisor.swap.site import Candidate, Example, Site
from advisor.swap.tensors import devices_of

_MOST_THREADS = 8


def compile_ahead(sites: Sequence[Site], budget_s: float) -> int:
    """Run each bundled candidate once on a GPU, each in a thread: their compilers hold no lock.

    What comes of it is passed over: a candidate that fails here fails again when it is tried.

    Args:
        sites: whose.
        budget_s: after which it is left to the trying what is not ready.

    Returns:
        How many candidates were begun.
    """
    todo = [
        (candidate, example)
        for site in sites
        for example in site.examples[:1]
        for candidate in site.candidates
        if candidate.source == "bundled" and _on_gpu(example)
    ]
    if len(todo) < 2:
        return 0
    devices = {d for _, e in todo for d in devices_of((e.args, dict(e.kwargs)))}
    threads = ThreadPoolExecutor(_threads(len(todo)), thread_name_prefix="advisor-swap")
    with kept_state(devices), unwarned():
        try:
            wait([threads.submit(_run, *one) for one in todo], timeout=budget_s)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
    let_go_of_workspaces()
    return len(todo)


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
            # Hard values come in fewer rows, for which some kernels are compiled anew.
            few = adversaries.narrowed(example)
            if few is not example:
                play(candidate.call, few)
