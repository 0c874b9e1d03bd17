"""From decoded events to columns."""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from advisor.trace.arguments import Arguments
from advisor.trace.events import KERNEL, MEMCPY, MEMSET, DeviceEvents, Events, Loss, RuntimeEvents, Trace
from advisor.trace.wire import UNDECODABLE, bounded

_KINDS = {
    "cpu_op": "op", "Operator": "op",
    "cuda_runtime": "runtime", "cuda_driver": "runtime", "Runtime": "runtime", "hip_runtime": "runtime",
    "xpu_runtime": "runtime", "xpu_driver": "runtime",
    "kernel": "device", "Kernel": "device", "gpu_memcpy": "device", "Memcpy": "device",
    "gpu_memset": "device", "Memset": "device",
    "user_annotation": "annotation",
    "python_function": "python",
}  # fmt: skip
_DEVICE_KINDS = {
    "kernel": KERNEL, "Kernel": KERNEL,
    "gpu_memcpy": MEMCPY, "Memcpy": MEMCPY,
    "gpu_memset": MEMSET, "Memset": MEMSET,
}  # fmt: skip
#: Ranges that older profilers filed under operators.
_RANGE_PREFIXES = ("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)", "advisor::")
#: Times beyond this many microseconds do not fit int64 nanoseconds.
_MAX_US = 9e15
#: No copy moves more; what claims to would spoil sums in 64 bits.
_MOST_BYTES = 1 << 48
#: A trace whose times lie past this counts from an epoch, so that an event at 0 has no real time.
_EPOCH_NS = 86_400 * 10**9

_DETAILS = {
    "not_an_event": "entries among the events are not events and were left out",
    "bad_time": "events whose time is missing or not a number were left out",
    "stray_time": "events at time zero or before, far from all others, were left out",
    "negative_duration": "events with a negative duration were taken as instants",
    "no_duration": "events without a duration were taken as instants",
    "bad_args": "events whose arguments could not be read lost their correlation",
}


class _DeviceArgs(msgspec.Struct, gc=False):
    correlation: int = -1
    device: int = -1
    stream: int = -1
    bytes: int = -1
    grid: list[int] | None = None


class _RuntimeArgs(msgspec.Struct, gc=False):
    correlation: int = -1


_DEVICE_ARGS = msgspec.json.Decoder(list[_DeviceArgs])
_RUNTIME_ARGS = msgspec.json.Decoder(list[_RuntimeArgs])

_TRACK = operator.attrgetter("pid", "tid")


class _Interner(dict[Any, int]):
    """Maps a value to its position in `values_seen`, adding it on first sight."""

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


#: Further columns from events, the text of their arguments, and the tally of what was odd.
_Extra = Callable[[list[Any], list[bytes], Counter[str]], dict[str, np.ndarray]]


