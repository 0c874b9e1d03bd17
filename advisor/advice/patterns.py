"""Calls that belong together: explicit attention, hand-written norms, gates, RoPE, chains of pointwise work.

A trace tells shapes and order but not which result goes where; a pattern is a run of calls whose names,
order and sizes fit. Each call is in one pattern at most, the first of `FINDERS` that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from advisor.advice.calls import Product, Unit
from advisor.roofline.costs import DTYPE_BYTES, Tensor

if TYPE_CHECKING:
    from advisor.advice.loop import Loop

#: Calls looked through for the other product of an attention, and for a product of a gate.
_REACH = 24
_CASTS = frozenset({"to", "_to_copy", "type_as", "float", "copy"})
_SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax"})
_NORMS = frozenset({"layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "group_norm"})
_ACTIVATIONS = frozenset(
    {"silu", "gelu", "sigmoid", "relu", "tanh", "mish", "elu", "leaky_relu", "hardswish"}
)
#: What rearranges a tensor, by a view or a copy.
_REARRANGING = frozenset({"reshape", "contiguous", "clone", "view", "transpose", "permute", "_unsafe_view"})
#: Pointwise operators that may read a second tensor of the same size.
_BINARY = frozenset({
    "add", "sub", "mul", "div", "where", "addcmul", "addcdiv", "lerp", "maximum", "minimum",
})  # fmt: skip
#: A chain on fewer elements takes less time than its launch.
_MIN_CHAIN = 65_536
_ARITHMETIC = frozenset({
    "add", "sub", "rsub", "mul", "div", "pow", "square", "neg", "abs", "exp", "log", "sqrt", "rsqrt",
    "reciprocal", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "where", "masked_fill", "addcmul",
    "addcdiv", "lerp", "sin", "cos", "erf", "softplus", "log1p", "expm1",
})  # fmt: skip
_POINTWISE = _ARITHMETIC | _ACTIVATIONS | _CASTS | {"dropout", "native_dropout", "glu", "prelu"}
_REDUCING = frozenset({"mean", "var", "var_mean", "sum", "std", "linalg_vector_norm", "norm", "amax"})


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Calls of one step that one kernel could do, with their gradients.

    Attributes:
        kind: a key of `FINDERS`.
        what: how a reader would name it: ``"add → gelu → layer_norm"``.
        units: in program order.
        elements: of the tensor that it works on.
        width: elements of a row, where it works on rows; 0 elsewhere.
        bytes_in, bytes_out: bytes an element of what goes in and comes out; None where not recorded.
        extra_inputs: tensors of that size which are read besides the first.
    """

    kind: str
    what: str
    units: Sequence[Unit]
    elements: int
    width: int = 0
    bytes_in: float | None = None
    bytes_out: float | None = None
    extra_inputs: int = 0

    @property
    def forward(self) -> list[int]:
        """Rows of the forward."""
        return [row for unit in self.units for row in unit.forward]

    @property
    def backward(self) -> list[int]:
        """Rows of the gradients."""
        return [row for unit in self.units for row in unit.backward]

    @property
    def rows(self) -> list[int]:
        """All rows."""
        return self.forward + self.backward

    @property
    def forward_bytes(self) -> float:
        """What one kernel would have to move: inputs once, the result once."""
        read, written = self._widths
        return self.elements * (read * (1 + self.extra_inputs) + written)

    @property
    def _widths(self) -> tuple[float, float]:
        """Bytes an element of input and result; 16 bits where not recorded."""
        return (
            2.0 if self.bytes_in is None else self.bytes_in,
            2.0 if self.bytes_out is None else self.bytes_out,
        )

    @property
    def backward_bytes(self) -> float:
        """For the gradients: the result's gradient and the inputs once, the inputs' gradients once."""
        read, written = self._widths
        return self.elements * (written + 2 * read * (1 + self.extra_inputs))


