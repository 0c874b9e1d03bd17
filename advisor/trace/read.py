"""Read a trace file into columns.

The fast path decodes straight into typed structs with `args` left as raw JSON. A file that it cannot
take goes to `repair`, which saves what it can and counts the rest.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from advisor.errors import InputError
from advisor.trace.columns import build_trace
from advisor.trace.events import Loss, Trace
from advisor.trace.sources import read_bytes

Raw = msgspec.Raw


class RawEvent(msgspec.Struct, gc=False):
    """One Chrome-trace event; what it may hold is what the traces seen so far hold."""

    ph: str = ""
    cat: str | None = None
    name: str | int | float | None = None
    pid: str | int | float | None = None
    tid: str | int | float | None = None
    ts: float | str | None = None
    dur: float | str | None = None
    id: str | int | float | None = None
    args: Raw = Raw()


class RawTrace(msgspec.Struct):
    """A trace file: events, and the entries beside them that we use."""

    traceEvents: list[RawEvent]
    schemaVersion: Raw = Raw()
    deviceProperties: Raw = Raw()
    distributedInfo: Raw = Raw()
    baseTimeNanoseconds: Raw = Raw()
    traceName: Raw = Raw()
    record_shapes: Raw = Raw()
    with_stack: Raw = Raw()
    cuda_runtime_version: Raw = Raw()
    cuda_driver_version: Raw = Raw()
    hip_runtime_version: Raw = Raw()
    hip_driver_version: Raw = Raw()
    training_advisor: Raw = Raw()


_OBJECT = msgspec.json.Decoder(RawTrace)
_LIST = msgspec.json.Decoder(list[RawEvent])


def read_trace(path: str | os.PathLike[str], *, limit_bytes: int | None = None) -> Trace:
    """Read one trace.

    Args:
        path: a ``.json`` or ``.json.gz`` file, ``-`` for stdin, or an fsspec URL.
        limit_bytes: refuse a file larger than this unpacked; by default a share of this machine's memory.

    Returns:
        The trace; `Trace.losses` says what was repaired or lost.

    Raises:
        InputError: nothing in it can be read as a trace.
    """
    name = os.fspath(path)
    data, size, broken = read_bytes(name, limit_bytes)
    losses = []
    if broken:
        losses.append(Loss("gzip", 1, "the gzip stream breaks off; what came before was kept"))
    return decode_trace(data, name, size, losses)


def decode_trace(data: bytes, path: str, size_bytes: int | None, losses: list[Loss] | None = None) -> Trace:
    """Turn the bytes of a trace file into columns; see `read_trace`."""
    losses = list(losses or ())
    with _gc_paused():
        try:
            events, meta = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            events, meta, repaired = _repaired(data, path, error)
            losses += repaired
        del data
        return build_trace(events, meta, path, size_bytes, losses)


def _decode(data: bytes) -> tuple[list[RawEvent], dict[str, Any]]:
    if data.lstrip()[:1] == b"[":
        return _LIST.decode(data), {}
    document = _OBJECT.decode(data)
    meta = {}
    for key in document.__struct_fields__[1:]:
        raw = getattr(document, key)
        if len(bytes(raw)):
            meta[key] = msgspec.json.decode(raw)
    return document.traceEvents, meta


def _repaired(data: bytes, path: str, error: Exception) -> tuple[list[RawEvent], dict[str, Any], list[Loss]]:
    from advisor.trace.repair import salvage

    events, meta, losses = salvage(data)
    if not events:
        raise InputError(f"{path}: not a profiler trace: {error}")
    return events, meta, losses


@contextmanager
def _gc_paused() -> Iterator[None]:
    # A million live structs make each pass of the collector slow, and none of them is garbage.
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


__all__ = ["RawEvent", "RawTrace", "decode_trace", "read_trace"]
