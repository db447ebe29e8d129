"""The batches of a run's recorded steps, read back into tensors: a trainer is fed without a worker.

For example::

    from pipeline import recorded_batches

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
from pipeline.storage.recording import Recording, read_recording


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
    return [
        codec.gather([(codec.ExtentReader(memoryview(extent_file.read_extent(file, index))), range(batch.rows))])
        for index, batch in enumerate(recorded)
    ]
