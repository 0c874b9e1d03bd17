"""A graph of the step and its backward, recorded as CUDA graphs and replayed: two launches for a thousand.

The first call is the original's, and tells which arguments stay the same objects (parameters, buffers). The
second is held against the original, and recorded on copies of the others. The third, on the next batch's
values, is held against the graph as it is. From the fourth on it is replayed, as long as a call is like the
recorded one and no other is waiting for its backward; any other call runs as it is. Again and again, ever
more rarely, a call is held against the graph as it is once more, and against the one that nothing was
replaced in: what was recorded must go on to see the parameters that the optimizer makes of those it was
recorded with.

Outputs are copies. Gradients are the recorded graph's own memory, which the next call writes over, in its
forward too. A parameter that has no gradient takes that memory for its own; one that has adds to what it has.
Where one still has ours when the next forward begins, as where gradients of several batches are added up, it
gets a copy first, unless the loop was seen to let go of such before the backward, again and again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx import Node

from advisor.report.format import duration
from advisor.swap.guard import kept_state
from advisor.swap.play import differentiated
from advisor.swap.tensors import plain, size_bytes

from .alike import Differs, alike, ends, hold_against, outputs_of, results_of, static
from .facts import fake
from .ops import function_name
from .record import Recorder, Unrecordable
from .written import put_back, written_alike, written_by

log = logging.getLogger(__name__)

#: Replays before which a call is checked: before each block of a comparison of whole steps begins to be timed
#: (see `advisor.capture.swapping.steps`), once it is over, and at powers of two from the last of these on.
_CHECKED = (1, 2, 13, 25, 64)
#: Calls in a row unlike the recorded one, after which the recording is dropped.
_PATIENCE = 50
#: Steps in a row that let go of gradients between forward and backward, from which on that is relied on:
#: a loop that adds up those of several batches does so once, and not in the step after.
_RELIED_ON = 2

#: How functions that draw random numbers begin.
_RANDOM = ("rand", "normal", "bernoulli", "multinomial", "uniform", "exponential", "dropout")

Call = Callable[..., Any]


class Recording:
    """One call, recorded.

    Args:
        call: takes tensors and other values, gives a tuple of tensors and None.
        args: of the call to record.
        fixed: which of them will be the same objects in every call.
        recorder: records.

    Raises:
        Unrecordable: it cannot be, and why.
    """

    def __init__(self, call: Call, args: Sequence[Any], fixed: Sequence[bool], recorder: Recorder) -> None:
        pairs = list(zip(args, fixed, strict=True))
        self._args = [a if keep or not isinstance(a, Tensor) else None for a, keep in pairs]
        self._static = [static(a, keep) for a, keep in pairs]
        self._copies = [i for i, keep in enumerate(fixed) if isinstance(args[i], Tensor) and not keep]
        self._wants = [i for i, s in enumerate(self._static) if isinstance(s, Tensor) and s.requires_grad]
        self._autocast = _autocast(args)
        self._differentiable: list[bool] = []
        self._given: list[Tensor] = []
        self._open: weakref.ref[_Open] | None = None
        self._turn = 0
        self._adds_up = recorder.adds_up
        #: Parameters that had a gradient when the forward began: of ours, if any had.
        self._out: list[Tensor] = []
        #: Steps in a row that let go of all of them before the backward.
        self._let_go = 0
        _refuse_others(self._static)
        wants = [self._static[i] for i in self._wants]

        def forward() -> list[Tensor | None]:
            return outputs_of(call(*self._static))

        def backward(outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
            return differentiated(ends(outputs), wants, self._given)

        def both() -> None:
            outputs = forward()
            _refuse_aliases(outputs, self._static)
            _refuse_other_leaves(outputs, wants)
            self._differentiable = [o is not None and o.requires_grad for o in outputs]
            self._given = [torch.ones_like(o) for o in ends(outputs)]
            backward(outputs)

        with kept_state({a.device for a in args if isinstance(a, Tensor)}), torch.enable_grad():
            # A cast that the cache holds would be one of another step's weights.
            torch.set_autocast_cache_enabled(False)
            recorder.rehearse(both)
            leaves = [args[i] for i in self._wants if fixed[i] and args[i].is_leaf]
            # A view is one of a bucket, which stays.
            held = [leaf.grad for leaf in leaves if leaf.grad is not None and not leaf.grad._is_view()]
            replaced_bytes = 0 if self._adds_up else size_bytes(held)
            recorded = recorder.record(forward, backward, replaced_bytes)
        self._outputs, self._gradients = recorded.outputs, recorded.gradients
        self._forward, self._backward = recorded.forward, recorded.backward
        # As in the call itself, nothing leads to what gets no gradient: whoever counts parameters sees that.
        self._given_to = [(i, g) for i, g in zip(self._wants, self._gradients, strict=True) if g is not None]
        self._leaves = [(self._args[i], g) for i, g in self._given_to]

    def takes(self, args: Sequence[Any]) -> bool:
        """Whether a call is like the recorded one."""
        if _autocast(args) != self._autocast or torch.is_anomaly_enabled():
            return False
        for known, kept, arg in zip(self._args, self._static, args, strict=True):
            if known is None and isinstance(kept, Tensor):
                same = (
                    type(arg) is Tensor
                    and arg.shape == kept.shape
                    and arg.dtype is kept.dtype
                    and arg.requires_grad == kept.requires_grad
                    and arg.device == kept.device
                )
            elif isinstance(known, Tensor):
                same = (
                    arg is known
                    and arg.data_ptr() == kept.data_ptr()
                    and arg.requires_grad == kept.requires_grad
                )
            else:
                same = type(arg) is type(known) and arg == known
            if not same:
                return False
        return True

    @property
    def waiting(self) -> bool:
        """Whether a call has been replayed whose backward may still come."""
        return self._open is not None and self._open() is not None

    def play(self, args: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Replay the call; what comes out is differentiable."""
        return _Replay.apply(self, args, *[args[i] for i, _ in self._given_to])  # type: ignore[no-any-return]

    def forward(self, args: Sequence[Any]) -> list[Tensor | None]:
        """The outputs, in memory of their own."""
        held = [(leaf, mine) for leaf, mine in self._leaves if leaf is not None and leaf.grad is not None]
        self._out = [leaf for leaf, mine in held if _is(leaf, mine)] or [leaf for leaf, _ in held]
        if not self._relied_on:
            self._move_gradients()
        return self._run_forward(args)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of all arguments that get one, in memory that the next call writes over.

        Raises:
            RuntimeError: the loop keeps gradients that it was relied on to let go of.
        """
        if self._relied_on and any(_is(leaf, mine) for leaf, mine in self._leaves):
            raise RuntimeError(
                "a step that was replayed has written over gradients that parameters still have, where the "
                "loop let go of them before. ADVISOR_SWAP_REPLAY=0 in the environment leaves it unreplayed"
            )
        if self._out:
            self._let_go = 0 if any(leaf.grad is not None for leaf in self._out) else self._let_go + 1
            self._out = []
        self._run_backward(gradients)
        return [g.detach() for _, g in self._given_to]

    @property
    def _relied_on(self) -> bool:
        """Whether gradients of ours need not be moved when a forward begins, for they will be let go of."""
        return self._let_go >= _RELIED_ON and not self._adds_up

    def results(
        self, args: Sequence[Any], gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Outputs and gradients for a check, which the loop sees nothing of."""
        self._move_gradients()
        outputs = self._run_forward(args)
        self._run_backward(gradients)
        return outputs, self._gradients

    def _run_forward(self, args: Sequence[Any]) -> list[Tensor | None]:
        for i in self._copies:
            self._static[i].copy_(args[i])
        self._forward()
        return [None if o is None else o.clone() for o in self._outputs]

    def _run_backward(self, gradients: Sequence[Tensor | None]) -> None:
        theirs = (g for g, wants in zip(gradients, self._differentiable, strict=True) if wants)
        for kept, g in zip(self._given, theirs, strict=True):
            if g is None:
                kept.zero_()
            else:
                kept.copy_(g)
        self._backward()

    def _move_gradients(self) -> None:
        """Give each parameter that has a gradient in our memory a copy of it, before that is written over."""
        for leaf, mine in self._leaves:
            if leaf is not None and _is(leaf, mine):
                leaf.grad = leaf.grad.clone()

    def opened(self) -> _Open:
        """Note that a call waits for its backward as long as what is handed out lives."""
        self._turn += 1
        opened = _Open(self._turn)
        self._open = weakref.ref(opened)
        return opened

    def close(self, opened: _Open) -> None:
        """Its backward begins.

        Raises:
            RuntimeError: another call has been replayed since, or this one's backward has been.
        """
        if opened.turn != self._turn:
            raise RuntimeError(
                "a second backward through a step, or one that another has followed: steps are replayed, and "
                "of the one before nothing is left. ADVISOR_SWAP_REPLAY=0 in the environment leaves them "
                "unreplayed"
            )
        self._open, opened.turn = None, 0


