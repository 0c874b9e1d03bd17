"""Running a graph once while keeping copies of what its sites are given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from advisor.swap.play import note_gradient_strides
from advisor.swap.site import Example
from advisor.swap.tensors import copied, plain

from . import checkpointing
from .facts import fake
from .match import Found

Keep = Callable[[Found, Example], None]


def fitting(wanted: Sequence[Found], left_bytes: int) -> list[Found]:
    """The sites whose inputs can be copied within so many bytes, the first ones first.

    What several sites take is copied once.
    """
    taken: set[Node] = set()
    fit = []
    for found in wanted:
        nodes = {*found.match.inputs, *found.extra} - taken
        more = sum(_span_bytes(value) for n in nodes if (value := fake(n)) is not None)
        if more <= left_bytes:
            left_bytes -= more
            taken |= nodes
            fit.append(found)
    return fit


def _span_bytes(tensor: Tensor) -> int:
    """Memory between a tensor's first and last element, all of which a copy with its strides takes."""
    sizes, strides = tuple(tensor.shape), tensor.stride()
    if not all(isinstance(n, int) for n in (*sizes, *strides)) or 0 in sizes:
        return 0
    return tensor.element_size() * (1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)))


class Collector(Interpreter):
    """Runs a graph node by node and hands on, for each site, the inputs it got.

    Args:
        gm: the graph.
        wanted: its sites.
        keep: told each site's example, once a run.
        inner: for each checkpointed part, by its module's name, the sites in it.
    """

    def __init__(
        self,
        gm: GraphModule,
        wanted: Sequence[Found],
        keep: Keep,
        inner: Mapping[str, Sequence[Found]] | None = None,
    ) -> None:
        super().__init__(gm)
        self._keep, self._inner = keep, inner or {}
        self._ending: dict[Node, list[Found]] = {}
        self._inputs: set[Node] = set()
        for found in wanted:
            order = {n: i for i, n in enumerate(gm.graph.nodes)}
            first = min(found.match.outputs, key=lambda n: order[n])
            self._ending.setdefault(first, []).append(found)
            self._inputs |= {*found.match.inputs, *found.extra}
        self._copies: dict[Node, Any] = {}
        #: Outputs of sites that were handed on, by node: which output of which call.
        self._outputs: dict[Node, list[tuple[int, Example]]] = {}

    def run_node(self, n: Node) -> Any:
        """Run a node; copy its value if a site takes it."""
        for found in self._ending.get(n, ()):
            self._hand_on(found)
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
            for index, example in self._outputs.get(n, ()):
                note_gradient_strides(value, index, example)
        if n in self._inputs and not isinstance(value, Tensor):
            self._copies[n] = value
        elif n in self._inputs and plain(value):
            # Short of memory, the example is what can be done without.
            with torch.no_grad(), contextlib.suppress(torch.OutOfMemoryError):
                self._copies[n] = copied(value)
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function; a checkpointed part is run likewise, under a real checkpoint."""
        if (
            not isinstance(target, torch._ops.HigherOrderOperator)
            or not args
            or not isinstance(args[0], GraphModule)
        ):
            return super().call_function(target, args, kwargs)
        name = next((k for k, v in self.module.named_children() if v is args[0]), "")
        if name not in self._inner:
            return super().call_function(target, args, kwargs)
        body = Collector(args[0], self._inner[name], self._keep)
        return checkpointing.run(lambda *given: body.run(*given), *args[1:], **kwargs)

    def _hand_on(self, found: Found) -> None:
        nodes = (*found.match.inputs, *found.extra)
        if any(n not in self._copies for n in nodes):
            return
        args = tuple(self._copies[n] for n in nodes)
        kind = next((a.device.type for a in args if isinstance(a, Tensor)), "cpu")
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        example = Example(args, {}, autocast, rng=found.match.random, grad=torch.is_grad_enabled())
        for index, node in enumerate(found.match.outputs):
            self._outputs.setdefault(node, []).append((index, example))
        self._keep(found, example)
