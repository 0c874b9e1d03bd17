"""Copies of tensors and stand-ins for modules: what is tried out never touches the loop's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

#: Vector loads of kernels look at addresses modulo this.
_ALIGNMENT_BYTES = 16

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def copied(tensor: Tensor) -> Tensor:
    """A detached copy with the same strides, the same alignment and the same `requires_grad`."""
    source = tensor.detach()
    span = 1 + sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True))
    if not source.numel():
        copy = source.clone()
    else:
        shift = source.data_ptr() % _ALIGNMENT_BYTES // source.element_size()
        flat = torch.empty(span + shift, dtype=source.dtype, device=source.device)
        # Gaps between rows are copied too: a stride of 0 or of a wider tensor stays what it is.
        flat[shift:].copy_(source.as_strided((span,), (1,)))
        copy = flat.as_strided(source.shape, source.stride(), shift)
    return copy.requires_grad_(tensor.requires_grad)


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A detached copy, in `dtype` if that is given and the tensor is one of floating numbers."""
    if dtype is None or not tensor.is_floating_point():
        return copied(tensor)
    return tensor.detach().to(dtype, copy=True).requires_grad_(tensor.requires_grad)


def plain(value: object) -> bool:
    """Whether a value is a tensor of torch's own, neither a subclass nor of a layout without strides."""
    return type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided  # type: ignore[attr-defined]


def stand_in(
    module: nn.Module,
    change: Callable[[Tensor], Tensor] = lambda tensor: tensor.detach(),
    memo: dict[int, Any] | None = None,
) -> nn.Module:
    """A module of the same class and settings with tensors of its own, and without hooks.

    Args:
        module: what it stands in for; it is only read.
        change: makes each parameter and buffer of the stand-in. By default they share memory.
        memo: what became of objects by id, for tensors and modules that occur twice.
    """
    memo = {} if memo is None else memo
    if id(module) in memo:
        return memo[id(module)]  # type: ignore[no-any-return]
    twin = object.__new__(type(module))
    memo[id(module)] = twin
    # Not by assignment: a class may have a `__setattr__` of its own.
    object.__setattr__(twin, "__dict__", dict(module.__dict__))
    for name in _HOOKS:
        if name in twin.__dict__:
            twin.__dict__[name] = type(twin.__dict__[name])()

    def parameter(old: nn.Parameter | None) -> nn.Parameter | None:
        if old is not None and id(old) not in memo:
            memo[id(old)] = nn.Parameter(change(old).detach(), requires_grad=old.requires_grad)
        return None if old is None else memo[id(old)]  # type: ignore[no-any-return]

    twin.__dict__["_parameters"] = {name: parameter(p) for name, p in module._parameters.items()}
    twin.__dict__["_buffers"] = {
        name: b if b is None else change(b).detach() for name, b in module._buffers.items()
    }
    twin.__dict__["_modules"] = {
        name: m if m is None else stand_in(m, change, memo) for name, m in module._modules.items()
    }
    return twin


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is called beside the module's `forward` when it is called."""
    return any(module.__dict__.get(name) for name in _HOOKS)


def remade(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Arguments in which every tensor, and each of a module, is what `change` makes of it.

    One that occurs twice is changed once.
    """
    leaves, spec = tree_flatten(tree)
    memo: dict[int, Any] = {}

    def leaf(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return stand_in(value, change, memo)
        if isinstance(value, Tensor):
            if id(value) not in memo:
                memo[id(value)] = change(value)
            return memo[id(value)]
        return value

    return tree_unflatten([leaf(value) for value in leaves], spec)


def named_tensors(args: tuple[Any, ...], kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a call once, buffers but the parameters of modules among them, by a reader's name."""
    seen: set[int] = set()
    for key, value in [*((str(i), a) for i, a in enumerate(args)), *dict(kwargs).items()]:
        for i, leaf in enumerate(tree_flatten(value)[0]):
            found: list[tuple[str, Tensor]] = []
            if isinstance(leaf, nn.Module):
                found = [*leaf.named_parameters(), *leaf.named_buffers()]
            elif isinstance(leaf, Tensor):
                found = [(f"input {key}" + (f"[{i}]" if i else ""), leaf)]
            for name, tensor in found:
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield name, tensor


def same_values(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape are equal to the bit; NaN equals NaN."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def size_bytes(tree: Any) -> int:
    """Of all tensors of some arguments."""
    return sum(t.numel() * t.element_size() for _, t in named_tensors((tree,), {}))


def devices_of(tree: Any) -> set[torch.device]:
    """Where the tensors of some arguments lie."""
    return {t.device for _, t in named_tensors((tree,), {})}
