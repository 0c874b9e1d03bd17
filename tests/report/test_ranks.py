"""Ranks of a job wait for each other inside collectives."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor import analyze
from advisor.report.model import RankSummary
from advisor.report.ranks import add_waiting, find_waiting, limit, remark


def rank(number: int | None, communication_ms: float | None, *, step_ms: float = 45.0) -> RankSummary:
    return RankSummary(
        rank=number,
        path=f"rank{number}.json",
        device="H200",
        step_time_ms=step_ms,
        gpu_busy_fraction=0.68,
        kernel_time_ms_per_step=30.0,
        communication_ms_per_step=communication_ms,
        exposed_communication_ms_per_step=communication_ms,
    )


def filled(*ranks: RankSummary) -> list[RankSummary]:
    add_waiting(ranks)
    return list(ranks)


def test_waiting_is_communication_beyond_that_of_the_rank_with_the_least() -> None:
    ranks = filled(rank(0, 16.4), rank(1, 2.0), rank(2, 5.0))
    assert [r.waiting_ms_per_step for r in ranks] == pytest.approx([14.4, 0.0, 3.0])


@pytest.mark.parametrize(
    "ranks",
    [
        (rank(0, 16.4),),
        (rank(0, 16.4), rank(0, 2.0)),
        (rank(0, 16.4), rank(None, 2.0)),
        (rank(0, 16.4), rank(1, 0.0)),
        (rank(0, 16.4), rank(1, None)),
    ],
    ids=["alone", "same number", "no number", "no communication", "unknown"],
)
def test_waiting_is_not_known_where_ranks_cannot_be_compared(ranks) -> None:
    assert all(r.waiting_ms_per_step is None for r in filled(*ranks))
    assert find_waiting(ranks, 0) is None


def test_a_rank_that_waits_is_told_for_whom_and_that_it_is_no_work() -> None:
    # GIVEN the figures of two ranks, seen from the one that waits
    waiting = find_waiting(filled(rank(0, 16.4), rank(1, 2.0)), shown=0)
    assert waiting is not None
    # THEN the verdict is no longer that rank's own
    said = limit(waiting, "The GPU works 88% of the step: its kernels limit this loop")
    assert said.startswith("The other ranks wait for rank 1, whose GPU works 68% of its step")
    assert "14.4 ms of the 16.4 ms that rank 0 spends" in said
    assert "its kernels limit" not in said
    # AND the remark warns of the figures that count waiting as work
    told = remark(waiting)
    assert (told.code, told.level) == ("ranks.waiting", "warning")
    assert "2.00 ms to 16.4 ms" in told.message
    assert "GPU busy" in told.message


def test_the_rank_that_is_waited_for_keeps_its_own_verdict_and_hears_of_the_others() -> None:
    waiting = find_waiting(filled(rank(0, 2.0), rank(1, 16.4), rank(2, 5.0)), shown=0)
    assert waiting is not None
    said = limit(waiting, "The GPU works 46% of the step")
    assert "wait for rank 0: 14.4 ms of the 16.4 ms that rank 1 spends" in said
    assert said.endswith(". The GPU works 46% of the step")
    assert remark(waiting).level == "info"


@pytest.mark.parametrize(
    ("least", "most"), [(14.5, 16.4), (0.2, 2.0)], ids=["a little of it", "a little of the step"]
)
def test_a_small_spread_is_not_worth_a_word(least, most) -> None:
    assert find_waiting(filled(rank(0, most), rank(1, least)), shown=0) is None


def test_two_ranks_of_a_real_job(shared: Path) -> None:
    # GIVEN rank 0, which spends 16.4 ms a step in NCCL, and rank 1, which spends 2.06
    report = analyze([shared / f"traces/h200/ddp2_gpt_rank{n}.json.gz" for n in (0, 1)])
    # THEN verdict, remarks and ranks say who waits for whom
    assert [r.waiting_ms_per_step for r in report.ranks] == pytest.approx([14.33, 0.0], abs=0.01)
    assert "wait for rank 1" in report.summary.verdict
    assert "rank 0's device time" in report.summary.verdict
    assert "ranks.waiting" in {remark.code for remark in report.data_quality}
