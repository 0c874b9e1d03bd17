"""The loop that is being recorded: what its trace cannot know, told once, and then let go of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from advisor.capture import context as ctx


class Loop:
    """A training loop's model, optimizers and loader, for as long as a window needs them.

    Args:
        model: its modules are marked and listed.
        optimizers: their settings and parameter shapes are listed.
        loader: its settings are listed.
        device: where the model trains; None for where its first parameter is.
        cycle: batches per optimizer step.
        more: further entries for the context block, read when the window ends.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        optimizers: Sequence[Any],
        loader: Any,
        device: torch.device | str | None,
        cycle: int,
        more: Callable[[], dict[str, Any]] | None,
    ) -> None:
        self.model = model
        self.device = _device_of(model) if device is None else torch.device(device)
        self.cycle = max(1, cycle)
        self._optimizers = tuple(optimizers)
        self._loader = loader
        self._more = more
        self._batch: list[list[Any]] | None = None
        self._peak_before: int | None = None

    def note_batch(self, batch: Any) -> None:
        """Keep the shapes of the first batch seen, not the batch."""
        if self._batch is None:
            self._batch = ctx.batch_context(batch)

    def note_peak_memory(self) -> None:
        """Keep the high-water mark of device memory before the window."""
        self._peak_before = ctx.peak_memory_bytes(self.device)

    def describe(self) -> dict[str, Any]:
        """The loop's share of the context block."""
        block: dict[str, Any] = {
            "schema": ctx.SCHEMA,
            **ctx.torch_context(self.device),
            "accumulate_grad_batches": self.cycle,
            "optimizers": ctx.known(lambda: ctx.optimizer_context(self._optimizers)),
            "parameters": ctx.known(lambda: ctx.parameter_context(self._optimizers)),
            "loader": ctx.known(lambda: ctx.loader_context(self._loader)),
            "batch": self._batch,
            "peak_memory_bytes": {
                "before": self._peak_before,
                "in_window": ctx.peak_memory_bytes(self.device),
            },
        }
        model = self.model
        if model is not None:
            block.update(ctx.known(lambda: ctx.module_context(model)) or {})
        more = (ctx.known(self._more) if self._more is not None else None) or {}
        block["versions"].update(more.pop("versions", {}))
        return {**block, **more}

    def forget(self) -> None:
        """Hold on to nothing of the loop."""
        self.model = None
        self._optimizers = ()
        self._loader = None
        self._more = None


def _device_of(model: torch.nn.Module | None) -> torch.device:
    parameter = next(model.parameters(), None) if model is not None else None
    if parameter is not None:
        return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
