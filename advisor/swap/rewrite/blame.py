"""Which of the things that were replaced in a step makes its results wrong, found on a live call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .alike import Call, Differs, hold_to, results_of

#: How a part's own fault is told.
_ALONE = "in the whole step, with nothing else replaced in it"


def blamed(
    names: Sequence[str], made: Callable[[Sequence[str]], Call], original: Call, args: Sequence[Any]
) -> dict[str, str]:
    """The parts whose results are wrong by themselves, and why.

    Args:
        names: of the parts.
        made: gives the step with these parts replaced and no others.
        original: the step with none.
        args: of the call, on which the step with all of them is wrong.

    Returns:
        None at all where that does not explain it: each part is right by itself, or the others, without those
        that are not, are wrong together.
    """
    if len(names) < 2:
        return {}
    expected = results_of(original, args)

    def fault(some: Sequence[str]) -> str:
        try:
            hold_to(expected, *results_of(made(some), args), _ALONE)
        except Differs as error:
            return str(error)
        return ""

    found = {name: why for name in names if (why := fault([name]))}
    others = [name for name in names if name not in found]
    return found if found and others and not fault(others) else {}
