"""A graph of the step and its backward, recorded as CUDA graphs and replayed: two launches for a thousand.

The first call runs as it is, and tells which arguments stay the same objects (parameters, buffers). The
second is recorded on copies of the others. The third, on the next batch's values, is held against the graph
as it is. From the fourth on it is replayed, as long as a call is like the recorded one and no other is
waiting for its backward; any other call runs as it is.

Outputs are copies. Gradients are the recorded graph's own memory, which the next backward writes over: a
parameter that still has its gradient then is given a copy of it first.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx import Node

from advisor.swap.guard import kept_state
from advisor.swap.play import differentiated
from advisor.swap.tensors import copied, plain, same_values, size_bytes

from .facts import fake
from .ops import function_name
from .record import Recorder, Unrecordable

log = logging.getLogger(__name__)

#: By how much results may differ from those of the graph as it is, relative, for kernels that sum in any
#: order; and, of gradients, relative to all of them together.
_TOLERANCE, _OF_ALL = 2e-2, 1e-4
#: Calls in a row unlike the recorded one, after which the recording is dropped.
_PATIENCE = 50

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
        self._static = [_static(a, keep) for a, keep in pairs]
        self._copies = [i for i, keep in enumerate(fixed) if isinstance(args[i], Tensor) and not keep]
        self._wants = [i for i, s in enumerate(self._static) if isinstance(s, Tensor) and s.requires_grad]
        self._autocast = _autocast(args)
        self._differentiable: list[bool] = []
        self._given: list[Tensor] = []
        self._open: weakref.ref[_Open] | None = None
        self._turn = 0
        _refuse_others(self._static)
        wants = [self._static[i] for i in self._wants]

        def forward() -> list[Tensor | None]:
            return _outputs(call(*self._static))

        def backward(outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
            return differentiated(_ends(outputs), wants, self._given)

        def both() -> None:
            outputs = forward()
            _refuse_aliases(outputs, self._static)
            self._differentiable = [o is not None and o.requires_grad for o in outputs]
            self._given = [torch.ones_like(o) for o in _ends(outputs)]
            backward(outputs)

        with kept_state({a.device for a in args if isinstance(a, Tensor)}), torch.enable_grad():
            # A cast that the cache holds would be one of another step's weights.
            torch.set_autocast_cache_enabled(False)
            recorder.rehearse(both)
            leaves = [args[i] for i in self._wants if fixed[i] and args[i].is_leaf]
            replaced_bytes = size_bytes([leaf.grad for leaf in leaves if leaf.grad is not None])
            recorded = recorder.record(forward, backward, replaced_bytes)
        self._outputs, self._gradients = recorded.outputs, recorded.gradients
        self._forward, self._backward = recorded.forward, recorded.backward
        self._leaves = [(self._args[i], g) for i, g in zip(self._wants, self._gradients, strict=True)]

    def takes(self, args: Sequence[Any]) -> bool:
        """Whether a call is like the recorded one."""
        if _autocast(args) != self._autocast or torch.is_anomaly_enabled():
            return False
        for known, static, arg in zip(self._args, self._static, args, strict=True):
            if known is None and isinstance(static, Tensor):
                same = (
                    type(arg) is Tensor
                    and arg.shape == static.shape
                    and arg.dtype is static.dtype
                    and arg.requires_grad == static.requires_grad
                    and arg.device == static.device
                )
            elif isinstance(known, Tensor):
                same = (
                    arg is known
                    and arg.data_ptr() == static.data_ptr()
                    and arg.requires_grad == static.requires_grad
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
        return _Replay.apply(self, args, *[args[i] for i in self._wants])  # type: ignore[no-any-return]

    def forward(self, args: Sequence[Any]) -> list[Tensor | None]:
        """The outputs, in memory of their own."""
        for i in self._copies:
            self._static[i].copy_(args[i])
        self._forward()
        return [None if o is None else o.clone() for o in self._outputs]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of all arguments that want one, in memory that the next backward writes over."""
        theirs = (g for g, wants in zip(gradients, self._differentiable, strict=True) if wants)
        for static, g in zip(self._given, theirs, strict=True):
            if g is None:
                static.zero_()
            else:
                static.copy_(g)
        for leaf, mine in self._leaves:
            if leaf is None or mine is None or leaf.grad is None:
                continue
            if leaf.grad.data_ptr() == mine.data_ptr():
                leaf.grad = leaf.grad.clone()
        self._backward()
        return [None if g is None else g.detach() for g in self._gradients]

    def opened(self) -> _Open:
        """Note that a call waits for its backward as long as what is handed out lives."""
        self._turn += 1
        opened = _Open(self._turn)
        self._open = weakref.ref(opened)
        return opened

    def close(self, opened: _Open) -> None:
        """Its backward begins.

        Raises:
            RuntimeError: another call has been replayed since.
        """
        if opened.turn != self._turn:
            raise RuntimeError(
                "a second backward through a step that another has followed: steps are replayed, and of the "
                "one before nothing is left. ADVISOR_SWAP_REPLAY=0 in the environment leaves them unreplayed"
            )
        self._open = None


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
        call: takes tensors and other values, gives a tuple of tensors and None; it writes to none of them.
        recorder: records.
    """

    def __init__(self, call: Call, recorder: Recorder) -> None:
        self._call, self._recorder = call, recorder
        #: Why it is not replayed, in one line; empty where it is, or may be.
        self.refused = ""
        self.proven = False
        self._before: list[Any] | None = None
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
            self._drop(str(error) if isinstance(error, Unrecordable) else f"{type(error).__name__}: {error}")
            ready = False
        if not ready:
            return self._call(*args)
        assert self._recording is not None
        return self._recording.play(args)

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
            self._prove(self._recording, args)
            self.proven = True
            return False
        return True

    def _first(self, args: Sequence[Any]) -> Any:
        """The call as it is; it must change nothing it is given, for to record it is to run it again."""
        tensors = [a for a in args if isinstance(a, Tensor)]
        # Running statistics are written to without a new version.
        values = [None if t.requires_grad else t.detach().clone() for t in tensors]
        versions = [t._version for t in tensors]
        result = self._call(*args)
        for t, value, version in zip(tensors, values, versions, strict=True):
            if t._version != version or (value is not None and not same_values(t, value)):
                self._drop("it writes to what it is given")
                return result
        self._before = list(args)
        return result

    def _prove(self, recording: Recording, args: Sequence[Any]) -> None:
        devices = {a.device for a in args if isinstance(a, Tensor)}
        own = [_static(a, True) for a in args]
        with kept_state(devices), torch.enable_grad():
            outputs = _outputs(self._call(*own))
            given = [torch.ones_like(o) for o in _ends(outputs)]
            wants = [a for a in own if isinstance(a, Tensor) and a.requires_grad]
            expected = differentiated(_ends(outputs), wants, given)
        with kept_state(devices), torch.no_grad():
            mine = recording.forward(args)
            supply = iter(given)
            gradients = recording.backward(
                [next(supply) if o is not None and o.requires_grad else None for o in outputs]
            )
        _alike("output", mine, [None if o is None else o.detach() for o in outputs])
        _alike("gradient", gradients, expected)

    def _drop(self, why: str) -> None:
        log.debug("a graph of the step is not replayed: %s", why, exc_info=True)
        self.refused = why.splitlines()[0] if why else "it cannot be recorded"
        with suppress(Exception):
            self.close()

    def close(self) -> None:
        """Let go of what was recorded."""
        self._before = self._recording = None
        self._recorder.close()


def drawn_on_cpu(node: Node) -> bool:
    """Whether a node draws random numbers on the host, which a recording would hold for good."""
    value = fake(node)
    named = function_name(node.target) if callable(node.target) else str(node.target)
    return value is not None and value.device.type == "cpu" and named.strip("_").startswith(_RANDOM)


def _static(value: Any, keep: bool) -> Any:
    """What the recorded call is given: memory that stays, and a leaf of its own."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad) if keep else copied(value)


