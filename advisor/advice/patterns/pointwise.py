"""Gates, rotary embedding, softmaxes with what is around them, and chains of pointwise work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from advisor.advice.calls import Unit
from advisor.advice.patterns.groups import (
    ACTIVATIONS,
    BINARY,
    CASTS,
    NORMS,
    POINTWISE,
    REDUCING,
    SOFTMAX,
    Group,
    bytes_of,
)

#: A chain on fewer elements takes less time than its launch.
_MIN_CHAIN = 65_536


def gate(units: Sequence[Unit]) -> Iterator[Group]:
    """``activation(a) * b``, a product of matrices in between or not."""
    waiting: list[Unit] = []
    for unit in units:
        if unit.name in ACTIVATIONS:
            waiting = [*waiting[-3:], unit]
        elif unit.name == "mul" and sum(tensor.numel == unit.numel for tensor in unit.tensors) == 2:
            partner = next((one for one in reversed(waiting) if one.numel == unit.numel), None)
            if partner is not None and unit.numel >= 4096:
                waiting = []
                width = unit.tensors[0].shape[-1] if unit.tensors[0].shape else 0
                size = bytes_of(unit.result_dtype)
                yield Group(
                    "gate",
                    f"{partner.name}(a) * b over {width}",
                    [partner, unit],
                    unit.numel,
                    width,
                    size,
                    size,
                    1,
                )
        elif unit.product is None and unit.forward and unit.name not in CASTS:
            waiting = []


def rope(units: Sequence[Unit]) -> Iterator[Group]:
    """Rotary embedding: ``x * cos + rotate_half(x) * sin``, or a product of complex numbers."""
    done = -1
    for at, unit in enumerate(units):
        if at <= done or not unit.tensors:
            continue
        span = _rotation_of_halves(units, at, done) or _complex_rotation(units, at, done)
        if span is None:
            continue
        start, end = span
        own = units[start : end + 1]
        done = end
        elements = max(one.numel for one in own)
        shape = max((tensor for one in own for tensor in one.tensors), key=lambda t: t.numel).shape
        size = bytes_of(own[-1].result_dtype)
        yield Group("rope", f"RoPE over {shape[-1]}", own, elements, shape[-1], size, size)


def _rotation_of_halves(units: Sequence[Unit], at: int, done: int) -> tuple[int, int] | None:
    if units[at].name != "neg":
        return None
    half = units[at].numel
    end = _next_launching(units, at)
    if end is None or units[end].name not in ("cat", "stack") or not half:
        return None
    full = 2 * half
    start = at
    while start - 1 > done and (
        (units[start - 1].name == "mul" and units[start - 1].numel == full)
        or (not units[start - 1].forward and units[start - 1].numel in (half, full))
    ):
        start -= 1
    for name in ("mul", "add"):
        following = _next_launching(units, end)
        if following is None or units[following].name != name or units[following].numel != full:
            return None
        end = following
    return start, end


def _complex_rotation(units: Sequence[Unit], at: int, done: int) -> tuple[int, int] | None:
    unit = units[at]
    if unit.name != "mul" or not any(tensor.dtype.startswith("complex") for tensor in unit.tensors):
        return None
    start = at - 1 if at - 1 > done and units[at - 1].name in CASTS else at
    end = at + 1 if at + 1 < len(units) and units[at + 1].name in CASTS else at
    return start, end


def _next_launching(units: Sequence[Unit], at: int) -> int | None:
    for following in range(at + 1, min(len(units), at + 6)):
        if units[following].forward:
            return following
    return None


def softmax(units: Sequence[Unit]) -> Iterator[Group]:
    """A softmax with the scale, mask and casts before and after it."""
    done = -1
    for at, unit in enumerate(units):
        if at <= done or unit.name not in SOFTMAX or not unit.numel:
            continue
        start, end = at, at
        while (
            start - 1 > done and units[start - 1].numel == unit.numel and units[start - 1].name in POINTWISE
        ):
            start -= 1
        while end + 1 < len(units) and units[end + 1].numel == unit.numel and units[end + 1].name in CASTS:
            end += 1
        own = [one for one in units[start : end + 1] if one.forward]
        if len([row for one in own for row in one.forward]) < 2:
            continue
        done = end
        yield Group(
            "softmax",
            " → ".join(one.name for one in own),
            units[start : end + 1],
            unit.numel,
            unit.tensors[0].shape[-1],
            bytes_of(own[0].tensors[0].dtype),
            bytes_of(own[-1].result_dtype),
        )


def chain(units: Sequence[Unit]) -> Iterator[Group]:
    """Neighbours of pointwise work on tensors of one size, up to a norm, a softmax or a sum at the end."""
    run: list[Unit] = []
    for unit in [*units, None]:
        ends = unit is not None and unit.name in NORMS | SOFTMAX | REDUCING
        fits = unit is not None and (not run or unit.numel == run[0].numel)
        if unit is not None and not unit.forward and fits:
            if run:
                run.append(unit)
            continue
        if unit is not None and fits and (unit.name in POINTWISE or (ends and run)):
            run.append(unit)
            if not ends:
                continue
            unit = None
        long_enough = sum(bool(one.forward) for one in run) >= 2 and run[0].numel >= _MIN_CHAIN
        if long_enough and not _reduces_all(run[-1]):
            yield _chain_of(run)
        run = [unit] if unit is not None and unit.name in POINTWISE and unit.forward else []


def _reduces_all(unit: Unit) -> bool:
    """Whether a number comes out: the end of a loss."""
    return unit.name in REDUCING and not any(value.startswith("[") for value in unit.call.concrete)


def _chain_of(run: Sequence[Unit]) -> Group:
    working = [unit for unit in run if unit.forward]
    elements = working[0].numel
    extra = sum(
        max(0, sum(tensor.numel == elements for tensor in unit.tensors) - 1)
        for unit in working
        if unit.name in BINARY
    )
    shape = max(working[0].tensors, key=lambda t: t.numel).shape if working[0].tensors else ()
    reduced = working[-1].name in REDUCING
    return Group(
        "chain",
        " → ".join(unit.name for unit in working),
        list(run),
        elements,
        shape[-1] if shape else 0,
        bytes_of(working[0].tensors[0].dtype if working[0].tensors else "unknown"),
        0.0 if reduced else bytes_of(working[-1].result_dtype),
        extra,
    )
