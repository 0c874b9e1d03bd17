"""Phase marks in Lightning's loop where no callback hook is, set while a window is open and then undone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from advisor.capture.ranges import Phases

#: The strategy's method that runs the user's step, by what the Trainer is doing.
STEP_METHODS = {
    "fit": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}


class LightningMarks:
    """Marks forward, batch fetch, batch transfer and the end of the optimizer's step.

    Each mark shadows a method on one instance, or is a hook that the optimizer offers; removing them leaves
    the instances' attributes as they were. The calls themselves go through unchanged.

    Args:
        trainer: a Lightning Trainer, of either package.
        phases: where the marks go.
        stage: a key of `STEP_METHODS`.
    """

    def __init__(self, trainer: Any, phases: Phases, stage: str) -> None:
        self._trainer: Any = trainer
        self._phases = phases
        self._stage = stage
        self._undo = contextlib.ExitStack()

    def install(self) -> None:
        """Set the marks."""
        trainer = self._trainer
        self._around(trainer.strategy, STEP_METHODS[self._stage], "forward")
        self._around(trainer.strategy, "batch_to_device", "input")
        if self._stage == "fit":
            self._fetch(getattr(trainer.fit_loop, "_data_fetcher", None))
            self._optimizer_end(trainer)

    def remove(self) -> None:
        """Undo all marks and forget the trainer."""
        self._undo.close()
        self._trainer = None

    def _around(self, owner: Any, method: str, phase: str) -> None:
        phases = self._phases
        original = getattr(owner, method)

        def marked(*args: Any, **kwargs: Any) -> Any:
            phases.open(phase)
            try:
                return original(*args, **kwargs)
            finally:
                phases.close(phase)

        self._shadow(owner, method, marked)

    def _after(self, owner: Any, method: str, then: Callable[[], None]) -> None:
        original = getattr(owner, method)

        def marked(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                then()

        self._shadow(owner, method, marked)

    def _fetch(self, fetcher: Any) -> None:
        """Lightning's own two points around the fetch, which it keeps as attributes of the fetcher."""
        start, stop = getattr(fetcher, "_start_profiler", None), getattr(fetcher, "_stop_profiler", None)
        if not callable(start) or not callable(stop):
            return
        phases = self._phases

        def started() -> None:
            start()
            phases.open("input")

        def stopped() -> None:
            phases.close("input")
            stop()

        self._shadow(fetcher, "_start_profiler", started)
        self._shadow(fetcher, "_stop_profiler", stopped)

    def _optimizer_end(self, trainer: Any) -> None:
        phases = self._phases
        scaler = getattr(getattr(trainer, "precision_plugin", None), "scaler", None)
        if scaler is not None:
            # It opens before the scaler and must not close inside it; a skipped step still updates the scale.
            self._after(scaler, "update", lambda: phases.close("optimizer"))
            return
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "register_step_post_hook"):
                handle = optimizer.register_step_post_hook(lambda *_: phases.close("optimizer"))
                self._undo.callback(handle.remove)

    def _shadow(self, owner: Any, name: str, replacement: Any) -> None:
        own = vars(owner)
        had, before = name in own, own.get(name)

        def restore() -> None:
            if vars(owner).get(name) is not replacement:
                return  # someone else has replaced it since
            if had:
                setattr(owner, name, before)
            else:
                delattr(owner, name)

        setattr(owner, name, replacement)
        self._undo.callback(restore)
