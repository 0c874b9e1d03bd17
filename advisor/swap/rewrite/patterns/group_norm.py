"""GroupNorm, and an activation behind it, as before a convolution in diffusion's networks.

Taken, with f one of ReLU, squared ReLU, SiLU, GELU by erf and GELU by tanh, called or written out:

    group_act_norm  f(group_norm(x)), and group_norm(x) alone; with the cast that autocast makes of either

Not taken: a norm that something beside its activation reads (then the norm alone is), a second activation
(which stays behind the first), InstanceNorm and BatchNorm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from advisor.kernels.group_norm import group_norm, unsupported_reasons
from advisor.swap.rewrite.candidates import bundled
from advisor.swap.rewrite.facts import Facts, fake, sole_user
from advisor.swap.rewrite.match import Match, pattern
from advisor.swap.rewrite.ops import Call, is_op, read
from advisor.swap.rewrite.parts import activation, is_float, uncast

_TAKEN = (torch.float32, torch.float16, torch.bfloat16)
#: Nodes of an activation that is written out, at most.
_LARGEST = 16


@pattern("group_act_norm", rank=16)
def find_group_norms(facts: Facts) -> Iterator[Match]:
    """Every GroupNorm, with the activation behind it where that alone reads it."""
    behind: dict[Node, tuple[str, Node]] = {}
    for node in facts.nodes:
        found = activation(node, facts)
        if found is None or not is_float(node):
            continue
        norm: Node = uncast(found.x)
        if _group_norm(norm, facts) is not None and _alone(norm, node):
            # The last one is the largest: squared ReLU holds ReLU.
            behind[norm] = found.name, node
    for node in facts.nodes:
        call = _group_norm(node, facts)
        if call is not None:
            yield _match(call, *behind.get(node, ("none", node)), facts)


def _group_norm(node: Any, facts: Facts) -> Call | None:
    """The node as a GroupNorm whose numbers are known."""
    call = read(node)
    if call is None or call.op != "group_norm" or not is_float(call.input, node):
        return None
    vectors = [v for v in (call["weight"], call["bias"]) if v is not None]
    known = isinstance(call["num_groups"], int) and isinstance(call["eps"], (int, float))
    return call if known and call["eps"] >= 0 and is_float(*vectors) else None


def _alone(norm: Node, last: Node) -> bool:
    """Whether all that is made of the norm goes into `last`."""
    queue, seen = [norm], set()
    while queue:
        node = queue.pop()
        if node is last or node in seen:
            continue
        seen.add(node)
        if not node.users or len(seen) > _LARGEST:
            return False
        queue += node.users
    return True


def _match(call: Call, name: str, out: Node, facts: Facts) -> Match:
    user = sole_user(out)
    if user is not None and is_op(user, "cast") and _narrows(out, user):
        out = user
    vectors = [v for v in (call["weight"], call["bias"]) if v is not None]
    settings = {
        "groups": call["num_groups"],
        "eps": float(call["eps"]),
        "name": name,
        "weighted": call["weight"] is not None,
        "biased": call["bias"] is not None,
        "dtype": facts.dtype(out),
    }
    weight, bias = ("weight" if settings["weighted"] else "None", "bias" if settings["biased"] else "None")
    permanent = (
        "from advisor.kernels.group_norm import group_norm\n"
        f"y = group_norm(x, {settings['groups']}, {weight}, {bias}, eps={settings['eps']:g}, "
        f'activation="{name}")'
    )
    what = "GroupNorm" if name == "none" else f"{name}(GroupNorm)"
    return Match(
        "group_act_norm", "norm", what, (call.input, *vectors), (out,), settings,
        (bundled("group_norm", _call, _reasons, permanent, **settings),),
    )  # fmt: skip


def _narrows(before: Node, after: Node) -> bool:
    """Whether a cast is to 16 bits: autocast's before a convolution, that the kernel can make itself."""
    wide, narrow = fake(before), fake(after)
    if wide is None or narrow is None:
        return False
    return narrow.dtype in _TAKEN and narrow.dtype.itemsize < wide.dtype.itemsize


def _named(vectors: Sequence[Tensor], weighted: bool, biased: bool) -> tuple[Tensor | None, Tensor | None]:
    left = list(vectors)
    weight = left.pop(0) if weighted else None
    return weight, left.pop(0) if biased else None


def _call(
    x: Tensor, *vectors: Tensor, groups: int, eps: float, name: str, weighted: bool, biased: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    weight, bias = _named(vectors, weighted, biased)
    return group_norm(x, groups, weight, bias, eps, name, out_dtype=dtype)


def _reasons(x: Tensor, *vectors: Tensor, groups: int, dtype: torch.dtype, **_: Any) -> Sequence[str]:
    # A weight and a bias are of one shape, so that it does not matter which of them is missing.
    of_result = [] if dtype in _TAKEN else [f"a result of {dtype}"]
    return [*unsupported_reasons(x, groups, *vectors), *of_result]
