"""Autocast's casts behind a norm, written into the graph, where nothing but one layer reads the norm.

A norm gives float32 under autocast, an activation behind it too, and the linear layer or convolution behind
those rounds that to 16 bits first. Written out, the cast can be made by the kernel that takes the norm's
place; as it is, the graph gives the same bits as before, forward and backward.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .facts import fake, sole_user
from .ops import forget, read

_NORMS = ("layer_norm", "rms_norm", "group_norm")
_ACTIVATIONS = ("relu", "silu", "gelu")
_LAYERS = ("linear", "conv1d", "conv2d", "conv3d")
_NARROW = (torch.bfloat16, torch.float16)


def write_out(gm: GraphModule) -> int:
    """Insert the casts, in place; how many."""
    count = 0
    for node in list(gm.graph.nodes):
        dtype = _rounded_to(node)
        value = fake(node)
        if dtype is None or value is None:
            continue
        with gm.graph.inserting_after(node):
            cast = gm.graph.call_method("to", (node, dtype))
        cast.meta = {**node.meta, "example_value": value.to(dtype)}
        node.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)
        count += 1
    if count:
        forget(gm.graph.nodes)
        gm.recompile()
    return count


def _rounded_to(node: Node) -> torch.dtype | None:
    """The dtype to which the one layer that reads a norm, or its activation, rounds it; else None."""
    user = sole_user(node) if _normalises(node) else None
    layer = read(user) if user is not None else None
    if user is None or layer is None or layer.op not in _LAYERS or layer.input is not node:
        return None
    before, after = fake(node), fake(user)
    if before is None or after is None or before.dtype != torch.float32 or after.dtype not in _NARROW:
        return None
    return after.dtype


def _normalises(node: Node) -> bool:
    """Whether the node is a norm, or an activation of a norm that nothing else reads."""
    call = read(node)
    if call is not None and call.op in _ACTIVATIONS and isinstance(call.input, Node):
        call = read(call.input) if sole_user(call.input) is node else None
    return call is not None and call.op in _NORMS
