"""The quarantine: a copy on disk of experience that is never delivered again, for whoever wants to know why.

`pipeline.experience.quarantine_reader.read` opens one.
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
    """Files under one folder, bounded in bytes: the oldest stay, for the first fault is the one that tells most."""

    def __init__(self, folder: Path, arena: Arena, *, most_bytes: int, count: Callable[[Kept], None]) -> None:
        """Use a folder, made when something is kept; what a kill left half written in it is removed.

        Args:
            folder: Where.
            arena: Where the experience lies.
            most_bytes: Of all files together; 0 keeps nothing.
            count: Told what became of each call.
        """
        self._folder = folder
        self._arena = arena
        self._most_bytes = most_bytes
        self._count = count
        for left in folder.glob("*.new"):
            left.unlink(missing_ok=True)

    def keep(self, chosen: Chosen, reason: str, detail: str) -> None:
        """Write extents into one file; a disk that is full costs the copy and nothing else."""
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
