"""Output files appear whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from advisor.errors import UsageError
from advisor.report.files import write_text, writing


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with writing(path) as file:
        file.write("half")
        file.flush()
        assert not path.exists()
    assert path.read_text() == "half"
    assert os.listdir(tmp_path) == ["out.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_was_there_before_survives_a_failure(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")

    def fail_halfway() -> None:
        with writing(path) as file:
            file.write("new")
            raise error

    with pytest.raises(error):
        fail_halfway()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_a_full_disk_is_the_users_to_know(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No space left"), writing(tmp_path / "out.txt"):
        raise OSError(28, "No space left on device")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("place", ["nowhere/out.txt", "file/out.txt"])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"out\.txt"):
        write_text(tmp_path / place, "text")


def test_a_folder_in_the_files_place_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError):
        write_text(tmp_path / "out", "text")
    assert os.listdir(tmp_path) == ["out"]


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "out.txt", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out.txt").stat().st_mode) == 0o640


def test_half_a_surrogate_pair_does_not_stop_the_writing(tmp_path: Path) -> None:
    write_text(tmp_path / "out.txt", "a\ud800b")
    assert (tmp_path / "out.txt").read_bytes() == b"a?b"
