"""Convolutions on NCHW tensors: which launches turn tensors around for them, and which work between them."""

from __future__ import annotations

import numpy as np

from advisor.advice.loop import Loop
from advisor.roofline.costs import Tensor, roles
from advisor.trace.events import KERNEL


def nchw_rows(loop: Loop) -> tuple[np.ndarray, np.ndarray]:
    """Layout transforms in convolutions; with any of them, norms and poolings on NCHW tensors too."""
    phase = loop.in_phase("forward", "loss", "backward", "other") & loop.counted
    layout = loop.by_name(lambda name: roles.role(name) == "layout", bool)
    transforms = np.flatnonzero((loop.family == "convolution") & layout & phase)
    if not len(transforms):
        return transforms, transforms
    beside = phase & np.isin(loop.family, ("norm", "pooling")) & (loop.rows.kind == KERNEL)
    others = np.flatnonzero(beside & ~np.isnan(loop.analysis.bounds.roof_ns))
    return transforms, others[np.array([_is_nchw_of(loop, row) for row in others.tolist()], bool)]


def is_nchw(tensors: list[Tensor]) -> bool:
    """Whether the first tensor is an image batch whose channels lie apart."""
    if not tensors or len(tensors[0].shape) not in (4, 5) or tensors[0].strides is None:
        return False
    image = tensors[0]
    strides = image.strides or ()
    return image.shape[1] > 1 and max(image.shape[2:]) > 1 and strides[1] != 1


def _is_nchw_of(loop: Loop, row: int) -> bool:
    unit = loop.calls.of_row.get(row)
    return unit is not None and is_nchw(unit.tensors)
