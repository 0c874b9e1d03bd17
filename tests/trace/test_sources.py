"""Where traces are found and how their bytes come in."""

import gzip
import io
import os
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from advisor.errors import InputError
from advisor.trace import sources
from advisor.trace.read import read_trace
from advisor.trace.sources import BrokenGzip, Source, find_traces, rank_in_name, read_bytes

TRACE = b'[{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2}]'


@pytest.fixture
def folder(tmp_path: Path):
    """Makes files with some content below a fresh folder."""

    def folder(*names: str) -> Path:
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(TRACE)
        return tmp_path

    return folder


def relative(found: list[str], base: Path) -> list[str]:
    return [os.path.relpath(path, base) for path in found]


def test_a_folder_gives_its_traces_by_rank_and_then_by_name(folder) -> None:
    base = folder("b.json", "sub/rank10.json.gz", "sub/rank2.json", "a.json", "notes.txt", ".hidden.json")
    assert relative(find_traces([base]), base) == ["sub/rank2.json", "sub/rank10.json.gz", "a.json", "b.json"]


def test_what_we_write_ourselves_is_not_taken_for_a_trace(folder) -> None:
    base = folder(
        "rank0.pt.trace.json.gz", "report.json", "rank0.report.json", "context.json", "journal.json"
    )
    assert relative(find_traces([base]), base) == ["rank0.pt.trace.json.gz"]


def test_a_file_named_outright_is_taken_whatever_its_name(folder) -> None:
    base = folder("report.json", "trace.bin")
    paths = [base / "report.json", base / "trace.bin"]
    assert find_traces(paths) == [str(path) for path in paths]


def test_several_paths_keep_their_order_and_name_no_file_twice(folder) -> None:
    base = folder("b.json", "a.json", "c/x.json")
    found = find_traces([base / "c", base / "b.json", base, "-"])
    assert relative(found[:-1], base) == ["c/x.json", "b.json", "a.json"]
    assert found[-1] == "-"


def test_a_glob_may_go_through_folders(folder) -> None:
    base = folder("run1/rank1.json", "run1/rank0.json", "run2/rank0.json", "other/x.txt")
    assert relative(find_traces([f"{base}/**/rank*.json"]), base) == [
        "run1/rank0.json",
        "run2/rank0.json",
        "run1/rank1.json",
    ]


@pytest.mark.parametrize(
    ("path", "says"),
    [("none.json", "no such file"), ("*.json", "no file matches"), (".", "no trace in this folder")],
)
def test_a_path_without_traces_is_an_error_that_says_which(folder, path: str, says: str) -> None:
    base = folder("readme.txt")
    with pytest.raises(InputError, match=says) as raised:
        find_traces([base / path])
    assert str(base) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank3.json", 3), ("trace_rank_12.json.gz", 12), ("Rank-0.json", 0), ("rank3.pt.trace.json.gz", 3),
     ("worker.json", None), ("rank.json", None), ("rank1234567.json", None)],
)  # fmt: skip
def test_the_rank_in_a_name(name: str, rank: int | None) -> None:
    assert rank_in_name(name) == rank


def test_gzip_is_told_by_content_not_by_name(folder, tmp_path: Path) -> None:
    (tmp_path / "plain.json").write_bytes(gzip.compress(TRACE))
    (tmp_path / "zipped.json.gz").write_bytes(TRACE)
    assert read_bytes(str(tmp_path / "plain.json")) == (TRACE, len(gzip.compress(TRACE)), False)
    assert read_bytes(str(tmp_path / "zipped.json.gz")) == (TRACE, len(TRACE), False)


def test_gzip_streams_one_after_the_other_are_one_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(TRACE[:30]) + gzip.compress(TRACE[30:]))
    assert read_bytes(str(path))[0] == TRACE
    # Also where the last of them breaks off.
    path.write_bytes(gzip.compress(TRACE[:30]) + gzip.compress(TRACE[30:])[:-4])
    assert read_bytes(str(path))[::2] == (TRACE, True)


def test_all_that_precedes_damage_in_a_gzip_stream_is_kept(tmp_path: Path) -> None:
    # GIVEN a stream of independent blocks, damaged at a known place
    packer = zlib.compressobj(wbits=31)
    content = [os.urandom(1000) for _ in range(100)]
    blocks = [packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH) for block in content]
    path = tmp_path / "t.json.gz"
    path.write_bytes(b"".join(blocks[:50]) + b"\xff" * 5000)
    # THEN every block before it is there
    data, _, broken = read_bytes(str(path))
    assert broken
    assert data.startswith(b"".join(content[:50]))


def test_a_gzip_stream_broken_from_its_start_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(TRACE)[:10])
    with pytest.raises(InputError, match=r"t\.json\.gz: the gzip stream is broken"):
        read_trace(path)


def test_pieces_stop_at_the_break_with_an_error_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(os.urandom(100_000))[:50_000])
    with pytest.raises(BrokenGzip):
        list(Source(str(path)).pieces())


