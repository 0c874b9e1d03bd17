"""Decode a well-formed trace a few megabytes at a time, so that it never lies in memory whole.

The list of events is cut between two events. Each stretch, and what stands before and after the list,
must be valid JSON by itself; together they then are the file. A file that does not cut this way is for
the caller to decode whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from advisor.trace.wire import EVENTS, HEAD, LIST_OPENS, OPENING, TRACE, RawEvent, checked

#: A file that shows no place to cut within this many bytes is not cut.
_MAX_STRETCH_BYTES = 64 << 20
_MAX_TRIES = 64
_BLANKS = re.compile(rb"\s*")


class NotStreamable(Exception):
    """The file does not cut into valid stretches; it may still be valid, or can be repaired."""


class EventStream:
    """Iterates over batches of events; `meta` is complete after the last.

    Raises:
        NotStreamable: while iterating, where the text does not cut or shows no list of events.
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: a stretch is not valid by itself.
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self.meta: dict[str, Any] = {}

    def __iter__(self) -> Iterator[list[RawEvent]]:
        head, text = self._head()
        bare = head.lstrip() == b"["
        if not bare:
            self.meta = HEAD.decode(checked(head + b"]}")).decoded()
        for piece in self._pieces:
            text += piece
            cut = _last_cut(text)
            if cut is None:
                if len(text) > _MAX_STRETCH_BYTES:
                    raise NotStreamable
                continue
            yield EVENTS.decode(b"[%b]" % checked(text[:cut]))
            text = text[cut + 1 :]
        if bare:
            yield EVENTS.decode(b"[" + checked(text))
            return
        last = TRACE.decode(b'{"traceEvents":[' + checked(text))
        self.meta |= last.decoded()
        yield last.traceEvents

    def _head(self) -> tuple[bytes, bytes]:
        """The text up to the list's bracket, and what of the rest was read with it."""
        text = b""
        for piece in self._pieces:
            text += piece
            opens = LIST_OPENS.search(text)
            if opens:
                return text[: opens.end()], text[opens.end() :]
            if len(text) > _MAX_STRETCH_BYTES:
                break
        raise NotStreamable


def _last_cut(text: bytes) -> int | None:
    """Where the comma between the last two events that both begin in this text stands."""
    end = len(text)
    for _ in range(_MAX_TRIES):
        brace = text.rfind(b"}", 0, end)
        if brace < 0:
            return None
        at = _after_blanks(text, brace + 1)
        if text[at : at + 1] == b"," and OPENING.match(text, _after_blanks(text, at + 1)):
            return at
        end = brace
    return None


def _after_blanks(text: bytes, start: int) -> int:
    blanks = _BLANKS.match(text, start)
    return blanks.end() if blanks else start
