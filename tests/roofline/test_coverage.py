"""How much of the kernel time of open projects' traces has a cost: what docs/costs.md says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from advisor.roofline.attach import attach_costs
from advisor.trace.events import KERNEL
from advisor.trace.link import load
from advisor.trace.phases import is_collective


def _share_with_a_cost(path: Path) -> float:
    timeline = load(str(path))
    rows, names = timeline.launches, timeline.trace.names
    collective = np.array([is_collective(name) for name in names], bool)[rows.name]
    counted = (rows.kind == KERNEL) & ~collective
    known = attach_costs(timeline).known
    return float(rows.dur_ns[counted & known].sum() / rows.dur_ns[counted].sum())


@pytest.mark.parametrize(
    ("trace", "least"),
    [
        ("v100_resnet50_workers0", 0.99),
        ("h100_vit_inference", 0.999),
        ("mi300x_bert_inference", 0.999),
        ("mi300x_norms_fwd_bwd", 0.999),
        ("a100_training_control", 0.94),
        ("b200_llm_inference", 0.94),
        ("a100_tensorlist_cudagraph", 0.35),
    ],
)
def test_most_of_a_traces_kernel_time_has_a_cost(shared: Path, trace: str, least: float) -> None:
    assert _share_with_a_cost(shared / f"traces/public/{trace}.json.gz") >= least


@pytest.mark.parametrize("trace", ["mi300x_hipgraph_decode", "v100_large_noshapes"])
def test_without_shapes_next_to_nothing_has_one(shared: Path, trace: str) -> None:
    assert _share_with_a_cost(shared / f"traces/public/{trace}.json.gz") <= 0.01
