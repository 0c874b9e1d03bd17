"""A module's class exchanged for one of the same name whose `forward` calls what was chosen.

The instance stays what it is: its parameters, hooks, state_dict keys, and whatever refers to it. A copy or a
pickle of it is one of the original class, so that it can be loaded where this package is not.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from advisor.kernels._device import UnsupportedError
from advisor.swap.journal import Change
from advisor.swap.site import Candidate, Example
from advisor.swap.warn import warn

#: A kernel that cannot be built or does not take a size. Other exceptions are the loop's own affair: memory
#: that runs out, hooks of inner modules, and checkpointing, which ends a recomputation by one.
_KERNEL_ERRORS: tuple[type[Exception], ...] = (UnsupportedError,)
try:
    from triton.runtime.errors import TritonError

    _KERNEL_ERRORS += (TritonError,)
except ImportError:
    pass

#: Set on classes made here.
MARK = "__advisor_swap__"


def call_key(training: bool, args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a kernel's choice of code and dtypes depends on: calls of one key are alike but for their sizes.

    The last dimension counts: it is the length of the rows that kernels work on.
    """
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    kind = tensors[0].device.type if tensors else "cpu"
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    values = [_value_key(a) for a in args]
    named = [(name, _value_key(value)) for name, value in kwargs.items()]
    return (training, autocast, torch.is_grad_enabled(), tuple(values), tuple(named))


def _value_key(value: Any) -> Any:
    if isinstance(value, Tensor):
        grad = value.requires_grad and torch.is_grad_enabled()
        last = value.shape[-1] if value.dim() else 0
        return (type(value) is Tensor, value.dtype, value.device.type, value.dim(), last, grad)
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value)


def verified_keys(examples: Iterable[Example]) -> frozenset[tuple[Any, ...]]:
    """The keys of the calls that a candidate was proven on, and of the same without gradients."""
    found = set()
    for example in examples:
        module, *args = example.args
        for grad in (True, False) if example.grad else (False,):
            with torch.set_grad_enabled(grad), _autocast(example, args):
                found.add(call_key(module.training, args, dict(example.kwargs)))
    return frozenset(found)


def _autocast(example: Example, args: list[Any]) -> Any:
    tensors = [a for a in (*args, *example.kwargs.values()) if isinstance(a, Tensor)]
    kind = tensors[0].device.type if tensors else "cpu"
    return torch.autocast(kind, dtype=example.autocast, enabled=example.autocast is not None)


def swapped_class(
    base: type[nn.Module], candidate: Candidate, keys: frozenset[tuple[Any, ...]]
) -> type[nn.Module]:
    """A subclass that calls a candidate where the call is like one that it was proven on.

    Args:
        base: whose `forward` serves all other calls: other dtypes, row lengths, eval mode, transforms.
        candidate: its `call` gets the module first.
        keys: `verified_keys`.
    """
    call: Callable[..., Any] = candidate.call
    state = {"on": True}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not state["on"] or _traced() or call_key(self.training, args, kwargs) not in keys:
            return base.forward(self, *args, **kwargs)
        try:
            return call(self, *args, **kwargs)
        except _KERNEL_ERRORS as error:
            state["on"] = False
            raised = f"{type(error).__name__}: {error}"
            warn(f"{base.__name__}: {candidate.name} is no longer used, it raised {raised}")
            return base.forward(self, *args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        twin = object.__new__(base)
        object.__setattr__(twin, "__dict__", self.__dict__)
        reduced = twin.__reduce_ex__(protocol)
        if isinstance(reduced, tuple) and reduced[:2] == (copyreg.__newobj__, (base,)):  # type: ignore[attr-defined]
            # Pickle takes that only for an object's own class.
            return (copyreg._reconstructor, (base, object, None), *reduced[2:])  # type: ignore[attr-defined]
        return reduced

    def __deepcopy__(self: nn.Module, memo: Any) -> Any:
        copy = base.__deepcopy__(self, memo)  # type: ignore[attr-defined]
        if type(copy) is type(self):
            set_class(copy, base)
        return copy

    forward.__doc__ = base.forward.__doc__
    body = {
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        MARK: candidate.name,
    }
    if hasattr(base, "__deepcopy__"):
        body["__deepcopy__"] = __deepcopy__
    metaclass: Any = type(base)
    return metaclass(base.__name__, (base,), body)  # type: ignore[no-any-return]


def _traced() -> bool:
    """Whether a transform or tracer is at work that may not know the kernels."""
    if torch.compiler.is_compiling():
        # Not `is_exporting()`: up to torch 2.11 Dynamo takes that for true whatever it traces for.
        return bool(getattr(torch.compiler, "_is_exporting_flag", False))
    return torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Exchange a module's class, whatever `__setattr__` of its own it has."""
    object.__setattr__(module, "__class__", cls)


def class_change(where: str, module: nn.Module, made: type[nn.Module]) -> Change:
    """The change of one module's class, to `made`."""
    base = made.__bases__[0]

    def do() -> None:
        set_class(module, made)

    def undo() -> None:
        if type(module) is made:
            set_class(module, base)
        elif made in type(module).__mro__:
            # Someone (a sharding wrapper, a parametrization) has subclassed ours since: that stays.
            set_class(module, _without(type(module), made))

    return Change(f"{where}: {getattr(made, MARK)}", do, undo)


def _without(cls: type, ours: type) -> type:
    """The same class on top of ours' base instead of ours."""
    if cls is ours:
        return ours.__bases__[0]
    if ours not in cls.__mro__:
        return cls
    bases = tuple(_without(base, ours) for base in cls.__bases__)
    body = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, bases, body)
