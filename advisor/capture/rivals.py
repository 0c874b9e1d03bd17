"""Other profilers of this process: found before a window opens, and made way for while it is open.

Torch keeps one profiler to a process and checks nothing: whichever stops second gets nothing, and reading
that nothing ends the process with a segmentation fault. A range that outlives its profiler and ends under the
next one writes its end into memory that the first has freed.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerAction

from advisor.capture import cupti
from advisor.capture.shadow import call_before

#: What every Python profiler of torch calls to begin, where `torch.autograd.profiler` looks it up.
_BEGINNINGS = ("_prepare_profiler", "_enable_profiler")


def another_profiler() -> str | None:
    """A profiler that is at work in this process, or None."""
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", False) or torch.autograd._profiler_enabled():
        return "another torch profiler is running"
    if _one_is_warming_up():
        return "another torch profiler is about to record"
    return cupti.other_user()


def _one_is_warming_up() -> bool:
    """Whether a `torch.profiler.profile` is prepared, which torch itself does not tell."""
    kind = torch.profiler.profile
    # By `type`: asking strangers' objects for their class may run their code.
    return any(
        issubclass(type(held), kind) and getattr(held, "current_action", None) is ProfilerAction.WARMUP
        for held in gc.get_objects()
    )


def end_open_ranges() -> None:
    """End every `record_function` range that is open: none may outlive the profiler that it began under.

    Lightning runs a training step inside such a range, the optimizer's. Ending one twice does nothing, so its
    owner notices nothing. Ranges of operators, which torch opens itself, are out of reach.
    """
    kind = torch.profiler.record_function
    records = [
        held.record
        for held in gc.get_objects()
        if issubclass(type(held), kind) and getattr(held, "record", None) is not None
    ]
    with torch._C.DisableTorchFunctionSubclass():
        for record in records:
            torch.ops.profiler._record_function_exit._RecordFunction(record)


class Watch:
    """Calls `make_way`, once, just before a profiler other than ours begins.

    Args:
        make_way: ends our profiler; what it raises is dropped, the other profiler begins in any case.
    """

    def __init__(self, make_way: Callable[[], None]) -> None:
        self._make_way: Callable[[], None] | None = make_way
        self._ours = False
        self._undo = contextlib.ExitStack()

    def install(self) -> None:
        """Begin to watch."""
        for name in _BEGINNINGS:
            self._undo.callback(call_before(torch.autograd.profiler, name, self._someone_begins))

    def remove(self) -> None:
        """Watch no longer."""
        self._make_way = None
        self._undo.close()

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """What begins in here is our own profiler."""
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    def _someone_begins(self) -> None:
        if not self._ours and self._make_way is not None:
            make_way, self._make_way = self._make_way, None
            make_way()
