"""The writer of a run's recording (`pipeline.storage.recording`, which has the format and the order of the writes).

Rows are recorded as the batch that the step was taken on, encoded again: without padding, each row once. The oldest
rows are removed beyond 4 GiB; lines stay. A full disk stops no step: the older half of the rows is
removed, for a checkpoint that finds no room too. If that is not enough, it costs the rows of these steps, and lines
wait.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from pipeline.experience import codec
from pipeline.experience.ragged import RaggedRows
from pipeline.runtime.messages import ExtentRows
from pipeline.storage import extent_file, sealed_json
from pipeline.storage.extent_file import SavedExtent
from pipeline.storage.files import FULL_DISK, flush_folder
from pipeline.storage.recording import (
    LINES,
    ROWS,
    Origin,
    PublishedWeights,
    Recorded,
    RecordedBatch,
    RecordLine,
    Taken,
    TrainerStart,
    recorded_rows,
    rows_path,
)
from pipeline.storage.step_lines import StepLines
from pipeline.storage.weights_header import WeightsVersion
from pipeline.telemetry.reader import version_of
from pipeline.trainer.checkpoints import libraries
from pipeline.trainer.connection import Batch
from pipeline.trainer.hooks import TakenStep, TrainerHook
from pipeline.trainer.state import Progress

if TYPE_CHECKING:
    from pipeline.trainer.trainer import Trainer

_LEAST_ROOM_BYTES = 1 << 20
_HEADER_BYTES = 8192
"""Room for the header of a file, beside the numbers of its rows."""

log = logging.getLogger(__name__)


class StepRecorder(TrainerHook):
    """Records the steps of one run, of a trainer with one rank."""

    def __init__(
        self,
        folder: Path,
        start: TrainerStart,
        *,
        after_step: int,
        most_bytes: int,
        count: Callable[[Recorded], None],
        hold: Callable[[int], None] = lambda nbytes: None,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """Open a recording, remove the steps that are taken again, and record the start.

        Args:
            folder: Folder of the recording; it is made if there is none.
            start: Description of this start.
            after_step: Steps that training continues from.
            most_bytes: Most bytes of all rows together; 0 records no rows.
            count: Called with each result.
            hold: Called with the bytes of all rows on disk, at first and whenever they have changed.
            clock_s: Unix time.

        Raises:
            OSError: If the folder or a file in it cannot be made, or not removed.
        """
        self._folder = folder
        self._most_bytes = most_bytes
        self._count = count
        self._hold = hold
        self._clock_s = clock_s
        self._memories: list[npt.NDArray[np.uint8]] = []
        self._is_failing = self._has_made_room = False
        self._lines = StepLines(folder / LINES, after_step=after_step)
        try:
            for left in (folder / ROWS).glob("*.new"):
                left.unlink(missing_ok=True)
            kept = remove_rows(folder, after_step)
            self._files = collections.deque((path, path.stat().st_size) for path in kept)
            self._nbytes = sum(nbytes for _, nbytes in self._files)
            self._warn_of_little_room()
        except BaseException:
            self._lines.close()
            raise
        # A killed predecessor may have flushed none of them.
        self._unflushed = len(self._files)
        self._hold(self._nbytes)
        self._write(RecordLine(after_step, start=start))

    def began(self, trainer: Trainer) -> Self:
        """Record the present weights; a predecessor may have been killed between their publish and their record."""
        self.published(trainer.step, trainer.version)
        return self

    def taken(self, taken: TakenStep) -> None:
        """Record a step."""
        self.record(taken.step, taken.batches, taken.progress)

    def record(self, step: int, batches: Sequence[Batch], progress: Progress) -> None:
        """Record a step: its rows first, then its line; called before its weights are published.

        Args:
            step: The step that was taken.
            batches: Batches of the step, in order.
            progress: The progress after it.
        """
        nbytes, digests = self._keep_rows(step, batches) if self._most_bytes else (0, [])
        recorded = [
            RecordedBatch(
                batch.lease,
                len(batch.rows),
                [_origin(part) for part in batch.parts],
                digests[index] if digests else "",
            )
            for index, batch in enumerate(batches)
        ]
        unix_s, experiences = round(self._clock_s(), 3), f"{progress.digest:016x}"
        taken = Taken(unix_s, batches[-1].for_version, experiences, recorded, nbytes)
        self._write(RecordLine(step, taken=taken))

    def published(self, step: int, version: WeightsVersion) -> None:
        """Record the weights after a step; of a version that is recorded already, nothing changes."""
        self._write(RecordLine(step, published=PublishedWeights(version.version, f"{version.fingerprint:016x}")))

    def flush(self) -> None:
        """Flush the lines, and the rows since the last flush, to disk."""
        self._lines.flush()
        count, self._unflushed = min(self._unflushed, len(self._files)), 0
        try:
            for path, _ in itertools.islice(reversed(self._files), count):
                # A file may have been removed for newer rows.
                with contextlib.suppress(FileNotFoundError):
                    flush_folder(path)
            if count:
                flush_folder(self._folder / ROWS)
        except OSError as error:
            log.warning("recorded rows were not flushed: path=%s error=%s", self._folder / ROWS, error.strerror)

    def give_way(self, level: int = logging.WARNING) -> bool:
        """Remove the older half of the rows, for a checkpoint that found no room: without it the steps are lost.

        Args:
            level: Level of its line in the log.

        Returns:
            Whether any were removed.
        """
        if not self._files:
            return False
        before = self._nbytes
        try:
            self._remove_down_to(before // 2)
        except OSError as error:
            log.warning("recorded rows were not removed: path=%s error=%s", self._folder / ROWS, error.strerror)
        message = "the disk is full, the older half of the recorded rows is removed: bytes=%d left_bytes=%d path=%s"
        log.log(level, message, before - self._nbytes, self._nbytes, self._folder / ROWS)
        return self._nbytes < before

    def close(self) -> None:
        """Close the files."""
        self._lines.close()

    def _write(self, line: RecordLine) -> None:
        self._lines.write(sealed_json.encode(line, indent=-1))

    def _held(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._hold(nbytes)

    def _warn_of_little_room(self) -> None:
        system = os.statvfs(self._folder)
        free_bytes = system.f_bavail * system.f_frsize
        if self._most_bytes > self._nbytes + free_bytes:
            log.warning("recorded rows may fill the disk, which the checkpoints need too: trainer.record = \"steps\" "
                        "keeps none: most_bytes=%d recorded_bytes=%d free_bytes=%d path=%s",
                        self._most_bytes, self._nbytes, free_bytes, self._folder)  # fmt: skip

    def _keep_rows(self, step: int, batches: Sequence[Batch]) -> tuple[int, list[str]]:
        """Write the rows of a step; return the size of the file, 0 if there is none, and a digest for each batch."""
        path, extents = rows_path(self._folder, step), []
        for index, batch in enumerate(batches):
            rows = len(batch.rows)
            # The "ticket" of a recorded batch is its lease.
            extent = SavedExtent(batch.lease, batch.position, 0, rows, list(range(rows)), batch.for_version, 0, 0, 0)
            extents.append((extent, self._encoded(index, batch.rows)))
        try:
            if not self._make_room(step, sum(len(data) + _HEADER_BYTES + 8 * extent.rows for extent, data in extents)):
                return 0, []
            try:
                nbytes, saved = extent_file.save_bytes(path, extents, {"step": str(step)})
            except OSError as error:
                if error.errno not in FULL_DISK or not self._files:
                    raise
                # Once a start: of a disk that stays full a line each few steps would be all that the log holds soon.
                self.give_way(logging.DEBUG if self._has_made_room else logging.WARNING)
                self._has_made_room = True
                nbytes, saved = extent_file.save_bytes(path, extents, {"step": str(step)})
        except OSError as error:
            if not self._is_failing:
                log.error("the rows of a step are not recorded: step=%d path=%s error=%s", step, path, error.strerror)
            self._is_failing = True
            self._count("failed")
            return 0, []
        finally:
            for memory, (_, data) in zip(self._memories, extents, strict=False):
                memory[: len(data)] = 0
        if self._is_failing:
            log.info("rows are recorded again: step=%d", step)
        self._is_failing = False
        self._files.append((path, nbytes))
        self._unflushed += 1
        self._held(self._nbytes + nbytes)
        self._count("kept")
        return nbytes, [f"{extent.digest:016x}" for extent in saved]

    def _encoded(self, index: int, rows: RaggedRows) -> memoryview:
        """Return the bytes of the batch at an index of the step, in memory that is kept: fresh pages cost more.

        It is zero before: the codec leaves bytes unwritten, and equal batches are to have equal bytes.
        """
        encoding = codec.Encoding(rows)
        if index == len(self._memories):
            self._memories.append(np.zeros(_LEAST_ROOM_BYTES, np.uint8))
        if (held := len(self._memories[index])) < encoding.nbytes:
            # Twice what is held at least: batches grow by little, each new memory is of fresh pages.
            self._memories[index] = np.zeros(max(encoding.nbytes, 2 * held), np.uint8)
        memory = self._memories[index].data
        return memory[: encoding.write(memory, checksum=False).nbytes]

    def _make_room(self, step: int, nbytes: int) -> bool:
        """Remove the oldest rows until `nbytes` more are within the limit; return False if they never are."""
        if nbytes > self._most_bytes:
            if not self._is_failing:
                log.error("the rows of a step are not recorded: step=%d bytes=%d most_bytes=%d",
                          step, nbytes, self._most_bytes)  # fmt: skip
            self._is_failing = True
            self._count("too_large")
            return False
        self._remove_down_to(self._most_bytes - nbytes)
        return True

    def _remove_down_to(self, nbytes: int) -> None:
        """Remove the oldest rows until all that are left have at most `nbytes`.

        Raises:
            OSError: If a file cannot be removed; it still counts.
        """
        while self._files and self._nbytes > nbytes:
            path, removed = self._files[0]
            path.unlink(missing_ok=True)
            self._files.popleft()
            self._held(self._nbytes - removed)
            self._count("removed")


def remove_rows(folder: Path, after_step: int) -> list[Path]:
    """Remove the rows of steps after one; return the files of the others, the oldest first.

    Raises:
        OSError: If a file cannot be removed.
    """
    files = list(recorded_rows(folder))
    for step, path in files:
        if step > after_step:
            path.unlink(missing_ok=True)
    if files and files[-1][0] > after_step:
        log.info("recorded steps are taken again: from_step=%d to_step=%d", after_step + 1, files[-1][0])
    return [path for step, path in files if step <= after_step]


def versions() -> dict[str, str]:
    """Return the versions of rlhfd and of the libraries whose functions a step calls."""
    return {"rlhfd": version_of("rlhfd"), **libraries()}


def cut(folder: Path, after_step: int) -> None:
    """Remove the steps after one from a recording, if there is one: a start that records nothing takes others.

    Raises:
        OSError: If a file cannot be cut or removed.
    """
    if (folder / LINES).exists():
        StepLines(folder / LINES, after_step=after_step).close()
        remove_rows(folder, after_step)


def _origin(part: ExtentRows) -> Origin:
    ranges: list[tuple[int, int]] = []
    for row in part.rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = ranges[-1][0], row + 1
        else:
            ranges.append((row, row + 1))
    return Origin(part.ticket, part.position, part.prompts, part.policy_version, ranges)
