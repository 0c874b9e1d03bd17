"""Writing output files: aside first, then renamed, so that a half-written one is never seen."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from advisor.errors import UsageError
from advisor.report.format import printable

#: In the head of each page; what `is_report` knows it by.
GENERATOR = '<meta name="generator" content="training-advisor">'
#: A report's mark is within this many bytes of its start or its end.
_MARK_WITHIN = 4096
_JSON_HEAD = re.compile(rb'\{\s*"schema_version":\s*"[^"]*",\s*"tool_version":')
_COMPARISON_HEAD = re.compile(rb'\{\s*"verdict":\s*"[^"]*",\s*"outcome":\s*"[a-z]+",\s*"basis":')


@contextmanager
def writing(path: Path, *, binary: bool = False) -> Iterator[IO[Any]]:
    """Open a file for writing that appears under its name only when it is complete.

    Raises:
        UsageError: it cannot be written (no such folder, no permission, disk full).
    """
    aside = None
    try:
        handle, aside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        mode = {"mode": "wb"} if binary else {"mode": "w", "encoding": "utf-8", "newline": ""}
        with os.fdopen(handle, **mode) as file:  # type: ignore[call-overload]
            yield file
        os.chmod(aside, 0o666 & ~_umask())
        os.replace(aside, path)
        aside = None
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        if aside is not None:
            with suppress(OSError):
                os.unlink(aside)


def write_text(path: Path, text: str) -> None:
    """Write a text file as UTF-8; see `writing`. Lone surrogates are written as ``?``."""
    with writing(path, binary=True) as file:
        file.write(text.encode("utf-8", "replace"))


def is_report(path: Path) -> bool:
    """Whether a file is a report or comparison of this tool's, in any form: a newer one may replace it."""
    try:
        with path.open("rb") as file:
            head = file.read(_MARK_WITHIN)
            file.seek(max(path.stat().st_size - _MARK_WITHIN, 0))
            tail = file.read(_MARK_WITHIN)
    except OSError:
        return False
    page = head.lstrip().lower().startswith(b"<!doctype html") and GENERATOR.encode() in head
    data = any(mark.match(head) for mark in (_JSON_HEAD, _COMPARISON_HEAD))
    lines = tail.rstrip().rsplit(b"\n", 1)
    prose = head.startswith(b"### ") and lines[-1].startswith(b"<sub>training-advisor ")
    return page or data or prose


def is_json_report(path: Path) -> bool:
    """Whether a file begins as a report's JSON does."""
    try:
        with path.open("rb") as file:
            return _JSON_HEAD.match(file.read(_MARK_WITHIN)) is not None
    except OSError:
        return False


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def to_json(report: msgspec.Struct) -> str:
    """A report as indented JSON, with a newline at its end; text that nothing could show is replaced."""
    text = msgspec.json.encode(printable(report)).decode("utf-8", "replace")
    return msgspec.json.format(text, indent=1) + "\n"
