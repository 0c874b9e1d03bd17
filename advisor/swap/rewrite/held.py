"""Numbers that a step puts on the device anew each time, put there once.

``torch.where(mask, torch.tensor(0.0, device=x.device), low)``, as masks are written, makes the host wait for
a copy in each step, and cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .ops import read

_MAKERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)
#: What reads a tensor into memory of its own, so that no one can write into the one that is kept.
_READERS = frozenset(
    ["where", "masked_fill", "add", "sub", "mul", "div", "pow", "eq", "ne", "lt", "le", "gt", "ge", "cat"]
)


def hold(gm: GraphModule) -> GraphModule:
    """Make such tensors at the first call and keep them, where nothing can write into them; in place."""
    for node in gm.graph.nodes:
        if _holdable(node):
            node.target = _once(node.target)
    gm.recompile()
    return gm


def _holdable(node: Node) -> bool:
    if node.op != "call_function" or node.target not in _MAKERS or node.all_input_nodes:
        return False
    if node.kwargs.get("requires_grad"):
        return False
    return all(_only_reads(user, node) for user in node.users)


def _only_reads(user: Node, node: Node) -> bool:
    call = read(user)
    if call is None or call.op not in _READERS:
        return False
    return not call.in_place or call.input is not node


def _once(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    kept: list[Tensor] = []

    def held(*args: Any, **kwargs: Any) -> Tensor:
        if not kept:
            # What is made in inference mode could not be saved for a backward.
            with torch.inference_mode(False):
                kept.append(make(*args, **kwargs))
        return kept[0]

    return held
