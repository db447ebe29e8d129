"""The quarantine: copies on disk of experience that is never delivered again, to find the cause.

`pipeline.experience.saved_rows.read_quarantine` opens a copy.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pipeline.buffer.metrics import Kept
from pipeline.storage import extent_file
from pipeline.storage.arena import Arena
from pipeline.storage.files import not_taken
from pipeline.storage.records import Chosen

log = logging.getLogger(__name__)

MOST_BYTES: Final = 1 << 30
"""Maximum bytes of the copies of a run."""


class Quarantine:
    """Files in one folder, bounded in bytes: the oldest stay, because the first fault explains the most."""

    def __init__(
        self, folder: Path, arena: Arena, *, count: Callable[[Kept], None], most_bytes: int = MOST_BYTES
    ) -> None:
        """Use a folder, made by the first copy; unfinished files of a killed process are removed.

        Args:
            folder: Folder of the copies.
            arena: Arena of the experience.
            count: Called with the result of each copy.
            most_bytes: Maximum bytes of all copies together.
        """
        self._folder = folder
        self._arena = arena
        self._most_bytes = most_bytes
        self._count = count
        for left in folder.glob("*.new"):
            with contextlib.suppress(OSError):
                left.unlink()

    def keep(self, chosen: Chosen, reason: str, detail: str) -> None:
        """Write extents into one file; if the disk is full, the copy alone is lost."""
        needed_bytes = sum(record.nbytes for record, _ in chosen)
        name = f"{time.strftime('%Y%m%dT%H%M%S')}-{reason}-ticket-{chosen[0][0].ticket}"
        try:
            # A ticket may be refused twice in a second.
            path = not_taken(self._folder / f"{name}{extent_file.SUFFIX}")
            # Not a damaged spool, which is moved here under its own name.
            used_bytes = sum(copy.stat().st_size for copy in self._folder.glob(f"[0-9]*{extent_file.SUFFIX}"))
            if used_bytes + needed_bytes > self._most_bytes:
                log.warning("not kept in quarantine: %d B beside %d B, at most %d B",
                            needed_bytes, used_bytes, self._most_bytes)  # fmt: skip
                self._count("full")
                return
            metadata = {"reason": reason, "detail": detail, "unix_s": f"{time.time():.3f}"}
            nbytes = extent_file.save(path, self._arena, chosen, metadata)
        except OSError as error:
            log.error("not kept in quarantine: %s", error)
            self._count("error")
            return
        log.warning("kept in quarantine: path=%s bytes=%d", path, nbytes)
        self._count("kept")
