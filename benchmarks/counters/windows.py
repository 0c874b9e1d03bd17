"""From the plain trace and the counters: the cases that agree in both, cut down to what an analysis reads."""

from __future__ import annotations

import bisect
import csv
import gzip
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from advisor.roofline.counter_join import join_launches
from advisor.roofline.counters import Counted, base_name

#: Prefix of the ranges that mark the cases in the trace.
RANGE = "zoo::"
#: Instructions of plain arithmetic units that have a column.
INSTRUCTIONS = ("ffma", "fadd", "fmul", "hfma", "hadd", "hmul", "dfma", "dadd", "dmul")
KEPT_ARGS = (
    "Input Dims", "Input type", "Input Strides", "Concrete Inputs", "Sequence number", "Fwd thread id",
    "External id", "correlation", "device", "context", "stream", "grid", "block", "bytes", "kernel_num_gb",
)  # fmt: skip
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")


class Window:
    """One case in the trace: its span on the host and its device events, in order of launch."""

    def __init__(self, name: str, start: float, end: float) -> None:
        self.name, self.start, self.end = name, start, end
        self.events: list[dict[str, Any]] = []
        self.kernels: list[dict[str, Any]] = []
        self.counted: list[int] = []


def windows_of(trace: dict[str, Any]) -> list[Window]:
    """The cases of a trace, each with what it launched."""
    events = trace["traceEvents"]
    windows = [
        Window(e["name"][len(RANGE) :], float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in events
        if e.get("cat") == "user_annotation" and str(e.get("name")).startswith(RANGE)
    ]
    windows.sort(key=lambda window: window.start)
    starts = [window.start for window in windows]

    def at(ts: float) -> Window | None:
        i = bisect.bisect_right(starts, ts) - 1
        return windows[i] if i >= 0 and ts <= windows[i].end else None

    launches = {
        e["args"]["correlation"]: float(e["ts"])
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    for e in events:
        if e.get("ph") != "X":
            continue
        on_device = e.get("cat") in DEVICE_EVENTS
        ts = launches.get(e["args"].get("correlation")) if on_device else float(e["ts"])
        window = at(ts) if ts is not None else None
        if window is not None and e.get("cat") in (*DEVICE_EVENTS, "cpu_op", "cuda_runtime", "cuda_driver"):
            window.events.append(e)
            if e["cat"] == "kernel":
                window.kernels.append(e)
    for window in windows:
        window.kernels.sort(key=lambda e: float(e["ts"]))
    return windows


def agreeing(windows: Sequence[Window], counted: Sequence[Counted]) -> list[Window]:
    """The cases all of whose kernels have counters, in order and without a stranger among them."""
    owners = [window for window in windows for _ in window.kernels]
    traced = [base_name(e["name"]) for window in windows for e in window.kernels]
    names = [base_name(one.kernel) for one in counted]
    for i, j in join_launches(traced, names):
        owners[i].counted.append(j)
    good = []
    for window in windows:
        at = window.counted
        if at == list(range(at[0], at[0] + len(window.kernels)) if at else ()) and len(at) == len(
            window.kernels
        ):
            good.append(window)
        else:
            print(f"not joined: {window.name}: {len(at)} of {len(window.kernels)} kernels")
    return good


def cut_down(trace: dict[str, Any], windows: Iterable[Window]) -> dict[str, Any]:
    """The trace without what lies outside the windows and what no analysis reads."""
    events: list[dict[str, Any]] = []
    spans: list[tuple[float, float]] = []
    for window in windows:
        spans.append((window.start, window.end))
        launched = {e["args"].get("correlation") for e in window.events if e["cat"] in DEVICE_EVENTS}
        for e in window.events:
            if e["cat"] in ("cuda_runtime", "cuda_driver") and e["args"].get("correlation") not in launched:
                continue
            args = {key: e["args"][key] for key in KEPT_ARGS if key in e.get("args", {})}
            events.append(
                {key: e[key] for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")} | {"args": args}
            )
    events.sort(key=lambda e: float(e["ts"]))
    if spans:
        # One step around everything, so that all of it counts.
        host = next(e for e in trace["traceEvents"] if str(e.get("name")).startswith(RANGE))
        step = {
            "ph": "X",
            "cat": "user_annotation",
            "name": "ProfilerStep#0",
            "pid": host["pid"],
            "tid": host["tid"],
        }
        first, last = min(start for start, _ in spans), max(end for _, end in spans)
        events.insert(0, {**step, "ts": first - 1, "dur": last - first + 2, "args": {}})
    kept = (
        "schemaVersion",
        "deviceProperties",
        "cuda_driver_version",
        "displayTimeUnit",
        "baseTimeNanoseconds",
    )
    head = {key: trace[key] for key in kept if key in trace}
    if "parameters" in trace:
        head["training_advisor"] = {"parameters": trace["parameters"]}
    return {**head, "traceEvents": events}


def write_counters(path: Path, windows: Sequence[Window], counted: Sequence[Counted]) -> None:
    dtypes = sorted({dtype for one in counted for dtype in one.tensor_flops})
    head = ["launch", "case", "kernel", "grid", "block", "time_ns", "dram_read_bytes", "dram_write_bytes"]
    rows = [[*head, *INSTRUCTIONS, "tensor_inst", *(f"tensor_flops_{dtype}" for dtype in dtypes), "dram_pct"]]
    kernels = [(window.name, e) for window in windows for e in window.kernels]
    for number, ((name, e), one) in enumerate(zip(kernels, counted, strict=True)):
        sizes = [str(tuple(e["args"].get(key, ()))) for key in ("grid", "block")]
        figures = [one.time_ns, one.bytes_read, one.bytes_written]
        figures += [one.instructions.get(i) for i in INSTRUCTIONS] + [one.tensor_instructions]
        figures += [one.tensor_flops.get(dtype) for dtype in dtypes] + [one.dram_pct]
        rows.append(
            [str(number), name, one.kernel, *sizes, *("" if f is None else f"{f:.10g}" for f in figures)]
        )
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    with gzip.GzipFile(path, "wb", mtime=0) as packed:
        packed.write(text.getvalue().encode())


def write_gz(path: Path, text: str) -> None:
    with gzip.GzipFile(path, "wb", mtime=0) as packed:
        packed.write(text.encode())