@dataclass(frozen=True, slots=True, eq=False)
class Attention(Group):
    """Attention written out as two products around a softmax.

    Attributes:
        scores: the product of queries and keys.
        values: the product of weights and values.
        causal: whether a triangular mask is seen.
        masked: whether any mask is.
        dropout: whether weights are dropped.
        dtype: of the products.
        split: what split one projection into queries, keys and values, or None. Its gradient concatenates
            theirs, which is slow where they are transposed.
    """

    scores: Product = field(kw_only=True)
    values: Product = field(kw_only=True)
    causal: bool = field(kw_only=True)
    masked: bool = field(kw_only=True)
    dropout: bool = field(kw_only=True)
    dtype: str = field(kw_only=True)
    split: Unit | None = field(kw_only=True, default=None)


class Patterns:
    """All groups of a loop, by kind."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = list(groups)

    def of(self, kind: str) -> list[Group]:
        """Those of a kind, in program order."""
        return [group for group in self.groups if group.kind == kind]

    def rows(self, *kinds: str) -> set[int]:
        """Rows of these kinds; of all where none is named."""
        return {row for group in self.groups if not kinds or group.kind in kinds for row in group.rows}


def find_patterns(loop: Loop) -> Patterns:
    """The groups of all steady steps."""
    found: list[Group] = []
    for sequence in loop.calls.sequences():
        free = list(sequence)
        for finder in FINDERS.values():
            for group in finder(free):
                found.append(group)
            taken = {id(unit) for group in found for unit in group.units}
            free = [unit for unit in free if id(unit) not in taken]
    return Patterns(found)


def attention(units: Sequence[Unit]) -> Iterator[Group]:
    """``softmax(q k^T) v`` by products and a softmax."""
    done = -1
    for at, unit in enumerate(units):
        if at <= done or unit.name not in _SOFTMAX or not unit.tensors:
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
        if (
            unit.name in ("reshape", "contiguous", "clone", "view", "transpose", "permute")
            and unit.numel == result
        ):
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
            _bytes_of(own[0].tensors[0].dtype if own[0].tensors else "unknown"),
            _bytes_of(own[-1].result_dtype),
        )


def _root_after(units: Sequence[Unit], at: int, rows: int) -> int | None:
    if units[at].name in ("linalg_vector_norm", "norm"):
        return at
    for next_at in range(at + 1, min(len(units), at + 8)):
        unit = units[next_at]
        if unit.name in ("rsqrt", "sqrt") and unit.numel == rows:
            return next_at
        if unit.name not in _ARITHMETIC | _CASTS | {"mean"}:
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
    return unit.name in _CASTS | {"pow", "square"}


def _is_square(unit: Unit, elements: int) -> bool:
    return sum(tensor.numel == elements for tensor in unit.tensors) == 2


def _finishes_norm(unit: Unit, elements: int, rows: int, width: int) -> bool:
    """Arithmetic with one full tensor, the others a value a row or a column."""
    if unit.name in _CASTS:
        return unit.numel in (elements, rows, width)
    if unit.name not in ("mul", "div", "add", "sub", "reciprocal"):
        return False
    full = [tensor for tensor in unit.tensors if tensor.numel == elements]
    small = {tensor.numel for tensor in unit.tensors if tensor.numel != elements}
    return (len(full) == 1 and bool(small) and small <= {rows, width}) or (not full and unit.numel == rows)


def gate(units: Sequence[Unit]) -> Iterator[Group]:
    """``activation(a) * b``, a product of matrices in between or not."""
    waiting: list[Unit] = []
    for unit in units:
        if unit.name in _ACTIVATIONS:
            waiting = [*waiting[-3:], unit]
        elif unit.name == "mul" and sum(tensor.numel == unit.numel for tensor in unit.tensors) == 2:
            partner = next((one for one in reversed(waiting) if one.numel == unit.numel), None)
            if partner is not None and unit.numel >= 4096:
                waiting = []
                width = unit.tensors[0].shape[-1] if unit.tensors[0].shape else 0
                size = _bytes_of(unit.result_dtype)
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
        elif unit.product is None and unit.forward and unit.name not in _CASTS:
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
        size = _bytes_of(own[-1].result_dtype)
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
    start = at - 1 if at - 1 > done and units[at - 1].name in _CASTS else at
    end = at + 1 if at + 1 < len(units) and units[at + 1].name in _CASTS else at
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
        if at <= done or unit.name not in _SOFTMAX or not unit.numel:
            continue
        start, end = at, at
        while (
            start - 1 > done and units[start - 1].numel == unit.numel and units[start - 1].name in _POINTWISE
        ):
            start -= 1
        while end + 1 < len(units) and units[end + 1].numel == unit.numel and units[end + 1].name in _CASTS:
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
            _bytes_of(own[0].tensors[0].dtype),
            _bytes_of(own[-1].result_dtype),
        )


def _works_on(unit: Unit, elements: int, names: frozenset[str]) -> bool:
    return unit.numel == elements and unit.name in names


def residual_norm(units: Sequence[Unit]) -> Iterator[Group]:
    """A residual added (after dropout or not) and normalised at once by a norm's own operator."""
    for at in range(1, len(units)):
        unit, added = units[at], units[at - 1]
        if unit.name not in _NORMS or unit.name == "group_norm" or added.name != "add":
            continue
        if sum(tensor.numel == unit.numel for tensor in added.tensors) != 2 or added.numel != unit.numel:
            continue
        start = at - 1
        if start and "dropout" in units[start - 1].name and units[start - 1].numel == unit.numel:
            start -= 1
        width = unit.tensors[0].shape[-1]
        first = max(_bytes_of(tensor.dtype) or 0.0 for tensor in added.tensors if tensor.numel == unit.numel)
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


