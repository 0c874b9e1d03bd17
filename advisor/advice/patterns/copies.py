"""Copies that only rearrange a tensor, and what becomes of the result."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.advice.calls import Unit
from advisor.roofline.costs import Tensor

#: What becomes of a copy: it is undone by the next ones; attention reads it, which takes strides; unknown.
UNDONE, INTO_ATTENTION, UNKNOWN = "undone", "into attention", "unknown"
#: Calls looked through for the attention that a copy goes into.
_REACH = 8
_Layout = frozenset[tuple[int, int]]


def fates(units: Sequence[Unit], copies: set[int]) -> dict[int, str]:
    """What becomes of each copy, by the identity of its unit.

    Args:
        units: of one step on one thread, in program order.
        copies: identities of those that copy and do nothing else.
    """
    found = {id(unit): UNKNOWN for unit in units if id(unit) in copies}
    working = [unit for unit in units if unit.forward]
    for at, unit in enumerate(working):
        if id(unit) not in copies or found[id(unit)] == UNDONE:
            continue
        for one in _undone_from(working, at, copies):
            found[id(one)] = UNDONE
        if found[id(unit)] == UNKNOWN and _goes_into_attention(unit, working[at + 1 : at + 1 + _REACH]):
            found[id(unit)] = INTO_ATTENTION
    return found


def _undone_from(units: Sequence[Unit], at: int, copies: set[int]) -> Sequence[Unit]:
    """The longest run of copies from here, each of the one before, that ends as the first began."""
    first = _copy_of(units[at])
    begins, ends, last = _layout(first[1] if first else None), None, at
    turned = False
    for place in range(at, len(units)):
        copy = _copy_of(units[place]) if id(units[place]) in copies else None
        if copy is None or begins is None:
            break
        target, source = copy
        if ends is not None and _layout(source) != ends:
            break
        ends = _layout(target)
        if ends is None:
            break
        turned |= ends != begins
        # Clones that leave the order as it is are made for another reason.
        if ends == begins and turned:
            last = place
    return units[at : last + 1] if last > at else ()


def _goes_into_attention(unit: Unit, following: Sequence[Unit]) -> bool:
    """Whether fused attention reads the copy, and would have read the original: its rows are whole."""
    copy = _copy_of(unit)
    if copy is None:
        return False
    target, source = copy
    layout = _layout(target)
    return (
        layout is not None
        and bool(source.strides and source.strides[-1] == 1)
        and any(
            "dot_product" in one.name and any(_layout(tensor) == layout for tensor in one.tensors[:3])
            for one in following
        )
    )


def _copy_of(unit: Unit) -> tuple[Tensor, Tensor] | None:
    """Target and source of the copy that a call makes."""
    for call in unit.calls:
        pair = call.inputs[:2]
        if call.name == "aten::copy_" and len(pair) == 2:
            target, source = pair
            if isinstance(target, Tensor) and isinstance(source, Tensor):
                return target, source
    return None


def _layout(tensor: Tensor | None) -> _Layout | None:
    """How a tensor lies in memory, whatever the order of its dimensions; None where that is not recorded."""
    if tensor is None or tensor.strides is None or len(tensor.strides) != len(tensor.shape):
        return None
    return frozenset(
        (size, step) for size, step in zip(tensor.shape, tensor.strides, strict=True) if size > 1
    )
