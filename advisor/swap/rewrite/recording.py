"""One call of a step's graph with its backward, recorded and replayed under autograd.

Outputs are copies. Gradients are the recorded graph's own memory, which the next call writes over, in its
forward too. A parameter that has no gradient takes that memory for its own; one that has adds to what it has.
Where one still has ours when the next forward begins, as where gradients of several batches are added up, it
gets a copy first, unless the loop was seen to let go of such before the backward, again and again.

One backward is replayed. Where another goes through the same call, or one that is to be differentiated
itself, the call is computed again as it is.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from advisor.swap.guard import kept_state
from advisor.swap.play import differentiated
from advisor.swap.tensors import plain, size_bytes

from .again import Beginning
from .alike import ends, outputs_of, static
from .record import Recorder, Unrecordable

#: Steps in a row that let go of gradients between forward and backward, from which on that is relied on:
#: a loop that adds up those of several batches does so once, and not in the step after.
_RELIED_ON = 2

Call = Callable[..., Any]


class Recording:
    """One call, recorded.

    Args:
        call: takes tensors and other values, gives a tuple of tensors and None.
        args: of the call to record.
        fixed: which of them will be the same objects in every call.
        recorder: records.
        written: which of them the call writes to.
        original: does the same, and can be differentiated twice; `call` unless given.
        again: told why a call that was replayed had to be computed again.

    Raises:
        Unrecordable: it cannot be, and why.
    """

    def __init__(
        self,
        call: Call,
        args: Sequence[Any],
        fixed: Sequence[bool],
        recorder: Recorder,
        written: Sequence[int] = (),
        original: Call | None = None,
        again: Callable[[str, bool], None] = lambda why, twice: None,
    ) -> None:
        self._call, self._original, self._again = call, original or call, again
        self._written = list(written)
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
        #: Whether that is relied on in the step under way.
        self._relies = False
        _refuse_others(self._static)
        self._device = next(a.device for a in args if isinstance(a, Tensor))
        wants = [self._static[i] for i in self._wants]

        def forward() -> list[Tensor | None]:
            return outputs_of(call(*self._static))

        def backward(outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
            found = differentiated(ends(outputs), wants, self._given)
            return _each_in_its_own(found, [*self._static, *self._given])

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
            replaced_bytes = 0 if self._adds_up() else size_bytes(held)
            recorded = recorder.record(forward, backward, replaced_bytes)
        self._outputs, self._gradients = recorded.outputs, recorded.gradients
        self._forward, self._backward = recorded.forward, recorded.backward
        # As in the call itself, nothing leads to what gets no gradient: whoever counts parameters sees that.
        self._given_to = [(i, g) for i, g in zip(self._wants, self._gradients, strict=True) if g is not None]
        self._leaves = [(self._args[i], g) for i, g in self._given_to]
        self._ours = {g.untyped_storage().data_ptr() for _, g in self._given_to}
        # Parameters that are concatenated get parts of one storage.
        self._sharing: dict[int, list[tuple[Any, Tensor]]] = {}
        for leaf, g in self._leaves:
            self._sharing.setdefault(g.untyped_storage()._cdata, []).append((leaf, g))
        self._holders = {storage: _holders(storage) for storage in self._sharing}

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
                # A gradient of ours would be written over before it is read.
                same = same and arg.untyped_storage().data_ptr() not in self._ours
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

    def exchanged(self, args: Sequence[Any]) -> list[int]:
        """Which tensors, taken for the same in each call, are others now; none if anything else differs."""
        as_before, found = list(args), []
        for i, (known, arg) in enumerate(zip(self._args, args, strict=True)):
            if isinstance(known, Tensor) and arg is not known and type(arg) is Tensor:
                if known.requires_grad or arg.requires_grad or arg.shape != known.shape:
                    return []
                found.append(i)
                as_before[i] = known
        return found if self.takes(as_before) else []

    @property
    def waiting(self) -> bool:
        """Whether a call has been replayed whose backward may still come."""
        return self._open is not None and self._open() is not None

    def kept(self) -> bool:
        """Whether someone beside the parameters has gradients in our memory, which must stay then."""
        for storage, sharing in self._sharing.items():
            if _holders(storage) > self._holders[storage] + sum(_is(leaf, mine) for leaf, mine in sharing):
                return True
        # Or the parameters' very objects.
        spare = torch.zeros(1, requires_grad=True)
        spare.grad = torch.zeros(1)
        alone = sys.getrefcount(spare.grad)
        return any(
            _is(leaf, mine) and sys.getrefcount(leaf.grad) > alone
            for leaf, mine in self._leaves
            if leaf is not None
        )

    def play(self, args: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Replay the call; what comes out is differentiable."""
        return _Replay.apply(self, args, *[args[i] for i, _ in self._given_to])  # type: ignore[no-any-return]

    def forward(self, args: Sequence[Any]) -> list[Tensor | None]:
        """The outputs, in memory of their own."""
        held = [(leaf, mine) for leaf, mine in self._leaves if leaf is not None and leaf.grad is not None]
        self._out = [leaf for leaf, mine in held if _is(leaf, mine)] or [leaf for leaf, _ in held]
        self._relies = self._relied_on
        if not self._relies:
            self._move_gradients()
        return self._run_forward(args)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of all arguments that get one, in memory that the next call writes over.

        Raises:
            RuntimeError: the loop keeps gradients that it was relied on to let go of.
        """
        self.begin_backward()
        self._run_backward(gradients)
        return [g.detach() for _, g in self._given_to]

    def begin_backward(self) -> None:
        """See which gradients of the step before the loop has let go of.

        Raises:
            RuntimeError: not of some that it was relied on to let go of.
        """
        if self._relies and any(_is(leaf, mine) for leaf, mine in self._leaves):
            raise RuntimeError(
                "a step that was replayed has written over gradients that parameters still have, where the "
                "loop let go of them before. ADVISOR_SWAP_REPLAY=0 in the environment leaves it unreplayed"
            )
        if self._out:
            self._let_go = 0 if any(leaf.grad is not None for leaf in self._out) else self._let_go + 1
            self._out = []

    @property
    def _relied_on(self) -> bool:
        """Whether gradients of ours need not be moved when a forward begins, for they will be let go of."""
        return self._let_go >= _RELIED_ON and not self._adds_up()

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

    def begin(self, args: Sequence[Any]) -> Beginning:
        """What a call that is about to be replayed begins with."""
        return Beginning(args, self._written, self._device, self._autocast)

    def close(self, opened: _Open) -> bool:
        """A backward begins; whether it is the first of the last call, of which all is still there."""
        if opened.turn != self._turn:
            return False
        self._open, opened.turn = None, 0
        return True

    def compute_again(
        self, beginning: Beginning, saved: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients of a replayed call that has no recorded backward, in memory of their own."""
        twice = torch.is_grad_enabled()
        why = "gradients of its gradients are taken" if twice else "more than one backward goes through it"
        self._again(why, twice)
        call = self._original if twice else self._call
        return beginning.gradients(call, saved, gradients, [i for i, _ in self._given_to])


