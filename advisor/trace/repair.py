"""Save what can be read of a trace file that is not valid JSON, and count the rest.

The file is cut into blocks at places that look like the start of an event. A block that decodes is taken
as it is; in one that does not, each event is decoded alone, mended where it must be, or counted as lost.
Every step is a linear pass in C over a bounded piece, so that no input takes more than linear time.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from advisor.trace.events import Loss
from advisor.trace.mend import MENDS, Mend, object_end, substitute, untouched
from advisor.trace.wire import EVENT, EVENTS, LIST_OPENS, META_KEYS, OPENING, UNDECODABLE, RawEvent, checked

#: Bytes decoded at once, and at once within a block that fails: one bad event makes few others go alone.
BLOCK_BYTES = 256 << 10
SUBBLOCK_BYTES = 8 << 10
#: Fragments tried together when an event's own arguments hold what looks like the start of an event.
_MAX_FRAGMENTS = 6
#: Longest stretch of the file's head or tail that is searched for entries other than events.
_MAX_META_BYTES = 16 << 20

_SEPARATORS = b", \t\r\n"

#: Events that no mending saved, after which the rest that do not decode are counted only.
_MAX_HOPELESS = 20_000

_DETAILS = {
    "encoding": "the file was not plain UTF-8 (byte-order mark or UTF-16) and was converted",
    "bad_utf8": "byte sequences that are not UTF-8 became replacement characters",
    "control_character": "control characters inside texts became spaces",
    "surrogate": "halves of surrogate pairs became replacement characters",
    "bad_escape": "stray backslashes were taken literally",
    "not_a_number": "values were a bare NaN or Infinity and were taken as missing",
    "trailing_comma": "commas too many were dropped",
    "unescaped_quote": "unescaped quotes inside texts were taken literally",
    "not_an_event": "entries among the events are not events and were left out",
    "malformed": "events have values of an unexpected type and were left out",
    "unreadable": "events could not be read and were left out",
    "truncated": "the file breaks off; what came before was kept",
}


class Salvager:
    """One pass over a broken file, block by block.

    Byte offsets in what is told are those of the UTF-8 text without its byte-order mark.

    Args:
        data: the uncompressed file.
    """

    def __init__(self, data: bytes) -> None:
        self._counts: dict[str, int] = {}
        self._first_at: dict[str, int] = {}
        self._data = data = self._as_utf8(data)
        opens = LIST_OPENS.search(data)
        self._start = self._tail = _next_opening(data, opens.end() if opens else 0)
        #: Inside the list of events; outside it, objects may be anything and are no loss.
        self._in_list = True
        self._hopeless = 0
        if opens:
            self._leftover(data[opens.end() : self._start], opens.end())

    def batches(self) -> Iterator[list[RawEvent]]:
        """The events, some thousands at a time."""
        data, start = self._data, self._start
        while start < len(data):
            end = _next_opening(data, start + BLOCK_BYTES)
            batch = self._block(start, end, untouched)
            if batch is None:
                batch, end = self._in_parts(start, end)
            yield batch
            start = end
        if LIST_OPENS.search(data) and self._in_list and "truncated" not in self._counts:
            self._count("truncated", len(data))

    def meta(self) -> dict[str, Any]:
        """Entries beside the events, from before and after them."""
        head = self._data[: min(self._start, _MAX_META_BYTES)]
        tail = self._data[self._tail : self._tail + _MAX_META_BYTES]
        return _meta_entries(tail) | _meta_entries(head)

    def losses(self) -> list[Loss]:
        """What was mended or lost so far."""
        return [Loss(kind, count, self._detail(kind)) for kind, count in self._counts.items()]

    def _block(self, start: int, end: int, mend: Mend) -> list[RawEvent] | None:
        """All events in [start, end), where this mending lets them be read at one go."""
        text, found = mend(self._data[start:end].rstrip(_SEPARATORS))
        try:
            batch = EVENTS.decode(b"[%b]" % checked(text))
        except UNDECODABLE:
            return None
        self._passed(end)
        self._count_all(found, start)
        return batch

    def _in_parts(self, start: int, end: int) -> tuple[list[RawEvent], int]:
        """The events that begin in [start, end), and where the last of them ends."""
        events: list[RawEvent] = []
        while start < end:
            stop = min(end, _next_opening(self._data, start + SUBBLOCK_BYTES))
            some = self._block(start, stop, untouched)
            if some is None:
                some = self._block(start, stop, substitute)
            if some is None:
                some, stop = self._one_by_one(start, stop)
            events += some
            start = stop
        return events, start

    def _one_by_one(self, start: int, end: int) -> tuple[list[RawEvent], int]:
        """The events that begin in [start, end), and where the last of them ends."""
        events: list[RawEvent] = []
        while start < end:
            in_list = self._in_list
            event, start = self._one(start)
            if event is not None and (event.ph or in_list):
                events.append(event)
        return events, start

    def _one(self, start: int) -> tuple[RawEvent | None, int]:
        data = self._data
        stop = first_stop = _next_opening(data, start + 1)
        fragments = _MAX_FRAGMENTS if self._hopeless < _MAX_HOPELESS else 1
        for _ in range(fragments):
            try:
                event = EVENT.decode(checked(data[start:stop].rstrip(_SEPARATORS)))
                self._passed(stop)
                return event, stop
            except UNDECODABLE as error:
                if "truncated" not in str(error) or stop == len(data):
                    break
            stop = _next_opening(data, stop + 1)
        return self._mended(start, first_stop), first_stop

    def _mended(self, start: int, stop: int) -> RawEvent | None:
        piece = self._data[start:stop].rstrip(_SEPARATORS)
        self._passed(stop)
        for mend in MENDS if self._hopeless < _MAX_HOPELESS else ():
            text, found = mend(piece)
            try:
                event, rest = _decode_first(text)
            except msgspec.ValidationError:
                self._count("malformed", start)
                end = object_end(text)
                self._leftover(b"" if end is None else text[end:], start)
                return None
            except UNDECODABLE:
                continue
            self._count_all(found, start)
            self._leftover(rest, stop - len(rest))
            return event
        self._hopeless += 1
        if self._in_list or b'"ph"' in piece[:4096]:
            self._count("truncated" if stop == len(self._data) else "unreadable", start)
        return None

    def _leftover(self, rest: bytes, offset: int) -> None:
        """Account for what stands between one event and the next: other entries, or the end of the list."""
        self._passed(offset)
        entries, closing, after = rest.partition(b"]")
        junk = [entry for entry in entries.split(b",") if entry.strip()]
        if junk and self._in_list:
            self._count("not_an_event", offset, len(junk))
        if closing:
            self._in_list = bool(LIST_OPENS.search(after))

    def _passed(self, offset: int) -> None:
        if self._in_list:
            self._tail = offset

    def _count(self, kind: str, offset: int, count: int = 1) -> None:
        self._counts[kind] = self._counts.get(kind, 0) + count
        self._first_at.setdefault(kind, offset)

    def _count_all(self, found: Mapping[str, int], offset: int) -> None:
        for kind, count in found.items():
            self._count(kind, offset, count)

    def _detail(self, kind: str) -> str:
        return f"{_DETAILS[kind]} (first at byte {self._first_at[kind]})"

    def _as_utf8(self, data: bytes) -> bytes:
        encoding = _encoding(data[:4])
        if encoding is None:
            return data
        self._count("encoding", 0)
        if encoding == "utf-8-sig":
            return data[3:]
        return data.decode(encoding, "replace").encode("utf-8", "replace")


def describe(data: bytes) -> str:
    """What bytes that hold no event are instead, with the byte at which that shows."""
    for magic, what in _MAGIC.items():
        if data.startswith(magic):
            return f"{what} (byte 0)"
    text = data[3:] if data.startswith(codecs.BOM_UTF8) else data
    if not text.strip():
        return f"only white space ({len(data)} bytes)"
    try:
        document = msgspec.json.decode(
            text, type=dict[str, msgspec.Raw] | list[msgspec.Raw] | float | str | None
        )
    except UNDECODABLE as failure:
        at = re.search(r"byte (\d+)", str(failure))
        offset = len(data) if "truncated" in str(failure) or at is None else int(at[1])
        return f"not readable as JSON from byte {offset} on, and no event can be found in it"
    if isinstance(document, dict):
        keys = ", ".join(list(document)[:6]) or "nothing"
        if "traceEvents" in document:
            return f"a JSON object whose traceEvents hold no event (byte {data.find(_EVENTS_KEY)})"
        return f"a JSON object without traceEvents; it holds {keys} (byte {len(data) - len(data.lstrip())})"
    kind = "list without any event" if isinstance(document, list) else "value"
    return f"a JSON {kind} (byte {len(data) - len(data.lstrip())})"


_EVENTS_KEY = b'"traceEvents"'
_MAGIC = {
    b"PK\x03\x04": "a zip archive; unpack it",
    b"\x28\xb5\x2f\xfd": "a zstd archive; unpack it",
    b"BZh": "a bzip2 archive; unpack it",
    b"\xfd7zXZ": "an xz archive; unpack it",
    b"SQLite format 3": "an SQLite database, such as Nsight Systems exports",
    b"PAR1": "a Parquet table",
    b"<": "an HTML or XML page",
}


def _decode_first(text: bytes) -> tuple[RawEvent, bytes]:
    """The event that text begins with, and what follows it."""
    try:
        return EVENT.decode(checked(text)), b""
    except msgspec.ValidationError:
        raise
    except UNDECODABLE:
        end = object_end(text)
        if end is None or end == len(text):
            raise
        return EVENT.decode(checked(text[:end])), text[end:]


def _next_opening(data: bytes, start: int) -> int:
    """Where the next object that looks like an event begins; the end of data where none does."""
    found = OPENING.search(data, start)
    return found.start() if found else len(data)


def _meta_entries(text: bytes) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    scanner = json.JSONDecoder(strict=False, parse_constant=lambda _: None)
    decoded = text.decode("utf-8", "replace")
    for key in META_KEYS:
        found = re.search(rf'"{key}"\s*:\s*', decoded)
        if found:
            try:
                entries[key] = scanner.raw_decode(decoded, found.end())[0]
            except (ValueError, RecursionError):
                continue
    return entries


def _encoding(start: bytes) -> str | None:
    """The encoding that the first four bytes of a JSON file betray, or None for plain UTF-8."""
    if start.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    if start in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):
        return "utf-32"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    zeros = "".join("0" if byte == 0 else "x" for byte in start)
    return {"000x": "utf-32-be", "x000": "utf-32-le", "0x0x": "utf-16-be", "x0x0": "utf-16-le"}.get(zeros)
