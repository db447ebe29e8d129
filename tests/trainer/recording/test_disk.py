"""Recorded rows are bounded, give way on a full disk, and are whole after a power failure or left out."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import CheckpointError
from pipeline.experience.saved_rows import recorded_batches
from pipeline.storage.recording import (
    LINES,
    ROWS,
    read_recording,
    recorded_rows,
    rows_path,
)
from pipeline.telemetry.reader import MetricsReader
from tests.support.recording import MOST_BYTES, Counts, recorder_in, take
from tests.trainer.test_trainer import Bench, bench

__all__ = ["bench"]


def test_the_oldest_rows_are_removed_beyond_the_limit_and_their_lines_stay(tmp_path: Path) -> None:
    counts = Counts()
    recorder = recorder_in(tmp_path / "one", counts)
    take(recorder, 1)
    recorder.close()
    each = counts.nbytes
    # The header's room is not all used: three files fit into this, with the room for a fourth they do not.
    limit = 3 * each + 8192
    recorder = recorder_in(tmp_path / "some", counts := Counts(), most_bytes=limit)
    take(recorder, *range(1, 5))
    recorder.close()
    recorder = recorder_in(tmp_path / "some", counts, after_step=4, most_bytes=limit)
    take(recorder, 5)
    recorder.close()

    recording = read_recording(tmp_path / "some")

    kept = [step for step in recording.steps if recording.has_rows(step)]
    assert kept and kept == list(range(6 - len(kept), 6)) and [*recording.steps] == [1, 2, 3, 4, 5]
    assert counts == {"kept": 5, "removed": 5 - len(kept)} and counts.nbytes <= limit
    assert counts.nbytes == sum(path.stat().st_size for _, path in recorded_rows(tmp_path / "some"))


def test_rows_larger_than_the_limit_are_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = recorder_in(tmp_path, counts := Counts(), most_bytes=100)
    take(recorder, 1, 2)
    recorder.close()

    assert counts == {"too_large": 2} and [*read_recording(tmp_path).steps] == [1, 2]
    assert sum("most_bytes=100" in record.message for record in caplog.records) == 1


def full_disk(monkeypatch: pytest.MonkeyPatch, folder: Path, most_bytes: Callable[[], int]) -> None:
    """Let writes of rows fail as on a disk with room for so many bytes of rows."""
    pwrite = os.pwrite

    def write(descriptor: int, data: bytes, offset: int) -> int:
        is_of_rows = Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent == folder / ROWS
        used = sum(path.stat().st_size for _, path in recorded_rows(folder))
        if is_of_rows and used + offset + len(data) > most_bytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write)


def test_a_full_disk_costs_rows_and_no_step_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    room = MOST_BYTES
    full_disk(monkeypatch, tmp_path, lambda: room)
    recorder = recorder_in(tmp_path, counts := Counts())
    take(recorder, 1)
    room = 0
    take(recorder, 2, 3)
    room = MOST_BYTES
    take(recorder, 4)
    recorder.close()

    recording = read_recording(tmp_path)
    assert [step for step in recording.steps if recording.has_rows(step)] == [4]
    assert [*recording.steps] == [1, 2, 3, 4] and counts == {"kept": 2, "removed": 1, "failed": 2}
    logged = [record.message for record in caplog.records]
    assert sum("are not recorded" in line for line in logged) == 1 and sum("again" in line for line in logged) == 1
    assert not [*(tmp_path / "rows").glob("*.new")]


def test_on_a_full_disk_older_rows_make_room_for_newer_ones_and_for_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = recorder_in(tmp_path, counts := Counts())
    take(recorder, 1)
    each = counts.nbytes
    full_disk(monkeypatch, tmp_path, lambda: 4 * each + each // 2)
    take(recorder, *range(2, 6))

    assert counts["kept"] == 5 and "failed" not in counts, "the older half made room for the last step"
    assert [step for step, _ in recorded_rows(tmp_path)] == list(range(1 + counts["removed"], 6))
    assert 2 <= counts["removed"] <= 3
    assert counts.nbytes == sum(path.stat().st_size for _, path in recorded_rows(tmp_path))

    assert recorder.give_way()

    assert [step for step, _ in recorded_rows(tmp_path)] == [5]
    assert counts.nbytes == rows_path(tmp_path, 5).stat().st_size
    assert sum("the disk is full" in record.message for record in caplog.records) == 2
    assert recorder.give_way() and not recorder.give_way()
    recorder.close()
    assert counts.nbytes == 0


def test_rows_that_make_room_for_rows_again_and_again_are_counted_and_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = recorder_in(tmp_path, counts := Counts())
    take(recorder, 1)
    most_bytes = 4 * counts.nbytes + counts.nbytes // 2
    full_disk(monkeypatch, tmp_path, lambda: most_bytes)

    take(recorder, *range(2, 20))
    recorder.close()

    assert counts["kept"] == 19 and counts["removed"] >= 12
    assert sum("the disk is full" in record.message for record in caplog.records) == 1


def test_recorded_rows_give_way_to_the_last_checkpoint_until_it_is_written(bench: Bench, tmp_path: Path) -> None:
    folder, left = tmp_path / "recording", list[int]()

    def save(*_: object, **__: object) -> Path:
        left.append(len([*recorded_rows(folder)]))
        if left[-1] > 1:
            raise CheckpointError(f"checkpoint step-000004 could not be written: {os.strerror(errno.ENOSPC)}")
        return folder

    trainer = bench.trainer(hooks=[recorder_in(folder)], max_steps=4)
    bench.save = save
    bench.run(trainer)

    assert left[0] == 4 and left[-1] <= 1 and left == sorted(left, reverse=True), left
    assert MetricsReader(bench.slab).read().value("rlhfd_checkpoints_total", result="ok") == 1
    assert [*read_recording(folder).steps] == [1, 2, 3, 4]


def test_a_checkpoint_that_fails_otherwise_costs_no_rows(bench: Bench, tmp_path: Path) -> None:
    folder, tried = tmp_path / "recording", list[int]()

    def save(*_: object, **__: object) -> Path:
        tried.append(1)
        raise CheckpointError("checkpoint step-000004 could not be written: Permission denied")

    trainer = bench.trainer(hooks=[recorder_in(folder)], max_steps=4)
    bench.save = save
    bench.run(trainer)

    assert len([*recorded_rows(folder)]) == 4 and tried == [1]


def test_a_limit_above_the_free_space_is_told_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder_in(tmp_path / "some").close()
    assert not caplog.records

    recorder_in(tmp_path / "more", most_bytes=1 << 62).close()

    (record,) = caplog.records
    assert f"most_bytes={1 << 62} recorded_bytes=0 free_bytes=" in record.message


def test_rows_of_another_size_than_recorded_are_none(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    take(recorder, 1, 2, 3)
    recorder.close()
    # After a power failure: the name is on disk, the bytes are not, or not all.
    rows_path(tmp_path, 1).write_bytes(b"")
    whole = rows_path(tmp_path, 2).read_bytes()
    rows_path(tmp_path, 2).write_bytes(whole[:-4096])

    recording = read_recording(tmp_path)

    assert [step for step in recording.steps if recording.has_rows(step)] == [3]
    assert len([*recorded_batches(tmp_path)]) == 1


def test_a_flush_puts_the_rows_since_the_last_one_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    for name in ("fdatasync", "fsync"):
        monkeypatch.setattr(os, name, lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    recorder = recorder_in(tmp_path)
    take(recorder, 1, 2)
    rows_path(tmp_path, 1).unlink()
    recorder.flush()
    take(recorder, 3)
    recorder.flush()
    recorder.close()
    # Its successor does not know which of them a killed one had flushed.
    again = recorder_in(tmp_path, after_step=2)
    again.flush()
    again.flush()
    again.close()

    lines, rows = str(tmp_path / LINES), str(tmp_path / "rows")
    two, three = str(rows_path(tmp_path, 2)), str(rows_path(tmp_path, 3))
    assert flushed == [lines, two, rows, lines, three, rows, lines, two, rows, lines]


def test_a_successor_tells_the_bytes_that_it_finds(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, counts := Counts())
    assert counts.nbytes == 0
    take(recorder, 1, 2, 3)
    recorder.close()

    recorder_in(tmp_path, counts := Counts(), after_step=2).close()

    assert counts.nbytes == sum(rows_path(tmp_path, step).stat().st_size for step in (1, 2)) > 0 and not counts


def test_rows_that_cannot_be_removed_keep_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorder_in(tmp_path, counts := Counts())
    take(recorder, 1)
    recorder.close()
    limit = 2 * counts.nbytes + 8192
    recorder = recorder_in(tmp_path, counts := Counts(), after_step=1, most_bytes=limit)
    take(recorder, 2)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == rows_path(tmp_path, 1):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        take(recorder, 3, 4, 5)
    on_disk = sum(path.stat().st_size for _, path in recorded_rows(tmp_path))
    assert counts["failed"] == 3 and counts.nbytes == on_disk <= limit

    take(recorder, 6)
    recorder.close()
    assert [step for step, _ in recorded_rows(tmp_path)] == [2, 6]