class _Open:
    """A call that has been replayed, held by autograd's graph until that is let go of."""

    def __init__(self, turn: int) -> None:
        self.turn = turn


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: Recording, args: Sequence[Any], *_wanted: Tensor) -> Any:
        outputs = recording.forward(args)
        ctx.recording, ctx.opened = recording, recording.opened()
        ctx.set_materialize_grads(False)
        differentiable = recording._differentiable
        ctx.mark_non_differentiable(
            *[o for o, grad in zip(outputs, differentiable, strict=True) if o is not None and not grad]
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.recording.close(ctx.opened)
        return (None, None, *ctx.recording.backward(gradients))


class Replayer:
    """Stands for a call, and replays it once that has been recorded and proven.

    Args:
        call: takes tensors and other values, gives a tuple of tensors and None; it writes to none of them but
            such as are the same in each call, as running statistics are.
        recorder: records.
        original: does what `call` is to do, other kernels within; None where that can't be compared.
        at_fault: told why `call`, or what was recorded of it, does something else.
        may_check: whether a check that is due may be made now; else it is put off.
        host_bound: leave it unreplayed where launching it takes no longer than the device does.
    """

    def __init__(
        self,
        call: Call,
        recorder: Recorder,
        original: Call | None = None,
        at_fault: Callable[[str], None] = lambda why: None,
        may_check: Callable[[], bool] = lambda: True,
        host_bound: bool = False,
    ) -> None:
        self._call, self._recorder = call, recorder
        self._host_bound = host_bound
        self._original, self._at_fault = original, at_fault
        self._may_check, self._due = may_check, False
        self._replays = 0
        #: Why it is not replayed, in one line; empty where it is, or may be.
        self.refused = ""
        self.proven = False
        self._before: list[Any] | None = None
        self._written: list[int] = []
        self._recording: Recording | None = None
        self._unlike = 0

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
            self._before = None
            if not all(fixed[i] for i in self._written):
                raise Unrecordable("it writes to what it is given")
            if self._original is not None:
                with self._unwritten(args):
                    mine = results_of(self._call, args)
                with self._unwritten(args):
                    hold_against(self._original, args, *mine)
            with self._unwritten(args):
                self._recording = Recording(self._call, args, fixed, self._recorder)
            return False
        if not self._recording.takes(args):
            self._unlike += 1
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
        if self._due and self._may_check():
            self._due = False
            self._prove(self._recording, args)
        self._replays += 1
        return True

    def _first(self, args: Sequence[Any]) -> Any:
        """The call as it is; what it writes to must be known, for to record it is to run it again."""
        # Before it has been held against it, the original serves.
        result, self._written = written_by(self._original or self._call, args)
        if any(args[i].requires_grad for i in self._written):
            self._drop("it writes to what it differentiates")
            return result
        self._before = list(args)
        return result

    def _prove(self, recording: Recording, args: Sequence[Any]) -> list[Tensor | None]:
        """That it gives what the call gives; gives the gradients that it began its backward with."""
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
        if host_ns <= replayed_ns:
            host, replayed = duration(host_ns / 1e6), duration(replayed_ns / 1e6)
            raise Unrecordable(f"the host launches it in {host}, replayed it takes {replayed}")

    def _drop(self, why: str) -> None:
        log.debug("a graph of the step is not replayed: %s", why, exc_info=True)
        self.refused = why.splitlines()[0] if why else "it cannot be recorded"
        with suppress(Exception):
            self.close()

    def close(self) -> None:
        """Let go of what was recorded."""
        self._before = self._recording = None
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


def _is(leaf: Tensor | None, mine: Tensor | None) -> bool:
    """Whether a parameter's gradient lies in the memory of this one."""
    if leaf is None or mine is None or leaf.grad is None:
        return False
    return leaf.grad.data_ptr() == mine.data_ptr()


def _refuse_others(values: Sequence[Any]) -> None:
    devices = {v.device for v in values if isinstance(v, Tensor)}
    if len(devices) != 1:
        raise Unrecordable(f"its tensors lie on {', '.join(sorted(map(str, devices))) or 'no device'}")
    for value in values:
        if isinstance(value, Tensor) and not plain(value):
            raise Unrecordable(f"it takes a {type(value).__name__}")
        if not isinstance(value, (Tensor, bool, int, float, str, type(None))):
            raise Unrecordable(f"it takes a {type(value).__name__}")


def _refuse_aliases(outputs: Sequence[Tensor | None], values: Sequence[Any]) -> None:
    given = {v.untyped_storage().data_ptr() for v in values if isinstance(v, Tensor)}
    if any(o is not None and o.numel() and o.untyped_storage().data_ptr() in given for o in outputs):
        raise Unrecordable("it gives back what it is given")


def _refuse_other_leaves(outputs: Sequence[Tensor | None], wants: Sequence[Any]) -> None:
    """A parameter that the call holds, and is not given, would get no gradient from a recording."""
    known = {id(t) for t in wants}
    todo = [o.grad_fn for o in ends(outputs)]
    seen = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise Unrecordable(
                f"it differentiates a tensor of shape {tuple(leaf.shape)} that it is not given"
            )
        for after, _ in getattr(node, "next_functions", ()):
            if after is not None and after not in seen:
                seen.add(after)
                todo.append(after)


def _autocast(args: Sequence[Any]) -> torch.dtype | None:
    kind = next((a.device.type for a in args if isinstance(a, Tensor)), "cpu")
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _is_due(replay: int) -> bool:
    """Whether the replay of this number, from 1 on, waits for a check."""
    return replay in _CHECKED or (replay > _CHECKED[-1] and replay & (replay - 1) == 0)
