"""What swap says to the user beside its results: warnings that can never become errors."""

from __future__ import annotations

import contextlib
import sys
import warnings


class SwapWarning(UserWarning):
    """Something could not be swapped or was swapped back; the loop is unharmed."""


def info(message: str) -> None:
    """Print one line on stderr."""
    with contextlib.suppress(OSError, ValueError):  # a closed stderr is no reason to stop training
        print(f"advisor: {message}", file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Warn; where warnings were made errors, print."""
    try:
        warnings.warn(SwapWarning(f"advisor: swap: {message}"), stacklevel=3)
    except Warning:
        info(f"swap: {message}")
