"""One class that is a Callback of each Lightning package: they are unrelated, each Trainer wants its own."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys

from advisor.errors import MissingExtraError

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class Root:
    """A base with an instance dict, so that more bases can be added to a class made from it."""


def lightning_bases(*, import_any: bool) -> tuple[type, ...]:
    """The Callback classes of the Lightning packages in use.

    Args:
        import_any: import what is installed if no package has been imported yet.
    """
    loaded = [name for name in _PACKAGES if sys.modules.get(name) is not None]
    if not loaded and import_any:
        loaded = [name for name in _PACKAGES if importlib.util.find_spec(name.partition(".")[0]) is not None]
    bases = []
    for name in loaded:
        with contextlib.suppress(ImportError):  # installed, but not for this torch
            bases.append(importlib.import_module(name).Callback)
    return tuple(bases)


def adopt_late_packages(callback: type) -> None:
    """Make a class from `Root` a Callback of a Lightning package that was imported after its module, too.

    Raises:
        MissingExtraError: if there is none.
    """
    new = tuple(base for base in lightning_bases(import_any=False) if base not in callback.__mro__)
    if new:
        callback.__bases__ = (*callback.__bases__, *new)
    if callback.__bases__ == (Root,):
        raise MissingExtraError(callback.__name__, "pytorch-lightning")
