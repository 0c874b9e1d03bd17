"""What makes two matches the same, and the `Site` that a match becomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from advisor.swap.site import Candidate, Example, Site

from .facts import Facts, fake_value, hangs_on_data
from .match import Found


@dataclass(frozen=True)
class Key:
    """What tells sites apart; alike in every process that runs the same step.

    Attributes:
        exact: pattern, settings, shapes and dtypes.
        loose: the same without all sizes but the last of each tensor, for a batch of another size.
        autocast: the dtype that is in force there, or None.
    """

    exact: str
    loose: str
    autocast: torch.dtype | None = None


def key_of(found: Found, facts: Facts) -> Key:
    """The key of a match."""
    match = found.match
    settings = ", ".join(f"{k}={v!r}" for k, v in sorted(match.attributes.items()))
    outputs = [_described(n, exact=False) for n in match.outputs]
    autocast = facts.autocast(match.outputs[0])

    def text(exact: bool) -> str:
        inputs = [_described(n, exact) for n in (*match.inputs, *found.extra)]
        return (
            f"{match.pattern}({settings}; {', '.join(inputs)} -> {', '.join(outputs)}; autocast {autocast})"
        )

    return Key(text(True), text(False), autocast)


def _described(node: Node, exact: bool) -> str:
    value = fake_value(node)
    if not hasattr(value, "shape"):
        return str(value) if exact else type(value).__name__
    sizes = [str(n) if isinstance(n, int) else "?" for n in value.shape]
    if not exact:
        sizes = ["?"] * (len(sizes) - 1) + sizes[-1:]
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"


def site_of(
    found: Found, original: Callable[..., Any], example: Example, places: list[str], calls_per_step: int
) -> Site:
    """A match as something to decide upon.

    Args:
        found: one of the matches with the same key.
        original: what stands there now, as a function.
        example: a call of it.
        places: where all of those matches are.
        calls_per_step: of all of them.
    """
    match = found.match
    taken = len(match.inputs)
    candidates = [_of_all_inputs(c, taken) if found.extra else c for c in match.candidates]
    steady = tuple(i for i, node in enumerate(match.inputs) if not hangs_on_data(node))
    return Site(
        match.kind, places, "pattern", match.what, original, [example], candidates, max(calls_per_step, 1),
        steady=steady,
    )  # fmt: skip


def _of_all_inputs(candidate: Candidate, taken: int) -> Candidate:
    """The candidate with the original's arguments, of which it takes the first."""

    def call(*args: Any) -> Any:
        return candidate.call(*args[:taken])

    def unsupported(example: Example) -> Any:
        return candidate.unsupported(replace(example, args=example.args[:taken]))

    return replace(candidate, call=call, unsupported=unsupported)
