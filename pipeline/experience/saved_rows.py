"""Rows in files of a run, read back into tensors: rows in quarantine, and the batches of recorded steps.

For example::

    from pipeline import read_quarantine, recorded_batches

    quarantined = read_quarantine("state/quarantine/20260131T120000-killed_trainer-ticket-7.safetensors")
    quarantined.reason, quarantined.detail, [extent.position for extent in quarantined.extents]
    quarantined.experience().sequences

    for experience in recorded_batches("state/runs/NAME/recording"):
        loss = ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import DecodeError
from pipeline.experience import codec
from pipeline.experience.ragged import RaggedRows
from pipeline.experience.types import Experience
from pipeline.storage import extent_file
from pipeline.storage.extent_file import ExtentFile, SavedExtent
from pipeline.storage.recording import Recording, read_recording


class QuarantinedExtent:
    """One quarantined batch or extent; `read_quarantine` opens it.

    Attributes:
        reason: The reason of the quarantine, as in `rlhfd_quarantined_total{reason}`; empty if the file has none.
        detail: The reason as a sentence; empty if the file has none.
        unix_s: Time of the quarantine in seconds since 1970; NaN if the file has none.
    """

    def __init__(self, file: ExtentFile) -> None:
        """Read the reason and the time of a quarantine file.

        Args:
            file: The opened file.

        Raises:
            DecodeError: If the time in the file is not a number.
        """
        self._file = file
        self.reason = file.metadata.get("reason", "")
        self.detail = file.metadata.get("detail", "")
        try:
            self.unix_s = float(file.metadata.get("unix_s", "nan"))
        except ValueError as error:
            raise DecodeError(f"{file.path}: its time is damaged: {error}") from error

    @property
    def extents(self) -> list[SavedExtent]:
        """The extents of the file, each with its ticket, prompt positions, rows, policy version and checksum."""
        return self._file.extents

    def experience(self) -> Experience:
        """Return the quarantined rows as the batch that a trainer would have received.

        Returns:
            An `Experience` on the CPU with every chosen row of every extent, padded on the left to the longest row;
            an `ExperienceVL` if the rows are vision-language ones.

        Raises:
            DecodeError: If the bytes of an extent are not an experience: they were damaged before the quarantine.
            FieldError: If the extents differ in their fields.
            OSError: If the file cannot be read.
        """
        return codec.gather_padded(
            [(_reader(self._file, index), extent.chosen) for index, extent in enumerate(self.extents)]
        )


def read_quarantine(path: str | os.PathLike[str]) -> QuarantinedExtent:
    """Open a quarantine file.

    Args:
        path: A file in `quarantine/` of the run's folder.

    Returns:
        The quarantined rows, with the reason of the quarantine.

    Raises:
        DecodeError: If the file is not a quarantine file.
        OSError: If the file cannot be read.
    """
    return QuarantinedExtent(extent_file.load(Path(path)))


def recorded_batches(
    folder: str | os.PathLike[str], *, first: int = 1, last: int | None = None
) -> Iterator[Experience]:
    """Yield the batches of all recorded steps whose rows are kept, in the order in which they were trained.

    Args:
        folder: The folder ``recording`` of a run with ``trainer.record = "rows"``. The run may go on meanwhile: the
            steps are those recorded at the first batch, without those whose rows have been removed until their turn.
            If it goes back to an earlier checkpoint meanwhile, rows of steps taken again are not the recorded ones.
        first: First step.
        last: Last step; None for the last one that is recorded.

    Yields:
        A batch as the trainer got it, on the CPU: rows padded on the left, with ``info["policy_version"]``, ``(B,)``
        int64. With `trainer.gradient_accumulation_steps` a step has several batches.

    Raises:
        DecodeError: If a line, or the bytes of a batch, are not the recorded ones.
        OSError: If there is no recording, or it cannot be read.
    """
    recording = read_recording(Path(folder))
    for step in sorted(recording.steps):
        if first <= step and (last is None or step <= last) and recording.has_rows(step):
            try:
                batches = batches_of(recording, step)
            except FileNotFoundError:
                # Removed by the run, between the look and the read.
                continue
            yield from (batch.padded() for batch in batches)


def batches_of(recording: Recording, step: int) -> list[RaggedRows]:
    """Return the batches of one recorded step, whose rows are kept.

    Raises:
        DecodeError: If the bytes of a batch are not the recorded ones.
        OSError: If the file of its rows cannot be read.
    """
    file, recorded = extent_file.load(recording.rows_path(step)), recording.steps[step].batches
    if [f"{extent.digest:016x}" for extent in file.extents] != [batch.digest for batch in recorded]:
        raise DecodeError(f"{file.path} does not hold the batches that were recorded for step {step}")
    # The rows by their number in the line: the list in the file is not covered by a digest.
    return [codec.gather([(_reader(file, index), range(batch.rows))]) for index, batch in enumerate(recorded)]


def _reader(file: ExtentFile, index: int) -> codec.ExtentReader:
    return codec.ExtentReader(memoryview(extent_file.read_extent(file, index)))
