"""Policy weights in shared memory: the trainer publishes versions, workers copy the newest.

    page 0      the slots' versions (`pipeline.storage.weights_header`)
    4,096       manifest: name, dtype, shape and offset of each tensor (msgpack)
    data        the slots, page-aligned

A slot's sequence is odd during a write. The publisher writes the slot after the newest, or the one after that if it
spares that one (`WeightsPublisher.begin`), in this order: sequence odd, tensors, fingerprint and version, sequence
even, and `newest` last. A reader copies the newest slot and compares its sequence before and after; if it has changed,
or the fingerprint is wrong, the copy is discarded. No process waits.

The newest slot does not always have the highest version: a trainer that resumes from a checkpoint publishes a lower
version as a rollback. `history` counts the rollbacks, so that version 7 differs from version 7 before a rollback.
The training state is in a second such file (`pipeline.models.weights.versions`), by version number.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from pipeline.errors import WeightsError
from pipeline.models.weights.copies import WeightsCopy
from pipeline.models.weights.shards import Shard
from pipeline.models.weights.slot_copy import Slot, combined
from pipeline.models.weights.tensor_specs import TensorSpec, tensor_specs, tensor_views
from pipeline.storage.files import allocate, refuse_larger_than_free, replacing, round_up
from pipeline.storage.truncation import truncated
from pipeline.storage.weights_header import (
    HEADER,
    MAGIC,
    MOST_SLOTS,
    NEWEST,
    PAGE_BYTES,
    Age,
    WeightsVersion,
    newest_version,
    pack_version,
    slot_mark,
    unpack_version,
)

_FETCH_ATTEMPTS = 16

_T = TypeVar("_T")

log = logging.getLogger(__name__)


def flatten(**models: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Return state dicts joined as ``{"actor.lm_head.weight": ...}``; a tensor under two names (tied weights) once."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, torch.Size, torch.dtype]] = set()
    for prefix, state in models.items():
        for name, tensor in (state or {}).items():
            identity = tensor_identity(tensor)
            if tensor.numel() and identity not in seen:
                seen.add(identity)
                tensors[f"{prefix}.{name}"] = tensor.detach()
    return tensors


def joined(models: Mapping[str, Mapping[str, _T]]) -> dict[str, _T]:
    """Return the values of several models by published name, as ``actor.lm_head.weight``."""
    return {f"{model}.{name}": value for model, named in models.items() for name, value in named.items()}


def part_of(published: Mapping[str, _T], model: str) -> dict[str, _T]:
    """Return one model's values by its own names: the inverse of `joined`."""
    prefix = f"{model}."
    return {name.removeprefix(prefix): value for name, value in published.items() if name.startswith(prefix)}


def tensor_identity(tensor: torch.Tensor) -> tuple[int, torch.Size, torch.dtype]:
    """Return a key that is the same for tied tensors."""
    return tensor.data_ptr(), tensor.shape, tensor.dtype


