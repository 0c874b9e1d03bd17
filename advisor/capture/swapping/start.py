"""Whether swap has anything to do in a run, and what does it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from advisor.capture import notify
from advisor.errors import UsageError

if TYPE_CHECKING:
    from advisor.capture.swapping.engine import Engine
    from advisor.capture.window import Window


#: Batches before swap begins where no recorded window says that the loop is steady; where others may record.
WARMUP = 20
SHARED_WARMUP = 256


class Idle:
    """What the callback tells swap of a run; this one hears it and does nothing."""

    @property
    def keeps(self) -> bool:
        """Whether the run has ended, and what it swapped stays until it is asked back."""
        return False

    def epoch_start(self) -> None:
        """An epoch begins."""

    def cut(self) -> None:
        """Something other than a step happened: it is not timed as one."""

    def batch_start(self) -> None:
        """A batch is about to be trained on."""

    def batch_end(self, batch_idx: int) -> None:
        """A batch has been trained on."""

    def restore(self) -> None:
        """Everything is to be put back now; on several ranks each must be asked, at the same batch."""

    def close(self) -> None:
        """The run has ended."""

    def interrupt(self) -> None:
        """The run was left by an exception."""

    def refresh(self) -> None:
        """The recording and its report may be there by now."""


def check_swap(swap: Any, max_memory_growth: Any) -> None:
    """See that the options make sense; loads `advisor.swap` only where it is asked for.

    Raises:
        UsageError: if not.
    """
    if isinstance(max_memory_growth, bool) or not isinstance(max_memory_growth, (int, float)):
        raise UsageError(f"swap_max_memory_growth={max_memory_growth!r}: give a fraction from 0, such as 0.1")
    if not 0 <= max_memory_growth < float("inf"):
        raise UsageError(f"swap_max_memory_growth={max_memory_growth!r}: give a fraction from 0, such as 0.1")
    if swap is None:
        return
    if (
        not isinstance(swap, (str, list, tuple))
        or not swap
        or not all(isinstance(kind, str) for kind in swap)
    ):
        raise UsageError(f"swap={swap!r}: give None, 'auto' or a list of kinds")
    from advisor.swap.kinds.registry import chosen_kinds

    chosen_kinds(swap)


def begin(
    trainer: Any,
    module: Any,
    swap: str | Sequence[str] | None,
    *,
    keep: bool,
    max_memory_growth: float,
    window: Callable[[], Window | None],
    shared: bool,
    warmup_steps: int | Literal["auto"],
    results: Path,
) -> Idle:
    """What swaps in this run; says in one line if nothing can be swapped.

    Args:
        trainer: of either Lightning package; about to fit.
        module: its LightningModule.
        swap: kinds, ``"auto"``, or None.
        keep: leave what was kept in the model after the run.
        max_memory_growth: share by which whole steps' peak memory may grow.
        window: the one that records on this rank; None where none does.
        shared: whether other ranks may record, which this one cannot see.
        warmup_steps: batches before swap begins where nothing is recorded.
        results: where to leave what was done where nothing is recorded.
    """
    if swap is None:
        return Idle()
    if trainer.fast_dev_run:
        _say(trainer, "nothing is swapped under fast_dev_run")
        return Idle()
    from advisor.capture.swapping.engine import Engine
    from advisor.capture.swapping.limits import (
        adds_up,
        compiler_of,
        looks_at_gradients,
        optimized_by,
        why_no_patterns,
        why_no_replay,
        why_not,
    )
    from advisor.capture.swapping.run import Swapping
    from advisor.swap.kinds.registry import chosen_kinds

    def is_steady(batches: int) -> bool:
        recording = window()
        if recording is not None:
            return recording.done
        return batches >= (SHARED_WARMUP if shared else WARMUP if warmup_steps == "auto" else warmup_steps)

    def folder() -> Path:
        recording = window()
        return (recording.folder if recording is not None else None) or results

    kinds = chosen_kinds(swap)
    compiler, left = compiler_of(module), why_no_patterns(trainer, module)
    unreplayed = left or why_no_replay(trainer, module)
    engine = Engine(
        module,
        trainer.optimizers,
        kinds,
        allow_memory=max_memory_growth > 0,
        modules=compiler is None,  # within a compiled graph they are the compiler's
        patterns=not left,
        inner=compiler,
        replay=not unreplayed,
        adds_up=partial(
            adds_up, weakref.ref(trainer), looks_at_gradients(module), optimized_by(trainer.optimizers)
        ),
    )
    return Swapping(
        trainer,
        module,
        engine,
        asked=kinds,
        keep=keep,
        max_memory_growth=max_memory_growth,
        is_steady=is_steady,
        folder=folder,
        unable=why_not(trainer) or _unable(engine),
        remarks=[unreplayed] if unreplayed else [],
    )


def _unable(engine: Engine) -> str:
    """Why nothing can be swapped; a fault is one reason more, which the other ranks must hear of too."""
    try:
        return engine.unable()
    except Exception as error:  # noqa: BLE001
        why = f"{type(error).__name__}: {error}"
        notify.warn(f"swap is off, training goes on as before: {why}")
        return why


def _say(trainer: Any, line: str) -> None:
    if trainer.is_global_zero:
        notify.info(f"swap: {line}")
