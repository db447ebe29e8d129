"""Quarantine files, read back into tensors.

For example::

    from pipeline import read_quarantine

    quarantined = read_quarantine("state/quarantine/20260131T120000-killed_trainer-ticket-7.safetensors")
    quarantined.reason, quarantined.detail, [extent.position for extent in quarantined.extents]
    quarantined.experience().sequences
"""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.errors import DecodeError
from pipeline.experience import codec
from pipeline.experience.types import Experience
from pipeline.storage import extent_file
from pipeline.storage.extent_file import ExtentFile, SavedExtent


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
        readers = [
            codec.ExtentReader(memoryview(extent_file.read_extent(self._file, index)))
            for index in range(len(self.extents))
        ]
        return codec.gather_padded(
            [(reader, extent.chosen) for reader, extent in zip(readers, self.extents, strict=True)]
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
