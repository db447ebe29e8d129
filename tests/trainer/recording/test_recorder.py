"""A recording holds each step once, with its rows or without, whatever is killed, full or too large."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.errors import ConfigError, DecodeError
from pipeline.experience import codec
from pipeline.experience.recorded_batches import batches_of, recorded_batches
from pipeline.experience.types import Experience
from pipeline.runtime.messages import ExtentRows
from pipeline.storage import extent_file
from pipeline.storage.recording import (
    LINES,
    Origin,
    Recorded,
    TrainerStart,
    read_recording,
    recorded_rows,
    recording_of,
    rows_path,
)
from pipeline.storage.weights_header import WeightsVersion
from pipeline.trainer.connection import Batch
from pipeline.trainer.recording.recorder import StepRecorder
from pipeline.trainer.resume import Start
from pipeline.trainer.state import Progress
from tests.support.experiences import made_up, made_up_vl
from tests.support.items import assert_equal
from tests.trainer.test_trainer import Bench, bench

__all__ = ["bench"]
MOST_BYTES = 1 << 30
START = TrainerStart("identity", {"daemon": {"seed": 3}}, {"torch": "2"}, "cpu")


class Counts(dict[Recorded, int]):
    nbytes = 0

    def count(self, result: Recorded, nbytes: int) -> None:
        self[result] = self.get(result, 0) + 1
        self.nbytes = nbytes


def recorder_in(
    folder: Path, counts: Counts | None = None, *, after_step: int = 0, most_bytes: int = MOST_BYTES
) -> StepRecorder:
    count = (Counts() if counts is None else counts).count
    return StepRecorder(folder, START, after_step=after_step, most_bytes=most_bytes, count=count, clock_s=lambda: 5.0)


def gathered(experience: Experience) -> Experience:
    """Return a batch as a trainer gets it: padded on the left alone."""
    memory = memoryview(bytearray(1 << 24))
    nbytes = codec.encode(experience, memory).nbytes
    return codec.gather([(codec.ExtentReader(memory[:nbytes]), range(len(experience.sequences)))])


def batch_of(step: int, experience: Experience | None = None) -> Batch:
    experience = gathered(made_up(seed=step)) if experience is None else experience
    parts = [ExtentRows(0, 64, 0, step - 1, 9, [0, 1, 3], 40, 2), ExtentRows(64, 64, 0, step - 1, 10, [5])]
    return Batch(experience, step + 100, step - 1, position=7, parts=parts)


def take(recorder: StepRecorder, *steps: int) -> None:
    for step in steps:
        recorder.record(step, [batch_of(step)], Progress(step, 1000 + step))
        recorder.published(step, WeightsVersion(step, 2000 + step))


def equal(one: Experience, other: Experience) -> None:
    for name, value in vars(other).items():
        assert_equal(name, getattr(one, name), value)


def test_a_step_is_recorded_with_its_rows_their_origin_and_both_digests(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    take(recorder, 1)
    two = [batch_of(2), batch_of(3, gathered(made_up_vl(seed=5)))]
    recorder.record(2, two, Progress(2, 0xABC))
    recorder.close()

    recording = read_recording(tmp_path)

    taken = recording.steps[1]
    assert (taken.time_unix_s, taken.for_version, taken.experiences) == (5.0, 0, f"{1001:016x}")
    (first,) = taken.batches
    assert (first.lease, first.rows) == (101, 4)
    assert first.origins == [Origin(9, 40, 2, 0, [(0, 2), (3, 4)]), Origin(10, -1, 0, 0, [(5, 6)])]
    assert recording.weights[1].weights == f"{2001:016x}" and 2 not in recording.weights
    assert recording.start_of(1) == START and recording.has_rows(2) and not recording.has_rows(3)
    found = [*recorded_batches(tmp_path)]
    assert len(found) == 3 and recording.steps[2].experiences == f"{0xABC:016x}"
    equal(found[0], gathered(made_up(seed=1)))
    equal(found[1], two[0].experience)
    equal(found[2], two[1].experience)
    assert [len(each.sequences) for each in recorded_batches(tmp_path, first=2, last=2)] == [4, 4]


def test_without_rows_a_step_has_its_line_alone(tmp_path: Path) -> None:
    counts = Counts()
    recorder = recorder_in(tmp_path, counts, most_bytes=0)
    take(recorder, 1)
    recorder.close()

    recording = read_recording(tmp_path)

    assert recording.steps[1].batches[0].digest == "" and not recording.has_rows(1)
    assert not (tmp_path / "rows").exists() and not counts and not [*recorded_batches(tmp_path)]


def test_equal_batches_have_equal_digests(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    for step in (1, 2):
        recorder.record(step, [batch_of(1, gathered(made_up(9, 30, 60, seed=1, holes=True)))], Progress(step))
        recorder.record(step + 2, [batch_of(1, gathered(made_up(9, 40, 60, seed=2)))], Progress(step + 2))
    recorder.close()

    steps = read_recording(tmp_path).steps

    assert steps[1].batches[0].digest == steps[2].batches[0].digest != steps[3].batches[0].digest


def test_a_batch_of_any_size_is_encoded(tmp_path: Path) -> None:
    large = gathered(made_up(64, 900, 900))
    recorder = recorder_in(tmp_path)
    recorder.record(1, [batch_of(1, large)], Progress(1))
    recorder.close()

    (found,) = recorded_batches(tmp_path)

    assert rows_path(tmp_path, 1).stat().st_size > 1 << 20
    equal(found, large)


def test_a_successor_takes_steps_again_and_each_is_recorded_once(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    take(recorder, 1, 2, 3)
    # Killed: in a line, and in a file of rows.
    recorder._lines.write(b'{"step":4,"tak')
    (tmp_path / "rows" / "step-000004.new").write_bytes(b"part")
    recorder.close()
    assert [*read_recording(tmp_path).steps] == [1, 2, 3], "the part of a line is not read"

    again = recorder_in(tmp_path, after_step=1)

    assert [step for step, _ in recorded_rows(tmp_path)] == [1]
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["step-000001.safetensors"]
    take(again, 2)
    again.close()
    recording = read_recording(tmp_path)
    assert [*recording.steps] == [1, 2] and len(recording.starts) == 2
    assert b'"step":3' not in (tmp_path / LINES).read_bytes()


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
    assert sum("trainer.record_bytes=100" in record.message for record in caplog.records) == 1


def test_a_full_disk_costs_rows_and_no_step_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    recorder = recorder_in(tmp_path, counts := Counts())
    take(recorder, 1)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        take(recorder, 2, 3)
    take(recorder, 4)
    recorder.close()

    recording = read_recording(tmp_path)
    assert [step for step in recording.steps if recording.has_rows(step)] == [1, 4]
    assert [*recording.steps] == [1, 2, 3, 4] and counts == {"kept": 2, "failed": 2}
    logged = [record.message for record in caplog.records]
    assert sum("are not recorded" in line for line in logged) == 1 and sum("again" in line for line in logged) == 1
    assert not [*(tmp_path / "rows").glob("*.new")]


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
        equal(found, gathered(made_up(seed=1)))


def test_damaged_lines_are_read_or_refused(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    take(recorder, 1, 2)
    recorder.close()
    whole, rng, refused = (tmp_path / LINES).read_bytes(), random.Random(5), 0

    for _ in range(500):
        place = rng.randrange(len(whole))
        (tmp_path / LINES).write_bytes(
            whole[:place] + rng.randbytes(rng.randrange(4)) + whole[place + rng.randrange(3) :]
        )
        try:
            read_recording(tmp_path)
        except DecodeError:
            refused += 1

    assert 250 < refused < 500


def test_rows_of_another_step_and_a_damaged_line_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    recorder = recorder_in(folder)
    take(recorder, 1, 2)
    recorder.close()
    rows_path(folder, 2).rename(rows_path(folder, 1))
    with pytest.raises(DecodeError, match="does not hold the batches that were recorded for step 1"):
        batches_of(read_recording(folder), 1)

    lines = (folder / LINES).read_bytes()
    (folder / LINES).write_bytes(lines.replace(b'"taken":{"time', b'"taken":["time', 1))
    with pytest.raises(ConfigError, match=r"steps\.jsonl:2 is damaged"):
        recording_of(tmp_path)
    with pytest.raises(ConfigError, match="no recording in"):
        recording_of(tmp_path / "elsewhere")


class Spy(StepRecorder):
    """Notes the newest published version at each step, and the steps whose weights it was told."""

    def __init__(self, folder: Path, newest: Callable[[], int], after_step: int = 0) -> None:
        super().__init__(folder, START, after_step=after_step, most_bytes=MOST_BYTES, count=Counts().count)
        self.seen: list[tuple[int, int]] = []
        self._newest = newest

    def record(self, step: int, batches: list[Batch], progress: Progress) -> None:  # type: ignore[override]
        self.seen.append((step, self._newest()))
        super().record(step, batches, progress)


def test_a_step_is_recorded_before_its_weights_are_published_and_they_after(bench: Bench, tmp_path: Path) -> None:
    newest = lambda: trainer._connection.newest().version  # noqa: E731
    spy = Spy(tmp_path / "recording", newest)
    trainer = bench.trainer(recorder=spy, max_steps=3, gradient_accumulation_steps=2)
    bench.run(trainer)

    recording = read_recording(tmp_path / "recording")

    assert spy.seen == [(1, 0), (2, 1), (3, 2)]
    assert {step: found.version for step, found in recording.weights.items()} == {0: 0, 1: 1, 2: 2, 3: 3}
    assert recording.weights[3].weights == f"{trainer.fingerprint:016x}"
    assert [len(taken.batches) for taken in recording.steps.values()] == [2, 2, 2]
    assert recording.steps[3].experiences == f"{trainer.progress.digest:016x}"
    assert [batch.lease for taken in recording.steps.values() for batch in taken.batches] == list(range(6))
    origins = [origin for taken in recording.steps.values() for batch in taken.batches for origin in batch.origins]
    assert all(origin.position >= 0 and origin.prompts > 0 for origin in origins)
    given = [experience for batches in bench.learner.batches for experience in batches]
    for found, trained in zip(recorded_batches(tmp_path / "recording"), given, strict=True):
        equal(found, trained)
        assert torch.equal(found.info["policy_version"], trained.info["policy_version"])


def test_weights_that_a_killed_trainer_published_and_did_not_record_are_recorded_by_its_successor(
    bench: Bench, tmp_path: Path
) -> None:
    folder = tmp_path / "recording"
    trainer = bench.trainer(recorder=Spy(folder, lambda: 0), max_steps=0)
    while trainer.step < 2:
        bench.turns(trainer, 1)
    lines = (folder / LINES).read_bytes().splitlines(keepends=True)
    (folder / LINES).write_bytes(b"".join(lines[:-1]))
    assert 2 not in read_recording(folder).weights

    trainer.close()
    successor = bench.trainer(
        recorder=Spy(folder, lambda: 0, after_step=2), start=Start(trainer.progress, None), max_steps=0
    )
    successor.close()

    assert read_recording(folder).weights[2].weights == f"{trainer.fingerprint:016x}"
