"""The header of a file of versions, as the store writes it, without the data."""

from __future__ import annotations

from pathlib import Path

from pipeline.storage.weights_header import HEADER, MAGIC, NEWEST, PAGE_BYTES, WeightsVersion, pack_version, slot_mark


def write_header(path: Path, version: int) -> None:
    """Write a file of weights or of training states whose newest version this is."""
    page = bytearray(PAGE_BYTES)
    HEADER.pack_into(page, 0, MAGIC, 1, 0, PAGE_BYTES, 0)
    marks = memoryview(page).cast("Q")
    marks[NEWEST] = 1
    for offset, word in enumerate((0, *pack_version(WeightsVersion(version, 1)))):
        marks[slot_mark(0) + offset] = word
    path.write_bytes(page)