class _Part:
    """Columns of one kind of event, batch upon batch."""

    def __init__(self, extra: _Extra) -> None:
        self._extra = extra
        self._columns: dict[str, list[np.ndarray]] = defaultdict(list)
        self._args: list[tuple[bytes, np.ndarray]] = []
        self.add([], _Interner(), _Tracks(), Counter())

    def add(self, events: list[Any], names: _Interner, tracks: _Tracks, odd: Counter[str]) -> None:
        n = len(events)
        ts_us = _floats([e.ts for e in events])
        dur_us = _floats([e.dur for e in events])
        usable = (np.abs(ts_us) < _MAX_US) & ~(np.abs(dur_us) > _MAX_US)
        if not usable.all():
            odd["bad_time"] += int(n - usable.sum())
            events = [events[i] for i in np.flatnonzero(usable).tolist()]
            ts_us, dur_us, n = ts_us[usable], dur_us[usable], len(events)
        odd["no_duration"] += int(np.isnan(dur_us).sum())
        odd["negative_duration"] += int((dur_us < 0).sum())
        texts = [bytes(e.args) for e in events]
        columns = {
            "name": np.fromiter(map(names.__getitem__, [e.name for e in events]), np.int32, n),
            "ts_ns": _whole_ns(ts_us),
            "dur_ns": _whole_ns(np.fmax(dur_us, 0)),
            "track": np.fromiter(map(tracks.__getitem__, map(_TRACK, events)), np.int32, n),
            **self._extra(events, texts, odd),
        }
        for key, column in columns.items():
            self._columns[key].append(column)
        self._args.append((b"".join(texts), np.fromiter(map(len, texts), np.int32, n)))

    def ordered(self, odd: Counter[str], epoch: bool) -> dict[str, Any]:
        """All columns, by start and then longer first; `epoch` where times count from one."""
        columns: dict[str, Any] = {}
        for key in list(self._columns):
            columns[key] = np.concatenate(self._columns.pop(key))
        columns["args"] = Arguments.pack(self._args)
        self._args = []
        ts_ns, dur_ns = columns["ts_ns"], columns["dur_ns"]
        order = np.lexsort((-dur_ns, ts_ns))
        if epoch:
            stray = int((ts_ns <= 0).sum())
            odd["stray_time"] += stray
            order = order[stray:]
        return {key: column.take(order) for key, column in columns.items()}

    def starts(self) -> list[np.ndarray]:
        """int64 arrays of the starts so far."""
        return self._columns["ts_ns"]


class TraceBuilder:
    """Turns batches of decoded events into a trace, holding on to none of them."""

    def __init__(self) -> None:
        self.event_count = 0
        self._names, self._tracks = _Interner(), _Tracks()
        self._odd: Counter[str] = Counter()
        self._parts = {
            "op": _Part(_nothing),
            "runtime": _Part(_correlations),
            "device": _Part(_device_columns),
            "annotation": _Part(_nothing),
            "python": _Part(_nothing),
        }

    def add(self, events: Iterable[Any]) -> None:
        """Take in events, objects with the attributes of `wire.RawEvent`."""
        events = list(events)
        self.event_count += len(events)
        buckets: dict[str, list[Any]] = {kind: [] for kind in self._parts}
        ops, kind_of = buckets["op"], _KINDS.get
        for event in events:
            if event.ph != "X":
                if not event.ph:
                    self._odd["not_an_event"] += 1
                    self.event_count -= 1
                continue
            kind = kind_of(event.cat)
            if kind == "op":
                # A name may be a number or missing.
                if str(event.name).startswith(_RANGE_PREFIXES):
                    kind = "annotation"
                else:
                    ops.append(event)
                    continue
            if kind is not None:
                buckets[kind].append(event)
        for kind, bucket in buckets.items():
            if bucket:
                self._parts[kind].add(bucket, self._names, self._tracks, self._odd)

    def finish(
        self, meta: dict[str, Any], path: str, size_bytes: int | None, losses: Iterable[Loss] = ()
    ) -> Trace:
        """The trace; the builder is spent.

        Args:
            meta: the file's other top-level entries.
            path: for messages.
            size_bytes: stored size of the file, or None.
            losses: what is known to be lost so far; what was odd in the events is added.
        """
        starts = np.concatenate([start for part in self._parts.values() for start in part.starts()])
        epoch = len(starts) > 0 and bool(np.median(starts) > _EPOCH_NS)
        del starts
        tables = {kind: self._parts.pop(kind).ordered(self._odd, epoch) for kind in list(self._parts)}
        odd = [Loss(kind, count, _DETAILS[kind]) for kind, count in self._odd.items() if count]
        return Trace(
            path=path,
            size_bytes=size_bytes,
            ops=Events(**tables["op"]),
            runtime=RuntimeEvents(**tables["runtime"]),
            device=DeviceEvents(**tables["device"]),
            annotations=Events(**tables["annotation"]),
            python=Events(**tables["python"]),
            names=[name if isinstance(name, str) else str(name) for name in self._names.values_seen],
            tracks=self._tracks.values_seen,
            event_count=self.event_count,
            meta=bounded(meta),
            losses=[*losses, *odd],
        )


