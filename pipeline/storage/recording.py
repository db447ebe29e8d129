"""The recording of a run: which rows made each optimizer step, and the weights that it gave (`trainer.record`).

    recording/steps.jsonl                    one JSON object a line, each with `step`
        {"step": 4, "start": {...}}          a trainer starts after step 4: its configuration and libraries
        {"step": 5, "taken": {...}}          step 5 was taken: its batches, the digest of all experience so far
        {"step": 5, "published": {...}}      its weights were published: version and fingerprint
              rows/step-000005.safetensors   its rows, an extent a batch, as in the quarantine

Each line is sealed (`pipeline.storage.sealed_json`).

A step's rows are in place before its line, and its line before its weights are published: what is published is
recorded. A trainer killed in between takes the step again; its successor has removed what it left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from pipeline.errors import ConfigError, DecodeError
from pipeline.storage import sealed_json
from pipeline.storage.extent_file import SUFFIX
from pipeline.storage.files import UNREADABLE

FOLDER: Final = "recording"
LINES: Final = "steps.jsonl"
ROWS: Final = "rows"
MOST_BYTES: Final = 4 << 30
"""Maximum bytes of the recorded rows of a run; the oldest are removed first."""

Recorded = Literal["kept", "removed", "too_large", "failed"]
"""Results for the rows of a step: kept; removed for newer ones or on a full disk; above the limit; not written."""


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows of one ticket in a batch: they follow from the run's seed, the prompts' positions and the version's weights.

    Attributes:
        ticket: The ticket's number.
        position: Position of the ticket's first prompt; -1 if unknown.
        prompts: Prompts of the ticket.
        version: The policy version that sampled the rows.
        rows: The rows in the ticket's extent, as ranges: first row, and the one after the last. They are in the order
            of the batch.
    """

    ticket: int
    position: int
    prompts: int
    version: int
    rows: list[tuple[int, int]]


class RecordedBatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """One leased batch of a step.

    Attributes:
        lease: The lease's number.
        rows: Rows of the batch.
        origins: The tickets that the rows are of, in the order of the batch.
        digest: xxh3-64 of the batch's bytes in the file of rows, in hexadecimal; empty if its rows are not recorded.
    """

    lease: int
    rows: int
    origins: list[Origin]
    digest: str = ""


class Taken(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step.

    Attributes:
        time_unix_s: Unix time of the step's end.
        for_version: The policy version that the step's last batch was leased for. It is that of the weights that took
            the step, unless several steps are taken between two versions (`trainer.publish_every`).
        experiences: Digest of all experience up to and including this step, in hexadecimal.
        batches: The batches of the step, in order.
        nbytes: Bytes of the file of its rows when it was written; 0 if they were not kept.
    """

    time_unix_s: float
    for_version: int
    experiences: str
    batches: list[RecordedBatch]
    nbytes: int = 0


class PublishedWeights(msgspec.Struct, frozen=True):
    """The weights after a step: their version, and their fingerprint in hexadecimal."""

    version: int
    weights: str


class TrainerStart(msgspec.Struct, frozen=True):
    """The start of a trainer.

    Attributes:
        identity: Identity of the run.
        config: The configuration in force.
        libraries: Versions of rlhfd, torch and transformers.
        device: The trainer's device.
    """

    identity: str
    config: dict[str, Any]
    libraries: dict[str, str]
    device: str


class RecordLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line: exactly one of its parts is given."""

    step: int
    start: TrainerStart | None = None
    taken: Taken | None = None
    published: PublishedWeights | None = None


class Recording(msgspec.Struct, frozen=True):
    """A recording that was read.

    Attributes:
        folder: Folder of the recording.
        starts: Step and description of each start of a trainer, in order.
        steps: The steps by number.
        weights: The published weights by the step after which they were published; 0: before the first.
    """

    folder: Path
    starts: list[tuple[int, TrainerStart]]
    steps: dict[int, Taken]
    weights: dict[int, PublishedWeights]

    def start_of(self, step: int) -> TrainerStart | None:
        """Return the start of the trainer that took a step."""
        return next((start for after, start in reversed(self.starts) if after < step), None)

    def rows_path(self, step: int) -> Path:
        """Return the path of a step's rows."""
        return rows_path(self.folder, step)

    def has_rows(self, step: int) -> bool:
        """Return whether a step's rows were recorded and are still there, in a file of the recorded size."""
        taken = self.steps.get(step)
        if taken is None or not taken.nbytes:
            return False
        try:
            # After a power failure a file may be there and be empty, or short.
            return self.rows_path(step).stat().st_size == taken.nbytes
        except OSError:
            return False

    def passed(self, step: int, *, digest: str, weights: str) -> bool:
        """Return whether training with these digests after a step was the recorded training.

        Args:
            step: The step; one without lines tells nothing.
            digest: Digest of all experience up to and including the step, in hexadecimal.
            weights: Fingerprint of the weights after it, in hexadecimal.
        """
        taken, published = self.steps.get(step), self.weights.get(step)
        return (taken is None or taken.experiences == digest) and (published is None or published.weights == weights)


def rows_path(folder: Path, step: int) -> Path:
    """Return the path of a step's rows in a recording's folder."""
    return folder / ROWS / f"step-{step:06d}{SUFFIX}"


def recorded_rows(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield step and path of each file of rows in a recording's folder, in order of steps."""
    for path in sorted((folder / ROWS).glob(f"step-*{SUFFIX}"), key=_step_of):
        if (step := _step_of(path)) >= 0:
            yield step, path


def read_recording(folder: Path) -> Recording:
    """Return a recording; the part of a line at the end, which a killed trainer left, is not read.

    Args:
        folder: The folder ``recording`` of a run.

    Raises:
        DecodeError: If a line does not decode, or is not the one that was written.
        OSError: If there is no recording, or it cannot be read.
    """
    found = Recording(folder, [], {}, {})
    path = folder / LINES
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                break
            try:
                line = sealed_json.decode(text, RecordLine)
            except UNREADABLE as error:
                raise DecodeError(f"{path}:{number}: {error}") from error
            if line.start is not None:
                found.starts.append((line.step, line.start))
            elif line.taken is not None:
                found.steps[line.step] = line.taken
            elif line.published is not None:
                found.weights[line.step] = line.published
    return found


def recording_of(run: Path) -> Recording:
    """Return the recording of a run.

    Args:
        run: Folder of the run.

    Raises:
        ConfigError: If there is none, or it cannot be read.
    """
    try:
        return read_recording(run / FOLDER)
    except FileNotFoundError as error:
        raise ConfigError(f'no recording in {run}: trainer.record = "rows" or "steps" keeps one') from error
    except (OSError, DecodeError) as error:
        raise ConfigError(f"{run / FOLDER}: {error}") from error


def _step_of(path: Path) -> int:
    number = path.name.removesuffix(SUFFIX).removeprefix("step-")
    return int(number) if number.isdecimal() else -1
