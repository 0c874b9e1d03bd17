"""Bias with each GELU, and the gates of common models."""

from collections.abc import Iterator

from .. import activations as act
from .probe import Probe, random


def probes() -> Iterator[Probe]:
    """Rows that fill blocks, and rows that do not."""
    for name, rows, cols in (("gelu", 9, 777), ("gelu_tanh", 16, 2048)):
        yield Probe(
            f"bias_activation, {name}", f"{rows}x{cols}",
            lambda x, bias, name=name: act.bias_activation(x, bias, name),
            lambda x, bias, name=name: act.bias_activation_reference(x, bias, name),
            random({"x": (rows, cols), "bias": (cols,)}, 3.0),
        )  # fmt: skip
    for name, rows, cols in (("silu", 16, 2048), ("gelu_tanh", 9, 777)):
        yield Probe(
            f"gated_activation, {name}", f"{rows}x{cols}",
            lambda gate, up, name=name: act.gated_activation(gate, up, name),
            lambda gate, up, name=name: act.gated_activation_reference(gate, up, name),
            random({"gate": (rows, cols), "up": (rows, cols)}, 3.0),
        )  # fmt: skip
