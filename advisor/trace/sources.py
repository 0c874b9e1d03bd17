"""Where traces come from: files, folders, globs, stdin and URLs, opened within a memory limit."""

from __future__ import annotations

import glob
import io
import os
import re
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

from advisor.errors import InputError

#: File names that a folder is searched for.
SUFFIXES = (".json", ".json.gz")
#: JSON files of our own that lie beside traces.
_NOT_TRACES = re.compile(r"^(report|context|journal)\b.*\.json$|\.(context|report)\.json$")
_CHUNK_BYTES = 16 << 20
_RANK = re.compile(r"rank[-_. ]?(\d{1,6})(?!\d)", re.IGNORECASE)


def rank_in_name(name: str) -> int | None:
    """The rank that a file name such as ``trace_rank3.json.gz`` states, or None."""
    found = _RANK.search(name)
    return int(found.group(1)) if found else None


def is_url(path: str) -> bool:
    """Whether a path names another file system (``s3://…``, ``gs://…``)."""
    return "://" in path


def find_traces(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Expand files, folders (searched in depth), globs, ``-`` and URLs into trace files.

    Returns:
        Paths in a stable order: as given, and within a folder or glob by rank, then by name.

    Raises:
        InputError: nothing was found at one of the paths.
    """
    found: dict[str, None] = {}
    for given in paths:
        path = os.fspath(given)
        if path == "-" or os.path.isfile(path):
            found[path] = None
            continue
        matches = _remote_matches(path) if is_url(path) else _local_matches(path)
        if not matches:
            raise InputError(_nothing_at(path))
        found.update(dict.fromkeys(sorted(matches, key=_by_rank)))
    return list(found)


def default_limit_bytes() -> int:
    """Uncompressed size that one trace may have: a third of this machine's memory, at most 32 GiB."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        memory = 8 << 30
    return min(memory // 3, 32 << 30)


def read_bytes(path: str, limit_bytes: int | None = None) -> tuple[bytes, int | None, bool]:
    """Read one trace file whole, unpacking gzip (told by content, not by name).

    Args:
        path: a file, ``-`` for stdin, or an fsspec URL.
        limit_bytes: uncompressed size to refuse beyond; `default_limit_bytes` where None.

    Returns:
        The uncompressed bytes, the stored size (None for stdin) and whether the gzip stream broke off.

    Raises:
        InputError: it cannot be opened, is empty, or is larger than the limit.
    """
    limit = default_limit_bytes() if limit_bytes is None else limit_bytes
    try:
        stored = _stored_bytes(path, limit)
    except (OSError, ImportError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not stored:
        raise InputError(f"{path}: the file is empty")
    size = None if path == "-" else len(stored)
    if stored[:2] != b"\x1f\x8b":
        return stored, size, False
    data, broken = _gunzip(path, stored, limit)
    if not data:
        raise InputError(f"{path}: the gzip stream is broken from its start; capture or copy the file again")
    return data, size, broken


def _local_matches(path: str) -> list[str]:
    if os.path.isdir(path):
        return [str(file) for file in Path(path).rglob("*") if file.is_file() and _is_trace_name(file.name)]
    return [match for match in glob.glob(path, recursive=True) if os.path.isfile(match)]


def _remote_matches(url: str) -> list[str]:
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url)
        if fs.isdir(path):
            names = [name for name in fs.find(path) if _is_trace_name(os.path.basename(name))]
        else:
            names = fs.glob(path) if glob.has_magic(path) else [path] if fs.exists(path) else []
    except (OSError, ImportError, ValueError) as error:
        raise InputError(f"{url}: cannot be read: {error}") from error
    return [fs.unstrip_protocol(name) for name in names]


def _is_trace_name(name: str) -> bool:
    return name.endswith(SUFFIXES) and not name.startswith(".") and not _NOT_TRACES.search(name)


def _by_rank(path: str) -> tuple[int, str]:
    rank = rank_in_name(os.path.basename(path))
    return (1 << 30 if rank is None else rank, path)


def _nothing_at(path: str) -> str:
    if os.path.isdir(path):
        return f"{path}: no trace in this folder (looked for {' and '.join('*' + s for s in SUFFIXES)})"
    if glob.has_magic(path):
        return f"{path}: no file matches"
    return f"{path}: no such file or folder"


def _stored_bytes(path: str, limit: int) -> bytes:
    if path == "-":
        data = sys.stdin.buffer.read(limit + 1)
    elif is_url(path):
        import fsspec

        with fsspec.open(path, "rb") as stream:
            data = stream.read(limit + 1)
    else:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > limit:
                raise _too_large(path, limit)
            data = file.read(limit + 1)
    if len(data) > limit:
        raise _too_large(path, limit)
    return data


def _gunzip(path: str, stored: bytes, limit: int) -> tuple[bytes, bool]:
    from isal import igzip, isal_zlib

    pieces, total = [], 0
    try:
        with igzip.GzipFile(fileobj=io.BytesIO(stored)) as unpacked:
            while piece := unpacked.read(_CHUNK_BYTES):
                total += len(piece)
                if total > limit:
                    raise _too_large(path, limit)
                pieces.append(piece)
    except (OSError, EOFError, isal_zlib.error):
        return _rescue_gzip(path, stored, limit), True
    return b"".join(pieces), False


def _rescue_gzip(path: str, stored: bytes, limit: int) -> bytes:
    """All that lies before the break, fed in small bites so that the last good block is kept."""
    unpacker, pieces, total = zlib.decompressobj(wbits=31), [], 0
    for start in range(0, len(stored), 4096):
        try:
            piece = unpacker.decompress(stored[start : start + 4096], limit + 1)
        except zlib.error:
            break
        total += len(piece)
        if total > limit:
            raise _too_large(path, limit)
        pieces.append(piece)
    return b"".join(pieces)


def _too_large(path: str, limit: int) -> InputError:
    return InputError(
        f"{path}: larger than {limit / 1e9:.1f} GB unpacked, more than is read on this machine by default; "
        "raise it with --max-gb, or capture fewer steps"
    )
