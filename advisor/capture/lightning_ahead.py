"""How many batches a Lightning Trainer has still to run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from advisor.capture.plan import Ahead


class EpochLengths:
    """Batches counted in each epoch, which tell the length of a loader that does not know its own."""

    def __init__(self) -> None:
        self.current = 0
        self.last: int | None = None

    def start(self) -> None:
        """An epoch begins."""
        if self.current:
            self.last = self.current
        self.current = 0

    def count(self) -> None:
        """A batch has ended."""
        self.current += 1


def of_fit(trainer: Any, batch_idx: int, epochs: EpochLengths) -> Ahead:
    """What lies ahead in ``fit`` after batch ``batch_idx``, from the loaders and the Trainer's limits."""
    batches = _whole(trainer.num_training_batches)
    left = None if batches is None else max(0, batches - batch_idx - 1)
    if left is None and epochs.last is not None:
        left = max(0, epochs.last - epochs.current) or None
        batches = epochs.last
    max_epochs = trainer.max_epochs
    epochs_later = None if max_epochs in (None, -1) else max(0, max_epochs - trainer.current_epoch - 1)
    later = 0 if epochs_later == 0 else None
    if later is None and epochs_later is not None and batches is not None:
        later = epochs_later * batches

    if trainer.max_steps not in (None, -1):
        cycle = trainer.accumulate_grad_batches
        in_cycle = (batch_idx + 1) % cycle
        allowed = max(0, (trainer.max_steps - trainer.global_step) * cycle - in_cycle)
        # With several optimizers or none in a batch the Trainer's count differs; then this is a bound only.
        if left is None or allowed <= left:
            left, later = allowed, 0
        elif later is None or allowed - left < later:
            later = allowed - left
    if trainer.is_last_batch or trainer.should_stop:
        left = 0
    every = _whole(getattr(trainer, "val_check_batch", None)) if trainer.enable_validation else None
    return Ahead(
        left_in_epoch=left,
        left_later=later,
        epoch_batches=batches,
        next_batch=batch_idx + 1,
        to_validation=every - (batch_idx + 1) % every if every else None,
        between_validations=every or None,
    )


def of_evaluation(batches: Sequence[int | float] | int | float, batch_idx: int, loader_idx: int) -> Ahead:
    """What lies ahead in validate, test or predict; each loader counts as an epoch."""
    counts = [batches] if isinstance(batches, (int, float)) else list(batches)
    here = _whole(counts[loader_idx]) if loader_idx < len(counts) else None
    left = None if here is None else max(0, here - batch_idx - 1)
    later = [_whole(count) for count in counts[loader_idx + 1 :]]
    return Ahead(
        left_in_epoch=left,
        left_later=None if None in later else sum(n for n in later if n is not None),
        epoch_batches=max((n for n in later if n is not None), default=None),
        next_batch=batch_idx + 1,
    )


def _whole(count: Any) -> int | None:
    """The count, or None for infinity and for what is no number."""
    return int(count) if isinstance(count, (int, float)) and math.isfinite(count) else None
