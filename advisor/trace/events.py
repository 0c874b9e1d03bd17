"""A trace as columns: one table per kind of event, times in ns, names interned, `args` undecoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from advisor.trace.arguments import Arguments

Raw = msgspec.Raw
_E = TypeVar("_E", bound="Events")

#: Kinds of device event, as stored in `DeviceEvents.kind`.
KERNEL, MEMCPY, MEMSET = 0, 1, 2
KIND_NAMES = ("kernel", "memcpy", "memset")


@dataclass(slots=True, eq=False)
class Events:
    """Events of one kind, ordered by start, longer first.

    Attributes:
        name: int32 (n,), index into `Trace.names`.
        ts_ns: int64 (n,), start.
        dur_ns: int64 (n,), never negative.
        track: int32 (n,), index into `Trace.tracks`.
        args: n undecoded JSON objects, empty where the event had none.
    """

    name: np.ndarray
    ts_ns: np.ndarray
    dur_ns: np.ndarray
    track: np.ndarray
    args: Sequence[Raw]

    def __len__(self) -> int:
        return len(self.ts_ns)

    @property
    def end_ns(self) -> np.ndarray:
        """int64 (n,), end of each event."""
        return self.ts_ns + self.dur_ns

    def take(self: _E, index: np.ndarray) -> _E:
        """The events at these positions (an integer array or a boolean mask), in that order."""
        if index.dtype == bool:
            index = np.flatnonzero(index)
        columns = {
            column: getattr(self, column)[index] for column in self.__dataclass_fields__ if column != "args"
        }
        args = self.args
        taken = args.take(index) if isinstance(args, Arguments) else [args[i] for i in index.tolist()]
        return type(self)(args=taken, **columns)


@dataclass(slots=True, eq=False)
class RuntimeEvents(Events):
    """Calls into CUDA, HIP or another device runtime.

    Attributes:
        correlation: int64 (n,), pairs a call with what it started on the device; -1 where absent.
    """

    correlation: np.ndarray


@dataclass(slots=True, eq=False)
class DeviceEvents(Events):
    """Kernels, copies and memsets on the device.

    Attributes:
        correlation: int64 (n,), -1 where absent.
        kind: uint8 (n,), KERNEL, MEMCPY or MEMSET.
        device: int32 (n,), -1 where absent.
        stream: int32 (n,), -1 where absent.
        bytes: int64 (n,), what a copy or memset moves; -1 where the trace does not say.
        grid_blocks: int64 (n,), thread blocks of a kernel; -1 where the trace does not say.
    """

    correlation: np.ndarray
    kind: np.ndarray
    device: np.ndarray
    stream: np.ndarray
    bytes: np.ndarray
    grid_blocks: np.ndarray


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that could not be read, or was repaired.

    Attributes:
        kind: a short code, e.g. ``"truncated"``.
        count: how many events or bytes, as `detail` says.
        detail: what happened, for a reader of the report.
    """

    kind: str
    count: int
    detail: str = ""


@dataclass(slots=True, eq=False)
class Trace:
    """One profiler trace of one process.

    Attributes:
        path: where it came from, for messages.
        size_bytes: size of the file as stored, or None for a stream.
        names: distinct event names; columns hold indices into it.
        tracks: (pid, tid) of each host thread or device lane, as text.
        ops: operators (``cpu_op``), host side.
        runtime: device runtime calls, host side.
        device: kernels, copies and memsets.
        annotations: ``record_function`` and profiler ranges, host side.
        python: Python frames, where the trace was taken with stacks.
        event_count: events in the file, of every kind.
        meta: the file's top-level entries other than events.
        context: the capture's own context block; empty for a foreign trace.
        losses: what was lost or repaired while reading.
    """

    path: str
    size_bytes: int | None
    names: list[str]
    tracks: list[tuple[str, str]]
    ops: Events
    runtime: RuntimeEvents
    device: DeviceEvents
    annotations: Events
    python: Events
    event_count: int
    meta: dict[str, Any] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)

    @property
    def context(self) -> dict[str, Any]:
        """The block that the capture wrote into the file, or an empty dict."""
        block = self.meta.get("training_advisor")
        return block if isinstance(block, dict) else {}

    @property
    def rank(self) -> int | None:
        """Rank by the file's own word, else by its name (``rank3.json``), else None."""
        from advisor.trace.sources import rank_in_name

        for holder in (self.meta.get("distributedInfo"), self.context):
            rank = holder.get("rank") if isinstance(holder, dict) else None
            if isinstance(rank, int) and not isinstance(rank, bool):
                return rank
        return rank_in_name(Path(self.path).name)

    @property
    def world_size(self) -> int | None:
        """Number of ranks in the job, or None."""
        for holder in (self.meta.get("distributedInfo"), self.context):
            size = holder.get("world_size") if isinstance(holder, dict) else None
            if isinstance(size, int) and not isinstance(size, bool):
                return size
        return None

    @property
    def has_device_work(self) -> bool:
        """Whether any kernel, copy or memset was recorded."""
        return len(self.device) > 0
