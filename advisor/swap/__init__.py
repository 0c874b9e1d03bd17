"""Swap: find what a faster kernel can replace in this loop, prove it, time it, keep what wins, undo it.

`find` and `rewrite` find what can be replaced, `kinds/` says with what, `verify` proves it on the loop's own
tensors, `measure` times it, `decide` chooses, `journal` applies and restores, `session` runs the whole.

The package is called: ``advisor.swap(model, inputs)`` is `swap_model`. Its names load torch on first use.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from advisor.swap.decide import Terms, decide
    from advisor.swap.outside import swap_model
    from advisor.swap.session import Swapper, find_swaps

_HOMES = {
    "Swapper": "advisor.swap.session",
    "Terms": "advisor.swap.decide",
    "decide": "advisor.swap.decide",
    "find_swaps": "advisor.swap.session",
    "swap_model": "advisor.swap.outside",
}

__all__ = ["Swapper", "Terms", "decide", "find_swaps", "swap_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'advisor.swap' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


class _Callable(ModuleType):
    """A module that is a function too: the user's word for it is ``advisor.swap(model, inputs)``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Swapper:
        return importlib.import_module("advisor.swap.outside").swap_model(*args, **kwargs)  # type: ignore[no-any-return]


sys.modules[__name__].__class__ = _Callable
