"""What the ledger's small tables hold: numbers of leases, ranges of prompts, published versions."""

from __future__ import annotations

import bisect
import itertools
import struct
from collections.abc import Iterable
from typing import NamedTuple

# More batches than any trainer holds at once; the ranks' credits are limited to it.
MOST_LEASES = 4096
# Above every `buffer.max_staleness`: no row of an older version is left.
VERSIONS_KEPT = 2048

_VERSION = struct.Struct("<qQQ")
VERSION_BYTES = _VERSION.size
VERSIONS_BYTES = VERSIONS_KEPT * VERSION_BYTES


class PromptRange(NamedTuple):
    """The prompts at ``position ... position + prompts - 1`` of the endless sequence."""

    position: int
    prompts: int


def add_prompts(ranges: list[PromptRange], more: PromptRange, *, most: int) -> list[PromptRange]:
    """Return `ranges` and `more`, sorted, adjacent and overlapping ranges joined.

    Beyond `most` ranges the two with the smallest gap are joined: some prompts are issued once more, none is lost.
    """
    ranges = list(ranges)
    bisect.insort(ranges, more)
    joined = [ranges[0]]
    for prompts in ranges[1:]:
        if prompts.position <= joined[-1].position + joined[-1].prompts:
            joined[-1] = _cover(joined[-1], prompts)
        else:
            joined.append(prompts)
    while len(joined) > most:
        gaps = [after.position - before.position - before.prompts for before, after in itertools.pairwise(joined)]
        at = gaps.index(min(gaps))
        joined[at : at + 2] = [_cover(joined[at], joined[at + 1])]
    return joined


def between(ranges: Iterable[PromptRange], position: int, stop: int) -> list[PromptRange]:
    """Return the prompts from `position` on and before `stop` that are in none of `ranges`."""
    left = []
    for prompts in sorted([*ranges, PromptRange(stop, 0)]):
        if prompts.position > position:
            left.append(PromptRange(position, min(prompts.position, stop) - position))
        position = max(position, prompts.position + prompts.prompts)
        if position >= stop:
            break
    return left


def _cover(first: PromptRange, second: PromptRange) -> PromptRange:
    stop = max(first.position + first.prompts, second.position + second.prompts)
    return PromptRange(first.position, stop - first.position)


class _Published(NamedTuple):
    version: int
    fingerprint: int
    # 0: valid; 1: rolled back; 2: valid, in place of other weights of this version that were rolled back.
    mark: int


class PublishedVersions:
    """The newest versions and their fingerprints; version v is at index ``v mod VERSIONS_KEPT``."""

    def __init__(self, data: memoryview) -> None:
        """Read the table; zeroed memory is an empty table."""
        # Stored is the version plus 1, so that zeros are no version.
        self._entries = {
            index: _Published(stored - 1, fingerprint, mark)
            for index, (stored, fingerprint, mark) in enumerate(_VERSION.iter_unpack(data[:VERSIONS_BYTES]))
            if stored
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublishedVersions) and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]

    def note(self, version: int, fingerprint: int) -> int:
        """Add a published version; return its index."""
        index = version % VERSIONS_KEPT
        before = self._entries.get(index)
        again = before is not None and before.version == version and before.fingerprint != fingerprint
        self._entries[index] = _Published(version, fingerprint, 2 if again else 0)
        return index

    def roll_back(self, version: int) -> list[int]:
        """Mark all versions above `version` as rolled back; return their indices."""
        indices = [index for index, found in self._entries.items() if found.version > version and found.mark != 1]
        for index in indices:
            self._entries[index] = self._entries[index]._replace(mark=1)
        return indices

    def knows(self, version: int, fingerprint: int) -> bool:
        """Return whether exactly these weights were published under this version and are not rolled back."""
        found = self._entries.get(version % VERSIONS_KEPT)
        return found is not None and found[:2] == (version, fingerprint) and found.mark != 1

    def fingerprint_of(self, version: int) -> int | None:
        """Return the fingerprint of the weights of a version; None if it is unknown or rolled back."""
        found = self._entries.get(version % VERSIONS_KEPT)
        return None if found is None or found.version != version or found.mark == 1 else found.fingerprint

    def rolled_back(self, version: int, fingerprint: int) -> bool:
        """Return whether these are, or may be, weights of this version that were rolled back."""
        found = self._entries.get(version % VERSIONS_KEPT)
        if found is None or found.version != version:
            return False
        return found.mark == 1 or (found.mark == 2 and found.fingerprint != fingerprint)

    def is_marked(self, version: int) -> bool:
        """Return whether any weights of this version were rolled back."""
        found = self._entries.get(version % VERSIONS_KEPT)
        return found is not None and found.version == version and found.mark != 0

    def entries(self) -> list[tuple[int, int]]:
        """Return the versions that are not rolled back with their fingerprints, oldest first."""
        return sorted(found[:2] for found in self._entries.values() if found.mark != 1)

    def pack(self, index: int) -> bytes:
        """Return the bytes of one entry."""
        version, fingerprint, mark = self._entries[index]
        return _VERSION.pack(version + 1, fingerprint, mark)
