"""Activations with their bias, activations written out, and gated ones.

Taken, with f one of ReLU, squared ReLU, SiLU, GELU by erf and GELU by tanh, called or written out:

    gate        f(g) * u, tensors of one shape, or the two halves of one tensor in either order
    bias_act    f(x + b) with a bias for each column, or f alone where it is written out

Not taken: an approximation of GELU by a sigmoid (``x sigmoid(1.702 x)``), other constants, a gate that
broadcasts or is used elsewhere too, a bias within a linear layer (its product adds it for nothing), an
activation that is called by name and has no bias (there is nothing to save).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from advisor.kernels.activations import (
    bias_activation,
    gated_activation,
    gated_activation_packed,
    unsupported_reasons,
)
from advisor.swap.rewrite.candidates import bundled, in_dtype, of_torch
from advisor.swap.rewrite.facts import Facts
from advisor.swap.rewrite.match import Match, pattern
from advisor.swap.rewrite.parts import activation, factors, half, is_float, with_bias

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pattern("gate", rank=25)
def find_gates(facts: Facts) -> Iterator[Match]:
    """Every product of an activation with another tensor of its shape."""
    for node in facts.nodes:
        pair = factors(node)
        if pair is None:
            continue
        for acted, up in (pair, pair[::-1]):
            found = activation(acted, facts)
            if found is None or up is found.x or not is_float(found.x, up, node):
                continue
            if facts.shape(found.x) != facts.shape(up):
                facts.refuse("gate", node, "the gate and what it multiplies differ in shape")
                continue
            yield _gate(node, found.name, found.x, up, facts)
            break


def _gate(node: Node, name: str, gate: Node, up: Node, facts: Facts) -> Match:
    dtype = facts.dtype(node)
    halves = half(gate, facts), half(up, facts)
    settings: dict[str, Any] = {"name": name, "dtype": dtype}
    if halves[0] is not None and halves[1] is not None and halves[0].of is halves[1].of:
        first = halves[0].first
        if first != halves[1].first and _only_these(halves[0].of, gate, up):
            settings["gate_first"] = first
            call = (
                "from advisor.kernels.activations import gated_activation_packed\n"
                f'y = gated_activation_packed(x, "{name}", gate_first={first})'
            )
            return Match(
                "gate", "gate", f"{name}(g) * u, {'gate, up' if first else 'up, gate'} = x.chunk(2, -1)",
                (halves[0].of,), (node,), settings,
                (bundled("gated_activation_packed", _packed, _packed_reasons, call, **settings),),
            )  # fmt: skip
    call = (
        f'from advisor.kernels.activations import gated_activation\ny = gated_activation(gate, up, "{name}")'
    )
    return Match(
        "gate", "gate", f"{name}(gate) * up", (gate, up), (node,), settings,
        (bundled("gated_activation", _gated, _reasons, call, **settings),),
    )  # fmt: skip


def _only_these(whole: Node, gate: Node, up: Node) -> bool:
    """Whether the two halves are all that is made of the whole: else its gradient is summed anyway."""
    seen = set()
    for user in whole.users:
        seen |= {user} if user in (gate, up) else set(user.users)
    return seen == {gate, up}


@pattern("bias_act", rank=45)
def find_biased(facts: Facts) -> Iterator[Match]:
    """Every activation of a sum with a bias, or written out."""
    for node in facts.nodes:
        found = activation(node, facts)
        if found is None:
            continue
        x, bias = with_bias(found.x, facts)
        if not is_float(x, node) or (bias is None and not found.written_out):
            continue
        settings: dict[str, Any] = {"name": found.name, "dtype": facts.dtype(node)}
        inputs = (x,) if bias is None else (x, bias)
        argument = "None" if bias is None else "bias"
        call = (
            "from advisor.kernels.activations import bias_activation\n"
            f'y = bias_activation(x, {argument}, "{found.name}")'
        )
        candidates = [bundled("bias_activation", _biased, _reasons, call, **settings)]
        if found.written_out and found.name in _FUNCTIONS:
            approximate = ', approximate="tanh"' if found.name == "gelu_tanh" else ""
            function = found.name.removesuffix("_tanh")
            theirs = f"y = torch.nn.functional.{function}(x{'' if bias is None else ' + bias'}{approximate})"
            candidates.append(of_torch(f"F.{function}", _of_torch, theirs, **settings))
        what = f"{found.name}({'x' if bias is None else 'x + bias'})" + (", written out" * found.written_out)
        yield Match("bias_act", "activation", what, inputs, (node,), settings, tuple(candidates))


def _gated(gate: Tensor, up: Tensor, *, name: str, dtype: torch.dtype) -> Tensor:
    return in_dtype(gated_activation(gate, up, name), dtype)


def _packed(x: Tensor, *, name: str, dtype: torch.dtype, gate_first: bool) -> Tensor:
    return in_dtype(gated_activation_packed(x, name, gate_first), dtype)


def _biased(x: Tensor, bias: Tensor | None = None, *, name: str, dtype: torch.dtype) -> Tensor:
    return in_dtype(bias_activation(x, bias, name), dtype)


def _of_torch(x: Tensor, bias: Tensor | None = None, *, name: str, dtype: torch.dtype) -> Tensor:
    return in_dtype(_FUNCTIONS[name](x if bias is None else x + bias), dtype)


def _reasons(x: Tensor, other: Tensor | None = None, *, name: str, **_: Any) -> Sequence[str]:
    return unsupported_reasons(x, other, name)


def _packed_reasons(x: Tensor, *, name: str, **_: Any) -> Sequence[str]:
    return unsupported_reasons(x, None, name)
