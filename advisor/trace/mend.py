"""Make a broken piece of JSON valid: substitutions over its bytes, from the harmless to the daring."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable

#: An event larger than this is not mended, for parsing it loosely would take many times its size.
MAX_BYTES = 16 << 20

_REPLACEMENT = "\ufffd".encode()
_CONTROLS = bytes(range(32))
_BLANK_CONTROLS = bytes.maketrans(_CONTROLS, b" " * 32)
_ESCAPE = re.compile(
    rb"""\\(?:["\\/bfnrt]
          |u(?![dD][89a-fA-F])[0-9a-fA-F]{4}
          |u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}
          |(?P<surrogate>u[dD][89a-fA-F][0-9a-fA-F]{2})
          |(?P<stray>))""",
    re.VERBOSE,
)
_NUMBER = rb"-?\b(?:NaN|nan|Infinity|inf)\b"
_COMMA = rb",(?=\s*[}\]])"
#: A backslash before a quote that opens nothing is passed over, lest each such quote be tried for a start.
_STRING = rb'\\.|"[^"\\]*(?:\\.[^"\\]*)*"'
_STRINGS = re.compile(_STRING, re.DOTALL)
_OUTSIDE_STRINGS = re.compile(
    _STRING + rb"|(?P<number>" + _NUMBER + rb")|(?P<comma>" + _COMMA + rb")", re.DOTALL
)
#: Cheaper than the above, and true wherever that finds anything.
_NOT_JSON = re.compile(_NUMBER + rb"|" + _COMMA)
_QUOTE = re.compile(rb'\\.|"', re.DOTALL)
#: What follows the quote that ends a value: the next key, or the end of the object.
_AFTER_VALUE = re.compile(rb'\s*(?:,\s*"[^"\\]{1,64}"\s*:|\}\s*(?:[,}\]]|\Z))')
#: What follows the quote that ends a key or a list's entry.
_AFTER_OTHER = re.compile(rb"\s*[:,\]]")

Mended = tuple[bytes, Counter[str]]
Mend = Callable[[bytes], Mended]


def untouched(text: bytes) -> Mended:
    """The text as it is: only something after it may be in the way."""
    return text, Counter()


def substitute(text: bytes) -> Mended:
    """Replace what JSON does not allow and no reader can take in another way.

    Returns:
        The text, and how often it had which trouble (the codes of `Loss`).
    """
    found: Counter[str] = Counter()
    if not text.isascii():
        decoded = text.decode("utf-8", "replace").encode()
        found["bad_utf8"] = decoded.count(_REPLACEMENT) - text.count(_REPLACEMENT)
        text = decoded
    strings = b"".join(_STRINGS.findall(text))
    found["control_character"] = len(strings) - len(strings.translate(None, _CONTROLS))
    text = text.translate(_BLANK_CONTROLS)
    if b"\\" in text:
        text = _ESCAPE.sub(lambda match: _escaped(match, found), text)
    if _NOT_JSON.search(text):
        text = _OUTSIDE_STRINGS.sub(lambda match: _outside(match, found), text)
    return text, +found


def escape_quotes(text: bytes) -> Mended:
    """Also escape quotes that cannot end the text they stand in."""
    return _requoted(text, backslash_escapes=True)


def escape_quotes_and_backslashes(text: bytes) -> Mended:
    r"""Also take ``\"`` for the end of a text where the next key follows, as after a Windows path."""
    return _requoted(text, backslash_escapes=False)


#: Tried in this order, each on the text as found.
MENDS: tuple[Mend, ...] = (
    untouched,
    substitute,
    escape_quotes,
    escape_quotes_and_backslashes,
)


def object_end(text: bytes) -> int | None:
    """Where the JSON object that text begins with ends, read loosely; None where it does not."""
    if len(text) > MAX_BYTES:
        return None
    decoded = text.decode("utf-8", "surrogateescape")
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(decoded)
    except (ValueError, RecursionError):
        return None
    return end if len(decoded) == len(text) else len(decoded[:end].encode("utf-8", "surrogateescape"))


def _escaped(match: re.Match[bytes], found: Counter[str]) -> bytes:
    if match["surrogate"] is not None:
        found["surrogate"] += 1
        return rb"\ufffd"
    if match["stray"] is not None:
        found["bad_escape"] += 1
        return rb"\\"
    return match[0]


def _outside(match: re.Match[bytes], found: Counter[str]) -> bytes:
    if match["number"] is not None:
        found["not_a_number"] += 1
        return b"null"
    if match["comma"] is not None:
        found["trailing_comma"] += 1
        return b""
    return match[0]


def _requoted(text: bytes, *, backslash_escapes: bool) -> Mended:
    pieces, last, inside, in_value = [], 0, False, False
    found: Counter[str] = Counter()
    for token in _QUOTE.finditer(text):
        at = token.end() - 1
        if text[at] != 0x22:
            continue
        escaped = token.end() - token.start() == 2
        if not inside:
            inside, in_value = True, text[max(0, at - 16) : at].rstrip().endswith(b":")
            continue
        ends = (_AFTER_VALUE if in_value else _AFTER_OTHER).match(text, at + 1)
        if escaped:
            if ends and in_value and not backslash_escapes:
                pieces += [text[last : at - 1], rb"\\"]
                found["bad_escape"] += 1
                last, inside = at, False
        elif ends:
            inside = False
        else:
            pieces += [text[last:at], b"\\"]
            found["unescaped_quote"] += 1
            last = at
    mended, others = substitute(b"".join([*pieces, text[last:]]))
    return mended, found + others
