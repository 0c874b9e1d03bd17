"""Tests on interned names: each name is looked at once, however many events carry it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def named(names: Sequence[str], index: np.ndarray, test: Callable[[str], object]) -> np.ndarray:
    """Which events have a name that passes; bool (n,).

    Args:
        names: the distinct names.
        index: int (n,), each event's position in `names`.
        test: called once for each name in use; its result is taken as true or false.
    """
    return coded(names, index, test, bool)


def coded(
    names: Sequence[str], index: np.ndarray, code: Callable[[str], object], dtype: type | np.dtype
) -> np.ndarray:
    """A value that each event's name has; (n,) of `dtype`. As `named`, for any function of the name."""
    table = np.zeros(len(names), dtype)
    used = np.zeros(len(names), bool)
    used[index] = True
    for i in np.flatnonzero(used).tolist():
        table[i] = code(names[i])
    return table[index] if len(index) else np.zeros(0, dtype)
