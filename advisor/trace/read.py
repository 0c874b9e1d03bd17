"""Read a trace file into columns.

A file is decoded some megabytes at a time into typed structs with `args` left as raw JSON, and each batch
is turned into columns at once. A file that cannot be cut that way is decoded whole; one that is not valid
goes to `repair`, which saves what it can and counts the rest.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from advisor.errors import InputError
from advisor.trace.columns import TraceBuilder
from advisor.trace.events import Loss, Trace
from advisor.trace.repair import Salvager, describe
from advisor.trace.sources import BrokenGzip, Source
from advisor.trace.stream import EventStream, NotStreamable
from advisor.trace.wire import EVENTS, TRACE, UNDECODABLE, RawEvent, RawTrace, checked

_LIST = re.compile(rb"\s*\[")


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
    source = Source(os.fspath(path), limit_bytes)
    try:
        return _streamed(source)
    except (NotStreamable, BrokenGzip, *UNDECODABLE):
        # Left before the file is read again: the exception holds what was built so far.
        pass
    data, broken = source.whole()
    losses = [Loss("gzip", 1, "the gzip stream breaks off; what came before was kept")] if broken else []
    return decode_trace(data, source.path, source.size_bytes, losses)


def decode_trace(data: bytes, path: str, size_bytes: int | None, losses: Iterable[Loss] = ()) -> Trace:
    """Turn the bytes of a trace file into columns, repairing what needs it; see `read_trace`."""
    builder = TraceBuilder()
    with _gc_paused():
        try:
            events, meta = _decode(data)
            builder.add(events)
            del events
        except UNDECODABLE:
            salvager = Salvager(data)
            for batch in salvager.batches():
                builder.add(batch)
            meta = salvager.meta()
            losses = [*losses, *salvager.losses()]
        if not builder.event_count:
            raise InputError(f"{path}: not a profiler trace: it is {describe(data)}")
        del data
        return builder.finish(meta, path, size_bytes, losses)


def _streamed(source: Source) -> Trace:
    stream, builder = EventStream(source.pieces()), TraceBuilder()
    with _gc_paused():
        for batch in stream:
            builder.add(batch)
            # The next batch is decoded before the name would be bound anew.
            del batch
        if not builder.event_count:
            raise NotStreamable
        return builder.finish(stream.meta, source.path, source.size_bytes)


def _decode(data: bytes) -> tuple[list[RawEvent], dict[str, Any]]:
    checked(data)
    if _LIST.match(data):
        return EVENTS.decode(data), {}
    document = TRACE.decode(data)
    return document.traceEvents, document.decoded()


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
