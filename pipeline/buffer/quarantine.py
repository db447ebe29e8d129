"""The quarantine: copies on disk of experience that is never delivered again, to find the cause.

`pipeline.experience.quarantine_reader.read` opens a copy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.buffer.observer import Kept
from pipeline.storage import extent_file
from pipeline.storage.arena import Arena
from pipeline.storage.records import Chosen

log = logging.getLogger(__name__)


class Quarantine:
    """Files in one folder, bounded in bytes: the oldest stay, because the first fault explains the most."""

    def __init__(self, folder: Path, arena: Arena, *, most_bytes: int, count: Callable[[Kept], None]) -> None:
        """Use a folder, made by the first copy; unfinished files of a killed process are removed.

        Args:
            folder: Folder of the copies.
            arena: Arena of the experience.
            most_bytes: Most bytes of all files together; 0 keeps no copy.
            count: Called with the result of each copy.
        """
        self._folder = folder
        self._arena = arena
        self._most_bytes = most_bytes
        self._count = count
        for left in folder.glob("*.new"):
            left.unlink(missing_ok=True)

    def keep(self, chosen: Chosen, reason: str, detail: str) -> None:
        """Write extents into one file; if the disk is full, the copy alone is lost."""
        needed_bytes = sum(record.nbytes for record, _ in chosen)
        name = f"{time.strftime('%Y%m%dT%H%M%S')}-{reason}-ticket-{chosen[0][0].ticket}{extent_file.SUFFIX}"
        try:
            used_bytes = sum(path.stat().st_size for path in self._folder.glob(f"*{extent_file.SUFFIX}"))
            if used_bytes + needed_bytes > self._most_bytes:
                log.warning("not kept in quarantine: %d B beside %d B of buffer.quarantine_bytes = %d",
                            needed_bytes, used_bytes, self._most_bytes)  # fmt: skip
                self._count("full")
                return
            metadata = {"reason": reason, "detail": detail, "unix_s": f"{time.time():.3f}"}
            nbytes = extent_file.save(self._folder / name, self._arena, chosen, metadata)
        except OSError as error:
            log.error("not kept in quarantine: %s", error)
            self._count("error")
            return
        log.warning("kept in quarantine: path=%s bytes=%d", self._folder / name, nbytes)
        self._count("kept")
