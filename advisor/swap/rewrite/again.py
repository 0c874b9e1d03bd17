"""A call that was replayed, computed again as it is: its loop differentiates it a second time, or twice over.

Of a replayed call nothing is left but what it gave. What it took is kept by autograd, as tensors are that a
graph saves: they are let go of with the graph, and a change to one of them is the error that it is in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from advisor.swap.guard import generators, kept_state

from .alike import outputs_of

Call = Callable[..., Any]


class Beginning:
    """What a call begins with beside its tensors; made before it is replayed.

    Args:
        args: of the call.
        written: which of them it writes to.
        device: where all of its tensors are.
        autocast: the dtype that is in force, or None.
    """

    def __init__(
        self,
        args: Sequence[Any],
        written: Sequence[int],
        device: torch.device,
        autocast: torch.dtype | None,
    ) -> None:
        self._written = {i: torch.empty_like(args[i]) for i in written}
        if written:
            torch._foreach_copy_(list(self._written.values()), [args[i] for i in written])
        self._tensors = [i for i, a in enumerate(args) if _savable(a) and i not in self._written]
        self._rest = list(args)
        for i in (*self._tensors, *written):
            self._rest[i] = None
        self._device = device
        self._drawn = [g.get_state() for g in generators([device])]
        self._autocast = autocast

    def to_save(self, args: Sequence[Any]) -> list[Tensor]:
        """The tensors for autograd to keep."""
        return [args[i] for i in self._tensors]

    def gradients(
        self, call: Call, saved: Sequence[Tensor], given: Sequence[Tensor | None], wanted: Sequence[int]
    ) -> list[Tensor | None]:
        """The gradients of these arguments, differentiable where a graph of their own is wanted.

        Args:
            call: what was recorded, or does the same; draws the same random numbers, and writes to copies.
            saved: what `to_save` gave.
            given: the gradients of what it gives.
            wanted: arguments.
        """
        twice = torch.is_grad_enabled()
        args = list(self._rest)
        for i, tensor in zip(self._tensors, saved, strict=True):
            args[i] = tensor
        for i, value in self._written.items():
            args[i] = value.clone()
        kind = self._device.type
        with kept_state([self._device]), torch.enable_grad():
            for generator, state in zip(generators([self._device]), self._drawn, strict=True):
                generator.set_state(state)
            # Arguments may hang on each other: what leads from one to another is not gone through.
            own: list[Any] = [a.view_as(a) if isinstance(a, Tensor) and a.requires_grad else a for a in args]
            dtype = self._autocast or torch.get_autocast_dtype(kind)
            with torch.autocast(kind, dtype=dtype, enabled=self._autocast is not None, cache_enabled=False):
                outputs = outputs_of(call(*own))
            ends = [(o, g) for o, g in zip(outputs, given, strict=True) if o is not None and g is not None]
            return list(
                torch.autograd.grad(
                    [o for o, _ in ends],
                    [own[i] for i in wanted],
                    [g for _, g in ends],
                    create_graph=twice,
                    allow_unused=True,
                )
            )


def _savable(value: Any) -> bool:
    """What was made in inference mode, as a table that a validation fills, autograd does not keep."""
    return isinstance(value, Tensor) and not value.is_inference()
