"""Residual addition with a norm; dropout drops everything or nothing here, so that results are comparable."""

from collections.abc import Iterator

from .. import add_norm
from .probe import Probe, random


def probes() -> Iterator[Probe]:
    """Both norms, and dropout of all."""
    cols = 1024
    yield Probe(
        "add_layer_norm", f"33x{cols}",
        lambda x, r, w, b: add_norm.add_layer_norm(x, r, cols, w, b),
        lambda x, r, w, b: add_norm.add_norm_reference(x, r, cols, w, b),
        random({"x": (33, cols), "r": (33, cols), "w": (cols,), "b": (cols,)}),
    )  # fmt: skip
    yield Probe(
        "add_rms_norm", "17x777",
        lambda x, r, w: add_norm.add_rms_norm(x, r, 777, w, 1e-5),
        lambda x, r, w: add_norm.add_norm_reference(x, r, 777, w, None, 1e-5, rms=True),
        random({"x": (17, 777), "r": (17, 777), "w": (777,)}),
    )  # fmt: skip
    yield Probe(
        "dropout_add of p = 1", f"9x{cols}",
        lambda x, r: add_norm.dropout_add(x, r, 1.0),
        lambda x, r: x * 0 + r,
        random({"x": (9, cols), "r": (9, cols)}), dtypes=("bf16", "fp16"),
    )  # fmt: skip
