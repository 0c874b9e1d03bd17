"""The model's operator calls in program order, each with what it launched forward and backward.

An operator that the user's code calls (``aten::softmax``) launches through others inside it
(``aten::_softmax``, a cast), and autograd launches its gradient later, on another thread. Patterns such as
explicit attention show only where these belong together; they are called a unit here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from advisor.roofline.costs import OpCall, Tensor
from advisor.roofline.costs.roles import is_matrix
from advisor.trace.link import Timeline
from advisor.trace.modules import forward_of
from advisor.trace.names import named
from advisor.trace.nesting import nearest
from advisor.trace.phases import PHASES, is_backward

if TYPE_CHECKING:
    from advisor.advice.loop import Loop

_NOT_THE_MODEL = tuple(PHASES.index(name) for name in ("input", "optimizer", "communication", "validation"))
#: Operators that choose among others and launch nothing of their own.
_MAX_CLIMB = 64


@dataclass(slots=True, eq=False)
class Unit:
    """One operator call of the model, in one step.

    Attributes:
        op: position in ``Trace.ops`` of the outermost ``aten::`` operator.
        name: its name without ``aten::`` and without the underscore of in-place operators.
        step: index of the step.
        track: host thread.
        forward: rows that it launched, in launch order; empty for a view.
        backward: rows of its gradient; empty where there is none or the trace does not link it.
        calls: what the operator, and each operator inside that launches, was called with.
    """

    op: int
    name: str
    step: int
    track: int
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    calls: Sequence[OpCall] = ()

    @property
    def call(self) -> OpCall:
        """The operator's own arguments."""
        return self.calls[0]

    @property
    def rows(self) -> list[int]:
        """All that it launched, forward and backward."""
        return self.forward + self.backward

    @property
    def tensors(self) -> list[Tensor]:
        """Tensor arguments, those in lists too; of the operators inside where its own are not recorded."""
        return next((found for found in map(tensors_of, self.calls) if found), [])

    @property
    def numel(self) -> int:
        """Elements of the largest argument; 0 where no shape is recorded."""
        return max((tensor.numel for tensor in self.tensors), default=0)

    @property
    def product(self) -> Product | None:
        """The matrix product that it is, or None."""
        return next((found for found in map(product_of, self.calls) if found is not None), None)

    @property
    def result_dtype(self) -> str:
        """Dtype that it gives: of the last cast inside, else of its widest argument; ``"unknown"``."""
        if self.name in ("to", "_to_copy", "type_as"):
            copies = [call for call in self.calls if call.name == "aten::copy_"]
            if copies and tensors_of(copies[-1]):
                return tensors_of(copies[-1])[0].dtype
        shaped = [tensor for tensor in self.tensors if tensor.shape]
        return max(shaped, key=lambda t: t.itemsize or 0).dtype if shaped else "unknown"


@dataclass(frozen=True, slots=True)
class Product:
    """``batch`` products of ``m x k`` by ``k x n``.

    Attributes:
        batch, m, n, k: sizes.
        a, b: the operands as the operator was given them.
    """

    batch: int
    m: int
    n: int
    k: int
    a: Tensor
    b: Tensor

    @property
    def results(self) -> int:
        """Elements of the result."""
        return self.batch * self.m * self.n


#: Position of the first factor among the arguments.
_FIRST_FACTOR = {
    "aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_addmm_activation": 1,
}  # fmt: skip


def tensors_of(call: OpCall) -> list[Tensor]:
    """Tensor arguments of a call, those in lists too."""
    flat = (item if isinstance(item, tuple) else (item,) for item in call.inputs)
    return [tensor for items in flat for tensor in items if isinstance(tensor, Tensor)]


