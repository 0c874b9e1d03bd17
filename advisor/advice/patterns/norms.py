"""Norms written out, and residual sums right before a norm's own operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from advisor.advice.calls import Unit
from advisor.advice.patterns.groups import ARITHMETIC, CASTS, NORMS, Group, bytes_of


def norm(units: Sequence[Unit]) -> Iterator[Group]:
    """RMSNorm or LayerNorm written out: a mean of squares, its root, and products."""
    done = -1
    for at, unit in enumerate(units):
        if at <= done or unit.name not in ("mean", "var", "var_mean", "linalg_vector_norm", "norm", "sum"):
            continue
        x = unit.tensors[0] if unit.tensors else None
        if x is None or len(x.shape) < 2 or x.shape[-1] < 16:
            continue
        elements, width = x.numel, x.shape[-1]
        rows = elements // width
        root = _root_after(units, at, rows)
        if root is None:
            continue
        start = at
        while start - 1 > done and _prepares_norm(units[start - 1], elements, rows):
            start -= 1
        end = root
        while end + 1 < len(units) and _finishes_norm(units[end + 1], elements, rows, width):
            end += 1
        if not any(one.numel == elements for one in units[root + 1 : end + 1]):
            continue
        own = units[start : end + 1]
        centred = any(one.name in ("sub", "var", "var_mean") for one in own)
        done = end
        yield Group(
            "norm",
            f"{'LayerNorm' if centred else 'RMSNorm'} over {width}",
            own,
            elements,
            width,
            bytes_of(own[0].tensors[0].dtype if own[0].tensors else "unknown"),
            bytes_of(own[-1].result_dtype),
        )


def _root_after(units: Sequence[Unit], at: int, rows: int) -> int | None:
    if units[at].name in ("linalg_vector_norm", "norm"):
        return at
    for next_at in range(at + 1, min(len(units), at + 8)):
        unit = units[next_at]
        if unit.name in ("rsqrt", "sqrt") and unit.numel == rows:
            return next_at
        if unit.name not in ARITHMETIC | CASTS | {"mean"}:
            return None
    return None


def _prepares_norm(unit: Unit, elements: int, rows: int) -> bool:
    if not unit.forward:
        return unit.numel in (elements, rows)
    if unit.name == "mean":
        return unit.numel == elements
    if unit.numel != elements:
        return False
    if unit.name in ("mul", "sub"):
        return len({tensor.shape for tensor in unit.tensors if tensor.numel == elements}) == 1 and (
            unit.name == "sub" or _is_square(unit, elements)
        )
    return unit.name in CASTS | {"pow", "square"}


def _is_square(unit: Unit, elements: int) -> bool:
    return sum(tensor.numel == elements for tensor in unit.tensors) == 2


def _finishes_norm(unit: Unit, elements: int, rows: int, width: int) -> bool:
    """Arithmetic with one full tensor, the others a value a row or a column."""
    if unit.name in CASTS:
        return unit.numel in (elements, rows, width)
    if unit.name not in ("mul", "div", "add", "sub", "reciprocal"):
        return False
    full = [tensor for tensor in unit.tensors if tensor.numel == elements]
    small = {tensor.numel for tensor in unit.tensors if tensor.numel != elements}
    return (len(full) == 1 and bool(small) and small <= {rows, width}) or (not full and unit.numel == rows)


def residual_norm(units: Sequence[Unit]) -> Iterator[Group]:
    """A residual added (after dropout or not) and normalised at once by a norm's own operator."""
    for at in range(1, len(units)):
        unit, added = units[at], units[at - 1]
        if unit.name not in NORMS or unit.name == "group_norm" or added.name != "add":
            continue
        if sum(tensor.numel == unit.numel for tensor in added.tensors) != 2 or added.numel != unit.numel:
            continue
        start = at - 1
        if start and "dropout" in units[start - 1].name and units[start - 1].numel == unit.numel:
            start -= 1
        width = unit.tensors[0].shape[-1]
        first = max(bytes_of(tensor.dtype) or 0.0 for tensor in added.tensors if tensor.numel == unit.numel)
        yield Group(
            "residual_norm",
            f"{' → '.join(one.name for one in units[start : at + 1])} over {width}",
            units[start : at + 1],
            unit.numel,
            width,
            first,
            first,
            1,
        )
