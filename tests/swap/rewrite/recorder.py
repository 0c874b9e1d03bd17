"""What stands in for CUDA graphs where there is no GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from advisor.swap.rewrite.record import Recorded


class OnCpu:
    """Does again what was recorded, into the same memory, as a CUDA graph does.

    Gradients lie where the forward computes, as they do in a pool of memory: it writes over them.
    """

    held_bytes = 0

    def __init__(self, spoil: float = 0.0, adds_up: Any = False, launch_ns: float = 2.0) -> None:
        self.adds_up = adds_up if callable(adds_up) else lambda: adds_up
        self._launch_ns = launch_ns
        self.replays, self.recordings, self._spoil = 0, 0, spoil
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def times_ns(self, launch, replay) -> tuple[float, float]:
        """As if it took 1 ns as it is replayed."""
        launch()
        replay()
        return self._launch_ns, 1.0

    def rehearse(self, run) -> None:
        run()

    def record(self, forward, backward, replaced_bytes=0) -> Recorded:
        self.recordings += 1
        state: dict[str, Any] = {"outputs": forward()}
        outputs = [None if o is None else o.detach().clone() for o in state["outputs"]]
        gradients = [None if g is None else g.clone() for g in backward(state["outputs"])]

        # What is recorded holds the casts of then.
        settings = {"dtype": torch.get_autocast_dtype("cpu"), "enabled": torch.is_autocast_enabled("cpu")}

        def within() -> torch.autocast:
            return torch.autocast("cpu", cache_enabled=False, **settings)

        def again_forward() -> None:
            self.replays += 1
            for g in gradients:
                if g is not None:
                    g.fill_(torch.nan)
            with torch.enable_grad(), within():
                state["outputs"] = forward()
            write(outputs, state["outputs"])

        def again_backward() -> None:
            with within():
                found = backward(state["outputs"])
            write(gradients, found)
            for g in gradients:
                if g is not None and self._spoil:
                    g.mul_(1 + self._spoil)

        return Recorded(outputs, gradients, again_forward, again_backward)


@torch.no_grad()
def write(to: list[Tensor | None], what: list[Tensor | None]) -> None:
    for static, value in zip(to, what, strict=True):
        if static is not None:
            static.copy_(value)
