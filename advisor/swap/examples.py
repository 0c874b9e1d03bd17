"""Real calls of modules, noted while the loop makes one step of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from advisor.swap.guard import generators
from advisor.swap.play import note_gradient_strides, parts
from advisor.swap.site import Example
from advisor.swap.tensors import copied, devices_of, plain, remade, size_bytes, stand_in

#: Of copies of inputs, all together.
CAP_BYTES = 2 * 2**30


@dataclass(eq=False)
class Record:
    """What was seen of one module.

    Attributes:
        examples: by signature: one call of each.
        calls: how many there were.
        reasons: why it is left alone, empty unless it is.
        fleeting: a stand-in with copies of the parameters, if they exist only during the call.
    """

    examples: dict[tuple[Any, ...], Example] = field(default_factory=dict)
    calls: int = 0
    reasons: list[str] = field(default_factory=list)
    fleeting: nn.Module | None = None


@dataclass(eq=False)
class _Open:
    """A call in progress, and the random numbers' states before it."""

    module: nn.Module
    signature: tuple[Any, ...]
    shared: tuple[Any, ...]
    states: list[Tensor]


class Watch:
    """Notes the calls of modules while it is entered. The loop's numbers stay what they are, to the bit.

    Args:
        modules: whose calls.
        alike: a key by module; calls of one signature are copied once for all modules of one key.
        cap_bytes: of copies; beyond it calls are counted only, and the module is left alone.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        alike: Callable[[nn.Module], Any] = id,
        cap_bytes: int = CAP_BYTES,
    ) -> None:
        self.records: dict[nn.Module, Record] = {module: Record() for module in modules}
        self._alike = {module: alike(module) for module in self.records}
        self._left_bytes = cap_bytes
        self._handles: list[Any] = []
        self._copies: dict[tuple[Any, ...], Example] = {}
        self._open: list[_Open] = []
        # Sharding wrappers gather parameters before a call and drop them after it.
        self._sharded = {m for m in self.records if any(not _whole(p) for p in m.parameters())}

    def __enter__(self) -> Watch:
        try:
            for module in self.records:
                self._handles += [
                    module.register_forward_pre_hook(self._before, with_kwargs=True),
                    module.register_forward_hook(self._after, with_kwargs=True),
                ]
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _release(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._open.clear()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record = self.records[module]
        record.calls += 1
        try:
            self._note(module, record, args, kwargs)
        except Exception as error:  # noqa: BLE001
            record.reasons.append(f"its call could not be noted: {type(error).__name__}: {error}")

    def _note(self, module: nn.Module, record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        reason = unfit(module, args, kwargs)
        if reason:
            record.reasons.append(reason)
            return
        signature = call_signature(module, args, kwargs)
        if signature in record.examples:
            return
        shared = (self._alike[module], signature)
        if not self._copy(module, record, shared, args, kwargs):
            record.reasons.append("copies of what it is called with would need too much memory")
            return
        states = [g.get_state() for g in generators(devices_of((args, kwargs)))]
        self._open.append(_Open(module, signature, shared, states))

    def _copy(
        self,
        module: nn.Module,
        record: Record,
        shared: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> bool:
        gathered = module in self._sharded and record.fleeting is None
        need = size_bytes((args, kwargs)) if shared not in self._copies else 0
        need += size_bytes(module) if gathered else 0
        if need > self._left_bytes:
            return False
        self._left_bytes -= need
        if shared not in self._copies:
            self._copies[shared] = _example(args, kwargs)
        if gathered:
            record.fleeting = stand_in(module, copied)
        return True

    def _after(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        # A call that raised has been left open: those above it end here too.
        if not any(entry.module is module for entry in self._open):
            return
        entry = self._open.pop()
        while entry.module is not module:
            entry = self._open.pop()
        record = self.records[module]
        try:
            now = [g.get_state() for g in generators(devices_of((args, kwargs)))]
            if any(not torch.equal(a, b) for a, b in zip(now, entry.states, strict=False)):
                self._copies[entry.shared] = replace(self._copies[entry.shared], rng=True)
            record.examples[entry.signature] = self._copies[entry.shared]
            self._see_backward(record, self._copies[entry.shared], result)
        except Exception as error:  # noqa: BLE001
            record.reasons.append(f"its call could not be noted: {type(error).__name__}: {error}")

    def _see_backward(self, record: Record, example: Example, result: Any) -> None:
        """How gradients come, and whether they are differentiated again, which the kernels refuse.

        Grad mode is on in a backward only if that is to be differentiated.
        """
        reason = "its gradient is differentiated again"

        def look(_gradient: Tensor) -> None:
            if torch.is_grad_enabled() and reason not in record.reasons:
                record.reasons.append(reason)

        for i, t in enumerate(parts(result)[0]):
            if t.requires_grad and not t.is_leaf:
                self._handles += [t.register_hook(look), note_gradient_strides(t, i, example)]


def unfit(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a call cannot be tried outside the loop; empty if it can."""
    for name, p in module.named_parameters():
        if not _whole(p):
            return f"its {name} is a {type(p).__name__}" + ("" if p.numel() else " without elements")
    for leaf in tree_flatten((args, kwargs))[0]:
        if isinstance(leaf, Tensor) and not plain(leaf):
            return f"is called with a {type(leaf).__name__}"
        if isinstance(leaf, nn.Module):
            return "is called with a module"
    return ""


def _whole(p: Tensor) -> bool:
    return plain(p) and p.numel() > 0


def call_signature(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All that tells calls apart but the values of tensors."""
    leaves, spec = tree_flatten((args, kwargs))
    grad = torch.is_grad_enabled()
    first: dict[int, int] = {}

    def key(i: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else id(leaf)
        same = first.setdefault(id(leaf), i)
        wants = grad and leaf.requires_grad
        return (same, leaf.dtype, leaf.device, tuple(leaf.shape), leaf.stride(), wants)

    return (
        module.training,
        grad,
        tuple((k, _autocast_dtype(k)) for k in ("cpu", "cuda")),
        str(spec),
        tuple(key(i, leaf) for i, leaf in enumerate(leaves)),
    )


def _autocast_dtype(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _example(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example:
    kinds = {d.type for d in devices_of((args, kwargs))}
    autocast = next((_autocast_dtype(k) for k in kinds if _autocast_dtype(k) is not None), None)
    grad = torch.is_grad_enabled()
    made, named = remade((args, kwargs), lambda t: copied(t) if grad else copied(t).requires_grad_(False))
    return Example(made, named, autocast=autocast, grad=grad)
