"""The buffer's journal: what it holds, on disk again and again, so that a crash of the machine costs no more than that.

    state_dir/journal/IDENTITY.safetensors    as a spool (see `pipeline.buffer.spool`), replaced whole by each write

Written every `buffer.journal_interval_s`, and as soon as there is another checkpoint: a journal counts only from the
checkpoint's weights on. How a start takes it in stands in `pipeline.buffer.spool`.

Who copies, and what of? The loop of the buffer lists the rows that are held and the books of that moment, which takes
as long as a scrape's; a thread copies the bytes, brings them to disk and renames, and the loop goes on serving. A
sealed extent never changes until its room is reserved anew, so all that is needed is that no room is: from the list to
the end of the copy the allocator keeps what is released (`ExtentAllocator.hold`). Nothing is ever copied torn, no row
is held longer, and the file is of one moment. What it costs is room: an arena that is full waits for its tickets until
the copy is on disk. Copying in the loop in slices would need the same hold and block tickets for every slice; a
checksum would only tell that an extent was lost.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable

from pipeline.buffer.buffer import Buffer
from pipeline.buffer.spool import journal_path, metadata_of
from pipeline.config.schema import Config
from pipeline.errors import DecodeError
from pipeline.runtime.latest_checkpoint import checkpoints_dir
from pipeline.storage import extent_file
from pipeline.storage.arena import Arena

_LOOK_S = 1.0

log = logging.getLogger(__name__)


class BufferSnapshot:
    """The journal of one run, written beside the buffer's loop; none with an interval of 0."""

    def __init__(
        self,
        config: Config,
        arena: Arena,
        count: Callable[[bool], None],
        *,
        executor: concurrent.futures.Executor | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Write nothing yet.

        Args:
            config: Of the run.
            arena: Its payload need not be mapped.
            count: Told of each write whether it is whole.
            executor: Runs one write at a time; its own thread if left out.
            on_progress: Called again and again while `close` waits for a write.
        """
        self.path = journal_path(config)
        self._interval_s = config.buffer.journal_interval_s
        self._latest = checkpoints_dir(config) / "latest.json"
        self._arena = arena
        self._count = count
        self._on_progress = on_progress
        self._is_awaited = False
        self._executor = executor or concurrent.futures.ThreadPoolExecutor(1, "journal")
        self._writing: concurrent.futures.Future[int] | None = None
        self._due_s = self._look_s = float("-inf")
        self._checkpoint: tuple[int, int] | None = None
        self._failing = False

    def step(self, buffer: Buffer, now_s: float) -> None:
        """Begin a write if one is due; every message until `now_s` has been handled."""
        if not self._interval_s:
            return
        if self._writing is not None:
            if not self._writing.done():
                return
            self._end(buffer)
        # Before there is a version nothing has been rolled out.
        if buffer.ledger.totals.policy_version < 0 or not self._is_due(now_s):
            return
        self._due_s = now_s + self._interval_s
        chosen, cut = buffer.freeze()
        metadata = metadata_of(buffer.ledger, cut)
        self._writing = self._executor.submit(
            extent_file.save, self.path, self._arena, chosen, metadata, self._progressed
        )

    def close(self, buffer: Buffer) -> None:
        """Wait for the write under way."""
        self._is_awaited = True
        if self._writing is not None:
            concurrent.futures.wait([self._writing])
            self._end(buffer)
        self._executor.shutdown()

    def remove(self) -> None:
        """Remove it: the run has ended in order."""
        self.path.unlink(missing_ok=True)

    def _progressed(self) -> None:
        # Beside the loop it says nothing: the loop's own silence is to be seen.
        if self._is_awaited:
            self._on_progress()

    def _is_due(self, now_s: float) -> bool:
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            if (checkpoint := self._look()) != self._checkpoint:
                self._checkpoint = checkpoint
                return True
        return now_s >= self._due_s

    def _look(self) -> tuple[int, int] | None:
        """Return what tells one checkpoint's note from another's: each is a file of its own, renamed."""
        try:
            found = self._latest.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _end(self, buffer: Buffer) -> None:
        """Take note of how a write ended."""
        assert self._writing is not None
        error, self._writing = self._writing.exception(), None
        buffer.thaw()
        self._count(error is None)
        if error is None:
            self._failing = False
        elif not isinstance(error, OSError | DecodeError):
            raise error
        elif not self._failing:
            # The one before stays, and counts as long as no newer checkpoint does.
            self._failing = True
            log.error("journal not written, tried again every %g s: path=%s: %s", self._interval_s, self.path, error)
