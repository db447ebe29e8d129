"""Periodic snapshots of the buffer's undelivered rows: a machine crash costs at most the time since the last one.

    runs/NAME/journal/IDENTITY.safetensors    format of a spool (see `pipeline.buffer.spool`), replaced by each write

A snapshot is written every `buffer.journal_interval_s`, and as soon as there is a new checkpoint: it is valid only with
a checkpoint whose weights were published before. `pipeline.buffer.spool` restores it.

The buffer's loop lists the held rows and the totals of one moment; this takes as long as a scrape. A thread copies the
bytes, flushes them to disk and renames the file, while the loop continues to serve. A sealed extent never changes until
its room is reserved again. So from the list to the end of the copy the allocator frees no released extent
(`ExtentAllocator.hold`). No extent is copied torn, no row is held longer, and the file is of one moment. The cost is
room: with a full arena, tickets wait until the copy is on disk. A copy in slices by the loop would need the same hold
and block tickets for every slice; a checksum would only detect that an extent was lost.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from pipeline.buffer.buffer import Buffer
from pipeline.buffer.spool import metadata_of, snapshot_path
from pipeline.config.schema import Config
from pipeline.errors import DecodeError
from pipeline.progress import Telemetry
from pipeline.runtime.latest_checkpoint import checkpoints_dir
from pipeline.storage import extent_file
from pipeline.storage.arena import Arena

_LOOK_S = 1.0

log = logging.getLogger(__name__)


class _Awaited(Telemetry):
    """Tells of the progress of a write once it is waited for: before, hang detection is about the loop's own."""

    def __init__(self, telemetry: Telemetry) -> None:
        super().__init__()
        self.has_begun = False
        self._telemetry = telemetry

    def progress(self, **numbers: Any) -> None:
        if self.has_begun:
            self._telemetry.progress(**numbers)


class BufferSnapshot:
    """Snapshots of one run, written beside the buffer's loop; none with an interval of 0."""

    def __init__(
        self,
        config: Config,
        arena: Arena,
        count: Callable[[bool], None],
        *,
        executor: concurrent.futures.Executor | None = None,
        telemetry: Telemetry = Telemetry.none(),
    ) -> None:
        """Prepare; the first `step` writes.

        Args:
            config: Configuration of the run.
            arena: The arena; its payload need not be mapped.
            count: Called after each write; its argument tells whether the write is whole.
            executor: Runs one write at a time; a thread of its own if left out.
            telemetry: Told of progress while `close` waits for a write.
        """
        self.path = snapshot_path(config)
        self._interval_s = config.buffer.journal_interval_s
        self._latest = checkpoints_dir(config) / "latest.json"
        self._arena = arena
        self._count = count
        self._awaited = _Awaited(telemetry)
        self._executor = executor or concurrent.futures.ThreadPoolExecutor(1, "journal")
        self._writing: concurrent.futures.Future[int] | None = None
        self._due_s = self._look_s = float("-inf")
        self._checkpoint: tuple[int, int] | None = None
        self._failing = False

    def step(self, buffer: Buffer, now_s: float) -> None:
        """Start a write if one is due; the caller has handled every message until `now_s`."""
        if not self._interval_s:
            return
        if self._writing is not None:
            if not self._writing.done():
                return
            self._end(buffer)
        # Before the first version there are no rows.
        if buffer.ledger.totals.policy_version < 0 or not self._is_due(now_s):
            return
        self._due_s = now_s + self._interval_s
        chosen, cut = buffer.freeze()
        metadata = metadata_of(buffer.ledger, cut)
        self._writing = self._executor.submit(extent_file.save, self.path, self._arena, chosen, metadata, self._awaited)

    def close(self, buffer: Buffer) -> None:
        """Wait for the write in progress."""
        self._awaited.has_begun = True
        if self._writing is not None:
            concurrent.futures.wait([self._writing])
            self._end(buffer)
        self._executor.shutdown()

    def remove(self) -> None:
        """Remove the file, if there is one and the disk is not read-only: the run has shut down in order."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _is_due(self, now_s: float) -> bool:
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            if (checkpoint := self._look()) != self._checkpoint:
                self._checkpoint = checkpoint
                return True
        return now_s >= self._due_s

    def _look(self) -> tuple[int, int] | None:
        """Return inode and time of the newest checkpoint's note; each note is a new file."""
        try:
            found = self._latest.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _end(self, buffer: Buffer) -> None:
        """Record the result of a write."""
        assert self._writing is not None
        error, self._writing = self._writing.exception(), None
        buffer.thaw()
        self._count(error is None)
        if error is None:
            self._failing = False
        elif not isinstance(error, OSError | DecodeError):
            raise error
        elif not self._failing:
            # The previous file stays, and is valid until there is a newer checkpoint.
            self._failing = True
            log.error("journal not written, tried again every %g s: path=%s: %s", self._interval_s, self.path, error)
