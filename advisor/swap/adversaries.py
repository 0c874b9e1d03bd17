"""Inputs on which a kernel goes wrong if it goes wrong at all, made from those of a real call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from advisor.swap.site import Example
from advisor.swap.tensors import copied, remade

#: float16 ends at 65504: products of values as large as those for other dtypes would overflow.
_LARGE = {torch.float16: 16.0}
_TINY = {torch.float16: 1e-3}
#: What is added to scores that are to count for nothing is less than this.
_HIDES = -1e3
#: What keys and values are shifted by, their own numbers being about one, and how large queries then are: the
#: scores differ little, so that written-out attention rounds next to nothing but what is the values'.
_COMMON, _GENTLE = 10.0, 0.25
#: No powers of two nor ratios of small numbers, which would leave roundings as they are.
_SIMILAR = (0.93, 0.977, 1.021, 1.067)


def _scaled_to(t: Tensor, rms: float) -> Tensor:
    now = t.double().square().mean().sqrt()
    filled = t if bool(now > 0) and bool(now.isfinite()) else torch.randn_like(t)
    now = filled.double().square().mean().sqrt()
    return (filled.double() * (rms / now)).to(t.dtype)


def _large(t: Tensor) -> Tensor:
    return _scaled_to(t, _LARGE.get(t.dtype, 100.0))


def _tiny(t: Tensor) -> Tensor:
    return _scaled_to(t, _TINY.get(t.dtype, 1e-4))


def _equal(t: Tensor) -> Tensor:
    return t[..., :1].expand_as(t).clone()


def _one_huge(t: Tensor, value: float = 100.0) -> Tensor:
    made = t.clone().contiguous()
    # Larger ones saturate a softmax, whose gradient is then all cancellation.
    made.view(-1)[made.numel() // 2] = value
    return made


def _anew(t: Tensor) -> Tensor:
    return torch.randn_like(t)


#: By name for a reader. Inputs are changed; parameters of modules only where they are drawn anew: a weight of
#: ones, as norms begin with, would hide which formula it is part of.
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "large values": _large,
    "tiny values": _tiny,
    "equal rows": _equal,
    "one huge value": _one_huge,
    "zeros": torch.zeros_like,
    "everything drawn anew": _anew,
}

_SATURATING: dict[str, Callable[[Tensor], Tensor]] = {
    "large values": lambda t: _scaled_to(t, 2.0),
    "one huge value": lambda t: _one_huge(t, 10.0),
    # The product of two such rows is as many times one number's as they are long; of others, its root.
    "equal rows": lambda t: _equal(t) * t.shape[-1] ** -0.25,
}


def hard(
    example: Example, *, saturates: bool = False, steady: Collection[int] = ()
) -> Iterator[tuple[str, Example]]:
    """The call with other values, one set after the other; shapes, dtypes and strides stay.

    Args:
        example: the call.
        saturates: whether it multiplies inputs and takes the softmax: values stay so small that the softmax
            is no step function, whose gradient is nought when written out and rounding when fused. Masks of
            large negative numbers may hide all keys of a row in another batch. In 16 bits, keys and values
            that are much alike tell whether the backward takes the rounding of its result for a gradient.
        steady: arguments that are what they are in every batch.
    """
    if saturates and _in_16_bits(example):
        yield "keys and values that have much in common (as training makes them)", _in_common(example)
    for name, make in {**VALUES, **(_SATURATING if saturates else {})}.items():
        yield name, changed(example, make, parameters=make is _anew)
    hidden = _hidden(example, steady) if saturates else None
    if hidden is not None:
        yield "a row that sees no key", hidden


def _in_16_bits(example: Example) -> bool:
    floats = [t for t in example.args if isinstance(t, Tensor) and t.is_floating_point()]
    return example.autocast is not None or any(t.element_size() == 2 for t in floats)


def _in_common(example: Example) -> Example:
    """The call with keys and values shifted by one number, whatever their layout, and small queries."""
    tensors = [t for t in example.args if isinstance(t, Tensor) and t.is_floating_point()]
    alone = bool(tensors) and not any(t is tensors[0] for t in tensors[1:])

    def shifted(t: Tensor) -> Tensor:
        if alone and t.data_ptr() == tensors[0].data_ptr() and t.shape == tensors[0].shape:
            return _scaled_to(t, _GENTLE)
        return (_scaled_to(t.double(), 1.0) + _COMMON).to(t.dtype)

    return changed(example, shifted)


def _hidden(example: Example, steady: Collection[int]) -> Example | None:
    """The call with each mask that is added hiding all of its first row; None where there is none."""
    args, found = list(example.args), False
    for i, arg in enumerate(args):
        if i in steady or not isinstance(arg, Tensor) or arg.requires_grad:
            continue
        # One row for all queries hides the same keys from all: a sample without any is none.
        if arg.dim() < 2 or arg.shape[-2] == 1:
            continue
        if not arg.is_floating_point() or not arg.numel() or not float(arg.amin()) <= _HIDES:
            continue
        args[i], found = arg.clone(), True
        args[i][..., 0, :] = arg.amin()
    return replace(example, args=tuple(args)) if found else None


def narrowed(example: Example, elements: int = 2**18) -> Example:
    """The call with fewer rows: tensors are cut along the first dimension where it is as long as the first's.

    Hard values are as hard in a few rows, and float64 is slow on most GPUs. Whether the call still works is
    for the caller to see.
    """
    leaves = tree_flatten((example.args, dict(example.kwargs)))[0]
    inputs = [t for t in leaves if isinstance(t, Tensor) and t.dim()]
    largest = max((t.numel() for t in inputs), default=0)
    if largest <= elements:
        return example
    rows = inputs[0].shape[0]
    # Kernels are compiled anew for one row, and for a number that is no multiple of 16.
    kept = rows * elements // largest
    kept = min(rows, kept // 16 * 16 if kept >= 16 else max(kept, 2))

    def cut(t: Tensor) -> Tensor:
        if id(t) not in {id(x) for x in inputs} or not t.shape[0] or t.shape[0] % rows:
            return t
        # Targets lie flat where what they are held against has rows in two dimensions.
        if t.shape[0] != rows and (t.is_floating_point() or t.dim() > 1):
            return t
        return copied(t[: kept * (t.shape[0] // rows)].detach().requires_grad_(t.requires_grad))

    modules = {id(m): m for m in leaves if isinstance(m, nn.Module)}
    args = tuple(a if id(a) in modules else remade(a, cut) for a in example.args)
    return replace(example, args=args, kwargs={k: remade(v, cut) for k, v in example.kwargs.items()})


def not_a_number(example: Example) -> Example:
    """The call with one NaN in each input."""

    def spoilt(t: Tensor) -> Tensor:
        made = t.clone().contiguous()
        made.view(-1)[0] = torch.nan
        return made

    return changed(example, spoilt)


def similar(example: Example) -> Iterator[Example]:
    """The call with inputs a few per cent larger and smaller, which round otherwise."""
    for factor in _SIMILAR:
        yield changed(example, lambda t, factor=factor: t * factor)  # type: ignore[misc]


def perturbed(example: Example) -> Example:
    """The call with every input and parameter off by what float32 cannot tell apart."""
    eps = torch.finfo(torch.float32).eps

    def off(t: Tensor) -> Tensor:
        sign = torch.randint(0, 2, t.shape, device=t.device, dtype=torch.int8) * 2 - 1
        return t.double() * (1 + eps * sign)

    return changed(example, off, parameters=True, keep_dtype=False)


def changed(
    example: Example, make: Callable[[Tensor], Tensor], *, parameters: bool = False, keep_dtype: bool = True
) -> Example:
    """The call with its inputs (those that have gradients, if any has) made anew."""
    leaves = tree_flatten((example.args, dict(example.kwargs)))[0]
    floats = [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point() and t.numel() and t.dim()]
    # Without a gradient it may be a mask or a table, whose values are part of what the call means.
    inputs = {id(t) for t in ([t for t in floats if t.requires_grad] or floats)}
    if parameters:
        modules = [m for m in leaves if isinstance(m, nn.Module)]
        inputs |= {id(p) for m in modules for p in m.parameters() if p.is_floating_point() and p.numel()}

    def remake(t: Tensor) -> Tensor:
        copy = copied(t)
        if id(t) not in inputs:
            return copy
        with torch.no_grad():
            made = make(t.detach())
            if not keep_dtype:
                return made.requires_grad_(t.requires_grad)
            # Written into the copy, so that its strides stay; one that overlaps itself holds fewer values.
            copy.as_strided(*_distinct(copy)).copy_(made[_firsts(copy)])
        return copied(copy).requires_grad_(t.requires_grad)

    args, kwargs = remade((example.args, dict(example.kwargs)), remake)
    return replace(example, args=args, kwargs=kwargs)


def _firsts(t: Tensor) -> tuple[slice, ...]:
    return tuple(slice(0, 1) if s == 0 else slice(None) for s in t.stride())


def _distinct(t: Tensor) -> tuple[list[int], tuple[int, ...]]:
    return [1 if s == 0 else n for n, s in zip(t.shape, t.stride(), strict=True)], t.stride()
