"""Calling something before a function of another library, as long as a window is open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


def call_before(owner: Any, name: str, then: Callable[[], None]) -> Callable[[], None]:
    """Have ``then`` called before each call of ``owner.name``, which goes through unchanged.

    Returns:
        What undoes it; nothing happens where there is no such function, or someone has replaced it since.
    """
    original = getattr(owner, name, None)
    if original is None:
        return lambda: None

    def shadow(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # the call is the user's and goes on whatever happens here
            then()
        return original(*args, **kwargs)

    def restore() -> None:
        if getattr(owner, name, None) is shadow:
            setattr(owner, name, original)

    setattr(owner, name, shadow)
    return restore
