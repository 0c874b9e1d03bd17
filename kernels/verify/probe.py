"""What a family checks: a kernel on inputs that are made for a device and a dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .judge import Function

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Probe:
    """One kernel at one size, forward and backward, in each dtype.

    Attributes:
        kernel: for a reader, e.g. ``layer_norm``.
        shape: for a reader, e.g. ``33x4096``.
        ours: takes the inputs as keywords.
        reference: the same in plain PyTorch.
        inputs: makes them, for a device and a dtype.
        eager: what stands for eager PyTorch, unless the reference does.
        dtypes: names in `DTYPES`.
        options: of `judge`, such as ``ulps``.
    """

    kernel: str
    shape: str
    ours: Function
    reference: Function
    inputs: Callable[[torch.device, torch.dtype], Mapping[str, Any]]
    eager: Function | None = None
    dtypes: tuple[str, ...] = tuple(DTYPES)
    options: Mapping[str, Any] = field(default_factory=dict)


def random(
    shapes: Mapping[str, tuple[int, ...]], spread: float = 1.0
) -> Callable[[torch.device, torch.dtype], Mapping[str, Any]]:
    """Inputs of normally distributed numbers times `spread`, by name of these shapes."""

    def make(device: torch.device, dtype: torch.dtype) -> Mapping[str, Any]:
        return {
            name: torch.randn(shape, device=device).mul(spread).to(dtype) for name, shape in shapes.items()
        }

    return make