@pytest.mark.parametrize("cut", [0, 7])
def test_a_gzip_bomb_stops_at_the_limit(tmp_path: Path, cut: int) -> None:
    # GIVEN fifty megabytes of blanks in fifty kilobytes, whole or cut short
    stored = gzip.compress(b" " * 50_000_000)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(stored[: len(stored) - cut])
    # THEN it is refused, naming the file and the way out
    with pytest.raises(InputError, match=r"bomb\.json\.gz: larger than 0\.01 GB unpacked.*--max-gb"):
        read_trace(path, limit_bytes=10_000_000)
    with pytest.raises(InputError, match="--max-gb"):
        read_bytes(str(path), 10_000_000)


@pytest.mark.parametrize("cut", [None, -1000])
def test_blanks_without_end_are_not_unpacked_into_memory(
    tmp_path: Path, monkeypatch, cut: int | None
) -> None:
    # GIVEN a small file that unpacks to far more, where a stretch without events is all there is
    monkeypatch.setattr(sources, "_BOMB_BYTES", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents":[' + b" " * (80 << 20))[:cut])
    with pytest.raises(InputError, match="200-fold"):
        read_trace(path)
    # THEN who knows better can say so
    with pytest.raises(InputError, match="not a profiler trace"):
        read_trace(path, limit_bytes=1 << 30)


def test_what_may_not_be_looked_at_and_links_in_circles_are_passed_over(tmp_path, monkeypatch) -> None:
    # GIVEN a folder with a trace, links to itself, a pipe, and a file that even its size may not be asked of
    for name in ("a.json", "secret.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "circle").symlink_to(tmp_path)
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    os.mkfifo(tmp_path / "pipe.json")
    real = os.stat

    def stat(path, *args, **kwargs):
        if os.fspath(path).endswith("secret.json"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    assert find_traces([tmp_path]) == [str(tmp_path / "a.json")]


def test_a_file_just_at_the_limit_is_read_and_one_byte_more_is_not(tmp_path: Path) -> None:
    for name, stored in (("t.json", TRACE), ("t.json.gz", gzip.compress(TRACE))):
        path = tmp_path / name
        path.write_bytes(stored)
        at = max(len(TRACE), len(stored))
        assert read_bytes(str(path), at)[0] == TRACE
        with pytest.raises(InputError, match="--max-gb"):
            read_bytes(str(path), len(TRACE) - 1)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "t.json").touch()
    with pytest.raises(InputError, match=r"t\.json: the file is empty"):
        read_trace(tmp_path / "t.json")


def test_a_missing_file_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.json: cannot be read: No such file"):
        read_trace(tmp_path / "gone.json")


@pytest.mark.parametrize("stored", [TRACE, gzip.compress(TRACE)], ids=["plain", "gzip"])
def test_stdin_is_read(monkeypatch: pytest.MonkeyPatch, stored: bytes) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(stored)))
    trace = read_trace("-")
    assert len(trace.ops) == 1
    assert trace.size_bytes is None


def test_a_broken_trace_from_stdin_is_repaired_though_it_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(TRACE[:-1])))
    assert [loss.kind for loss in read_trace("-").losses] == ["truncated"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(TRACE[:-1],))
    writer.start()
    assert find_traces([pipe]) == [str(pipe)]
    trace = read_trace(pipe)
    writer.join()
    assert len(trace.ops) == 1
    assert trace.size_bytes is None


@pytest.fixture
def memory():
    """An empty file system in memory."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def test_urls_are_found_and_read(memory) -> None:
    for name in ("run/rank1.json.gz", "run/rank0.json.gz", "run/report.json"):
        memory.pipe(f"/{name}", gzip.compress(TRACE))
    for given in ("memory://run", "memory://run/rank*.json.gz"):
        found = find_traces([given])
        assert [path.rpartition("/")[2] for path in found] == ["rank0.json.gz", "rank1.json.gz"]
        trace = read_trace(found[1])
        assert len(trace.ops) == 1
        assert trace.rank == 1
        assert trace.size_bytes == len(gzip.compress(TRACE))


def test_a_url_without_traces_is_an_error(memory) -> None:
    with pytest.raises(InputError, match="memory://none"):
        find_traces(["memory://none"])
    with pytest.raises(InputError, match=r"gone\.json"):
        read_trace("memory://gone.json")
    with pytest.raises(InputError, match="nosuchprotocol://a"):
        find_traces(["nosuchprotocol://a"])


def test_whatever_a_file_system_raises_is_an_input_error(memory, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentials(Exception):
        pass

    def refuse(*_: object, **__: object) -> None:
        raise NoCredentials

    monkeypatch.setattr(type(memory), "isdir", refuse)
    monkeypatch.setattr(type(memory), "_open", refuse)
    with pytest.raises(InputError, match="memory://t: cannot be read: NoCredentials"):
        find_traces(["memory://t"])
    with pytest.raises(InputError, match="memory://t: cannot be read: NoCredentials"):
        read_trace("memory://t")


def test_a_url_is_held_to_the_limit(memory) -> None:
    memory.pipe("/t.json", TRACE)
    with pytest.raises(InputError, match="--max-gb"):
        read_trace("memory://t.json", limit_bytes=10)


def test_a_folder_where_one_trace_is_wanted_says_what_takes_folders(tmp_path) -> None:
    with pytest.raises(InputError, match="a folder, not a trace; `advisor analyze`"):
        read_trace(tmp_path)
