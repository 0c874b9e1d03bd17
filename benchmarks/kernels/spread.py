"""Work spread over long-lived processes, any of which may fail, hang or end without harm to the rest."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

Work = Callable[[Any], object]


@dataclass(frozen=True)
class Outcome:
    """What became of one item: nothing in `failure` where it was done."""

    item: Any
    seconds: float
    failure: str | None = None


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    item: Any = None
    since: float = field(default_factory=time.monotonic)

    def give(self, item: Any) -> None:
        self.item, self.since = item, time.monotonic()
        # One that has ended meanwhile shows at the next look at its pipe.
        with contextlib.suppress(OSError):
            self.pipe.send(item)

    def ended(self, failure: str | None) -> Outcome:
        return Outcome(self.item, time.monotonic() - self.since, failure)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def spread(
    work: Work, items: Sequence[Any], *, processes: int, budget_s: float, limit_s: float
) -> Iterator[Outcome]:
    """An outcome an item, as they end; items are begun in order. Nothing is left running afterwards.

    Args:
        work: done with each item; it and the items must pickle.
        items: what to do.
        processes: side by side at most.
        budget_s: after which what was not done is given up, without an outcome.
        limit_s: the longest for one item; its process is ended then, and another takes its place.
    """
    stop = time.monotonic() + budget_s
    left = list(reversed(items))
    # Processes that may take the places of lost ones: beyond that, those that are left go on alone.
    spare = 2 * processes
    workers: list[_Worker] = []
    try:
        for _ in range(min(processes, len(left))):
            workers.append(_started(work))
            workers[-1].give(left.pop())
        while workers and (now := time.monotonic()) < stop:
            next_limit = min(worker.since for worker in workers) + limit_s
            ready = wait([w.pipe for w in workers], timeout=max(min(stop, next_limit) - now, 0.0))
            for worker in list(workers):
                if worker.pipe in ready:
                    lost, outcome = _answer(worker)
                elif time.monotonic() - worker.since >= limit_s:
                    lost, outcome = True, worker.ended(f"took more than {limit_s:.0f} s")
                else:
                    continue
                if lost or not left:
                    workers.remove(worker)
                    worker.stop()
                if lost and left and spare > 0:
                    spare -= 1
                    workers.append(_started(work))
                    workers[-1].give(left.pop())
                elif not lost and left:
                    worker.give(left.pop())
                yield outcome
    finally:
        for worker in workers:
            worker.stop()


def _answer(worker: _Worker) -> tuple[bool, Outcome]:
    """Whether the process is lost, and what became of its item."""
    try:
        return False, worker.ended(worker.pipe.recv())
    except (EOFError, OSError):
        worker.process.join(5)
        return True, worker.ended(f"its process ended ({worker.process.exitcode})")


def _started(work: Work) -> _Worker:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(work, there), daemon=True)
    process.start()
    # The other process has its own; with this one open too, its end would not be noticed.
    there.close()
    return _Worker(process, here)


def _serve(work: Work, pipe: Connection) -> None:
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        try:
            work(item)
            failure = None
        except Exception as error:  # noqa: BLE001
            failure = f"{type(error).__name__}: {error}"
        pipe.send(failure)
