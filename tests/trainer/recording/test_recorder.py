"""A recording holds each step once, with its rows or without, whatever is killed, full or too large."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from pipeline.config.identity import run_dir
from pipeline.config.schema import Config
from pipeline.experience.saved_rows import recorded_batches
from pipeline.storage.recording import (
    LINES,
    Origin,
    read_recording,
    recorded_rows,
    rows_path,
)
from pipeline.telemetry.reader import MetricsReader, version_of
from pipeline.trainer.connection import Batch
from pipeline.trainer.metrics import TrainerMetrics
from pipeline.trainer.process import open_recorder
from pipeline.trainer.recording.recorder import StepRecorder, cut, versions
from pipeline.trainer.resume import Start
from pipeline.trainer.state import Progress
from tests.support.experiences import made_up, made_up_vl, through
from tests.support.recording import MOST_BYTES, START, Counts, batch_of, equal, recorder_in, take
from tests.trainer.test_trainer import Bench, bench

__all__ = ["bench"]


def test_a_step_is_recorded_with_its_rows_their_origin_and_both_digests(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    take(recorder, 1)
    two = [batch_of(2), batch_of(3, through(made_up_vl(seed=5)))]
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
    equal(found[0], through(made_up(seed=1)))
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
        recorder.record(step, [batch_of(1, through(made_up(9, 30, 60, seed=1, holes=True)))], Progress(step))
        recorder.record(step + 2, [batch_of(1, through(made_up(9, 40, 60, seed=2)))], Progress(step + 2))
    recorder.close()

    steps = read_recording(tmp_path).steps

    assert steps[1].batches[0].digest == steps[2].batches[0].digest != steps[3].batches[0].digest


def test_a_batch_of_any_size_is_encoded(tmp_path: Path) -> None:
    large = through(made_up(64, 900, 900))
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


def test_steps_that_are_undone_without_a_recording_are_removed_from_it(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "recording"
    cut(folder, 0)
    assert not folder.exists()
    recorder = recorder_in(folder)
    take(recorder, 1, 2, 3)
    recorder.close()

    cut(folder, 1)

    assert [*read_recording(folder).steps] == [1] and [step for step, _ in recorded_rows(folder)] == [1]


def config_in(tmp_path: Path, record: str) -> Config:
    return Config.model_validate({"daemon": {"state_dir": str(tmp_path / "state")}, "trainer": {"record": record}})


def metrics_of(bench: Bench) -> TrainerMetrics:
    bench.slab.begin("trainer", 0)
    return TrainerMetrics(bench.slab.writer("trainer", 0), rank=0, reward_source="function")


def test_a_start_that_records_nothing_removes_the_steps_that_it_takes_again(bench: Bench, tmp_path: Path) -> None:
    config = config_in(tmp_path, "off")
    folder = run_dir(config) / "recording"
    recorder = recorder_in(folder)
    take(recorder, 1, 2, 3)
    recorder.close()

    opened = open_recorder(config, Start(Progress(2)), torch.device("cpu"), metrics_of(bench))

    assert opened is None
    assert [*read_recording(folder).steps] == [1, 2] and [step for step, _ in recorded_rows(folder)] == [1, 2]


def test_the_bytes_on_disk_are_exported_from_the_start_on(bench: Bench, tmp_path: Path) -> None:
    config, reader = config_in(tmp_path, "rows"), MetricsReader(bench.slab)
    folder = run_dir(config) / "recording"

    def open_one(after_step: int) -> StepRecorder | None:
        return open_recorder(config, Start(Progress(after_step)), torch.device("cpu"), metrics_of(bench))

    first = open_one(0)
    assert first is not None and reader.read().value("rlhfd_recording_bytes") == 0
    take(first, 1, 2)
    first.close()
    second = open_one(1)
    assert second is not None
    second.close()
    held = rows_path(folder, 1).stat().st_size
    assert reader.read().value("rlhfd_recording_bytes") == held > 0
    (_, start), *_ = read_recording(folder).starts
    assert start.libraries == versions()
    (folder / LINES).unlink()
    (folder / LINES).mkdir()

    # The rows are still there: their bytes are not known, and not 0.
    assert open_one(1) is None

    assert reader.read().value("rlhfd_recordings_total", result="failed") == 1
    assert reader.read().value("rlhfd_recording_bytes") is None


def test_a_start_names_the_version_of_rlhfd() -> None:
    assert versions()["rlhfd"] == version_of("rlhfd") and {"torch", "transformers"} < versions().keys()


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
    trainer = bench.trainer(hooks=[spy], max_steps=3, gradient_accumulation_steps=2)
    bench.run(trainer)

    recording = read_recording(tmp_path / "recording")

    assert spy.seen == [(1, 0), (2, 1), (3, 2)]
    assert {step: found.version for step, found in recording.weights.items()} == {0: 0, 1: 1, 2: 2, 3: 3}
    assert recording.weights[3].weights == f"{trainer.version.fingerprint:016x}"
    assert [len(taken.batches) for taken in recording.steps.values()] == [2, 2, 2]
    assert recording.steps[3].experiences == f"{trainer.progress.digest:016x}"
    assert [batch.lease for taken in recording.steps.values() for batch in taken.batches] == list(range(6))
    origins = [origin for taken in recording.steps.values() for batch in taken.batches for origin in batch.origins]
    assert all(origin.position >= 0 and origin.prompts > 0 for origin in origins)
    given = [rows.padded() for batches in bench.learner.batches for rows in batches]
    for found, trained in zip(recorded_batches(tmp_path / "recording"), given, strict=True):
        equal(found, trained)
        assert torch.equal(found.info["policy_version"], trained.info["policy_version"])


def test_weights_that_a_killed_trainer_published_and_did_not_record_are_recorded_by_its_successor(
    bench: Bench, tmp_path: Path
) -> None:
    folder = tmp_path / "recording"
    trainer = bench.trainer(hooks=[Spy(folder, lambda: 0)], max_steps=0)
    while trainer.step < 2:
        bench.turns(trainer, 1)
    lines = (folder / LINES).read_bytes().splitlines(keepends=True)
    (folder / LINES).write_bytes(b"".join(lines[:-1]))
    assert 2 not in read_recording(folder).weights

    trainer.close()
    successor = bench.trainer(
        hooks=[Spy(folder, lambda: 0, after_step=2)],
        start=Start(trainer.progress, None),
        max_steps=0,
    )
    successor.close()

    assert read_recording(folder).weights[2].weights == f"{trainer.version.fingerprint:016x}"
