"""The registry of rules: each declares itself beside its own code."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from advisor.advice.finding import Finding
from advisor.errors import UsageError

if TYPE_CHECKING:
    from advisor.advice.loop import Loop


class NotApplicable(Exception):
    """Raised by a rule whose subject the loop does not have, or about which the trace does not tell."""


Audit: TypeAlias = "Callable[[Loop], Iterator[Finding]]"

_rules: dict[str, Rule] = {}


@dataclass(frozen=True)
class Rule:
    """A rule and what is said of it.

    Attributes:
        id: ``family.name``; the family is the beginning of its module's name.
        title: what is so where all is well: "Batches are ready in time".
        failure: what is so where it is not: "The loop waits for batches".
        explanation: why it costs time, how it is recognised, what the change is, when the rule stays silent.
        source: of its figures and of the mechanism: papers, documentation, measurements; one a line.
        audit: yields findings; raises `NotApplicable`.
    """

    id: str
    title: str
    failure: str
    explanation: str
    source: str
    audit: Audit

    @property
    def family(self) -> str:
        """The first part of the id."""
        return self.id.partition(".")[0]


def rule(id: str, *, title: str, failure: str, source: str = "") -> Callable[[Audit], Audit]:
    """Register the decorated audit; its docstring is the explanation that `advisor explain` shows.

    Raises:
        ValueError: the id is taken, or the audit has no docstring.
    """

    def register(audit: Audit) -> Audit:
        if id in _rules:
            raise ValueError(f"the rule {id} is registered already")
        text = inspect.getdoc(audit)
        if not text:
            raise ValueError(f"the rule {id} lacks a docstring: it is its explanation")
        _rules[id] = Rule(id, title, failure, text, source, audit)
        return audit

    return register


@functools.cache
def _load() -> None:
    from advisor.advice import rules

    for module in pkgutil.iter_modules(rules.__path__):
        importlib.import_module(f"{rules.__name__}.{module.name}")


def all_rules() -> list[Rule]:
    """Every rule, by id."""
    _load()
    return [_rules[id] for id in sorted(_rules)]


def find_rule(id: str) -> Rule:
    """The rule of this id.

    Raises:
        UsageError: there is none; says which are near.
    """
    import difflib

    _load()
    if id in _rules:
        return _rules[id]
    near = difflib.get_close_matches(id, _rules, n=3, cutoff=0.5)
    raise UsageError(
        f"no rule is called {id!r}"
        + (f"; did you mean {', '.join(near)}?" if near else "; `advisor explain` lists them")
    )
