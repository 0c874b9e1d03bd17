"""A fluent builder of Kineto-like traces, small enough to work out by hand.

    trace = Builder()
    with trace.step(7, 1000, 900):
        ...
    trace.op("aten::mm", 10, 50).launch("gemm", 20, at=100, dur=300)
    timeline = trace.join()

Times are in µs, as in the file.
"""

from __future__ import annotations

import json
from typing import Any

from advisor.trace.events import Trace
from advisor.trace.link import Timeline, join
from advisor.trace.read import decode_trace

HOST, MAIN, BACKWARD = 1, 1, 2


class Builder:
    """Collects events. `tid` is the host thread of what follows, until `on` changes it."""

    def __init__(self, *, device: str | None = "NVIDIA H100 80GB HBM3") -> None:
        self.events: list[dict[str, Any]] = []
        self.meta: dict[str, Any] = {}
        if device:
            self.meta["deviceProperties"] = [{"id": 0, "name": device, "totalGlobalMem": 85_045_870_592}]
        self._tid = MAIN
        self._correlation = 0

    def on(self, tid: int) -> Builder:
        """What follows is on this host thread."""
        self._tid = tid
        return self

    def event(self, cat: str, name: Any, ts: float, dur: float | None, **args: Any) -> Builder:
        """Any event, on the current thread."""
        event = {"ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": self._tid, "ts": ts, "args": args}
        if dur is not None:
            event["dur"] = dur
        self.events.append(event)
        return self

    def range(self, name: str, ts: float, dur: float) -> Builder:
        """A `record_function` or profiler range."""
        return self.event("user_annotation", name, ts, dur)

    def step(self, number: int, ts: float, dur: float) -> Builder:
        """A ProfilerStep range."""
        return self.range(f"ProfilerStep#{number}", ts, dur)

    def op(
        self,
        name: str,
        ts: float,
        dur: float,
        *,
        dims: list[Any] | None = None,
        dtype: str = "float",
        sequence: int | None = None,
        forward_thread: int = 0,
        cat: str = "cpu_op",
        dtypes: list[str] | None = None,
        strides: list[Any] | None = None,
        concrete: list[str] | None = None,
        **args: Any,
    ) -> Builder:
        """An operator; with `dims` it has recorded shapes, contiguous unless `strides` are given."""
        if dims is not None:
            args["Input Dims"] = dims
            args["Input type"] = dtypes or [dtype if shape else "Scalar" for shape in dims]
            args["Input Strides"] = strides or [_contiguous(shape) for shape in dims]
            args["Concrete Inputs"] = concrete or [""] * len(dims)
        if sequence is not None:
            args |= {"Sequence number": sequence, "Fwd thread id": forward_thread}
        return self.event(cat, name, ts, dur, **args)

    def python(self, name: str, ts: float, dur: float) -> Builder:
        """A Python frame."""
        return self.event("python_function", name, ts, dur)

    def call(self, ts: float, *, correlation: int, name: str = "cudaLaunchKernel", dur: float = 2) -> Builder:
        """A runtime or driver call."""
        cat = "cuda_driver" if name.startswith("cu") and not name.startswith("cuda") else "cuda_runtime"
        return self.event(cat, name, ts, dur, correlation=correlation)

    def work(
        self,
        name: str,
        ts: float,
        dur: float,
        *,
        correlation: int | None,
        cat: str = "kernel",
        device: int = 0,
        stream: int = 7,
        **args: Any,
    ) -> Builder:
        """A kernel, copy or memset on the device."""
        args |= {"device": device, "stream": stream}
        if correlation is not None:
            args["correlation"] = correlation
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": device,
                "tid": stream,
                "ts": ts,
                "dur": dur,
                "args": args,
            }
        )
        return self

    def launch(self, name: str, ts: float, *, at: float, dur: float, **work: Any) -> Builder:
        """A launch call on the current thread at `ts`, and the kernel it starts `at` a later time."""
        self._correlation += 1
        return self.call(ts, correlation=self._correlation).work(
            name, at, dur, correlation=self._correlation, **work
        )

    def context(self, **block: Any) -> Builder:
        """Entries of the capture's context block."""
        self.meta.setdefault("training_advisor", {}).update(block)
        return self

    def document(self) -> dict[str, Any]:
        """The trace as Kineto writes it."""
        return {**self.meta, "traceEvents": self.events}

    def json(self) -> bytes:
        """The file's bytes."""
        return json.dumps(self.document()).encode()

    def trace(self) -> Trace:
        """Read into columns."""
        return decode_trace(self.json(), "built.json", len(self.events))

    def join(self) -> Timeline:
        """Read and joined up."""
        return join(self.trace())


def _contiguous(shape: list[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]