class _Open:
    """A call that has been replayed, held by autograd's graph until that is let go of."""

    def __init__(self, turn: int) -> None:
        self.turn = turn


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: Recording, args: Sequence[Any], *_wanted: Tensor) -> Any:
        beginning = recording.begin(args)
        outputs = recording.forward(args)
        ctx.recording, ctx.opened, ctx.beginning = recording, recording.opened(), beginning
        ctx.save_for_backward(*beginning.to_save(args))
        ctx.set_materialize_grads(False)
        differentiable = recording._differentiable
        ctx.mark_non_differentiable(
            *[o for o, grad in zip(outputs, differentiable, strict=True) if o is not None and not grad]
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        recording = ctx.recording
        if recording.close(ctx.opened):
            if not torch.is_grad_enabled():
                return (None, None, *recording.backward(gradients))
            recording.begin_backward()
        saved = ctx.saved_tensors
        return (None, None, *recording.compute_again(ctx.beginning, saved, gradients))


def _is(leaf: Tensor | None, mine: Tensor | None) -> bool:
    """Whether a parameter's gradient lies in the memory of this one."""
    if leaf is None or mine is None or leaf.grad is None:
        return False
    return leaf.grad.data_ptr() == mine.data_ptr()


def _holders(storage: int) -> int:
    return int(torch._C._storage_Use_Count(storage))


def _each_in_its_own(gradients: Sequence[Tensor | None], others: Sequence[Any]) -> list[Tensor | None]:
    """Gradients of which no two share memory, nor one with anything else, as where a sum hands on its own.

    Parameters take them for their own, and what scales gradients in place would scale such twice.
    """
    taken = [_span(o) for o in others if isinstance(o, Tensor)]
    own: list[Tensor | None] = []
    for g in gradients:
        if g is not None:
            first, last = _span(g)
            if any(first < end and begin < last for begin, end in taken):
                g = g.clone()
            taken.append(_span(g))
        own.append(g)
    return own


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where in memory it begins and ends."""
    if not tensor.numel():
        return (0, 0)
    items = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + items * tensor.element_size()


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
