"""The ranks of one job beside each other: who waits for whom inside collectives.

A collective ends when its last rank has come, so all ranks leave it at about the same time, and those
that came early spend the difference inside its kernel: a profiler counts it as work. The rank that spends
least time in collectives is the one that the others wait for. That holds where all ranks move the same
data, as in data parallelism; stages of a pipeline or experts of unequal load differ by design too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from advisor.report import format as fmt
from advisor.report.model import Quality, RankSummary

#: Waiting is told from this share of a step on...
_OF_STEP = 0.05
#: ...if it is this share of the communication too: links and clocks differ a little.
_OF_COMMUNICATION = 0.2


def add_waiting(ranks: Sequence[RankSummary]) -> None:
    """Fill in `RankSummary.waiting_ms_per_step`, where these are ranks of one job that all communicate."""
    numbers = [rank.rank for rank in ranks]
    if len(ranks) < 2 or None in numbers or len(set(numbers)) < len(numbers):
        return
    times = [rank.communication_ms_per_step for rank in ranks if rank.communication_ms_per_step]
    if len(times) == len(ranks):
        for rank, time in zip(ranks, times, strict=True):
            rank.waiting_ms_per_step = time - min(times)


@dataclass(frozen=True, slots=True)
class Waiting:
    """That ranks wait for one of them by more than a little.

    Attributes:
        shown: the rank that the report's other figures are of.
        last: the rank with the least time in collectives.
        longest: the rank with the most; itself `shown` where that one waits by more than a little.
        least_ms, most_ms: communication of ranks in a step, the shortest and the longest.
    """

    shown: int
    last: RankSummary
    longest: RankSummary
    least_ms: float
    most_ms: float

    @property
    def told_of(self) -> str:
        """How long `longest` waits, of what: for a sentence."""
        return (
            f"{fmt.duration(self.longest.waiting_ms_per_step)} of the "
            f"{fmt.duration(self.longest.communication_ms_per_step)} that rank {self.longest.rank} spends in "
            "collectives per step"
        )


def find_waiting(ranks: Sequence[RankSummary], shown: int | None) -> Waiting | None:
    """The waiting among ranks that `add_waiting` has filled in; None where there is little or none known."""
    known = [rank for rank in ranks if rank.waiting_ms_per_step is not None]
    waiting = [rank for rank in known if _waits(rank)]
    if not waiting or shown is None:
        return None
    times = [rank.communication_ms_per_step or 0.0 for rank in known]
    own = [rank for rank in waiting if rank.rank == shown]
    return Waiting(
        shown=shown,
        last=min(known, key=_communication_ms),
        longest=own[0] if own else max(waiting, key=_communication_ms),
        least_ms=min(times),
        most_ms=max(times),
    )


def limit(waiting: Waiting, own: str) -> str:
    """What limits a job whose ranks wait: the first part of the verdict.

    Args:
        waiting: from `find_waiting`.
        own: what would be said of the shown rank alone.
    """
    last = waiting.last
    if last.rank == waiting.shown:
        return f"The other ranks wait for rank {last.rank}: {waiting.told_of} is waiting. {own}"
    busy = f", whose GPU works {last.gpu_busy_fraction:.0%} of its step" if last.gpu_busy_fraction else ""
    return f"The other ranks wait for rank {last.rank}{busy}: {waiting.told_of} is waiting"


def remark(waiting: Waiting) -> Quality:
    """The spread across ranks, and what it does to the figures of the shown one."""
    shown_waits = waiting.longest.rank == waiting.shown
    return Quality(
        level="warning" if shown_waits else "info",
        code="ranks.waiting",
        message=f"ranks spend {fmt.duration(waiting.least_ms)} to {fmt.duration(waiting.most_ms)} per step "
        f"in collectives, rank {waiting.last.rank} the least. {waiting.told_of} is waiting for it, if all "
        "ranks move the same data"
        + ("; GPU busy, kernel time and the share of communication count it as work" if shown_waits else "")
        + f". See what rank {waiting.last.rank} does longer",
    )


def _waits(rank: RankSummary) -> bool:
    waiting, step = rank.waiting_ms_per_step, rank.step_time_ms
    return bool(
        waiting
        and step
        and waiting >= _OF_STEP * step
        and waiting >= _OF_COMMUNICATION * _communication_ms(rank)
    )


def _communication_ms(rank: RankSummary) -> float:
    return rank.communication_ms_per_step or 0.0
