"""Activation checkpointing in a traced step.

Dynamo turns ``torch.utils.checkpoint`` into an operator that only tags what may be recomputed, for a
compiler to act upon. Run as it is, it recomputes nothing and keeps all activations. So a graph that is run
eagerly gets the real thing back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

from .ops import function_name

_NAMES = ("tag_activation_checkpoint", "wrap_activation_checkpoint")
_SETTINGS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
#: Operators with graphs of their own that run eagerly as well as compiled.
_HARMLESS = (*_NAMES, "autograd_function_apply")


def is_checkpoint(node: Node) -> bool:
    """Whether the node runs a checkpointed part of the step."""
    return node.op == "call_function" and function_name(node.target) in _NAMES and is_higher_order(node)


def is_higher_order(node: Node) -> bool:
    """Whether the node takes a graph."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def needs_compiler(gm: GraphModule) -> str:
    """The operator in the graph that is slow unless compiled (flex attention, say); else empty."""
    for node in gm.graph.nodes:
        if is_higher_order(node) and function_name(node.target) not in _HARMLESS:
            return function_name(node.target)
    return next((name for _, _, body in bodies(gm) if (name := needs_compiler(body))), "")


def bodies(gm: GraphModule) -> Iterator[tuple[Node, Node, GraphModule]]:
    """(the node that runs it, the node that fetches it, the graph) of each checkpointed part."""
    for node in gm.graph.nodes:
        if is_checkpoint(node) and isinstance(node.args[0], Node) and node.args[0].op == "get_attr":
            body = getattr(gm, str(node.args[0].target), None)
            if isinstance(body, GraphModule):
                yield node, node.args[0], body


def run(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the tagging operator stands for."""
    settings = {name: kwargs.pop(name) for name in _SETTINGS if name in kwargs}
    settings.setdefault("use_reentrant", False)
    return checkpoint(body, *args, **settings, **kwargs)


def run_eagerly(gm: GraphModule) -> GraphModule:
    """The graph with real checkpoints in place of tags, changed in place."""
    for node in gm.graph.nodes:
        if is_checkpoint(node):
            node.target = run
    gm.recompile()
    return gm
