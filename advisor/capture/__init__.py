"""Record one window of a training loop: profiler, ranges, context, and the measure of what that cost.

`Window` serves any PyTorch loop; `advisor.TrainingAdvisor` adapts it to Lightning. Names load on
first use: the worker process lives in this package and must never import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from advisor.capture.callback import TrainingAdvisor
    from advisor.capture.plan import Ahead
    from advisor.capture.window import Window

_HOMES = {
    "Ahead": "advisor.capture.plan",
    "TrainingAdvisor": "advisor.capture.callback",
    "Window": "advisor.capture.window",
}

__all__ = ["Ahead", "TrainingAdvisor", "Window"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'advisor.capture' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
