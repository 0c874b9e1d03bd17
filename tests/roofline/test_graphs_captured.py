"""Replays captured on an H200 by ``benchmarks/graphs/capture.py``: torch.cuda.graph and reduce-overhead."""

from pathlib import Path

import pytest

from advisor.report.build import analyze

CAPTURES = Path(__file__).parents[1] / "data" / "graphs"


@pytest.mark.parametrize("kind", ["whole", "compile"])
def test_a_replayed_step_takes_its_work_from_the_same_step_run_eagerly(kind: str) -> None:
    # GIVEN a step replayed from a CUDA graph, and the same step launched kernel by kernel
    replayed, eager = CAPTURES / f"{kind}_graph.json.gz", CAPTURES / f"{kind}_eager.json.gz"

    # WHEN it is analysed alone and beside the eager one
    alone = analyze(replayed).summary
    beside = analyze(replayed, reference=eager).summary
    truth = analyze(eager).summary

    # THEN alone its replayed part stays unknown, and beside it the step does the eager step's work
    assert alone.coverage.replayed_time_fraction > 0.5
    assert alone.coverage.costed_time_fraction < 1 - 0.9 * alone.coverage.replayed_time_fraction
    assert beside.coverage.costed_time_fraction > 0.98
    assert beside.flops_per_step == pytest.approx(truth.flops_per_step, rel=1e-6)
