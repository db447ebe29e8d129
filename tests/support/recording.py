"""A recorder of made-up steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.experience.types import Experience
from pipeline.runtime.messages import ExtentRows
from pipeline.storage import sealed_json
from pipeline.storage.recording import (
    LINES,
    Recorded,
    RecordLine,
    TrainerStart,
)
from pipeline.storage.weights_header import WeightsVersion
from pipeline.trainer.connection import Batch
from pipeline.trainer.recording.recorder import StepRecorder
from pipeline.trainer.state import Progress
from tests.support.experiences import made_up, through
from tests.support.items import assert_equal

MOST_BYTES = 1 << 30
START = TrainerStart("identity", {"daemon": {"seed": 3}}, {"torch": "2"}, "cpu")


class Counts(dict[Recorded, int]):
    nbytes = -1

    def count(self, result: Recorded) -> None:
        self[result] = self.get(result, 0) + 1

    def hold(self, nbytes: int) -> None:
        self.nbytes = nbytes


def recorder_in(
    folder: Path, counts: Counts | None = None, *, after_step: int = 0, most_bytes: int = MOST_BYTES
) -> StepRecorder:
    counts = Counts() if counts is None else counts
    return StepRecorder(folder, START, after_step=after_step, most_bytes=most_bytes, count=counts.count,
                        hold=counts.hold, clock_s=lambda: 5.0)  # fmt: skip


def batch_of(step: int, experience: Experience | None = None) -> Batch:
    experience = through(made_up(seed=step)) if experience is None else experience
    parts = [ExtentRows(0, 64, 0, step - 1, 9, [0, 1, 3], 40, 2), ExtentRows(64, 64, 0, step - 1, 10, [5])]
    return Batch(experience, step + 100, step - 1, position=7, parts=parts)


def take(recorder: StepRecorder, *steps: int) -> None:
    for step in steps:
        recorder.record(step, [batch_of(step)], Progress(step, 1000 + step))
        recorder.published(step, WeightsVersion(step, 2000 + step))


def equal(one: Experience, other: Experience) -> None:
    for name, value in vars(other).items():
        assert_equal(name, getattr(one, name), value)


def rewrite(folder: Path, change: Callable[[RecordLine], RecordLine]) -> None:
    """Change the lines of a recording, each whole and with its checksum."""
    path = folder / LINES
    lines = [sealed_json.decode(line, RecordLine) for line in path.read_bytes().splitlines()]
    path.write_bytes(b"".join(sealed_json.encode(change(line), indent=-1) for line in lines))
