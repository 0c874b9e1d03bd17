"""From decoded events to columns."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from advisor.trace.events import KERNEL, MEMCPY, MEMSET, DeviceEvents, Events, Loss, RuntimeEvents, Trace

_OP_CATS = frozenset({"cpu_op", "Operator"})
_RUNTIME_CATS = frozenset(
    {"cuda_runtime", "cuda_driver", "Runtime", "hip_runtime", "xpu_runtime", "xpu_driver"}
)
_DEVICE_KINDS = {
    "kernel": KERNEL, "Kernel": KERNEL,
    "gpu_memcpy": MEMCPY, "Memcpy": MEMCPY,
    "gpu_memset": MEMSET, "Memset": MEMSET,
}  # fmt: skip
#: Ranges that older profilers filed under operators.
_RANGE_PREFIXES = ("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)", "advisor::")


class _DeviceArgs(msgspec.Struct, gc=False):
    correlation: int | str | None = None
    device: int | str | None = None
    stream: int | str | None = None
    bytes: int | float | str | None = None
    grid: list[int] | None = None


class _RuntimeArgs(msgspec.Struct, gc=False):
    correlation: int | str | None = None


_DEVICE_ARGS = msgspec.json.Decoder(_DeviceArgs)
_RUNTIME_ARGS = msgspec.json.Decoder(_RuntimeArgs)


class _Interner(dict):
    """Maps a value to its position in `values`, adding it on first sight."""

    def __init__(self) -> None:
        super().__init__()
        self.values_seen: list[Any] = []

    def __missing__(self, key: Any) -> int:
        index = self[key] = len(self.values_seen)
        self.values_seen.append(key)
        return index


class _Tracks(_Interner):
    """Positions of (pid, tid), which may be numbers in one event and text in another."""

    def __missing__(self, key: tuple[Any, Any]) -> int:
        pid, tid = key
        as_text = (str(pid), str(tid))
        if as_text != key:
            index = self[key] = self[as_text]
            return index
        return super().__missing__(key)


def build_trace(
    events: list[Any], meta: dict[str, Any], path: str, size_bytes: int | None, losses: list[Loss]
) -> Trace:
    """Sort decoded events into columns by kind.

    Args:
        events: objects with the attributes of `read.RawEvent`; emptied on the way to free memory early.
        meta: the file's other top-level entries.
        path: for messages.
        size_bytes: stored size of the file, or None.
        losses: what is known to be lost so far; more may be added.
    """
    count = len(events)
    buckets = _by_kind(events)
    events.clear()
    names, tracks, tally = _Interner(), _Tracks(), _Tally()

    def columns(bucket: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        return _common_columns(bucket, names, tracks, tally)

    ops, op_columns = columns(buckets.pop("op", []))
    runtime, runtime_columns = columns(buckets.pop("runtime", []))
    device, device_columns = columns(buckets.pop("device", []))
    annotations, annotation_columns = columns(buckets.pop("annotation", []))
    python, python_columns = columns(buckets.pop("python", []))
    return Trace(
        path=path,
        size_bytes=size_bytes,
        ops=Events(**op_columns),
        runtime=RuntimeEvents(**runtime_columns, correlation=_correlations(runtime, tally)),
        device=DeviceEvents(**device_columns, **_device_columns(device, tally)),
        annotations=Events(**annotation_columns),
        python=Events(**python_columns),
        names=[name if isinstance(name, str) else str(name) for name in names.values_seen],
        tracks=tracks.values_seen,
        event_count=count,
        meta=meta,
        losses=losses + tally.losses(),
    )


class _Tally:
    """Counts of events that were out of order in some way."""

    _DETAILS = {
        "bad_time": "events whose time is missing or not a number were left out",
        "negative_duration": "events with a negative duration were taken as instants",
        "no_duration": "events without a duration were taken as instants",
        "bad_args": "events whose arguments have unexpected types lost their correlation",
    }

    def __init__(self) -> None:
        self.counts: dict[str, int] = defaultdict(int)

    def losses(self) -> list[Loss]:
        return [Loss(kind, n, self._DETAILS[kind]) for kind, n in self.counts.items() if n]


def _by_kind(events: Iterable[Any]) -> dict[str, list[Any]]:
    buckets: dict[str, list[Any]] = defaultdict(list)
    ops, runtime, device = buckets["op"], buckets["runtime"], buckets["device"]
    for event in events:
        if event.ph != "X":
            continue
        cat = event.cat
        if cat in _OP_CATS:
            if str(event.name).startswith(_RANGE_PREFIXES):
                buckets["annotation"].append(event)
            else:
                ops.append(event)
        elif cat in _RUNTIME_CATS:
            runtime.append(event)
        elif cat in _DEVICE_KINDS:
            device.append(event)
        elif cat == "user_annotation":
            buckets["annotation"].append(event)
        elif cat == "python_function":
            buckets["python"].append(event)
    return buckets


def _common_columns(
    bucket: list[Any], names: _Interner, tracks: _Tracks, tally: _Tally
) -> tuple[list[Any], dict[str, Any]]:
    """Events that have a usable time, in order, and their columns."""
    n = len(bucket)
    ts_us = _floats(bucket, n, lambda e: e.ts)
    dur_us = _floats(bucket, n, lambda e: e.dur)
    usable = np.isfinite(ts_us) & (np.abs(ts_us) < 9e15) & ~(np.abs(dur_us) > 9e15)
    tally.counts["bad_time"] += int(n - usable.sum())
    tally.counts["no_duration"] += int(np.isnan(dur_us[usable]).sum())
    dur_us = np.nan_to_num(dur_us, nan=0.0, posinf=0.0, neginf=0.0)
    tally.counts["negative_duration"] += int((dur_us[usable] < 0).sum())
    ts_ns = np.zeros(n, np.int64)
    ts_ns[usable] = np.rint(ts_us[usable] * 1000)
    dur_ns = np.rint(np.clip(dur_us, 0, 9e15) * 1000).astype(np.int64)
    order = np.lexsort((-dur_ns, ts_ns))
    order = order[usable[order]]
    name = np.fromiter((names[e.name] for e in bucket), np.int32, n)
    track = np.fromiter((tracks[e.pid, e.tid] for e in bucket), np.int32, n)
    ordered = [bucket[i] for i in order.tolist()]
    return ordered, {
        "name": name[order],
        "ts_ns": ts_ns[order],
        "dur_ns": dur_ns[order],
        "track": track[order],
        "args": [e.args for e in ordered],
    }


def _floats(bucket: list[Any], n: int, get: Callable[[Any], Any]) -> np.ndarray:
    try:
        return np.fromiter(map(get, bucket), np.float64, n)
    except (TypeError, ValueError):
        return np.fromiter((_as_float(get(e)) for e in bucket), np.float64, n)


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _as_int(value: Any, missing: int = -1) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return missing
    return number if -(1 << 62) < number < 1 << 62 else missing


def _correlations(events: list[Any], tally: _Tally) -> np.ndarray:
    found = np.full(len(events), -1, np.int64)
    decode = _RUNTIME_ARGS.decode
    for i, event in enumerate(events):
        try:
            found[i] = decode(event.args).correlation
        except (msgspec.DecodeError, TypeError, ValueError, OverflowError):
            found[i] = _as_int(_loose(event.args, tally).get("correlation"))
    return found


def _device_columns(events: list[Any], tally: _Tally) -> dict[str, np.ndarray]:
    n = len(events)
    correlation, size, grid = (np.full(n, -1, np.int64) for _ in range(3))
    device, stream = (np.full(n, -1, np.int32) for _ in range(2))
    decode = _DEVICE_ARGS.decode
    for i, event in enumerate(events):
        try:
            args = decode(event.args)
            correlation[i], device[i], stream[i] = args.correlation, args.device, args.stream
        except (msgspec.DecodeError, TypeError, ValueError, OverflowError):
            args = _lenient_device_args(_loose(event.args, tally))
            correlation[i], device[i], stream[i] = args.correlation, args.device, args.stream
        if args.bytes is not None:
            size[i] = _as_int(args.bytes)
        if args.grid is not None:
            grid[i] = _as_int(math.prod(args.grid))
    return {
        "correlation": correlation,
        "kind": np.fromiter((_DEVICE_KINDS[e.cat] for e in events), np.uint8, n),
        "device": device,
        "stream": stream,
        "bytes": size,
        "grid_blocks": grid,
    }


def _lenient_device_args(args: dict[str, Any]) -> _DeviceArgs:
    small = {key: _as_int(args.get(key)) for key in ("correlation", "device", "stream")}
    for key in ("device", "stream"):
        if not -1 <= small[key] < 1 << 31:
            small[key] = -1
    grid = args.get("grid")
    if not (isinstance(grid, list) and all(isinstance(g, int) for g in grid)):
        grid = None
    return _DeviceArgs(**small, bytes=args.get("bytes"), grid=grid)


def _loose(raw: msgspec.Raw, tally: _Tally) -> dict[str, Any]:
    if not len(bytes(raw)):
        return {}
    try:
        args = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        args = None
    if not isinstance(args, dict):
        tally.counts["bad_args"] += 1
        return {}
    return args
