"""Softmax: plain, causal and masked, and rows too long for registers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import softmax as family
from .probe import Probe, random


def _eager(x: Tensor, **options: Any) -> Tensor:
    """Scale, mask and softmax in fp32, as autocast and Hugging Face's attention have it."""
    y = family.softmax_reference(x.to(torch.promote_types(x.dtype, torch.float32)), **options)
    return y.to(x.dtype)


def probes() -> Iterator[Probe]:
    """Short, long and causal rows, and the logarithm."""
    settings: list[tuple[str, tuple[int, ...], dict[str, Any], tuple[str, ...]]] = [
        ("softmax", (33, 4096), {"scale": 0.3}, ("fp32", "fp16", "bf16")),
        ("softmax", (3, 20000), {}, ("fp32", "bf16")),
        ("log_softmax", (33, 777), {"log": True}, ("fp32", "bf16")),
        ("softmax, causal", (2, 3, 65, 65), {"causal": True, "scale": 0.125}, ("fp16", "bf16")),
    ]
    for name, shape, options, dtypes in settings:
        yield Probe(
            name, "x".join(map(str, shape)),
            lambda x, options=options: family.softmax(x, **options),
            lambda x, options=options: _eager(x, **options),
            random({"x": shape}, 3.0), dtypes=dtypes,
        )  # fmt: skip
