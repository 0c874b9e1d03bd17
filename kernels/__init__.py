"""Bundled Triton kernels: forward and backward as PyTorch operators, references, drop-in modules.

Installed as `advisor.kernels`; knows nothing of the rest of the package. Importing it loads neither torch nor
Triton; naming one of its members does. A family is a module here, and says itself which names it gives: a
function named as its module (`softmax.softmax`) stays there, since the package's attribute of that name is
the module. See ``docs/kernels.md``.
"""

import importlib
from functools import cache
from typing import Any


@cache
def _homes() -> dict[str, str]:
    """The module that holds each public name."""
    from ._family import families

    found = families()
    return {name: module for module, family in found.items() for name in family.public if name not in found}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_homes())
    if name.startswith("_") or name not in _homes():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_homes()[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_homes()]
