"""Gated MLPs, ``down(f(gate(x)) * up(x))``, whatever their classes and their layers are called.

Which layer is which, and what f is, is found by putting stand-ins in the layers' places and looking at what
the module makes of their results. The layers are called as they are, so that those that are quantised,
adapted or hooked stay right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from advisor.kernels import activations as kernels
from advisor.swap.kinds.registry import Offer, kind
from advisor.swap.site import Candidate, Example
from advisor.swap.tensors import has_hooks, stand_in
from advisor.swap.wide import Widened

_ROWS = 3
#: ReLU squared is no gate of any known network; "none" would be no activation.
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True)
class Gate:
    """Which of a module's layers does what.

    Attributes:
        gate, up: layers from x; the same where one makes both halves.
        down: the layer to the result.
        activation: its name at the bundled kernels.
        gate_first: of one layer's result, whether the gate is the first half.
    """

    gate: str
    up: str
    down: str
    activation: str
    gate_first: bool = True

    @property
    def packed(self) -> bool:
        """One layer makes gate and linear part."""
        return self.gate == self.up


class _Stub(nn.Module):
    """Takes a layer's place: notes what it gets, gives what it was given."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result = result
        self.got: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Whatever `x` is, the same."""
        self.got.append(x)
        return self.result


def _width(layer: nn.Module) -> tuple[int, int] | None:
    given, made = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    return (given, made) if isinstance(given, int) and isinstance(made, int) else None


def _layers(module: nn.Module) -> dict[str, tuple[int, int]]:
    found = {name: _width(layer) for name, layer in module.named_children()}
    return {name: width for name, width in found.items() if width is not None}


def _looks_like_one(module: nn.Module) -> bool:
    return len(_layers(module)) in (2, 3) and not isinstance(module, (nn.Sequential, nn.ModuleList))


@kind("gate", watches=_looks_like_one)
def gate(module: nn.Module, example: Example) -> Offer | str:
    """The bundled kernel between the module's own layers."""
    if len(example.args) != 1 or example.kwargs or not isinstance(example.args[0], Tensor):
        return "is not called with one tensor"
    found = recognised(module, example.args[0])
    if found is None:
        # Attention has two or three layers too, and nobody expects a gate of it.
        return "computes no gated MLP" if _widens(_layers(module)) else ""
    called = (found.gate, found.up, found.down)
    others = {name: layer for name, layer in module.named_children() if name not in called}
    if any(map(has_hooks, others.values())):
        return "its activation has hooks, which would not run"
    what = f"{type(module).__name__}: gated MLP with {found.activation}"
    return Offer([_bundled(found)], what, covers=tuple(others))


def _widens(widths: dict[str, tuple[int, int]]) -> bool:
    """Whether some order of the layers leads from a size to a larger one, gated, and back."""
    for names in permutations(widths.values()):
        *firsts, (inner, size) = names
        wide = 2 * inner if len(firsts) == 1 else inner
        if inner > size and all(width == (size, wide) for width in firsts):
            return True
    return False


def recognised(module: nn.Module, x: Tensor) -> Gate | None:
    """What a module does with its layers; None if that is no gated MLP."""
    widths = _layers(module)
    for names in permutations(widths):
        first, down = names[0], names[-1]
        size, inner = widths[down][1], widths[down][0]
        halves = len(names) == 2
        if x.shape[-1] != size or any(
            widths[n] != (size, 2 * inner if halves else inner) for n in names[:-1]
        ):
            continue
        if halves:
            orders = [(first, first, order) for order in (True, False)]
        else:
            orders = [(names[0], names[1], True)]
        product = _probed(module, names, widths, x)
        if product is None:
            continue
        results, made = product
        for gate_name, up_name, order in orders:
            for activation in _ACTIVATIONS:
                g, u = _parts(results, gate_name, up_name, order)
                expected = kernels.gated_activation_reference(g, u, activation)
                if torch.allclose(made, expected, rtol=1e-9, atol=1e-12):
                    return Gate(gate_name, up_name, down, activation, order)
    return None


def _parts(results: dict[str, Tensor], gate: str, up: str, gate_first: bool) -> tuple[Tensor, Tensor]:
    if gate != up:
        return results[gate], results[up]
    a, b = results[gate].chunk(2, -1)
    return (a, b) if gate_first else (b, a)


def _probed(
    module: nn.Module, names: tuple[str, ...], widths: dict[str, tuple[int, int]], x: Tensor
) -> tuple[dict[str, Tensor], Tensor] | None:
    """What the stand-ins gave, and what reached the last; None if anything else happened to it or to x."""
    rows = torch.randn(1, _ROWS, x.shape[-1], dtype=torch.float64, device=x.device)
    results = {n: torch.randn(1, _ROWS, widths[n][1], dtype=torch.float64, device=x.device) for n in names}
    probe = stand_in(module)
    stubs = {n: _Stub(results[n]) for n in names}
    probe._modules = {**probe._modules, **stubs}
    try:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False), Widened():
            result = probe(rows)
    except Exception:  # noqa: BLE001
        return None
    *firsts, last = names
    once = all(len(stub.got) == 1 for stub in stubs.values())
    if not once or not all(torch.equal(stubs[n].got[0], rows) for n in firsts):
        return None
    made = stubs[last].got[0]
    if not isinstance(result, Tensor) or not torch.equal(result, results[last]):
        return None
    return (results, made) if made.shape[-1] == widths[last][0] else None


def _bundled(found: Gate) -> Candidate:
    name = found.activation

    def call(module: nn.Module, x: Tensor) -> Tensor:
        down: Callable[..., Any] = getattr(module, found.down)
        if found.packed:
            made = kernels.gated_activation_packed(getattr(module, found.gate)(x), name, found.gate_first)
        else:
            g, u = getattr(module, found.gate)(x), getattr(module, found.up)(x)
            made = kernels.gated_activation(g, u, name)
        return down(made)

    def unsupported(example: Example) -> list[str]:
        reasons = kernels.unsupported_reasons(example.args[1], None, name)
        # Between the layers autocast's dtype goes, whatever that of the input is.
        return [r for r in reasons if example.autocast is None or not r.startswith("dtype")]

    if found.packed:
        used = f'gated_activation_packed(self.{found.gate}(x), "{name}", gate_first={found.gate_first})'
    else:
        used = f'gated_activation(self.{found.gate}(x), self.{found.up}(x), "{name}")'
    function = used.split("(")[0]
    return Candidate(
        f"advisor.kernels.{function}",
        call,
        "bundled",
        permanent=f"from advisor.kernels import {function}\nself.{found.down}({used})",
        unsupported=unsupported,
    )
