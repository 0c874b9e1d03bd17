"""Cross-entropy over a vocabulary of odd length, with and without a gradient in the forward."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import cross_entropy as family
from .probe import Probe

_ROWS, _CLASSES = 17, 5001


def _inputs(device: torch.device, dtype: torch.dtype) -> Mapping[str, Any]:
    target = torch.randint(0, _CLASSES, (_ROWS,), device=device)
    target[1::5] = -100
    return {"logits": torch.randn(_ROWS, _CLASSES, device=device).mul(4).to(dtype), "target": target}


def _ours(logits: Tensor, target: Tensor) -> Tensor:
    return family.cross_entropy(logits, target, label_smoothing=0.1)


def _late(logits: Tensor, target: Tensor) -> Tensor:
    return family.cross_entropy(logits, target, label_smoothing=0.1, gradient_in_forward=False)


def _reference(logits: Tensor, target: Tensor) -> Tensor:
    return family.cross_entropy_reference(logits, target, label_smoothing=0.1)


def probes() -> Iterator[Probe]:
    """Label smoothing and ignored rows in each."""
    shape, options = f"{_ROWS}x{_CLASSES}", {"ulps": 4}
    yield Probe("cross_entropy", shape, _ours, _reference, _inputs, options=options)
    yield Probe(
        "cross_entropy, gradient in the backward", shape, _late, _reference, _inputs,
        dtypes=("bf16",), options=options,
    )  # fmt: skip
