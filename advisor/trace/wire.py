"""What a Chrome-trace file holds, as typed structs: the shape that reading and repairing share."""

from __future__ import annotations

import re
from typing import Any

import msgspec

Raw = msgspec.Raw

#: What a decoder raises on bytes that it cannot take.
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


#: Levels of lists and objects in an entry beside the events; what lies deeper is no figure.
_MAX_LEVELS = 32


def bounded(value: Any, levels: int = _MAX_LEVELS) -> Any:
    """A decoded value as what a figure can be: None for a number past 64 bits or for what lies too deep."""
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 63 else None
    if isinstance(value, (dict, list)) and not levels:
        return None
    if isinstance(value, dict):
        return {key: bounded(item, levels - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [bounded(item, levels - 1) for item in value]
    return value


class RawEvent(msgspec.Struct, gc=False):
    """One Chrome-trace event; what it may hold is what the traces seen so far hold."""

    ph: str = ""
    cat: str | None = None
    name: str | int | float | bool | None = None
    pid: str | int | float | bool | None = None
    tid: str | int | float | bool | None = None
    ts: float | str | None = None
    dur: float | str | None = None
    id: str | int | float | bool | None = None
    args: Raw = Raw()


class RawMeta(msgspec.Struct):
    """The entries beside the events that are used."""

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

    def decoded(self) -> dict[str, Any]:
        """The entries that the file has, as plain values."""
        raws = {key: getattr(self, key) for key in META_KEYS}
        return {key: msgspec.json.decode(raw) for key, raw in raws.items() if memoryview(raw).nbytes}


META_KEYS = RawMeta.__struct_fields__


class RawTrace(RawMeta, kw_only=True):
    """A whole trace file."""

    traceEvents: list[RawEvent]


EVENT = msgspec.json.Decoder(RawEvent)
EVENTS = msgspec.json.Decoder(list[RawEvent])
TRACE = msgspec.json.Decoder(RawTrace)


class _RawHead(RawMeta):
    traceEvents: Raw = Raw()


#: The head of a file, with its list of events left out.
HEAD = msgspec.json.Decoder(_RawHead)

#: How an object begins that is most likely an event.
OPENING = re.compile(rb'\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args|id|bp|s)"\s*:')
#: Where the list of events begins.
LIST_OPENS = re.compile(rb'\A\s*\[|"traceEvents"\s*:\s*\[')

_SURROGATE_START = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)


def checked(text: bytes) -> bytes:
    """The same text, once it is sure that what a decoder leaves raw will decode later.

    Raises:
        UnicodeDecodeError: bytes that are not UTF-8.
        msgspec.DecodeError: half a surrogate pair.
    """
    if not text.isascii():
        text.decode()
    if b"\\" in text and _SURROGATE_START.search(text) and any(m[1] for m in _SURROGATE.finditer(text)):
        raise msgspec.DecodeError("half a surrogate pair")
    return text
