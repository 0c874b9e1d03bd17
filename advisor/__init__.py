"""Find out why a PyTorch Lightning training step takes as long as it does, and what to change.

The public names load on first use, so that ``import advisor`` costs nothing and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from advisor.capture.callback import TrainingAdvisor
    from advisor.report.build import analyze
    from advisor.report.saved import compare
    from advisor.swap.outside import swap_model as swap
    from advisor.trace.link import load

_HOMES = {
    "TrainingAdvisor": "advisor.capture.callback",
    "analyze": "advisor.report.build",
    "compare": "advisor.report.saved",
    "load": "advisor.trace.link",
}

__all__ = ["TrainingAdvisor", "__version__", "analyze", "compare", "load", "swap"]


def __getattr__(name: str) -> Any:
    if name == "swap":
        return importlib.import_module("advisor.swap")  # a package that can be called
    if name not in _HOMES:
        raise AttributeError(f"module 'advisor' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
