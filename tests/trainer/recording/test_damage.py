"""Damage of a recording is found."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, DecodeError
from pipeline.experience.saved_rows import batches_of, recorded_batches
from pipeline.storage import extent_file
from pipeline.storage.recording import (
    LINES,
    Recording,
    read_recording,
    recording_of,
    rows_path,
)
from tests.support.experiences import made_up, through
from tests.support.recording import equal, recorder_in, take


def test_no_flipped_byte_of_recorded_rows_goes_unnoticed(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    take(recorder, 1)
    recorder.close()
    path, rng = rows_path(tmp_path, 1), random.Random(4)
    whole, recording = path.read_bytes(), read_recording(tmp_path)
    bytes_start = extent_file.load(path).starts[0]

    # Each byte of a row, and some of the header, of which some say nothing about the rows.
    for place in [*range(bytes_start, len(whole), 7), *rng.sample(range(bytes_start), 200)]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :])
        if place >= bytes_start:
            with pytest.raises(DecodeError, match="is not the one that was saved"):
                batches_of(recording, 1)
            continue
        try:
            (found,) = batches_of(recording, 1)
        except DecodeError:
            continue
        equal(found.padded(), through(made_up(seed=1)))


def parts_of(recording: Recording) -> list[tuple[str, int, object]]:
    found: list[tuple[str, int, object]] = [("start", step, start) for step, start in recording.starts]
    found += [("taken", step, taken) for step, taken in recording.steps.items()]
    return found + [("published", step, published) for step, published in recording.weights.items()]


def test_what_is_read_of_damaged_lines_was_written(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    take(recorder, 1, 2)
    recorder.close()
    whole, rng, refused = (tmp_path / LINES).read_bytes(), random.Random(5), 0
    written = parts_of(read_recording(tmp_path))
    assert len(written) == 5

    for attempt in range(400):
        place = rng.randrange(len(whole))
        # A flipped bit, or bytes that are put in or missing.
        damaged = bytes([whole[place] ^ 1 << rng.randrange(8)]) if attempt % 2 else rng.randbytes(rng.randrange(4))
        (tmp_path / LINES).write_bytes(whole[:place] + damaged + whole[place + 1 :])
        try:
            found = parts_of(read_recording(tmp_path))
        except DecodeError:
            refused += 1
            continue
        assert all(part in written for part in found)

    assert refused > 350


def test_a_line_without_its_checksum_is_damaged(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    take(recorder, 1)
    recorder.close()
    first, *_ = (tmp_path / LINES).read_bytes().splitlines(keepends=True)

    (tmp_path / LINES).write_bytes(first[: first.rindex(b',"seal"')] + b"}\n")

    with pytest.raises(DecodeError, match=r"steps\.jsonl:1: damaged: its seal is not that of its members"):
        read_recording(tmp_path)


def test_rows_that_the_run_removes_meanwhile_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorder_in(tmp_path)
    take(recorder, 1, 2, 3)
    recorder.close()
    found = recorded_batches(tmp_path)
    next(found)
    rows_path(tmp_path, 2).unlink()
    has_rows = Recording.has_rows

    def then_removed(recording: Recording, step: int) -> bool:
        had = has_rows(recording, step)
        rows_path(tmp_path, step).unlink(missing_ok=True)
        return had

    assert len([*found]) == 1
    # Between the look and the read.
    monkeypatch.setattr(Recording, "has_rows", then_removed)
    assert not [*recorded_batches(tmp_path)]


def test_rows_of_another_step_and_a_damaged_line_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    recorder = recorder_in(folder)
    take(recorder, 1, 2)
    recorder.close()
    rows_path(folder, 2).rename(rows_path(folder, 1))
    with pytest.raises(DecodeError, match="does not hold the batches that were recorded for step 1"):
        batches_of(read_recording(folder), 1)

    lines = (folder / LINES).read_bytes()
    (folder / LINES).write_bytes(lines.replace(b'"lease":101', b'"lease":100', 1))
    with pytest.raises(ConfigError, match=r"steps\.jsonl:2: damaged"):
        recording_of(tmp_path)
    with pytest.raises(ConfigError, match="no recording in"):
        recording_of(tmp_path / "elsewhere")
