"""How a pattern says what can stand in for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from advisor.swap.site import Candidate, Example


def bundled(
    name: str,
    call: Callable[..., Any],
    reasons: Callable[..., Sequence[str]],
    permanent: str = "",
    /,
    **settings: Any,
) -> Candidate:
    """A candidate on a bundled kernel.

    Args:
        name: of the kernel in `advisor.kernels`.
        call: takes the match's inputs and `settings`.
        reasons: takes the same; why the kernel cannot serve them.
        permanent: the change by hand.
        settings: keyword arguments of both.
    """

    def unsupported(example: Example) -> Sequence[str]:
        return reasons(*example.args, **settings)

    return Candidate(f"advisor.kernels.{name}", partial(call, **settings), "bundled", permanent, unsupported)


def of_torch(
    name: str,
    call: Callable[..., Any],
    permanent: str = "",
    reasons: Callable[..., Sequence[str]] | None = None,
    /,
    *,
    deterministic: bool = True,
    **settings: Any,
) -> Candidate:
    """A candidate of PyTorch's own; the arguments are those of `bundled`."""

    def unsupported(example: Example) -> Sequence[str]:
        return () if reasons is None else reasons(*example.args, **settings)

    return Candidate(
        f"torch {name}", partial(call, **settings), "torch", permanent, unsupported, deterministic
    )


def in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as the rest of the graph expects it; itself where it is so already."""
    return value if value.dtype == dtype else value.to(dtype)
