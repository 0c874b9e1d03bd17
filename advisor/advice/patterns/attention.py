"""Attention written out as two products around a softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from advisor.advice.calls import Product, Unit
from advisor.advice.patterns.groups import REARRANGING, SOFTMAX, Attention, Group
from advisor.roofline.costs import Tensor

#: Calls looked through for the other product.
_REACH = 24


def attention(units: Sequence[Unit]) -> Iterator[Group]:
    """``softmax(q k^T) v`` by products and a softmax."""
    done = -1
    for at, unit in enumerate(units):
        if at <= done or unit.name not in SOFTMAX or not unit.tensors:
            continue
        scores = unit.tensors[0]
        if len(scores.shape) < 2 or scores.shape[-1] < 16:
            continue
        before = _product_near(units, range(at - 1, max(done, at - 1 - _REACH), -1), _gives(scores))
        after = _product_near(units, range(at + 1, min(len(units), at + 1 + _REACH)), _takes(scores))
        if before is None or after is None:
            continue
        first, last = units[before].product, units[after].product
        if first is None or last is None:
            continue
        queries, keys = first.m, first.n
        sizes = {scores.numel, queries * keys, first.batch * queries * keys}
        own = [
            one for one in units[before : after + 1]
            if one in (units[before], units[after]) or one.numel in sizes or _shaped(one, queries, keys)
        ]  # fmt: skip
        around = list(_views_around(units, before, after, first, last))
        done = after
        names = [one.name for one in own]
        masked = any(name in ("masked_fill", "where", "tril", "triu", "add", "baddbmm") for name in names)
        triangular = any(name in ("tril", "triu") for name in names)
        yield Attention(
            "attention",
            f"attention over {queries} x {keys}",
            [*around[0], *own, *around[1]],
            scores.numel,
            keys,
            scores=first,
            values=last,
            causal=triangular or (queries == keys and _shared_mask(own, queries, keys)),
            masked=masked,
            dropout=any("dropout" in name for name in names),
            dtype=first.a.dtype,
            split=_split_before(units, before, first.a.numel),
        )


def _product_near(
    units: Sequence[Unit], reach: Sequence[int] | range, fits: Callable[[Product], bool]
) -> int | None:
    """The nearest unit in reach that is a product which fits."""
    for at in reach:
        product = units[at].product
        if product is not None and fits(product):
            return at
    return None


def _gives(scores: Tensor) -> Callable[[Product], bool]:
    return lambda product: product.results == scores.numel and product.n == scores.shape[-1]


def _takes(scores: Tensor) -> Callable[[Product], bool]:
    return lambda product: product.a.numel == scores.numel and product.k == scores.shape[-1]


def _shaped(unit: Unit, queries: int, keys: int) -> bool:
    return any(tensor.shape[-2:] == (queries, keys) for tensor in unit.tensors)


def _shared_mask(units: Sequence[Unit], queries: int, keys: int) -> bool:
    """A mask that all sequences of the batch share: such masks are triangular nearly always."""
    return any(
        tensor.shape[-2:] == (queries, keys) and tensor.numel == queries * keys
        for unit in units
        if unit.name in ("masked_fill", "where", "add")
        for tensor in unit.tensors
    )


def _views_around(
    units: Sequence[Unit], before: int, after: int, first: Product, last: Product
) -> tuple[list[Unit], list[Unit]]:
    """Transposed copies of the operands and of the result, which fused attention reads by strides."""
    sizes = {first.a.numel, first.b.numel, last.b.numel}
    earlier: list[Unit] = []
    for unit in reversed(units[max(0, before - 8) : before]):
        if unit.product is not None or (unit.forward and unit.name not in ("reshape", "contiguous", "clone")):
            break
        if unit.numel in sizes:
            earlier.append(unit)
    result = last.results
    later: list[Unit] = []
    for unit in units[after + 1 : after + 4]:
        if unit.product is not None:
            break
        if unit.name in REARRANGING and unit.numel == result:
            later.append(unit)
    return earlier[::-1], later


def _split_before(units: Sequence[Unit], before: int, heads: int) -> Unit | None:
    return next(
        (
            unit
            for unit in reversed(units[max(0, before - 12) : before])
            if unit.name in ("split", "split_with_sizes", "chunk", "unbind") and unit.numel == 3 * heads
        ),
        None,
    )
