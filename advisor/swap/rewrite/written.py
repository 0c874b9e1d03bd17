"""What a step writes to of what it is given, such as running statistics, put back after it is checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from advisor.swap.tensors import plain, same_values

from .alike import Differs, alike


def written_by(call: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, list[int] | str]:
    """What a call gives, and which of its arguments it has written to; or why that cannot be told.

    Whatever is amiss with the arguments, only the call itself raises.
    """
    tensors = {i: a for i, a in enumerate(args) if isinstance(a, Tensor)}
    try:
        # Running statistics are written to without a new version.
        values = {i: t.detach().clone() for i, t in tensors.items() if not t.requires_grad}
        versions = {i: _version(t) for i, t in tensors.items()}
    except Exception as error:  # noqa: BLE001
        return call(*args), _untold(error)
    result = call(*args)
    try:
        return result, [
            i
            for i, t in tensors.items()
            if _version(t) != versions[i] or (i in values and not same_values(t, values[i]))
        ]
    except Exception as error:  # noqa: BLE001
        return result, _untold(error)


def _version(tensor: Tensor) -> int:
    """What was made in inference mode has none."""
    return 0 if tensor.is_inference() else tensor._version


def _untold(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "there is no memory for a copy of what it is given"
    return f"what it is given cannot be compared: {type(error).__name__}: {error}"


def shared_among(results: Any) -> list[tuple[Tensor, int]]:
    """Of a call's results, those that share memory with another, and their versions: copies would not."""
    given = results if isinstance(results, (tuple, list)) else [results]
    tensors = [r for r in given if isinstance(r, Tensor) and plain(r) and not r.is_inference()]
    at = Counter(t.untyped_storage().data_ptr() for t in tensors)
    return [(t.detach(), t._version) for t in tensors if at[t.untyped_storage().data_ptr()] > 1]


@contextmanager
def put_back(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Undo at the end what is written to these within; what that was is in the list by then."""
    before = [t.detach().clone() for t in tensors]
    after: list[Tensor] = []
    try:
        yield after
    finally:
        after += [t.detach().clone() for t in tensors]
        for t, value in zip(tensors, before, strict=True):
            # Not in the eyes of autograd, which may hold it for a backward that is still to come.
            t.data.copy_(value)


def written_alike(mine: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """That two runs have written the same.

    Raises:
        Differs: they have not.
    """
    alike("written value", mine, expected)
    exact = [(a, b) for a, b in zip(mine, expected, strict=True) if not b.is_floating_point()]
    if not all(torch.equal(a, b) for a, b in exact):
        raise Differs("replayed, it does not write the same")
