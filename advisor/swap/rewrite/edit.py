"""Taking matches out of a graph: the part as a function, and the graph with something in its place."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .facts import fake
from .match import Found
from .ops import read

#: Functions that look at values alone; what they are given may lie in memory as it likes.
_LAYOUT_FREE = frozenset(
    (
        "linear", "matmul", "baddbmm", "einsum", "contiguous", "reshape", "flatten", "layer_norm", "rms_norm",
        "cross_entropy", "nll_loss", "sum", "mean", "var", "cat", "stack",
    )
)  # fmt: skip
#: Functions whose result lies as their argument does.
_LAYOUT_PASSED_ON = frozenset(
    (
        "add", "sub", "mul", "div", "neg", "transpose", "permute", "t", "mT", "dropout", "relu", "silu",
        "gelu", "tanh", "sigmoid", "cast", "unsqueeze", "expand", "getitem", "softmax", "masked_fill",
    )
)  # fmt: skip

_OUT_OF_PLACE: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ipow: operator.pow,
}


def original_of(found: Found, order: dict[Node, int]) -> GraphModule:
    """What stands in the graph now, as a function of the match's inputs and its `extra` ones.

    Writes in place are written out of place, so that it leaves its arguments alone.
    """
    graph = Graph()
    known: dict[Node, Node] = {}
    for i, node in enumerate((*found.match.inputs, *found.extra)):
        known[node] = graph.placeholder(f"x{i}")
    known.update({node: known[twin] for node, twin in found.match.same})
    for node in sorted(found.interior, key=lambda n: order[n]):
        known[node] = _copied(graph, node, known)
    outputs = tuple(known[n] for n in found.match.outputs)
    graph.output(outputs if len(outputs) > 1 else outputs[0])
    return GraphModule(torch.nn.Module(), graph)


def _copied(graph: Graph, node: Node, known: dict[Node, Node]) -> Node:
    new = graph.node_copy(node, lambda n: known[n])
    new.meta = {}
    call = read(node)
    if call is None or not call.in_place:
        return new
    if node.target in _OUT_OF_PLACE:
        new.target = _OUT_OF_PLACE[node.target]
    elif new.op == "call_method":
        new.target = str(new.target).removesuffix("_")
    else:
        new.target = getattr(F, call.op)
        rest = {k: v for k, v in call.args.items() if k not in ("input", "inplace")}
        new.args, new.kwargs = (known[call.input],), rest
    return new


def copy_of(gm: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
    """A graph of its own over the same modules, and what became of each node."""
    graph = Graph()
    known: dict[Node, Node] = {}
    result = graph.graph_copy(gm.graph, known)
    output = graph.output(result)
    for node in gm.graph.nodes:
        if node.op == "output":
            known[node] = output
    return GraphModule(gm, graph), known


def replaced(gm: GraphModule, chosen: Iterable[tuple[Found, Callable[..., Any]]]) -> GraphModule:
    """A copy of the graph with each match's calls in place of its nodes.

    Args:
        gm: stays as it is.
        chosen: matches that do not overlap, each with what takes its inputs and gives its outputs.
    """
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    copy, known = copy_of(gm)
    for found, call in chosen:
        _put(copy.graph, found, call, known, order)
    copy.graph.lint()
    copy.recompile()
    return copy


def _put(
    graph: Graph, found: Found, call: Callable[..., Any], known: dict[Node, Node], order: dict[Node, int]
) -> None:
    match = found.match
    first = min(match.outputs, key=lambda n: order[n])
    with graph.inserting_before(known[first]):
        function, settings = _function(call)
        new = graph.call_function(function, tuple(known[n] for n in match.inputs), settings)
        new.meta["stack_trace"] = first.meta.get("stack_trace")
        made = (
            [graph.call_function(operator.getitem, (new, i)) for i in range(len(match.outputs))]
            if len(match.outputs) > 1
            else [new]
        )
        for i, old in enumerate(match.outputs):
            strides = _strides_that_count(old)
            if strides is not None:
                made[i] = graph.call_function(laid_out, (made[i], strides))
            # Later matches and checks of layout read it.
            made[i].meta["example_value"] = fake(old)
    for old, now in zip(match.outputs, made, strict=True):
        known[old].replace_all_uses_with(now)
    gone = [(n, known[n]) for n in sorted(found.interior, key=lambda n: -order[n]) if n in known]
    gone += [(node, known[node]) for node, _ in match.same]
    known.update(zip(match.outputs, made, strict=True))
    for node, old in gone:
        if not old.users:
            graph.erase_node(old)
            if known[node] is old:
                del known[node]


def _function(call: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A call as a graph can hold it: a function with a name, and keyword arguments."""
    if isinstance(call, partial) and not call.args and hasattr(call.func, "__name__"):
        return call.func, dict(call.keywords)

    def replacement(*args: Any) -> Any:
        return call(*args)

    return replacement, {}


def _strides_that_count(node: Node) -> tuple[int, ...] | None:
    """The strides of a result if something behind it may look at them, as ``view`` does; else None."""
    value = fake(node)
    if value is None or value.dim() < 2 or not _layout_counts(node, 4):
        return None
    strides = value.stride()
    return tuple(strides) if all(isinstance(s, int) for s in strides) else None


def _layout_counts(node: Node, depth: int) -> bool:
    for user in node.users:
        call = read(user)
        if call is None or depth == 0 or user.target == "view":
            return True
        if call.op in _LAYOUT_PASSED_ON:
            if _layout_counts(user, depth - 1):
                return True
        elif call.op not in _LAYOUT_FREE:
            return True
    return False


def laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor with its dimensions in memory in the order that these strides tell."""
    if x.stride() == strides:
        return x
    order = sorted(range(x.dim()), key=lambda d: (-strides[d], d))
    back = sorted(range(x.dim()), key=lambda d: order[d])
    return x.permute(order).contiguous().permute(back)
