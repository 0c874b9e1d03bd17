"""Triton's compiler at work while the loop trains on.

Each candidate is called once between two batches, with its launches left out: that tells which kernels it
needs, for which types. Threads then compile them, on the host alone. Nothing is loaded, launched or allocated
on a device meanwhile, no random number is drawn and no setting changed: the loop sees nothing of it, and
neither does a CUDA graph that is being captured. What is compiled serves in this process, and Triton keeps
it on disk.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch

from advisor.kernels._triton import INTERPRETED
from advisor.swap.ahead import narrower, tasks
from advisor.swap.guard import kept_state, unwarned
from advisor.swap.play import play, reasons
from advisor.swap.site import Candidate, Example, Site
from advisor.swap.tensors import devices_of

log = logging.getLogger(__name__)

#: The compiler's Python holds the lock that the loop needs too: more threads would take more turns from it.
_MOST_THREADS = 2

_launching: ContextVar[bool] = ContextVar("advisor_swap_launching", default=True)


class Background:
    """The kernels of some sites' candidates, compiled in threads.

    What takes how long is logged for debugging, as the attribute `swap` of the records.

    Args:
        sites: whose bundled candidates; those for a GPU.

    Attributes:
        begun: how many kernels are compiled; none where all are at hand, or Triton cannot tell them.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        start_s = time.monotonic()
        self._kernels = _noted(tasks(sites))
        self._start_s = self._last_s = time.monotonic()
        self.begun = len(self._kernels)
        self._log("kernels noted", kernels=self.begun, noting_s=self._start_s - start_s)
        self._threads: ThreadPoolExecutor | None = None
        if self._kernels:
            count = max(1, min(self.begun, _MOST_THREADS, (os.cpu_count() or 2) - 1))
            self._threads = ThreadPoolExecutor(count, thread_name_prefix="advisor-swap-compiler")
            for kernel in self._kernels:
                kernel.future = self._threads.submit(kernel.compile)
                kernel.future.add_done_callback(self._note_time)

    @property
    def done(self) -> bool:
        """Whether nothing is being compiled any more."""
        return all(kernel.future is None or kernel.future.done() for kernel in self._kernels)

    def wait(self, seconds: float) -> bool:
        """Wait until all is compiled, but no longer than this; whether it is."""
        return not wait([k.future for k in self._kernels if k.future is not None], timeout=seconds).not_done

    def stop(self) -> None:
        """Begin no more, and wait for what is being compiled, which nothing can end; no thread is left."""
        threads, self._threads = self._threads, None
        if threads is not None:
            left = sum(kernel.future is not None and not kernel.future.done() for kernel in self._kernels)
            self._log("compiled beside the loop", compiling_s=self._last_s - self._start_s, left=left)
            threads.shutdown(wait=True, cancel_futures=True)
        for kernel in self._kernels:
            kernel.settle()
        self._kernels = []

    def _note_time(self, _future: Future[Any]) -> None:
        self._last_s = time.monotonic()

    @staticmethod
    def _log(what: str, **spent: float) -> None:
        log.debug("%s: %s", what, spent, extra={"swap": spent})


class Pending:
    """Stands for a kernel in Triton's own table while it is being compiled.

    Where launches are left out it does nothing; elsewhere it is the compiled one, which is waited for, or
    compiled there and then where no thread has done so.

    Args:
        compile: makes it; on the host alone.
        enter: puts a kernel into Triton's table.
    """

    def __init__(self, compile: Callable[[], Any], enter: Callable[[Any], None]) -> None:
        self.compile, self._enter = compile, enter
        self.future: Future[Any] | None = None
        self._made: Any = None
        enter(self)

    def result(self, ignore_errors: bool = False) -> Any:
        """The compiled kernel; as Triton asks for it before a launch."""
        if not _launching.get():
            return self
        if self._made is None:
            made = self._compiled()
            self._enter(made)
            self._made = made
        return self._made

    def settle(self) -> None:
        """Make way for the compiled kernel, if there is one by now."""
        future = self.future
        if future is not None and future.done() and not future.cancelled() and not future.exception():
            self.result()

    def _compiled(self) -> Any:
        # One that no thread has begun is not waited for: others may be before it.
        if self.future is not None and not self.future.cancel():
            # One that failed fails here as it would without us.
            with suppress(Exception):
                return self.future.result()
        return self.compile()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.result(), name) if _launching.get() else _nothing


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _noted(todo: Sequence[tuple[Candidate, Example]]) -> list[Pending]:
    """The kernels that some calls launch and that have not been compiled in this process."""
    found: dict[Any, Pending] = {}
    if not todo or INTERPRETED:
        return []
    devices = {d for _, example in todo for d in devices_of((example.args, dict(example.kwargs)))}
    # Someone else's mode may be in force already, which is a RuntimeError.
    with suppress(ImportError, RuntimeError), ExitStack() as stack:
        stack.enter_context(kept_state(devices))
        stack.enter_context(unwarned())
        # A backward on a thread of autograd's own would not know that launches are left out.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_launches_left_out(found))
        for candidate, example in todo:
            with suppress(Exception):
                if not reasons(candidate, example):
                    play(candidate.call, example)
                    for few in narrower(example):
                        play(candidate.call, few)
    return list(found.values())


@contextmanager
def _launches_left_out(found: dict[Any, Pending]) -> Iterator[None]:
    """Within it, on this thread, a kernel that Triton has not compiled is noted, and not launched.

    Raises:
        ImportError: this Triton compiles nothing apart from launching it.
    """
    from triton import AsyncCompileMode

    class Noting(AsyncCompileMode):  # type: ignore[misc]
        """Takes what Triton would have compiled elsewhere, and asks for nothing at its end."""

        def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
            if key not in found:
                found[key] = Pending(compile_fn, finalize_fn)
            return found[key]

    launching = _launching.set(False)
    try:
        with Noting(None):
            yield
    finally:
        _launching.reset(launching)