def _floats(values: list[Any]) -> np.ndarray:
    """float64 (n,), NaN for what is no number."""
    try:
        return np.fromiter(values, np.float64, len(values))
    except (TypeError, ValueError):
        return np.fromiter(map(_as_float, values), np.float64, len(values))


def _whole_ns(us: np.ndarray) -> np.ndarray:
    """int64 ns; whole us apart from the rest, since ns since 1970 are past what float64 can count."""
    whole = np.trunc(us)
    return whole.astype(np.int64) * 1000 + np.rint((us - whole) * 1000).astype(np.int64)


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _as_int(value: Any) -> int:
    """A whole number from 0 on that fits int64, or -1."""
    if isinstance(value, bool):
        return -1
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if 0 <= number < 1 << 63 else -1


def _nothing(events: list[Any], texts: list[bytes], odd: Counter[str]) -> dict[str, np.ndarray]:
    return {}


def _correlations(events: list[Any], texts: list[bytes], odd: Counter[str]) -> dict[str, np.ndarray]:
    decoded = _decoded(texts, _RUNTIME_ARGS, _lenient_runtime_args, odd)
    return {"correlation": _ints([args.correlation for args in decoded])}


def _device_columns(events: list[Any], texts: list[bytes], odd: Counter[str]) -> dict[str, np.ndarray]:
    n = len(events)
    decoded = _decoded(texts, _DEVICE_ARGS, _lenient_device_args, odd)
    prod = math.prod
    nbytes = _ints([args.bytes for args in decoded])
    return {
        "correlation": _ints([args.correlation for args in decoded]),
        "kind": np.fromiter((_DEVICE_KINDS[e.cat] for e in events), np.uint8, n),
        "device": _ints([args.device for args in decoded], np.int32),
        "stream": _ints([args.stream for args in decoded], np.int32),
        "bytes": np.where(nbytes <= _MOST_BYTES, nbytes, -1),
        "grid_blocks": _ints([prod(args.grid) if args.grid else -1 for args in decoded]),
    }


def _decoded(
    texts: list[bytes],
    decoder: msgspec.json.Decoder[list[Any]],
    lenient: Callable[[dict[str, Any]], Any],
    odd: Counter[str],
) -> list[Any]:
    """The arguments of each event: all in one call, or each alone where that fails."""
    try:
        decoded = decoder.decode(b"[%b]" % b",".join([text or b"{}" for text in texts]))
    except UNDECODABLE:
        decoded = []
        for text in texts:
            try:
                decoded += decoder.decode(b"[%b]" % (text or b"{}"))
            except UNDECODABLE:
                decoded.append(lenient(_loose(text, odd)))
    return decoded


def _ints(values: list[int], dtype: type[np.signedinteger[Any]] = np.int64) -> np.ndarray:
    """Whole numbers as a column; -1 for one that is negative or does not fit."""
    try:
        column = np.fromiter(values, dtype, len(values))
    except OverflowError:
        limit = int(np.iinfo(dtype).max)
        column = np.fromiter((v if v <= limit else -1 for v in map(_as_int, values)), dtype, len(values))
    return np.maximum(column, -1)


def _lenient_runtime_args(args: dict[str, Any]) -> _RuntimeArgs:
    return _RuntimeArgs(_as_int(args.get("correlation")))


def _lenient_device_args(args: dict[str, Any]) -> _DeviceArgs:
    grid = args.get("grid")
    if not (isinstance(grid, list) and grid and all(type(g) is int for g in grid)):
        grid = None
    numbers = {key: _as_int(args.get(key)) for key in ("correlation", "device", "stream", "bytes")}
    return _DeviceArgs(**numbers, grid=grid)


def _loose(text: bytes, odd: Counter[str]) -> dict[str, Any]:
    if not text:
        return {}
    try:
        args = msgspec.json.decode(text)
    except UNDECODABLE:
        args = None
    if not isinstance(args, dict):
        odd["bad_args"] += 1
        return {}
    return args
