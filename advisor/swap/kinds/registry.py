"""How a kind says which modules it looks at and what it offers for them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import nn

from advisor.errors import UsageError
from advisor.swap.site import KINDS, Candidate, Example


@dataclass(frozen=True)
class Offer:
    """What a kind has for a module.

    Attributes:
        candidates: their `call` takes the module first, then what its `forward` takes.
        what: what the module is, for a reader; its class's name unless given.
        reference: see `Site`.
        covers: names of modules within it that the candidates do not call.
    """

    candidates: list[Candidate] = field(default_factory=list)
    what: str = ""
    reference: Callable[..., Any] | None = None
    covers: tuple[str, ...] = ()


#: Of a module (a stand-in) and a call of it: an offer, or why there is none (empty where none is expected).
Offering = Callable[[nn.Module, Example], "Offer | str"]


@dataclass(frozen=True)
class ModuleKind:
    """One way in which modules are replaced.

    Attributes:
        kind: of `KINDS`.
        watches: whether a module might be one, by a look at it.
        offer: says what there is for it, by a call that it got.
    """

    kind: str
    watches: Callable[[nn.Module], bool]
    offer: Offering


_REGISTERED: dict[str, ModuleKind] = {}


def kind(name: str, watches: Callable[[nn.Module], bool]) -> Callable[[Offering], Offering]:
    """Register the decorated function as what is offered for the modules that `watches` picks."""
    if name not in KINDS:
        raise ValueError(f"kind {name!r}: one of {', '.join(KINDS)}")

    def register(offer: Offering) -> Offering:
        key = f"{offer.__module__}.{offer.__qualname__}"
        if key in _REGISTERED:
            raise ValueError(f"{key} is registered already")
        _REGISTERED[key] = ModuleKind(name, watches, offer)
        return offer

    return register


@cache
def _load() -> None:
    package = importlib.import_module(__package__ or "")
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{found.name}")


def module_kinds(kinds: Collection[str]) -> list[ModuleKind]:
    """Those of these kinds that replace modules, in the order of their files."""
    _load()
    return [found for key, found in sorted(_REGISTERED.items()) if found.kind in kinds]


def chosen_kinds(asked: str | Collection[str]) -> tuple[str, ...]:
    """The kinds that a user asks for.

    Raises:
        UsageError: one of them does not exist.
    """
    if asked == "auto":
        return KINDS
    names = [asked] if isinstance(asked, str) else list(asked)
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise UsageError(f"swap: no kind {unknown[0]!r}; give 'auto', or some of {', '.join(KINDS)}")
    return tuple(name for name in KINDS if name in names)