def product_of(call: OpCall) -> Product | None:
    """The matrix product that a call asks for, or None."""
    at = _FIRST_FACTOR.get(call.name)
    if at is None or len(call.inputs) < at + 2:
        return None
    a, b = call.inputs[at], call.inputs[at + 1]
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or len(a.shape) != len(b.shape):
        return None
    if len(a.shape) not in (2, 3) or a.shape[-1] != b.shape[-2]:
        return None
    return Product(a.shape[0] if len(a.shape) == 3 else 1, a.shape[-2], b.shape[-1], a.shape[-1], a, b)


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A launch that multiplies matrices.

    Attributes:
        row: position in ``Timeline.launches``.
        unit: the call that it belongs to.
        product: what its operator was asked for.
        itemsize: bytes of an element.
    """

    row: int
    unit: Unit
    product: Product
    itemsize: float

    @property
    def flops(self) -> float:
        """Of all products of the batch."""
        return 2.0 * self.product.batch * self.product.m * self.product.n * self.product.k

    @property
    def elements(self) -> float:
        """Of both operands and the result."""
        p = self.product
        return float(p.batch * (p.m * p.k + p.k * p.n + p.m * p.n))

    @property
    def nbytes(self) -> float:
        """Operands read and the result written, once."""
        return self.itemsize * self.elements

    @property
    def row_lengths(self) -> list[int]:
        """Elements from one row to the next in each operand and in the result."""
        found = [self.product.n]
        for operand in (self.product.a, self.product.b):
            strides = operand.strides or (operand.shape[-1], 1)
            found.append(max(strides[-2:]))
        return found


class Calls:
    """The units of a loop's steady steps.

    Args:
        loop: whose calls.
    """

    def __init__(self, loop: Loop) -> None:
        self._timeline: Timeline = loop.timeline
        self._counted = loop.counted
        self._call = loop.call

    @cached_property
    def units(self) -> list[Unit]:
        """All units, by step, thread and time."""
        timeline = self._timeline
        rows, ops = timeline.launches, timeline.trace.ops
        wanted = self._counted & (rows.op >= 0) & ~np.isin(rows.phase, _NOT_THE_MODEL)
        at = np.flatnonzero(wanted)
        at = at[np.argsort(rows.launch_ts_ns[at], kind="stable")]
        source, is_gradient = self._forward_operators(at)
        units: dict[int, Unit] = {}
        inside: dict[int, list[int]] = {}
        for row, op, gradient, leaf in zip(
            at.tolist(), source.tolist(), is_gradient.tolist(), rows.op[at].tolist(), strict=True
        ):
            if op < 0:
                continue
            if op not in units:
                name = timeline.trace.names[ops.name[op]].removeprefix("aten::")
                units[op] = Unit(op, _plain(name), int(rows.step[row]), int(ops.track[op]))
                inside[op] = [op]
            (units[op].backward if gradient else units[op].forward).append(row)
            if not gradient and leaf not in inside[op]:
                inside[op].append(leaf)
        for op, unit in units.items():
            unit.calls = [self._call(leaf) for leaf in inside[op]]
        return sorted(units.values(), key=lambda unit: (unit.step, unit.track, unit.op))

    @cached_property
    def of_row(self) -> dict[int, Unit]:
        """The unit of each row that has one."""
        return {row: unit for unit in self.units for row in unit.rows}

    @cached_property
    def matrices(self) -> list[Matrix]:
        """All launches that multiply matrices and whose operator's sizes are recorded."""
        names, rows = self._timeline.trace.names, self._timeline.launches
        found = []
        for unit in self.units:
            for row in unit.rows:
                product = (
                    product_of(self._call(int(rows.op[row]))) if is_matrix(names[rows.name[row]]) else None
                )
                itemsize = product.a.itemsize if product is not None else None
                if product is not None and itemsize is not None:
                    found.append(Matrix(row, unit, product, itemsize))
        return found

    def sequences(self) -> Iterator[list[Unit]]:
        """Units of one step on one thread, in program order, each in turn."""
        current: list[Unit] = []
        for unit in self.units:
            if current and (unit.step, unit.track) != (current[0].step, current[0].track):
                yield current
                current = []
            current.append(unit)
        if current:
            yield current

    def _forward_operators(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The unit's operator of each row (-1: none), and whether the row is of its gradient."""
        timeline = self._timeline
        rows, ops = timeline.launches, timeline.trace.ops
        names = timeline.trace.names
        engine = named(names, ops.name, is_backward)
        owner = nearest(rows.op[at], timeline.op_parent, engine)
        source = rows.op[at].astype(np.int64)
        gradient = owner >= 0
        if gradient.any():
            owners, which = np.unique(owner[gradient], return_inverse=True)
            source[gradient] = forward_of(ops, np.flatnonzero(~engine), owners)[which.reshape(-1)]
        plain = named(names, ops.name, lambda name: name.startswith("aten::"))
        found = source >= 0
        source[found] = self._outermost(source[found], plain)
        return source, gradient

    def _outermost(self, op: np.ndarray, plain: np.ndarray) -> np.ndarray:
        """The outermost of the ``aten::`` operators directly around each of these."""
        op, parent = op.copy(), self._timeline.op_parent
        left = np.flatnonzero(plain[op]) if len(op) else np.zeros(0, np.int64)
        for _ in range(_MAX_CLIMB):
            above = parent[op[left]]
            goes = (above >= 0) & plain[np.maximum(above, 0)]
            left = left[goes]
            if not len(left):
                break
            op[left] = above[goes]
        return op


def _plain(name: str) -> str:
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name
