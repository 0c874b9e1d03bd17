"""One torch.profiler session: start, step, stop, write out, let go."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from advisor.capture import cupti
from advisor.capture.rivals import Watch, end_open_ranges
from advisor.errors import AdvisorError

#: The process that has already held a session; a forked child is a process of its own.
_spent_pid: int | None = None


class CaptureError(AdvisorError):
    """The profiler could not record or write its trace."""


def is_spent() -> bool:
    """Whether this process has had its session: each further one corrupts leading kernel records."""
    return _spent_pid == os.getpid()


class Session:
    """A profile of the next steps: the first one arms the profiler, the others are recorded.

    Starting arms it. Each `step` closes a ``ProfilerStep#N`` range and opens the next; N counts from 0 at the
    arming step, so the trace begins with ``ProfilerStep#1``.

    Args:
        make_way: called just before another profiler of torch begins; it is to close this session.
    """

    def __init__(self, make_way: Callable[[], None] | None = None) -> None:
        self._profiler: torch.profiler.profile | None = None
        self._running = False
        self._watch = Watch(make_way or self.close)
        self._teardown = contextlib.ExitStack()

    def start(self) -> None:
        """Arm the profiler.

        Raises:
            CaptureError: if this torch supports no activity to record.
        """
        global _spent_pid
        wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA, getattr(ProfilerActivity, "XPU", None)}
        activities = [a for a in torch.profiler.supported_activities() if a in wanted]
        if not activities:
            raise CaptureError("this build of torch has no Kineto profiler, so nothing can be recorded")
        _spent_pid = os.getpid()
        self._teardown.enter_context(cupti.teardown_requested())
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=lambda step: ProfilerAction.RECORD if step else ProfilerAction.WARMUP,
            record_shapes=True,
            profile_memory=False,
            with_stack=False,
            experimental_config=_trace_only(),
        )
        self._running = True
        self._watch.install()
        end_open_ranges()
        with _unwarned(), self._watch.ours():
            self._profiler.start()

    def step(self) -> None:
        """A step has ended and another follows."""
        if self._profiler is not None and self._running:
            self._see_that_it_is_ours()
            with _unwarned(), self._watch.ours():
                self._profiler.step()

    def stop(self) -> None:
        """End the recording; waits for the device, once.

        Raises:
            CaptureError: if another profiler has ended it: to stop it or to read it would end the process.
        """
        self._watch.remove()
        if self._profiler is not None and self._running:
            self._running = False
            self._see_that_it_is_ours()
            with self._watch.ours():
                try:
                    self._end_last_step()
                    end_open_ranges()
                finally:
                    self._profiler.stop()

    def _end_last_step(self) -> None:
        """End the last step's range first: looking for open ranges takes a while, and is no part of it."""
        last = getattr(self._profiler, "step_rec_fn", None)
        if last is not None:
            last.__exit__(None, None, None)
            self._profiler.step_rec_fn = None  # type: ignore[union-attr]

    def _see_that_it_is_ours(self) -> None:
        assert self._profiler is not None
        recording = self._profiler.current_action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
        if recording and not torch.autograd._profiler_enabled():
            self._running, self._profiler = False, None
            raise CaptureError("another profiler has ended this one")

    def write(self, path: Path) -> None:
        """Write the recording as Chrome trace JSON.

        Raises:
            CaptureError: if the file is missing or cut short, as on a full disk: Kineto says nothing then.
        """
        if self._profiler is None:
            raise CaptureError("the profiler was stopped before it recorded anything")
        self._profiler.export_chrome_trace(str(path))
        if not _is_whole(path):
            raise CaptureError(f"could not write the trace {path} in full: is the disk full?")

    def release(self) -> None:
        """Stop if need be, and drop the recording: kept alive, it slows the steps that follow."""
        try:
            self.stop()
        finally:
            profiler, self._profiler = self._profiler, None
            if profiler is not None:
                if profiler.profiler is not None:
                    profiler.profiler.kineto_results = None
                profiler.profiler = None
                profiler.action_map = {}  # bound methods: a cycle that only the collector would free

    def close(self) -> None:
        """Release, and give the process its environment back; CUPTI's teardown reads it until then."""
        try:
            self.release()
        finally:
            self._teardown.close()


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """Without torch's word on several cycles, of which there is one here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        yield


def _trace_only() -> Any:
    """Skip the profiler's Python event objects, which we never read, where torch can (2.13)."""
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(trace_only=True)
    except TypeError:
        return None


def _is_whole(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - 64, 0))
            return file.read().rstrip().endswith(b"}")
    except OSError:
        return False