def chain(units: Sequence[Unit]) -> Iterator[Group]:
    """Neighbours of pointwise work on tensors of one size, up to a norm, a softmax or a sum at the end."""
    run: list[Unit] = []
    for unit in [*units, None]:
        ends = unit is not None and unit.name in _NORMS | _SOFTMAX | _REDUCING
        fits = unit is not None and (not run or _same_size(run, unit))
        if unit is not None and not unit.forward and fits:
            if run:
                run.append(unit)
            continue
        if unit is not None and fits and (unit.name in _POINTWISE or (ends and run)):
            run.append(unit)
            if not ends:
                continue
            unit = None
        long_enough = sum(bool(one.forward) for one in run) >= 2 and run[0].numel >= _MIN_CHAIN
        if long_enough and not _reduces_all(run[-1]):
            yield _chain_of(run)
        run = [unit] if unit is not None and unit.name in _POINTWISE and unit.forward else []


def _reduces_all(unit: Unit) -> bool:
    """Whether a number comes out: the end of a loss."""
    return unit.name in _REDUCING and not any(value.startswith("[") for value in unit.call.concrete)


def _same_size(run: Sequence[Unit], unit: Unit) -> bool:
    return unit.numel == max(one.numel for one in run)


def _chain_of(run: Sequence[Unit]) -> Group:
    working = [unit for unit in run if unit.forward]
    elements = working[0].numel
    extra = sum(
        max(0, sum(tensor.numel == elements for tensor in unit.tensors) - 1)
        for unit in working
        if unit.name
        in ("add", "sub", "mul", "div", "where", "addcmul", "addcdiv", "lerp", "maximum", "minimum")
    )
    shape = max(working[0].tensors, key=lambda t: t.numel).shape if working[0].tensors else ()
    reduced = working[-1].name in _REDUCING
    return Group(
        "chain",
        " → ".join(unit.name for unit in working),
        list(run),
        elements,
        shape[-1] if shape else 0,
        _bytes_of(working[0].tensors[0].dtype if working[0].tensors else "unknown"),
        0.0 if reduced else _bytes_of(working[-1].result_dtype),
        extra,
    )


def ends_in_norm(group: Group) -> bool:
    """Whether a chain needs whole rows: it ends in a norm or a softmax."""
    return group.units[-1].name in _NORMS | _SOFTMAX


def _bytes_of(dtype: str) -> float | None:
    return DTYPE_BYTES.get(dtype)


def score_entries(group: Attention) -> float:
    """Entries of the scores that are needed: half of them below a triangular mask."""
    entries = float(group.scores.results)
    return entries / 2 if group.causal and not math.isclose(group.scores.m, 1) else entries


#: In order of precedence.
FINDERS: dict[str, Callable[[Sequence[Unit]], Iterator[Group]]] = {
    "attention": attention,
    "norm": norm,
    "gate": gate,
    "rope": rope,
    "softmax": softmax,
    "residual_norm": residual_norm,
    "chain": chain,
}
