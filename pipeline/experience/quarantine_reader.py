"""What lies in quarantine, as tensors again.

from pipeline.experience.quarantine_reader import read
case = read("state/quarantine/20260131T120000-killed_trainer-ticket-7.safetensors")
case.reason, case.detail, [extent.position for extent in case.extents]
case.experience().sequences
"""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.errors import DecodeError
from pipeline.experience import codec
from pipeline.experience.types import Experience
from pipeline.storage import extent_file
from pipeline.storage.extent_file import ExtentFile, SavedExtent


class Case:
    """One quarantined batch or extent."""

    def __init__(self, file: ExtentFile) -> None:
        self._file = file
        self.reason = file.metadata.get("reason", "")
        self.detail = file.metadata.get("detail", "")
        try:
            self.unix_s = float(file.metadata.get("unix_s", "nan"))
        except ValueError as error:
            raise DecodeError(f"{file.path}: its time is damaged: {error}") from error

    @property
    def extents(self) -> list[SavedExtent]:
        """Ticket, prompt positions, rows, policy version and checksum of each extent."""
        return self._file.extents

    def experience(self) -> Experience:
        """Return the quarantined rows as the batch that a trainer would have got.

        Raises:
            DecodeError: If the bytes cannot be read as experience: they were damaged before they came here.
        """
        readers = [
            codec.ExtentReader(memoryview(extent_file.read_extent(self._file, place)))
            for place in range(len(self.extents))
        ]
        return codec.gather([(reader, extent.chosen) for reader, extent in zip(readers, self.extents, strict=True)])


def read(path: str | os.PathLike[str]) -> Case:
    """Open a quarantine file.

    Raises:
        DecodeError: If it is none.
        OSError: If it cannot be read.
    """
    return Case(extent_file.load(Path(path)))
