"""Read a trace file into columns.

The fast path decodes straight into typed structs with `args` left as raw JSON. A file that it cannot
take goes to `repair`, which saves what it can and counts the rest.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from advisor.errors import InputError
from advisor.trace.columns import build_trace
from advisor.trace.events import Loss, Trace
from advisor.trace.repair import describe, salvage
from advisor.trace.sources import read_bytes
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
        except UNDECODABLE:
            events, meta, repaired = salvage(data)
            losses += repaired
        if not any(event.ph for event in events):
            raise InputError(f"{path}: not a profiler trace: it is {describe(data)}")
        del data
        return build_trace(events, meta, path, size_bytes, losses)


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
