"""Linear layer with cross-entropy, whole and in chunks."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .. import linear_cross_entropy as family
from .probe import Probe


def _inputs(device: torch.device, dtype: torch.dtype) -> Mapping[str, Any]:
    target = torch.randint(0, 1001, (40,), device=device)
    target[1::4] = -100
    return {
        "x": torch.randn(40, 64, device=device).to(dtype),
        "linear_weight": torch.randn(1001, 64, device=device).mul(0.5).to(dtype),
        "target": target,
    }


def probes() -> Iterator[Probe]:
    """Both variants."""
    for variant in ("fast", "memory"):
        yield Probe(
            f"linear_cross_entropy, {variant}", "40x64x1001",
            lambda variant=variant, **given: family.linear_cross_entropy(**given, variant=variant),
            lambda **given: family.linear_cross_entropy_reference(**given),
            _inputs, dtypes=("fp32", "bf16"), options={"ulps": 4},
        )  # fmt: skip
