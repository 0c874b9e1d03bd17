"""Bias, activation and LayerNorm in one pass."""

from collections.abc import Iterator

from .. import bias_act_norm as family
from .probe import Probe, random


def probes() -> Iterator[Probe]:
    """Both forms of GELU."""
    for name, rows, cols in (("gelu_tanh", 33, 4096), ("gelu", 20, 777)):
        yield Probe(
            f"bias, {name}, LayerNorm", f"{rows}x{cols}",
            lambda x, b, w, s, name=name: family.bias_act_norm(x, b, name, w, s),
            lambda x, b, w, s, name=name: family.bias_act_norm_reference(x, b, name, w, s),
            random({"x": (rows, cols), "b": (cols,), "w": (cols,), "s": (cols,)}),
        )  # fmt: skip
