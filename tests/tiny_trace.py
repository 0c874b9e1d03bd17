"""A Kineto trace small enough to check by hand: three steps of one matrix product and one addition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HOST, THREAD, STREAM = 100, 100, 7
STEP_US = 1000.0


def _span(category: str, name: str, ts: float, dur: float, tid: int = THREAD, **args: Any) -> dict[str, Any]:
    pid = 0 if category == "kernel" else HOST
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def _launched_op(
    op: str, kernel: str, ts: float, dur: float, number: int, dims: list[list[int]]
) -> list[dict[str, Any]]:
    """An operator on the host, its launch, and a kernel that starts 20 us later."""
    shapes = {
        "External id": number,
        "Input Dims": dims,
        "Input type": ["c10::BFloat16"] * len(dims),
        "Input Strides": [[d[1], 1] for d in dims],
        "Concrete Inputs": [""] * len(dims),
    }
    device = {"device": 0, "context": 1, "stream": STREAM, "grid": [256, 1, 1], "block": [256, 1, 1]}
    return [
        _span("cpu_op", op, ts, 30.0, **shapes),
        _span("cuda_runtime", "cudaLaunchKernel", ts + 10, 5.0, correlation=number),
        _span("kernel", kernel, ts + 20, dur, tid=STREAM, correlation=number, **device),
    ]


def tiny_trace(steps: int = 3) -> dict[str, Any]:
    """The trace as Kineto writes it: `steps` steps of 1 ms on an H100, with shapes."""
    events: list[dict[str, Any]] = []
    for step in range(steps):
        ts = 1_000_000.0 + step * STEP_US
        events.append(_span("user_annotation", f"ProfilerStep#{step + 5}", ts, STEP_US - 1))
        square = [4096, 4096]
        events += _launched_op("aten::mm", "sm90_gemm_bf16", ts + 50, 250.0, 10 * step + 1, [square, square])
        events += _launched_op(
            "aten::add", "vectorized_elementwise_kernel", ts + 350, 40.0, 10 * step + 2, [square, square]
        )
    return {
        "schemaVersion": 1,
        "deviceProperties": [
            {
                "id": 0,
                "name": "NVIDIA H100 80GB HBM3",
                "totalGlobalMem": 85_045_870_592,
                "computeMajor": 9,
                "computeMinor": 0,
                "numSms": 132,
                "warpSize": 32,
            }
        ],
        "displayTimeUnit": "ms",
        "traceEvents": events,
    }


def write_tiny_trace(path: Path, steps: int = 3) -> Path:
    """Write the trace as JSON to `path` and return it."""
    path.write_text(json.dumps(tiny_trace(steps)))
    return path
