"""A graph of the step and its backward, recorded as CUDA graphs and replayed: two launches for a thousand.

The first call is the original's, and tells which arguments stay the same objects (parameters, buffers). The
second is held against the original, and recorded on copies of the others. The third, on the next batch's
values, is held against the graph as it is. From the fourth on it is replayed, as long as a call is like the
recorded one and no other is waiting for its backward; any other call runs as it is. Again and again, ever
more rarely, a call is held against the graph as it is once more, and against the one that nothing was
replaced in: what was recorded must go on to see the parameters that the optimizer makes of those it was
recorded with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from advisor.report.format import duration
from advisor.swap.guard import kept_state

from .alike import Differs, alike, hold_against, results_of
from .facts import fake
from .ops import function_name
from .record import Recorder, Unrecordable, give_back
from .recording import Recording
from .written import put_back, shared_among, written_alike, written_by

log = logging.getLogger(__name__)

#: Replays before which a call is checked: before each block of a comparison of whole steps begins to be timed
#: (see `advisor.capture.swapping.steps`), once it is over, and at powers of two from the last of these on.
_CHECKED = (1, 2, 13, 25, 64)
#: Calls in a row unlike the recorded one, after which the recording is dropped.
_PATIENCE = 50
#: After so many it is looked whether all that differs is a tensor that another was put in place of.
_EXCHANGED = 3

#: Share of what the device takes for a graph, below which the host's launching of it surely hides behind
#: that, whatever else of the step the host has to do; above it, whole steps tell.
_DEVICE_BOUND = 0.5

#: How functions that draw random numbers begin.
_RANDOM = ("rand", "normal", "bernoulli", "multinomial", "uniform", "exponential", "dropout")

Call = Callable[..., Any]


class Replayer:
    """Stands for a call, and replays it once that has been recorded and proven.

    Args:
        call: takes tensors and other values, gives a tuple of tensors and None; it writes to none of them but
            such as are the same in each call, as running statistics are.
        recorder: records.
        original: does what `call` is to do, other kernels within; None where that can't be compared.
        at_fault: told why `call`, or what was recorded of it, does something else.
        may_check: whether a check that is due may be made now; else it is put off.
        host_bound: leave it unreplayed where the device is surely busy for longer than the host launches.
        plain: does what `call` is to do and can be differentiated twice; `call` unless given.
        may_stay: of each argument, whether it may be the same object in every call, as what a module has is,
            and a batch is not though it be passed several times over; all may unless given.
        make_room: called before it is recorded.
        varies: told which arguments it had taken for the same in every call, and that are others now.
        twice: called where gradients of gradients are taken, which `plain` then serves for.
    """

    def __init__(
        self,
        call: Call,
        recorder: Recorder,
        original: Call | None = None,
        at_fault: Callable[[str], None] = lambda why: None,
        may_check: Callable[[], bool] = lambda: True,
        host_bound: bool = False,
        plain: Call | None = None,
        may_stay: Sequence[bool] | None = None,
        make_room: Callable[[], None] = lambda: None,
        varies: Callable[[Sequence[int]], None] = lambda which: None,
        twice: Callable[[], None] = lambda: None,
    ) -> None:
        self._call, self._recorder = call, recorder
        self._plain, self._may_stay, self._make_room = plain, may_stay, make_room
        self._varies, self._twice = varies, twice
        self._host_bound = host_bound
        self._original, self._at_fault = original, at_fault
        self._may_check, self._due = may_check, False
        self._replays = 0
        #: Why it is not replayed, in one line; empty where it is, or may be.
        self.refused = ""
        #: What it takes launched and replayed, in one line, where that was to be known.
        self.measured = ""
        self.proven = False
        self._before: list[Any] | None = None
        #: Of what the first call gave, those that share memory with another, and their versions.
        self._shared: list[tuple[Tensor, int]] = []
        #: The backward passes that have gone through it.
        self._passes: set[int] = set()
        self._written: list[int] = []
        self._recording: Recording | None = None
        self._unlike = 0
        #: Whether something took memory that steps do not.
        self._spent = False

    def __call__(self, *args: Any) -> Any:
        """The call's result."""
        if self.refused or not torch.is_grad_enabled():
            return self._call(*args)
        if self._recording is None and self._before is None:
            return self._first(args)
        try:
            ready = self._ready(args)
        except Exception as error:  # noqa: BLE001  what cannot be recorded runs as it is
            why = str(error) if isinstance(error, Unrecordable) else f"{type(error).__name__}: {error}"
            self._drop(why)
            if isinstance(error, Differs) and (self._replays or error.rewritten):
                self._at_fault(f"after {self._replays} replays: {why}" if self._replays else why)
                if error.rewritten and self._original is not None:
                    self._call = self._original
            ready = False
        if self._spent:  # by now, what failed is let go of
            self._spent = False
            give_back(args)
        if not ready:
            return self._call(*args)
        assert self._recording is not None
        return self._recording.play(args)

    @property
    def writes(self) -> bool:
        """Whether the call writes to what it is given, so that it must not be run once more."""
        return bool(self._written)

    def _unwritten(self, args: Sequence[Any]) -> AbstractContextManager[list[Tensor]]:
        """What the call writes to is after it as before."""
        return put_back([args[i] for i in self._written])

    @property
    def held_bytes(self) -> int:
        """Of the device's memory, what the recording holds."""
        return self._recorder.held_bytes if self._recording is not None else 0

    def _ready(self, args: Sequence[Any]) -> bool:
        """Whether this call can be replayed; records, or proves what was recorded, where that is due."""
        if self._recording is None:
            assert self._before is not None
            fixed = [a is b for a, b in zip(args, self._before, strict=True)]
            if self._may_stay is not None:
                fixed = [same and may for same, may in zip(fixed, self._may_stay, strict=True)]
            self._before, self._spent = None, True
            shared, self._shared = self._shared, []
            if any(tensor._version != version for tensor, version in shared):
                raise Unrecordable("what it gives shares memory, and is written to afterwards")
            if len(self._passes) > 1:
                raise Unrecordable("more than one backward goes through it")
            if torch.is_anomaly_enabled():
                raise Unrecordable("anomalies are looked for in its backward")
            if not all(fixed[i] for i in self._written):
                raise Unrecordable("it writes to what it is given")
            if self._original is not None:
                with self._unwritten(args):
                    mine = results_of(self._call, args)
                with self._unwritten(args):
                    hold_against(self._original, args, *mine)
            self._make_room()
            with self._unwritten(args):
                self._recording = Recording(
                    self._call, args, fixed, self._recorder, self._written, self._plain, self._computed_again
                )
            return False
        if not self._recording.takes(args):
            self._unlike += 1
            if self._unlike == _EXCHANGED and (others := self._recording.exchanged(args)):
                self._varies(others)
                return False
            if self._unlike >= _PATIENCE:
                self._drop("the step's tensors are other objects, or of other sizes, from call to call")
            return False
        self._unlike = 0
        if self._recording.waiting:
            return False
        if not self.proven:
            given = self._prove(self._recording, args)
            if self._host_bound:
                self._refuse_unless_host_bound(self._recording, args, given)
            self.proven = True
            return False
        self._due |= _is_due(self._replays + 1)
        check = self._due and self._may_check()
        if self._recording.kept():
            raise Unrecordable("gradients are kept beyond the step")
        if check:
            self._due = False
            # Memory for it may be short; that for a replay is there.
            with suppress(torch.OutOfMemoryError):
                self._prove(self._recording, args)
        self._replays += 1
        return True

    def _first(self, args: Sequence[Any]) -> Any:
        """The call as it is; what it writes to must be known, for to record it is to run it again."""
        # Before it has been held against it, the original serves.
        result, written = written_by(self._original or self._call, args)
        if isinstance(written, str):
            self._drop(written)
            return result
        self._written = written
        if any(args[i].requires_grad for i in self._written):
            self._drop("it writes to what it differentiates")
            return result
        self._before, self._shared = list(args), shared_among(result)
        self._note_passes(result)
        return result

    def _note_passes(self, result: Any) -> None:
        passes = self._passes
        for output in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.register_hook(lambda _: passes.add(torch._C._current_graph_task_id()))

    def _prove(self, recording: Recording, args: Sequence[Any]) -> list[Tensor | None]:
        """That it gives what the call gives; gives the gradients that it began its backward with."""
        self._spent = True
        devices = {a.device for a in args if isinstance(a, Tensor)}
        with self._unwritten(args) as written:
            outputs, expected = results_of(self._call, args)
        given = [torch.ones_like(o) if o is not None and o.requires_grad else None for o in outputs]
        if self._original is not None:
            with self._unwritten(args):
                hold_against(self._original, args, outputs, expected)
        with self._unwritten(args) as mine_written, kept_state(devices), torch.no_grad():
            mine, gradients = recording.results(args, given)
        alike("output", mine, [None if o is None else o.detach() for o in outputs])
        alike("gradient", gradients, expected)
        written_alike(mine_written, written)
        return given

    def _refuse_unless_host_bound(
        self, recording: Recording, args: Sequence[Any], given: Sequence[Tensor | None]
    ) -> None:
        devices = {a.device for a in args if isinstance(a, Tensor)}
        with self._unwritten(args), kept_state(devices), torch.no_grad():
            host_ns, replayed_ns = self._recorder.times_ns(
                lambda: results_of(self._call, args), lambda: recording.results(args, given)
            )
        host, replayed = duration(host_ns / 1e6), duration(replayed_ns / 1e6)
        self.measured = f"the host launches it in {host}, replayed it takes {replayed}"
        if host_ns <= _DEVICE_BOUND * replayed_ns:
            raise Unrecordable(self.measured)

    def _computed_again(self, why: str, twice: bool) -> None:
        """The loop does with a replayed call what only the call itself can: from now on that serves."""
        if not self.refused:
            self._drop(why)
        if twice:
            self._call = self._plain or self._call
            self._twice()

    def start_anew(self) -> None:
        """Steps have passed without it: unless it is recorded by now, the next call is the first again."""
        if self._recording is None:
            self._before, self._shared = None, []

    @property
    def recorded(self) -> bool:
        """Whether it holds a recording."""
        return self._recording is not None

    def _drop(self, why: str) -> None:
        log.debug("a graph of the step is not replayed: %s", why, exc_info=True)
        self.refused = why.splitlines()[0] if why else "it cannot be recorded"
        with suppress(Exception):
            self.close()

    def close(self) -> None:
        """Let go of what was recorded."""
        self._before = self._recording = None
        self._shared = []
        self._recorder.close()


def drawn(node: Node) -> bool:
    """Whether a node draws random numbers."""
    named = function_name(node.target) if callable(node.target) else str(node.target)
    return named.strip("_").startswith(_RANDOM)


def collective(node: Node) -> bool:
    """Whether ranks talk in a node: each of them must run it as often as the others."""
    module = getattr(node.target, "__module__", None) or ""
    return node.op == "call_function" and ("c10d" in module or module.startswith("torch.distributed"))


def drawn_on_cpu(node: Node) -> bool:
    """Whether a node draws random numbers on the host, which a recording would hold for good."""
    value = fake(node)
    return value is not None and value.device.type == "cpu" and drawn(node)


def _is_due(replay: int) -> bool:
    """Whether the replay of this number, from 1 on, waits for a check."""
    return replay in _CHECKED or (replay > _CHECKED[-1] and replay & (replay - 1) == 0)