def _refuse_others(values: Sequence[Any]) -> None:
    devices = {v.device for v in values if isinstance(v, Tensor)}
    if len(devices) != 1:
        raise Unrecordable(f"its tensors lie on {', '.join(sorted(map(str, devices))) or 'no device'}")
    for value in values:
        if isinstance(value, Tensor) and not plain(value):
            raise Unrecordable(f"it takes a {type(value).__name__}")
        if not isinstance(value, (Tensor, bool, int, float, str, type(None))):
            raise Unrecordable(f"it takes a {type(value).__name__}")


def _outputs(result: Any) -> list[Tensor | None]:
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    if any(o is not None and not (isinstance(o, Tensor) and plain(o)) for o in outputs):
        raise Unrecordable("it gives something else than tensors")
    if not any(o is not None and o.requires_grad for o in outputs):
        raise Unrecordable("nothing of it is differentiated")
    return outputs


def _refuse_aliases(outputs: Sequence[Tensor | None], values: Sequence[Any]) -> None:
    given = {v.untyped_storage().data_ptr() for v in values if isinstance(v, Tensor)}
    if any(o is not None and o.numel() and o.untyped_storage().data_ptr() in given for o in outputs):
        raise Unrecordable("it gives back what it is given")


def _ends(outputs: Sequence[Tensor | None]) -> list[Tensor]:
    return [o for o in outputs if o is not None and o.requires_grad]


def _autocast(args: Sequence[Any]) -> torch.dtype | None:
    kind = next((a.device.type for a in args if isinstance(a, Tensor)), "cpu")
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _alike(what: str, mine: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    pairs = list(zip(mine, expected, strict=True))
    if any((a is None) != (b is None) for a, b in pairs):
        raise Unrecordable(f"replayed, it has {what}s where it has none, or the other way round")
    floats = [(a, b) for a, b in pairs if a is not None and b is not None and b.is_floating_point()]
    if not floats:
        return
    sizes = torch.stack([b.float().norm() for _, b in floats])
    off = torch.stack([(a.float() - b.float()).norm() for a, b in floats])
    allowed = _TOLERANCE * sizes + _OF_ALL * sizes.square().sum().sqrt()
    # Not "off > allowed": NaN must not pass.
    if not bool((off <= allowed).all()):
        worst = float((off / sizes.clamp_min(1e-30)).max())
        raise Unrecordable(f"replayed, its {what}s are not the same (off by {worst:.1e})")
