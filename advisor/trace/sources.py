"""Where traces come from: files, folders, globs, stdin and URLs, read within a limit of size."""

from __future__ import annotations

import glob
import io
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from isal import igzip
from isal.igzip_lib import IsalError

from advisor.errors import InputError

#: File names that a folder is searched for.
SUFFIXES = (".json", ".json.gz")
#: JSON files of our own that lie beside traces.
_NOT_TRACES = re.compile(r"^(report|context|journal)\b.*\.json$|\.(context|report)\.json$")
#: The package's stubs do not say that it is an exception.
_ISAL_ERROR = cast("type[Exception]", IsalError)
_GZIP_MAGIC = b"\x1f\x8b"
_PIECE_BYTES = 2 << 20
#: What unpacks to this much, and to this many times its size, is no trace: the most alike events reach 60.
_BOMB_BYTES = 1 << 30
_BOMB_RATIO = 200
_BITE_BYTES = 4096
#: A recorded window of `TrainingAdvisor`: one folder, with a file a rank.
_WINDOW = re.compile(r"step_\d+")
_RANK = re.compile(r"rank[-_. ]?(\d{1,6})(?!\d)", re.IGNORECASE)


class BrokenGzip(Exception):
    """A gzip stream that breaks off or is damaged; `Source.whole` keeps what comes before."""


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
        InputError: nothing was found at one of the paths, or windows of several steps.
    """
    found: dict[str, None] = {}
    for given in paths:
        path = os.fspath(given)
        if path == "-" or (os.path.exists(path) and not os.path.isdir(path)):
            found[path] = None
            continue
        matches = _remote_matches(path) if is_url(path) else _local_matches(path)
        if not matches:
            raise InputError(_nothing_at(path))
        _require_one_window(path, matches)
        found.update(dict.fromkeys(sorted(matches, key=_by_rank)))
    return list(found)


def default_limit_bytes() -> int:
    """Uncompressed size that one trace may have: a third of this machine's memory, at most 32 GiB."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        memory = 8 << 30
    return min(memory // 3, 32 << 30)


class Source:
    """One trace file, to be read in pieces and, where that does not do, whole.

    Args:
        path: a file, ``-`` for stdin, or an fsspec URL.
        limit_bytes: uncompressed size to refuse beyond; `default_limit_bytes` where None.

    Attributes:
        size_bytes: size as stored, or None for a stream.

    Raises:
        InputError: it cannot be opened, is empty, or is larger than the limit.
    """

    def __init__(self, path: str, limit_bytes: int | None = None) -> None:
        self.path = path
        self._limit = default_limit_bytes() if limit_bytes is None else limit_bytes
        #: Content of what cannot be read twice.
        self._stored: bytes | None = None
        if not is_url(path) and os.path.isdir(path):
            raise InputError(
                f"{path}: a folder, not a trace; `advisor analyze` takes the traces of a whole folder"
            )
        with self._errors():
            if not is_url(path) and os.path.isfile(path):
                self.size_bytes: int | None = os.path.getsize(path)
            else:
                self._stored = _read_once(path, self._limit)
                self.size_bytes = len(self._stored) if is_url(path) else None
            stored = self.size_bytes if self._stored is None else len(self._stored)
            with self._open() as file:
                self._gzip = file.read(2) == _GZIP_MAGIC
        #: In pieces a bomb is harmless; what is held whole without the user's word on its size is not.
        self._whole_limit = self._limit
        if self._gzip and limit_bytes is None:
            self._whole_limit = min(self._limit, max(_BOMB_BYTES, _BOMB_RATIO * (stored or 0)))
        if not stored:
            raise InputError(f"{path}: the file is empty")
        if stored > self._limit:
            raise self._too_large()

    def pieces(self) -> Iterator[bytes]:
        """The uncompressed content, some megabytes at a time.

        Raises:
            BrokenGzip: the compressed stream breaks off or is damaged here.
        """
        yield from self._unpacked(self._limit)

    def _unpacked(self, limit: int) -> Iterator[bytes]:
        total = 0
        with self._errors(), self._open() as file:
            stream = igzip.GzipFile(fileobj=file) if self._gzip else file
            while piece := _next_piece(stream):
                total += len(piece)
                if total > limit:
                    raise self._too_large(limit)
                yield piece

    def whole(self) -> tuple[bytes, bool]:
        """The uncompressed content, up to where the gzip stream breaks off, and whether it does."""
        try:
            return _gathered(self._unpacked(self._whole_limit)), False
        except BrokenGzip:
            pass
        with self._errors(), self._open() as file:
            data = _gathered(self._before_break(file))
        if not data:
            raise InputError(
                f"{self.path}: the gzip stream is broken from its start; capture or copy the file again"
            )
        return data, True

    def _before_break(self, file: BinaryIO) -> Iterator[bytes]:
        """All that can be unpacked; streams may follow each other."""
        unpacker, total = zlib.decompressobj(wbits=31), 0
        while bite := file.read(_BITE_BYTES):
            before = unpacker.copy()
            try:
                pieces, unpacker = _unpacked(unpacker, bite)
            except zlib.error:
                pieces, file = _unpacked_to_the_break(before, bite), io.BytesIO()
            for piece in pieces:
                total += len(piece)
                if total > self._whole_limit:
                    raise self._too_large(self._whole_limit)
                yield piece

    def _open(self) -> BinaryIO:
        return open(self.path, "rb") if self._stored is None else io.BytesIO(self._stored)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ImportError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise InputError(f"{self.path}: cannot be read: {why}") from error

    def _too_large(self, limit: int | None = None) -> InputError:
        limit = self._limit if limit is None else limit
        return InputError(
            f"{self.path}: larger than {limit / 1e9:.3g} GB unpacked, the most that is read"
            + (f" of a file that grows {_BOMB_RATIO}-fold" if limit < self._limit else "")
            + "; raise it with --max-gb, or capture fewer steps"
        )


def read_bytes(path: str, limit_bytes: int | None = None) -> tuple[bytes, int | None, bool]:
    """Read one trace file whole, unpacking gzip (told by content, not by name); see `Source`.

    Returns:
        The uncompressed bytes, the stored size (None for a stream) and whether the gzip stream broke off.

    Raises:
        InputError: it cannot be opened, is empty, or is larger than the limit.
    """
    source = Source(path, limit_bytes)
    data, broken = source.whole()
    return data, source.size_bytes, broken


def _require_one_window(path: str, matches: Iterable[str]) -> None:
    """Traces of one folder are ranks of one job; windows recorded one after the other are not."""
    folders = {
        folder for match in matches if _WINDOW.fullmatch(os.path.basename(folder := os.path.dirname(match)))
    }
    if len({os.path.basename(folder) for folder in folders}) > 1:
        last = max(folders, key=lambda folder: (int(folder.rpartition("_")[2]), folder))
        raise InputError(f"{path}: {len(folders)} recorded windows; give one of them, such as {last}")


def _local_matches(path: str) -> list[str]:
    if os.path.isdir(path):
        # Folders that may not be entered are passed over, and links to folders, which may go in circles.
        inside = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
        return [file for file in inside if _is_trace_name(os.path.basename(file)) and os.path.isfile(file)]
    return [match for match in glob.glob(path, recursive=True) if os.path.isfile(match)]


def _remote_matches(url: str) -> list[str]:
    import fsspec

    with _remote_errors(url):
        fs, path = fsspec.core.url_to_fs(url)
        if fs.isdir(path):
            names = [name for name in fs.find(path) if _is_trace_name(os.path.basename(name))]
        else:
            names = fs.glob(path) if glob.has_magic(path) else [path] if fs.exists(path) else []
    return [fs.unstrip_protocol(name) for name in names]


@contextmanager
def _remote_errors(url: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each file system has errors of its own
        raise InputError(f"{url}: cannot be read: {str(error) or type(error).__name__}") from error


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


def _gathered(pieces: Iterable[bytes]) -> bytes:
    """Joined without holding the pieces and the whole at once."""
    buffer = io.BytesIO()
    for piece in pieces:
        buffer.write(piece)
    return buffer.getvalue()


def _next_piece(stream: Any) -> bytes:
    try:
        return stream.read(_PIECE_BYTES)
    except EOFError as error:
        raise BrokenGzip from error
    except (OSError, _ISAL_ERROR) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise BrokenGzip from error


def _unpacked(unpacker: Any, bite: bytes) -> tuple[list[bytes], Any]:
    """A bite unpacked (at most some thousandfold), and the unpacker for the next."""
    pieces = []
    while bite:
        pieces.append(unpacker.decompress(bite))
        bite = b""
        if unpacker.eof:
            bite, unpacker = unpacker.unused_data.lstrip(b"\0"), zlib.decompressobj(wbits=31)
    return pieces, unpacker


def _unpacked_to_the_break(unpacker: Any, bite: bytes) -> list[bytes]:
    pieces = []
    try:
        for i in range(len(bite)):
            more, unpacker = _unpacked(unpacker, bite[i : i + 1])
            pieces += more
    except zlib.error:
        pass
    return pieces


def _read_once(path: str, limit: int) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read(limit + 1)
    if is_url(path):
        import fsspec

        with _remote_errors(path), fsspec.open(path, "rb") as stream:
            return stream.read(limit + 1)
    with open(path, "rb") as file:
        return file.read(limit + 1)
