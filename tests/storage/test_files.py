"""Writing under a temporary name and renaming: a reader finds the old file or the whole new one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pipeline.storage.files import no_room, not_taken, replacing, round_up


def test_a_file_is_replaced_at_the_end_of_the_block_alone(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_bytes(b"old")

    with replacing(path) as descriptor:
        os.write(descriptor, b"new")
        during = path.read_bytes()

    assert (during, path.read_bytes()) == (b"old", b"new")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_name_that_is_taken_gets_the_next_number(tmp_path: Path) -> None:
    path = tmp_path / "kept.tar"
    names = []
    for _ in range(3):
        not_taken(path).write_bytes(b"")
        names = sorted(each.name for each in tmp_path.iterdir())

    assert names == ["kept-2.tar", "kept-3.tar", "kept.tar"]


def test_a_block_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_bytes(b"old")

    def write() -> None:
        with replacing(path) as descriptor:
            os.write(descriptor, b"ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_a_file_has_its_own_mode_and_nothing_of_a_killed_writers(tmp_path: Path, mode: int) -> None:
    left = tmp_path / ".kept.new"
    left.write_bytes(b"a longer text than the next one")
    left.chmod(0o666)

    with replacing(tmp_path / "kept", temporary=left, mode=mode) as descriptor:
        os.write(descriptor, b"new")

    assert (tmp_path / "kept").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == mode
    assert not left.exists()


@pytest.mark.parametrize("flush", [False, True])
def test_a_flush_is_of_the_file_before_its_rename_and_of_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: bool
) -> None:
    path, calls = tmp_path / "kept", []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(descriptor: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def noted_rename(old: Path, new: Path) -> None:
        calls.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    with replacing(path, flush=flush) as descriptor:
        os.write(descriptor, b"new")

    assert calls == (["file", "rename", "folder"] if flush else ["rename"])


def test_sizes_are_rounded_up_to_whole_multiples() -> None:
    assert [round_up(nbytes, 64) for nbytes in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_a_file_system_without_an_inode_says_so_and_not_how_many_bytes_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = list(os.statvfs(tmp_path))
    full[5:8] = [20, 0, 0]
    monkeypatch.setattr(os, "statvfs", lambda folder: os.statvfs_result(full))

    assert str(no_room(tmp_path, 4096, "a file")) == (
        f"a file does not fit: all 20 inodes of the file system of {tmp_path} are taken"
    )
