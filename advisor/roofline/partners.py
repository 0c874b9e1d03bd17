"""The other half of a node of the autograd graph: the forward call of a backward one, and the reverse.

A backward operator's arguments are its gradients alone; what it works with was an argument of the forward
call. Both carry the node's sequence number.
"""

from __future__ import annotations

from functools import cached_property

import msgspec
import numpy as np

from advisor.trace.events import Events
from advisor.trace.names import named


class _Node(msgspec.Struct, gc=False):
    number: int = msgspec.field(default=-1, name="Sequence number")


_NODE = msgspec.json.Decoder(_Node)


class Partners:
    """Operators by the number of their autograd node; nothing is read before the first question.

    Args:
        ops: all operators, sorted by start.
        names: the interned names.
    """

    def __init__(self, ops: Events, names: list[str]) -> None:
        self._ops, self._names = ops, names
        self._of_name: dict[str, dict[int, list[int]]] = {}

    def partner(self, op: int, name: str) -> int:
        """Position of the one other operator of `op`'s node whose name begins so, or -1."""
        number = self._number(op)
        if name not in self._of_name:
            found: dict[int, list[int]] = {}
            candidates = named(self._names, self._ops.name, lambda text: text.startswith(name))
            for at in np.flatnonzero(candidates).tolist():
                found.setdefault(self._number(at), []).append(at)
            self._of_name[name] = found
        of_node = self._of_name[name].get(number, []) if number >= 0 else []
        partners = [at for at in of_node if self._ops.name[at] != self._ops.name[op]]
        return partners[0] if len(partners) == 1 else -1

    @cached_property
    def _numbers(self) -> np.ndarray:
        """int64 (n,): the sequence number that each operator carries, or -1."""
        return np.array([_number(raw) for raw in self._ops.args], np.int64)

    def _number(self, op: int) -> int:
        """The node that an operator made or runs.

        One without a number made the node before the one that the next operator on its thread would make.
        """
        own = int(self._numbers[op])
        if own >= 0:
            return own
        ops = self._ops
        end = int(ops.ts_ns[op] + ops.dur_ns[op])
        later = np.flatnonzero(self._numbers >= 0)
        later = later[(ops.track[later] == ops.track[op]) & (ops.ts_ns[later] >= end)]
        return int(self._numbers[later[0]]) - 1 if len(later) else -1


def _number(raw: msgspec.Raw) -> int:
    try:
        return _NODE.decode(raw).number
    except msgspec.DecodeError:
        return -1
