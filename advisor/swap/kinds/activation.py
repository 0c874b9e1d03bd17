"""GELU and SiLU, alone or behind the bias of a linear layer in an `nn.Sequential`."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from advisor.kernels import activations as kernels
from advisor.swap.kinds.registry import Offer, kind
from advisor.swap.site import Candidate, Example
from advisor.swap.tensors import has_hooks


def activation_name(module: nn.Module | None) -> str | None:
    """What the bundled kernels call an activation module of torch's own; None for others."""
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    if type(module) is nn.SiLU and not module.inplace:
        return "silu"
    return None


def _is_one(module: nn.Module) -> bool:
    return activation_name(module) is not None


@kind("activation", watches=_is_one)
def activation(module: nn.Module, example: Example) -> Offer | str:
    """The bundled kernel without a bias."""
    name = activation_name(module)
    if name is None or len(example.args) != 1 or example.kwargs:
        return "is not called with one tensor"

    def call(_module: nn.Module, x: Tensor) -> Tensor:
        return kernels.bias_activation(x, None, name)

    found = Candidate(
        "advisor.kernels.bias_activation",
        call,
        "bundled",
        permanent=f'from advisor.kernels import bias_activation\nbias_activation(x, None, "{name}")',
        unsupported=lambda e: kernels.unsupported_reasons(e.args[1], None, name),
    )
    return Offer([found])


def _pairs(module: nn.Module) -> dict[int, str]:
    """Where in a sequence a linear layer with a bias stands before an activation, and which."""
    layers = list(module.children())
    found = {}
    for i, (linear, after) in enumerate(pairwise(layers)):
        name = activation_name(after)
        if type(linear) is nn.Linear and linear.bias is not None and name is not None:
            found[i] = name
    return found


def _has_pair(module: nn.Module) -> bool:
    flat = not any(True for child in module.children() for _ in child.children())
    return type(module).forward is nn.Sequential.forward and flat and bool(_pairs(module))


@kind("activation", watches=_has_pair)
def sequential(module: nn.Module, example: Example) -> Offer | str:
    """The product of the linear layer without its bias, and bias and activation in one kernel."""
    if len(example.args) != 1 or example.kwargs or not isinstance(example.args[0], Tensor):
        return "is not called with one tensor"
    pairs = _pairs(module)

    def call(module: nn.Module, x: Tensor) -> Tensor:
        layers = list(module.children())
        i = 0
        while i < len(layers):
            layer = layers[i]
            if i in pairs and not has_hooks(layer) and not has_hooks(layers[i + 1]):
                assert isinstance(layer, nn.Linear)
                z = F.linear(x, layer.weight)
                x = kernels.bias_activation(z, layer.bias.to(z.dtype), pairs[i])
                i += 2
            else:
                x = layer(x)
                i += 1
        return x

    def unsupported(example: Example) -> list[str]:
        reasons = kernels.unsupported_reasons(example.args[1])
        # Between the layers autocast's dtype goes, whatever that of the input is.
        return [r for r in reasons if example.autocast is None or not r.startswith("dtype")]

    found = Candidate(
        "advisor.kernels.bias_activation",
        call,
        "bundled",
        permanent=(
            "from advisor.kernels import bias_activation\n"
            f'bias_activation(F.linear(x, linear.weight), linear.bias, "{next(iter(pairs.values()))}")'
        ),
        unsupported=unsupported,
    )
    what = "Sequential of Linear and " + ", ".join(dict.fromkeys(pairs.values()))
    named = list(module.named_children())
    after = [named[i + 1] for i in pairs if not has_hooks(named[i][1])]
    return Offer([found], what, covers=tuple(name for name, layer in after if not has_hooks(layer)))
