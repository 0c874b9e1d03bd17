"""What the capture says to the user: plain lines, and warnings that can never become errors."""

from __future__ import annotations

import contextlib
import sys
import warnings

#: Why a second window of one process stays closed, and the way out.
REPEATED = (
    "nothing is recorded: this process has recorded a window before, and a second one would not be exact "
    "(allow_repeat=True records nevertheless)"
)


class AdvisorWarning(UserWarning):
    """The capture could not do its work; training is unharmed."""


def info(message: str) -> None:
    """Print one line on stderr."""
    with contextlib.suppress(OSError, ValueError):  # a closed stderr is no reason to stop training
        print(f"advisor: {message}", file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Warn once; where the user turned warnings into errors, print instead."""
    try:
        warnings.warn(AdvisorWarning(f"advisor: {message}"), stacklevel=3)
    except Warning:
        info(message)
