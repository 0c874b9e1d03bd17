"""Whatever a trace holds, a report comes out: no crash, no NaN, shares that add up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from advisor.errors import InputError
from advisor.report.build import build_report
from advisor.report.files import to_json
from advisor.report.launches import launch_rows
from advisor.roofline.analysis import analyse_timeline
from advisor.trace.link import join
from advisor.trace.read import decode_trace

NAMES = [
    "aten::mm", "aten::linear", "aten::add_", "aten::_fused_adamw_", "aten::cross_entropy_loss", "x", "",
    "ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#2", "ProfilerStep#99999999999999999999999",
    "autograd::engine::evaluate_function: MmBackward0", "torch::autograd::AccumulateGrad", "MmBackward0",
    "advisor::module::a.0", "advisor::phase::backward", "advisor::phase::validation", "nn.Module: Linear_0",
    "enumerate(DataLoader)#x", "Optimizer.step#SGD.step", "cudaLaunchKernel", "ncclDevKernel_AllReduce",
    "Memcpy HtoD (Pageable -> Device)", "Memset (Device)", "ampere_sgemm_128x64", None, 7,
]  # fmt: skip
CATEGORIES = [
    "cpu_op", "Operator", "user_annotation", "python_function", "cuda_runtime", "cuda_driver", "kernel",
    "gpu_memcpy", "gpu_memset", "ac2g", None,
]  # fmt: skip
TIMES = st.one_of(
    st.integers(0, 300), st.floats(-10, 1e3), st.sampled_from([0, 1.7e15, -5, 1e300, None, "12.5", "soon"])
)
SMALL = st.one_of(st.integers(-2, 3), st.sampled_from([None, "1", 2**63, 2**70, 1.5]))
DIMS = st.one_of(
    st.lists(st.one_of(st.lists(st.integers(-1, 64), max_size=3), st.integers(0, 9)), max_size=4),
    st.sampled_from(["", None, [[[2, 2]], []]]),
)
ARGS = st.fixed_dictionaries(
    {},
    optional={
        "correlation": SMALL,
        "device": SMALL,
        "stream": SMALL,
        "bytes": SMALL,
        "grid": st.sampled_from([[1, 1, 1], [0, 0, 0], [108, 2, 1], "big"]),
        "Input Dims": DIMS,
        "Input type": st.lists(
            st.sampled_from(["float", "c10::Half", "Scalar", "", 3, ["float"]]), max_size=4
        ),
        "Concrete Inputs": st.lists(st.sampled_from(["", "1", "[2, 2]"]), max_size=4),
        "Sequence number": SMALL,
        "Fwd thread id": SMALL,
    },
)
EVENTS = st.lists(
    st.fixed_dictionaries(
        {
            "ph": st.sampled_from(["X", "X", "X", "f", "M"]),
            "cat": st.sampled_from(CATEGORIES),
            "name": st.sampled_from(NAMES),
            "pid": st.sampled_from([0, 1, "1"]),
            "tid": st.sampled_from([1, 2, "stream 7"]),
            "ts": TIMES,
            "dur": TIMES,
            "args": st.one_of(ARGS, st.sampled_from([[], "args", None])),
        }
    ),
    max_size=25,
)
CONTEXTS = st.sampled_from(
    [
        {},
        {"baseline": {"median_ms": 0.05}, "accumulate_grad_batches": 2},
        {"baseline": 3, "parameters": {"shape": 1}, "flags": [], "device": "gpu", "after": 1},
        {"parameters": [{"shape": [4, "x"], "count": -1}], "accumulate_grad_batches": "two"},
        {"parameters": [3, {"shape": 1}], "device": {"name": 1.5, "total_memory_bytes": ["80"]}},
        {"optimizers": [{"class": ["AdamW"]}], "peak_memory_bytes": {"in_window": {}}},
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(EVENTS, CONTEXTS, st.sampled_from([[], [{"id": 0, "name": "NVIDIA H200"}], "odd", [3, {"name": 4}]]))
def test_a_report_comes_out_of_any_events(
    events: list[dict[str, Any]], context: dict[str, Any], devices: Any
) -> None:
    document = {"deviceProperties": devices, "training_advisor": context, "traceEvents": events}
    try:
        trace = decode_trace(json.dumps(document).encode(), "any.json", 1)
    except InputError:
        return
    analysis = analyse_timeline(join(trace))
    report = build_report(analysis)

    assert not [one for one in report.data_quality if one.code == "advice.failed"]
    json.loads(to_json(report), parse_constant=lambda name: pytest.fail(f"{name} in the report"))
    assert len(list(launch_rows(analysis))) == len(analysis.timeline.launches)
    for slices in (report.breakdown.step, report.breakdown.phase, report.breakdown.family):
        shares = [part.fraction for part in slices if part.fraction is not None]
        assert not shares or sum(shares) == pytest.approx(1)
    bound = report.summary.bound_time_fraction
    shares = [getattr(bound, name) for name in bound.__struct_fields__]
    assert None in shares or sum(shares) == pytest.approx(1)
    for fraction in (report.summary.gpu_busy_fraction, report.summary.coverage.costed_time_fraction):
        assert fraction is None or 0 <= fraction <= 1 + 1e-9
    assert sum(group.time_ms_per_step for group in report.kernels) >= 0