class WeightsMapping:
    """The file's mapping, of publisher and readers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "r+b") as file:
            status = os.fstat(file.fileno())
            if status.st_size < PAGE_BYTES:
                raise WeightsError(truncated(path, status.st_size, PAGE_BYTES))
            self.inode = status.st_ino
            self._map = mmap.mmap(file.fileno(), 0)
        self.memory = memoryview(self._map)
        self.slots: int
        self.nbytes: int
        magic, self.slots, self.nbytes, self.data_offset, manifest_bytes = HEADER.unpack_from(self.memory)
        if magic != MAGIC:
            raise WeightsError(f"{path} is not a weights file of this version")
        if len(self._map) < (whole := self.data_offset + self.slots * self.nbytes):
            raise WeightsError(truncated(path, len(self._map), whole))
        manifest = self.memory[PAGE_BYTES : PAGE_BYTES + manifest_bytes]
        self.specs = msgspec.msgpack.decode(manifest, type=list[TensorSpec])
        self.marks = self.memory[:PAGE_BYTES].cast("Q")
        self._slots: dict[int, Slot] = {}

    def slot(self, slot: int) -> Slot:
        """Return a slot with its tensors."""
        if slot not in self._slots:
            memory = self.memory[self.data_offset + slot * self.nbytes :][: self.nbytes]
            self._slots[slot] = Slot(memory, tensor_views(memory, self.specs))
        return self._slots[slot]

    def newest_slot(self) -> int | None:
        """Return the slot of the newest version; None before the first publish."""
        slot = self.marks[NEWEST]
        return slot - 1 if slot else None

    def version(self, slot: int) -> WeightsVersion:
        """Return the version in a slot; its sequence tells whether it is whole."""
        return unpack_version(self.marks, slot)

    def slot_of(self, wanted: Age) -> int | None:
        """Return the slot that holds a complete version; None if there is none."""
        for slot in range(self.slots if self.newest_slot() is not None else 0):
            if self.marks[slot_mark(slot)] % 2 == 0 and self.version(slot).age == wanted:
                return slot
        return None

    def whole(self) -> list[WeightsVersion]:
        """Return the versions in the slots that are written and complete, whether their page was turned or not."""
        return [self.version(slot) for slot in range(self.slots) if (n := self.marks[slot_mark(slot)]) and n % 2 == 0]

    def discard(self, age: Age) -> None:
        """Mark a version as one that is being written."""
        if (slot := self.slot_of(age)) is not None:
            self.marks[slot_mark(slot)] |= 1

    def release(self) -> None:
        """Take the slots out of the resident memory of this process until the next access; their bytes stay."""
        self._map.madvise(mmap.MADV_DONTNEED, self.data_offset, self.slots * self.nbytes)

    def close(self) -> None:
        """Unmap the file; it stays."""
        # Without a name that outlives the loop: the map is closed once no slot refers to it.
        while self._slots:
            self._slots.popitem()[1].close()
        self.marks.release()
        self.memory.release()
        try:
            self._map.close()
        except BufferError:
            # A tensor over a slot is still referenced; the mapping is released with it.
            pass


class WeightsPublisher(WeightsMapping):
    """The trainer's side of the weights; exactly one process publishes."""

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor] | None = None, *, slots: int = 3) -> None:
        """Attach to the weights of an earlier trainer of the same model, or allocate room for `slots` versions.

        Args:
            path: The file, in the instance's shared-memory folder.
            tensors: The tensors to publish (`flatten`), which fix names, dtypes and shapes; None to attach to the file
                that another rank has made.
            slots: Versions held at once, at least 2.

        Raises:
            ConfigError: If shared memory has too little room.
        """
        if not 2 <= slots <= MOST_SLOTS:
            raise ValueError(f"slots must be 2 to {MOST_SLOTS}, got {slots}")
        self._history = 0
        if tensors is not None and not self.matches(path, tensors):
            if (before := newest_version(path)) is not None:
                self._history = before.history
            _create(path, tensor_specs(tensors), slots)
        super().__init__(path)
        self.names = frozenset(spec.name for spec in self.specs)

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor], **described: Any) -> WeightsVersion:
        """Publish `version` as the newest, from whole tensors.

        Args:
            version: Version number, above the newest unless it is a rollback.
            tensors: Values, on any device, under the names given to the constructor.
            described: The other fields of `WeightsVersion`, but fingerprint and history.

        Returns:
            The published version.

        Raises:
            WeightsError: If a tensor is missing, of another shape, or the version is not new.
        """
        wanted, slot = self.following(WeightsVersion(version, **described)), self.begin()
        published = wanted._replace(fingerprint=combined(self.slot(slot).write(tensors)))
        self.finish(slot, published)
        return published

    def following(self, wanted: WeightsVersion) -> WeightsVersion:
        """Return a version that is to be published next, with its history.

        Raises:
            WeightsError: If the version is not new.
        """
        newest = self.newest_slot()
        before = None if newest is None else self.version(newest)
        if before is not None and before.version >= wanted.version and not wanted.rollback:
            raise WeightsError(f"version {wanted.version} is not above {before.version}")
        history = wanted.rollback + (self._history if before is None else before.history)
        return wanted._replace(history=history, position=wanted.position if wanted.rollback else -1)

    def next_slot(self, spared: Age | None = None) -> int:
        """Return the slot that `begin` takes."""
        newest = self.newest_slot()
        taken = None if spared is None else self.slot_of(spared)
        following = 0 if newest is None else (newest + 1) % self.slots
        return (following + 1) % self.slots if following == taken else following

    def begin(self, *, spared: Age | None = None) -> int:
        """Mark the slot after the newest as being written, or the one after that if it holds the version `spared`."""
        slot = self.next_slot(spared)
        self.marks[slot_mark(slot)] |= 1
        return slot

    def finish(self, slot: int, published: WeightsVersion) -> None:
        """Make the slot of `begin`, whose bytes are whole, the newest version."""
        mark = slot_mark(slot)
        for spec, word in enumerate(pack_version(published), mark + 1):
            self.marks[spec] = word
        self.marks[mark] += 1
        # Last: a reader that finds this slot as the newest finds it complete.
        self.marks[NEWEST] = slot + 1

    @staticmethod
    def matches(path: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the file exists and has the names, dtypes and shapes of these tensors."""
        if not path.exists():
            return False
        with contextlib.closing(WeightsMapping(path)) as mapping:
            return bool(mapping.specs == tensor_specs(tensors))


class WeightsReader:
    """A worker's side of the weights.

    A trainer that publishes other tensors than its predecessor, or the same in another order, makes a new file under
    the same name: it is mapped in place of the old one at the next look for a version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapping = WeightsMapping(path)

    def _follow(self) -> None:
        """Map the present file; the old one stays if there is none, as at the end of the daemon."""
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self.path).st_ino != self._mapping.inode:
                mapping = WeightsMapping(self.path)
                self.close()
                self._mapping = mapping

    @property
    def nbytes(self) -> int:
        """Bytes of one version."""
        return self._mapping.nbytes

    def newest(self) -> WeightsVersion | None:
        """Return the newest version as `newest_whole`; None before the first publish."""
        self._follow()
        return None if self._mapping.newest_slot() is None else self.newest_whole()

    def newest_whole(self) -> WeightsVersion:
        """Return the newest version, all of whose header was read before it changed.

        Raises:
            WeightsError: If there is none yet, or each attempt met a write.
        """
        return self._whole(None, lambda slot, found: True)

    def fetch(
        self, into: Mapping[str, torch.Tensor | Shard], *, age: Age | None = None, partial: bool = False
    ) -> WeightsVersion:
        """Copy the newest version, or the version of a given age, into a model's tensors or a rank's shards of them.

        Args:
            into: Targets by published name; every published tensor needs one of its shape.
            age: Age of the version; None for the newest.
            partial: Whether a published tensor without a target is not copied; the fingerprint covers all.

        Returns:
            The version that the targets now hold, with its verified fingerprint.

        Raises:
            WeightsError: If there is no such version, a target is missing or has another shape, or every attempt at a
                whole copy failed.
        """
        return self._whole(age, lambda slot, found: slot.read(into, partial=partial) == found.fingerprint)

    def feed(self, load: Callable[[Mapping[str, torch.Tensor]], None], *, age: Age | None = None) -> WeightsVersion:
        """Hand the tensors of a version to a function that loads them, without a copy in between.

        Args:
            load: Takes the tensors by published name, for the length of the call. It may be called again, if the first
                version was overwritten meanwhile: what it has loaded is of no version until `feed` returns.
            age: Age of the version; None for the newest.

        Returns:
            The version loaded, with its verified fingerprint.

        Raises:
            WeightsError: If there is no such version, or every attempt at a whole one failed.
        """
        return self._whole(age, lambda slot, found: slot.fingerprint_during(load) == found.fingerprint)

    def copy(self) -> WeightsCopy:
        """Return a copy of the newest version, to be sent to another machine.

        Raises:
            WeightsError: If there is no version yet, or every attempt at a whole copy failed.
        """
        data = np.empty(0, np.uint8)

        def take(slot: Slot, found: WeightsVersion) -> bool:
            nonlocal data
            memory = np.frombuffer(slot.memory, np.uint8)
            data = data if len(data) == len(memory) else np.empty_like(memory)
            data[:] = memory
            return True

        return WeightsCopy(self._whole(None, take), list(self._mapping.specs), data)

    def _whole(self, age: Age | None, take: Callable[[Slot, WeightsVersion], bool]) -> WeightsVersion:
        """Call `take` on a slot until the slot was not written to during the call; return the version taken."""
        for _ in range(_FETCH_ATTEMPTS):
            self._follow()
            slot = self._mapping.newest_slot() if age is None else self._mapping.slot_of(age)
            if slot is None:
                raise WeightsError(
                    "no weights were published yet" if age is None else f"version {age[0]} is no longer held"
                )
            mark = slot_mark(slot)
            before = self._mapping.marks[mark]
            found = self._mapping.version(slot)
            if before % 2 == 0 and take(self._mapping.slot(slot), found) and self._mapping.marks[mark] == before:
                return found
            log.warning("weights of version %d were overwritten during the copy, retrying", found.version)
        raise WeightsError(f"no whole copy of the weights in {_FETCH_ATTEMPTS} attempts")

    def views(self, age: Age) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a version in place, by published name; they may be written over.

        Raises:
            WeightsError: If it is not held.
        """
        slot = self._mapping.slot_of(age)
        if slot is None:
            raise WeightsError(f"version {age[0]} is no longer held")
        return self._mapping.slot(slot).views

    def holds(self, age: Age) -> bool:
        """Return whether a version is held, complete."""
        self._follow()
        return self._mapping.slot_of(age) is not None

    def close(self) -> None:
        """Unmap."""
        self._mapping.close()


def bytes_of_slot(specs: list[TensorSpec]) -> int:
    """Return the size of a slot with these tensors; a fingerprint is of all its bytes."""
    return round_up(specs[-1].offset + specs[-1].nbytes, PAGE_BYTES) if specs else PAGE_BYTES


def _create(path: Path, specs: list[TensorSpec], slots: int) -> None:
    manifest = msgspec.msgpack.encode(specs)
    data_offset = PAGE_BYTES + round_up(len(manifest), PAGE_BYTES)
    slot_bytes = bytes_of_slot(specs)
    total_bytes = data_offset + slots * slot_bytes
    what = f"weights in {slots} slots of {slot_bytes:,} B each, a file"
    refuse_larger_than_free(path.parent, total_bytes, what)
    with replacing(path) as descriptor:
        allocate(descriptor, total_bytes, what)
        os.pwrite(descriptor, HEADER.pack(MAGIC, slots, slot_bytes, data_offset, len(manifest)), 0)
        os.pwrite(descriptor, manifest, PAGE_BYTES)
