"""Activations with their bias, activations written out, and gated ones.

Taken, with f one of ReLU, squared ReLU, SiLU, GELU by erf and GELU by tanh, called or written out:

    gate        f(g) * u, tensors of one shape, or the two halves of one tensor in either order
    bias_act    f(x + b) with a bias for each column, or f alone where it is written out
    linear_act  f(x W^T + b), f not ReLU: the product without its bias, which the activation's kernel adds and
                sums the gradient of on the way

Not taken: an approximation of GELU by a sigmoid (``x sigmoid(1.702 x)``), other constants, a gate that
broadcasts or is used elsewhere too, an activation that is called by name and has no bias, ReLU behind a
linear layer (there is nothing to save).
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
from advisor.swap.rewrite.ops import read
from advisor.swap.rewrite.parts import activation, factors, half, is_float, with_bias
from advisor.swap.site import Candidate

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


@pattern("linear_act", rank=44)
def find_behind_linear(facts: Facts) -> Iterator[Match]:
    """Every activation behind a linear layer with a bias."""
    for node in facts.nodes:
        found = activation(node, facts)
        layer = read(found.x) if found is not None and found.name not in ("relu", "relu_squared") else None
        if found is None or layer is None or layer.op != "linear" or layer["bias"] is None:
            continue
        if not is_float(layer.input, found.x, node):
            continue
        settings: dict[str, Any] = {"name": found.name, "dtype": facts.dtype(node)}
        call = (
            "from advisor.kernels.activations import bias_activation\n"
            f'y = bias_activation(F.linear(x, weight), bias, "{found.name}")'
        )
        candidates = [bundled("bias_activation", _behind_linear, _linear_reasons, call, **settings)]
        what = f"{found.name}(linear(x))"
        if found.written_out:
            candidates.append(_torchs(found.name, "F.linear(x, weight, bias)", _of_torch_behind, settings))
            what += ", written out"
        inputs = (layer.input, layer["weight"], layer["bias"])
        yield Match("linear_act", "activation", what, inputs, (node,), settings, tuple(candidates))


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
            argument = "x" if bias is None else "x + bias"
            candidates.append(_torchs(found.name, argument, _of_torch, settings))
        what = f"{found.name}({'x' if bias is None else 'x + bias'})" + (", written out" * found.written_out)
        yield Match("bias_act", "activation", what, inputs, (node,), settings, tuple(candidates))


def _torchs(name: str, argument: str, call: Callable[..., Tensor], settings: dict[str, Any]) -> Candidate:
    """PyTorch's own function for what is written out."""
    function, tanh = name.removesuffix("_tanh"), name == "gelu_tanh"
    approximate = ', approximate="tanh"' if tanh else ""
    theirs = f"y = torch.nn.functional.{function}({argument}{approximate})"
    return of_torch(f"F.{function}", call, theirs, **settings)


def _gated(gate: Tensor, up: Tensor, *, name: str, dtype: torch.dtype) -> Tensor:
    return in_dtype(gated_activation(gate, up, name), dtype)


def _packed(x: Tensor, *, name: str, dtype: torch.dtype, gate_first: bool) -> Tensor:
    return in_dtype(gated_activation_packed(x, name, gate_first), dtype)


def _biased(x: Tensor, bias: Tensor | None = None, *, name: str, dtype: torch.dtype) -> Tensor:
    return in_dtype(bias_activation(x, bias, name), dtype)


def _behind_linear(x: Tensor, weight: Tensor, bias: Tensor, *, name: str, dtype: torch.dtype) -> Tensor:
    product = F.linear(x, weight)
    return in_dtype(bias_activation(product, bias.to(product.dtype), name), dtype)


def _of_torch(x: Tensor, bias: Tensor | None = None, *, name: str, dtype: torch.dtype) -> Tensor:
    return in_dtype(_FUNCTIONS[name](x if bias is None else x + bias), dtype)


def _of_torch_behind(x: Tensor, weight: Tensor, bias: Tensor, *, name: str, dtype: torch.dtype) -> Tensor:
    return in_dtype(_FUNCTIONS[name](F.linear(x, weight, bias)), dtype)


def _reasons(x: Tensor, other: Tensor | None = None, *, name: str, **_: Any) -> Sequence[str]:
    return unsupported_reasons(x, other, name)


def _linear_reasons(x: Tensor, _weight: Tensor, bias: Tensor, *, name: str, **_: Any) -> Sequence[str]:
    return unsupported_reasons(x, None, name) or unsupported_reasons(bias, None, name)


def _packed_reasons(x: Tensor, *, name: str, **_: Any) -> Sequence[str]:
    return unsupported_reasons(x, None, name)
