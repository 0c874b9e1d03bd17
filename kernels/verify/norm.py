"""LayerNorm and RMSNorm: rows in registers, of odd length, and walked in blocks."""

from collections.abc import Iterator
from typing import Any

from .. import norm
from .probe import Probe, random


def probes() -> Iterator[Probe]:
    """Both norms, with Llama's casting and Gemma's offset."""
    for rows, cols in ((33, 4096), (20, 777)):
        shapes = {"x": (rows, cols), "w": (cols,), "b": (cols,)}
        yield Probe(
            "layer_norm", f"{rows}x{cols}",
            lambda x, w, b: norm.layer_norm(x, x.shape[-1], w, b),
            lambda x, w, b: norm.layer_norm_reference(x, x.shape[-1], w, b),
            random(shapes),
        )  # fmt: skip
    yield Probe(
        "layer_norm", "3x40000",
        lambda x, w, b: norm.layer_norm(x, x.shape[-1], w, b),
        lambda x, w, b: norm.layer_norm_reference(x, x.shape[-1], w, b),
        random({"x": (3, 40000), "w": (40000,), "b": (40000,)}), dtypes=("bf16",),
    )  # fmt: skip
    yield Probe(
        "rms_norm", "33x2048",
        lambda x, w: norm.rms_norm(x, x.shape[-1], w, 1e-6),
        lambda x, w: norm.rms_norm_reference(x, x.shape[-1], w, 1e-6),
        random({"x": (33, 2048), "w": (2048,)}),
    )  # fmt: skip
    options: dict[str, Any] = {"casting": "llama", "offset": 1.0}
    yield Probe(
        "rms_norm, llama's casting", "33x1024",
        lambda x, w: norm.rms_norm(x, x.shape[-1], w, 1e-6, **options),
        lambda x, w: norm.rms_norm_reference(x, x.shape[-1], w, 1e-6, **options),
        random({"x": (33, 1024), "w": (1024,)}), dtypes=("fp16", "bf16"),
    )  # fmt: skip
