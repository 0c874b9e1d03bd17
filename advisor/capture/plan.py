"""When the window opens and how many batches it holds. Pure: a decision from counts."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.errors import UsageError

#: Batches before the captured ones: one that arms the profiler, one recorded and thrown away.
LEAD_BATCHES = 2
#: Batches measured after the window to see whether the step time is back.
AFTER_BATCHES = 12
#: Measured batches after which automatic warm-up no longer waits for a stable step time.
AUTO_CAP = 200
#: Warm-up of jobs that capture several ranks: they must open together without talking to each other.
SHARED_WARMUP = 50


@dataclass(frozen=True, slots=True)
class Ahead:
    """What lies ahead when a batch has ended. None is unknown.

    Attributes:
        left_in_epoch: batches still to come in this epoch.
        left_later: batches in the epochs after it.
        epoch_batches: batches in each of those epochs.
        next_batch: index of the next batch within its epoch.
        to_validation: batches until a validation run interrupts the epoch.
        between_validations: batches from one such run to the next.
    """

    left_in_epoch: int | None = None
    left_later: int | None = None
    epoch_batches: int | None = None
    next_batch: int = 0
    to_validation: int | None = None
    between_validations: int | None = None


def check_counts(warmup_steps: int | str, capture_steps: int) -> None:
    """See that the counts make sense.

    Raises:
        UsageError: if not.
    """
    if warmup_steps != "auto" and (
        not isinstance(warmup_steps, int) or isinstance(warmup_steps, bool) or warmup_steps < 0
    ):
        raise UsageError(f"warmup_steps={warmup_steps!r}: give a number of batches from 0, or 'auto'")
    if not isinstance(capture_steps, int) or isinstance(capture_steps, bool) or capture_steps < 1:
        raise UsageError(f"capture_steps={capture_steps!r}: give a number of batches from 1")


def whole_cycles(capture: int, cycle: int) -> int:
    """The batches to capture, rounded up to whole cycles of gradient accumulation."""
    return -(-capture // cycle) * cycle


def _largest(room: int, capture: int, cycle: int) -> int:
    """Batches that can be captured in ``room``: whole cycles if one fits, else what there is."""
    fits = min(capture, room - LEAD_BATCHES)
    if fits >= cycle:
        return fits - fits % cycle
    return max(fits, 0)


def batches_to_capture(ahead: Ahead, *, capture: int, cycle: int, ready: bool, measured: int) -> int:
    """Decide at the end of a batch whether the window opens now.

    The window never runs past its epoch and never holds an epoch's first batch, starts on a cycle of
    gradient accumulation and avoids a validation run, each as far as the batches that exist
    allow. With few batches left it opens before the loop is ready, and shrinks.

    Args:
        ahead: what is known of the batches to come.
        capture: batches wanted, a multiple of ``cycle``.
        cycle: batches per optimizer step.
        ready: whether the warm-up is over.
        measured: batches measured so far.

    Returns:
        Batches to capture from here, after `LEAD_BATCHES` others; 0 to go on waiting.
    """
    aligned = (ahead.next_batch + LEAD_BATCHES) % cycle == 0
    if ahead.left_in_epoch is None:
        return capture if ready and aligned else 0

    room = ahead.left_in_epoch
    later_room = _later_room(ahead)
    best = max(_largest(room, capture, cycle), _largest(later_room, capture, cycle))
    here = _largest(room, capture, cycle)
    if here == 0 or here < best:
        return 0
    window = LEAD_BATCHES + here
    last_chance = _largest(later_room, capture, cycle) < here
    if last_chance and room - cycle < window:
        # No later position is as good: wait only for one that is aligned and still fits.
        to_aligned = -(ahead.next_batch + LEAD_BATCHES) % cycle
        return here if aligned or room - to_aligned < window else 0
    if not aligned:
        return 0
    if _validation_inside(ahead, window) and (not last_chance or _fits_after(ahead, window)):
        return 0
    if ready:
        return here
    if not last_chance:
        return 0
    spare = room - window + (ahead.left_later or 0)
    return here if spare <= min(AFTER_BATCHES, measured * 2 // 3) else 0


def _later_room(ahead: Ahead) -> int:
    """Most batches that a window could use in a later epoch, its first batch excluded."""
    if ahead.left_later == 0:
        return 0
    length = ahead.epoch_batches
    if length is None:
        return 0 if ahead.left_later is None else ahead.left_later - 1
    return (length if ahead.left_later is None else min(length, ahead.left_later)) - 1


def _validation_inside(ahead: Ahead, window: int) -> bool:
    """Whether a validation run would cut through the window, and a later window would be spared."""
    if ahead.to_validation is None or ahead.between_validations is None:
        return False
    return ahead.to_validation < window <= ahead.between_validations


def _fits_after(ahead: Ahead, window: int) -> bool:
    """Whether the window still fits between the coming validation and the end of the epoch."""
    return (ahead.left_in_epoch or 0) - (ahead.to_validation or 0) >= window
