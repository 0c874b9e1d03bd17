"""The parts of a graph whose value no input of the step can change, computed where it is needed.

A causal mask is one: ``torch.tril(torch.ones(T, T))``, a comparison of positions, or a buffer of a module.
It is not recognised by its spelling but evaluated, on the CPU, and looked at. A module's tensor can change
between steps, so whatever was concluded from it holds while it is the same tensor in the same version
(`Proof`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from .ops import read

#: Elements up to which a constant is computed: a mask of 8192 x 8192.
_LIMIT = 1 << 26

_FACTORIES = frozenset(["ones", "zeros", "full", "arange", "tensor"])
_LIKE = {"ones_like": 1.0, "zeros_like": 0.0, "new_ones": 1.0, "new_zeros": 0.0}
_PURE = frozenset(
    [
        "tril",
        "triu",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "not",
        "and",
        "or",
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "pow",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "square",
        "where",
        "masked_fill",
        "transpose",
        "t",
        "mT",
        "permute",
        "reshape",
        "flatten",
        "unflatten",
        "unsqueeze",
        "squeeze",
        "expand",
        "repeat",
        "contiguous",
        "clone",
        "detach",
        "getitem",
        "cast",
    ]
)


class Constants:
    """Values of nodes that hang on nothing but constants and tensors that modules keep.

    Args:
        inputs: what stands for each placeholder.
    """

    def __init__(self, inputs: Mapping[Node, Any]) -> None:
        self._inputs = inputs
        self._known: dict[Node, tuple[Tensor, frozenset[Node]] | None] = {}

    def leave_out(self, nodes: Iterable[Node]) -> None:
        """Take these for not constant: something writes into them."""
        self._known.update(dict.fromkeys(nodes))

    def of(self, node: Node) -> Tensor | None:
        """The node's value on the CPU, or None where it is not constant."""
        found = self._value(node)
        return None if found is None else found[0]

    def sources(self, node: Node) -> frozenset[Node]:
        """The modules' tensors that the value hangs on."""
        found = self._value(node)
        return frozenset() if found is None else found[1]

    def given(self, placeholder: Node) -> Any:
        """What stands for a placeholder."""
        return self._inputs.get(placeholder)

    def _value(self, node: Node) -> tuple[Tensor, frozenset[Node]] | None:
        if node not in self._known:
            self._known[node] = None
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                self._known[node] = self._compute(node)
        return self._known[node]

    def _compute(self, node: Node) -> tuple[Tensor, frozenset[Node]] | None:
        value = node.meta.get("example_value")
        if not isinstance(value, Tensor) or any(not isinstance(n, int) for n in value.shape):
            return None
        if value.numel() > _LIMIT:
            return None
        if node.op == "placeholder":
            given = self._inputs.get(node)
            if not isinstance(given, Tensor) or given.requires_grad or not kept_by_module(node):
                return None
            return (given.detach().cpu(), frozenset([node])) if _is_plain(given) else None
        call = read(node)
        if call is None:
            return None
        if call.op in _LIKE or call.op in ("full_like", "new_full"):
            fill = _LIKE.get(call.op, call.args.get("fill_value"))
            if isinstance(fill, (int, float)):
                return torch.full(tuple(value.shape), fill, dtype=value.dtype), frozenset()
            return None
        if call.op not in _PURE and call.op not in _FACTORIES:
            return None
        return self._run(node, call.op, value.dtype, call.in_place)

    def _run(self, node: Node, op: str, dtype: torch.dtype, in_place: bool) -> Any:
        parts = {n: self._value(n) for n in node.all_input_nodes}
        if any(part is None for part in parts.values()) or (op in _PURE and not parts):
            return None
        sources = frozenset().union(*(part[1] for part in parts.values() if part))
        if op == "cast":
            (part,) = list(parts.values())[:1]
            assert part is not None
            return part[0].to(dtype), sources

        def value_of(n: Node) -> Tensor:
            part = parts[n]
            assert part is not None
            return part[0].clone() if in_place else part[0]

        args = map_arg(node.args, value_of)
        kwargs = {k: v for k, v in map_arg(dict(node.kwargs), value_of).items() if k != "device"}
        if op == "tensor" or op in _FACTORIES:
            kwargs["dtype"] = dtype
        try:
            target: Any = node.target
            result = (
                getattr(args[0], target)(*args[1:], **kwargs)
                if node.op == "call_method"
                else target(*args, **kwargs)
            )
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
        return (result, sources) if isinstance(result, Tensor) else None


def kept_by_module(placeholder: Node) -> bool:
    """Whether a placeholder stands for a tensor that a module holds, rather than for data of the step."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        source = getattr(placeholder.meta.get("grapharg"), "source", None)
    while source is not None:
        if any("NNModuleSource" in kind.__name__ for kind in type(source).__mro__):
            return True
        source = getattr(source, "base", None)
    return False


def _is_plain(value: Tensor) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and not value.is_meta


@dataclass(frozen=True, eq=False)
class Proof:
    """A conclusion from a tensor's value, which stands while the tensor is the same in the same version.

    Attributes:
        index: of the graph's input.
        tensor: which it was.
        version: its count of writes.
    """

    index: int
    tensor: weakref.ref[Tensor]
    version: int

    @classmethod
    def about(cls, index: int, tensor: Tensor) -> Proof:
        """A proof that rests on this input."""
        return cls(index, weakref.ref(tensor), _version(tensor))

    def stands(self, inputs: Any) -> bool:
        """Whether it holds for these inputs of the graph."""
        given: Tensor = inputs[self.index]
        return self.tensor() is given and _version(given) == self.version


def _version(tensor: Tensor) -> int:
    # Tensors made in inference mode cannot be written outside it and count no writes.
    return 0 if tensor.is_inference() else tensor._version
