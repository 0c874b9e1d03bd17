"""GroupNorm and an activation: groups in registers, of odd depth and size, and shared by programs."""

from collections.abc import Iterator

from .. import group_norm as family
from .probe import Probe, random


def probes() -> Iterator[Probe]:
    """With the activation that diffusion has, and without any."""
    for name, groups, shape in (
        ("silu", 8, (4, 64, 16, 16)),
        ("gelu_tanh", 3, (2, 15, 7, 9)),
        ("silu", 2, (1, 12, 100, 70)),
        ("none", 32, (3, 320, 8, 8)),
    ):
        yield Probe(
            f"group_norm, {name}", f"{'x'.join(map(str, shape))} in {groups}",
            lambda x, w, b, g=groups, name=name: family.group_norm(x, g, w, b, 1e-5, name),
            lambda x, w, b, g=groups, name=name: family.group_norm_reference(x, g, w, b, 1e-5, name),
            random({"x": shape, "w": shape[1:2], "b": shape[1:2]}),
        )  # fmt: skip
