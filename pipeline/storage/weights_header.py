"""The header of a weights file: the versions in its slots, and the newest of them. Read without torch.

    page 0      magic, slots, slot bytes, data offset, manifest bytes; `newest` (slot + 1, 0 before the first publish)
    512         one header of 64 B a slot: sequence, version, fingerprint, trained_through, history, rollback,
                log-prob and tokens of the probe

A slot's sequence is odd while it is written, and `newest` is written last (`pipeline.models.weights.store`).
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

MAGIC = b"rlhfd-weights\x00\x00\x01"
HEADER = struct.Struct("<16sQQQQ")
PAGE_BYTES = 4096
NEWEST = 64 // 8
_SLOT_HEADERS = 512
_SLOT_HEADER_BYTES = 64
MOST_SLOTS = (PAGE_BYTES - _SLOT_HEADERS) // _SLOT_HEADER_BYTES
_FLOAT_BITS, _BITS = struct.Struct("<d"), struct.Struct("<Q")


class Probe(NamedTuple):
    """Summed log-prob, in nats, of the tokens of the run's first prompt under these weights."""

    log_prob: float
    tokens: int


Age = tuple[int, int]
"""A version's number and its history."""


class WeightsVersion(NamedTuple):
    """A version, published or to be published.

    Attributes:
        version: Number of the version.
        fingerprint: xxh3-64 of the digests of its blocks; 0 until it is published.
        trained_through: The first lease that it does not include.
        rollback: Whether it replaces a later version.
        history: Rollbacks up to this version.
        probe: The probe's result with these weights; None without a probe.
        position: First prompt that may be missing from the weights of a rollback; -1 if unknown.
    """

    version: int
    fingerprint: int = 0
    trained_through: int = 0
    rollback: bool = False
    history: int = 0
    probe: Probe | None = None
    position: int = -1

    @property
    def age(self) -> Age:
        """Number and history; unique within a run."""
        return self.version, self.history


def slot_mark(slot: int) -> int:
    """Return the start of a slot's header, in words of 8 bytes."""
    return (_SLOT_HEADERS + slot * _SLOT_HEADER_BYTES) // 8


def pack_version(published: WeightsVersion) -> tuple[int, ...]:
    """Return the words that follow a slot's sequence."""
    probe = published.probe
    (bits,) = _BITS.unpack(_FLOAT_BITS.pack(probe.log_prob if probe else 0.0))
    # 0: no rollback; 1: a rollback with unknown position; above: the position plus 2.
    undone = published.position + 2 if published.rollback else 0
    version, fingerprint, through = published.version, published.fingerprint, published.trained_through
    return version, fingerprint, through, published.history, undone, bits, probe.tokens if probe else 0


def unpack_version(marks: memoryview[int], slot: int) -> WeightsVersion:
    """Return the version of a slot.

    Args:
        marks: The page's words.
        slot: Number of the slot; its sequence tells whether it is whole.
    """
    mark = slot_mark(slot)
    _, version, fingerprint, through, history, rollback, bits, tokens = marks[mark : mark + 8]
    (log_prob,) = _FLOAT_BITS.unpack(_BITS.pack(bits))
    probe = Probe(log_prob, tokens) if tokens else None
    return WeightsVersion(version, fingerprint, through, bool(rollback), history, probe, max(rollback, 1) - 2)


def is_whole(path: Path) -> bool:
    """Return whether a file has all slots of a weights file."""
    with path.open("rb") as file:
        return _is_whole(file.read(PAGE_BYTES), os.fstat(file.fileno()).st_size)


def _is_whole(page: bytes, size_bytes: int) -> bool:
    if len(page) < PAGE_BYTES or page[: len(MAGIC)] != MAGIC:
        return False
    _, slots, slot_bytes, data_offset, _ = HEADER.unpack_from(page)
    whole_bytes: int = data_offset + slots * slot_bytes
    return size_bytes >= whole_bytes


def newest_version(path: Path, *, attempts: int = 1) -> WeightsVersion | None:
    """Return the newest version of a weights file.

    None before the first publish, during a write of the header, and of a file that another program has cut off.

    Args:
        path: Path of the file; it need not exist.
        attempts: Reads of a header that is being written; a write of it takes microseconds.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        page = os.pread(descriptor, PAGE_BYTES, 0)
        for _ in range(attempts):
            # Two reads: they differ if the page is written in between.
            before, page = page, os.pread(descriptor, PAGE_BYTES, 0)
            if page == before:
                break
        else:
            return None
        has_all = _is_whole(page, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
    if not has_all:
        return None
    marks = memoryview(page).cast("Q")
    slot = marks[NEWEST] - 1
    if not 0 <= slot < MOST_SLOTS or marks[slot_mark(slot)] % 2:
        return None
    return unpack_version(marks, slot)
