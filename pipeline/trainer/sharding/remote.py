"""A rank's shards on another machine than the daemon's: its versions and checkpoints are files of that machine.

    rank (`RemoteVersions`, `RemoteFiles`)                gateway (`ShardService`), beside the files
    publish: its ranges, in the published dtype   ---->   into the slot of all ranks, and the rank's training state
    restore: names and ranges                     ---->   checks the version whole
             its ranges                           <----   of the slot, or of a checkpoint's safetensors files
    collectives with the other ranks

The collectives of a publish stay those of `PolicyVersions`; each part that is one rank's alone is a call of its
gateway. So each byte of a shard travels once a version and once a restore, in parts of some hundred megabytes with a
checksum, and the files are those that ranks of one machine would have written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from pipeline.errors import CheckpointError, RlhfdError, WeightsError
from pipeline.models.weights.shards import Group, Shard, as_shards
from pipeline.models.weights.store import WeightsReader
from pipeline.models.weights.versions import PolicyVersions, exact_shards, with_elements
from pipeline.storage.weights_header import Age, WeightsVersion
from pipeline.trainer.sharding.tensor_files import Files, TensorFiles

_PART_BYTES: Final = 1 << 28

Shapes = dict[str, tuple[int, ...]]
"""The shape of each whole tensor, by name."""

Range = tuple[str, int, int]
"""Name of a tensor, first element and number of elements."""


Count = Callable[[str, int], None]
"""Counts bytes between two machines, by the value of the metric's label."""


Ask = Callable[..., Any]
"""Calls a method of a rank's `ShardService`, by its name and arguments; returns the result or raises its RlhfdError."""


class Part(NamedTuple):
    """A contiguous range of a tensor on its way.

    Attributes:
        name: The tensor's name.
        start: First element of the range.
        dtype: Name of the dtype.
        data: The elements' bytes, uint8.
    """

    name: str
    start: int
    dtype: str
    data: np.ndarray[Any, np.dtype[np.uint8]]

    @classmethod
    def of(cls, name: str, start: int, tensor: Tensor) -> Part:
        """Return the range that begins at an element."""
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return cls(name, start, str(tensor.dtype).removeprefix("torch."), data)

    def tensor(self) -> Tensor:
        """Return the elements, (n,)."""
        # What has arrived is read-only memory.
        return torch.from_numpy(self.data.copy()).view(getattr(torch, self.dtype))


class Parts(NamedTuple):
    """Ranges of several tensors, with the xxh3-64 checksum of their bytes."""

    parts: list[Part]
    checksum: int

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Parts:
        """Return parts to be sent."""
        listed = [*parts]
        return cls(listed, _checksum(listed))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return sum(part.data.nbytes for part in self.parts)

    def checked(self) -> list[Part]:
        """Return the parts.

        Raises:
            WeightsError: If other bytes have arrived than were sent.
        """
        if _checksum(self.parts) != self.checksum:
            raise WeightsError("shards have changed on their way between two machines")
        return self.parts


class ShardService:
    """The files of one remote rank, on the daemon's machine; its gateway calls `answer` in one thread.

    Args:
        weights_path: File of the weights.
        shard: The rank's shard.
        weight_slots: See `PolicyVersions`.
    """

    def __init__(self, weights_path: Path, shard: int, *, weight_slots: int) -> None:
        self._path = weights_path
        # The collectives are the rank's own; its number names its training state.
        self._versions = PolicyVersions(weights_path, Group(shard), weight_slots=weight_slots)
        self._reader: WeightsReader | None = None
        self._files: dict[int, TensorFiles] = {}

    def answer(self, method: str, arguments: Sequence[Any]) -> Any:
        """Return the result of a method, of this service or of its `PolicyVersions`, or the method's RlhfdError."""
        try:
            return getattr(self if hasattr(self, method) else self._versions, method)(*arguments)
        except RlhfdError as error:
            return error.with_traceback(None)

    def write_part(self, slot: int, shapes: Shapes, parts: Parts) -> list[int]:
        """Write parts of the rank's shards into a slot of the weights; return the digests of `PolicyVersions`."""
        return self._versions.write_part(slot, _shards(shapes, parts))

    def write_state(self, slot: int, shapes: Shapes, parts: Parts) -> list[int]:
        """Write parts of the rank's training state; return the digests of `PolicyVersions`."""
        return self._versions.write_state(slot, _shards(shapes, parts))

    def open_version(self, of_training: bool, age: Age | None, shapes: Shapes) -> WeightsVersion:
        """Check that a version of the weights, or of the rank's training state, is whole and has these tensors.

        Returns:
            The version; its ranges are read until `close_version`.
        """
        self._close_reader()
        self._reader = WeightsReader(self._versions.training_path if of_training else self._path)
        return self._reader.fetch(_shards(shapes, None), age=age)

    def ranges(self, age: Age, ranges: Sequence[Range]) -> Parts:
        """Return ranges of the version."""
        assert self._reader is not None
        tensors = self._reader.views(age)
        return Parts.of(Part.of(name, start, tensors[name].reshape(-1)[start : start + n]) for name, start, n in ranges)

    def close_version(self, age: Age) -> None:
        """Unmap the version.

        Raises:
            WeightsError: If it has been written over.
        """
        assert self._reader is not None
        is_held = self._reader.holds(age)
        self._close_reader()
        if not is_held:
            raise WeightsError(f"version {age[0]} is no longer held")

    def open_files(self, files: Sequence[Path] | Path, where: str) -> tuple[int, Shapes]:
        """Open safetensors files, or those of a model's folder; return their number and the shapes of their tensors."""
        opened = TensorFiles(files, where)
        number = max(self._files, default=0) + 1
        self._files[number] = opened
        return number, {name: opened.shape_of(name) for name in opened.names()}

    def rows_of_files(self, number: int, name: str, first: int, count: int) -> Parts:
        """Return rows of a tensor.

        Raises:
            CheckpointError: If they cannot be read.
        """
        try:
            return Parts.of([Part.of(name, 0, self._files[number].rows(name, first, count))])
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{name}: {error}") from error

    def close_files(self, number: int) -> None:
        """Close the files."""
        self._files.pop(number).close()

    def has_file(self, path: Path) -> bool:
        """Return whether a file exists."""
        return path.is_file()

    def close(self) -> None:
        """Unmap the versions, and close the files."""
        self._close_reader()
        for opened in self._files.values():
            opened.close()
        self._versions.close()

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class RemoteVersions(PolicyVersions):
    """`PolicyVersions` of a rank whose files are those of another machine.

    Args:
        ask: Calls the rank's `ShardService`.
        count: Counts bytes of shards.
        group: The ranks that publish together; None for one that only looks.
    """

    def __init__(self, ask: Ask, count: Count, group: Group | None = None) -> None:
        super().__init__(Path("elsewhere"), group)
        self._ask = ask
        self._count = count
        self._weights_bytes = 0

    @property
    def weights_bytes(self) -> int:
        """Bytes of one version, the same on every rank; 0 before the first publish."""
        return self._weights_bytes

    def may_lack_state(self) -> bool:
        """As `PolicyVersions`."""
        return bool(self._ask("may_lack_state"))

    def newest(self) -> WeightsVersion | None:
        """As `PolicyVersions`."""
        found: WeightsVersion | None = self._ask("newest")
        return found

    def own_kept(self) -> WeightsVersion | None:
        """As `PolicyVersions`."""
        found: WeightsVersion | None = self._ask("own_kept")
        return found

    def restore(self, models: Mapping[str, Tensor | Shard], *, version: WeightsVersion | None = None) -> WeightsVersion:
        """As `PolicyVersions`."""
        return self._read(exact_shards(models), None if version is None else version.age, of_training=False)

    def restore_training(self, version: WeightsVersion, into: Mapping[str, Tensor]) -> bool:
        """As `PolicyVersions`."""
        if not self.holds_training(version, into):
            return False
        return self._read(as_shards(with_elements(into)), version.age, of_training=True).age == version.age

    def holds_training(self, version: WeightsVersion, into: Mapping[str, Tensor]) -> bool:
        """As `PolicyVersions`."""
        return bool(self._ask("holds_training", version, _on_meta(with_elements(into))))

    def begin_part(self) -> int:
        """As `PolicyVersions`."""
        self._weights_bytes = self._ask("begin_part")
        return self._weights_bytes

    def write_part(self, slot: int, shards: Mapping[str, Shard]) -> list[int]:
        """As `PolicyVersions`."""
        return self._write("write_part", slot, shards)

    def digests_of(self, slot: int, blocks: Sequence[int]) -> list[int]:
        """As `PolicyVersions`."""
        found: list[int] = self._ask("digests_of", slot, list(blocks)) if blocks else []
        return found

    def begin_state(self, state: Mapping[str, Tensor]) -> int | None:
        """As `PolicyVersions`."""
        slot: int | None = self._ask("begin_state", _on_meta(state)) if self._has_room else None
        self._has_room = slot is not None
        return slot

    def write_state(self, slot: int, state: Mapping[str, Tensor | Shard]) -> list[int]:
        """As `PolicyVersions`."""
        return self._write("write_state", slot, as_shards(state))

    def finish_state(self, slot: int, version: WeightsVersion, digests: Sequence[int]) -> None:
        """As `PolicyVersions`."""
        self._ask("finish_state", slot, version, list(digests))

    def close(self) -> None:
        """Do nothing: the gateway unmaps the files."""

    def _write(self, method: str, slot: int, shards: Mapping[str, Shard]) -> list[int]:
        shapes = {name: shard.shape for name, shard in shards.items()}
        digests: list[int] = []
        for batch in _batches(shards):
            parts = Parts.of(Part.of(name, start, tensor.to(shards[name].dtype)) for name, start, tensor in batch)
            self._count("shards_sent", parts.nbytes)
            found: list[int] = self._ask(method, slot, shapes, parts)
            # A block that two parts share is hashed by neither, but after all.
            digests = [max(pair) for pair in zip(digests or found, found, strict=True)]
        return digests

    def _read(self, shards: Mapping[str, Shard], age: Age | None, *, of_training: bool) -> WeightsVersion:
        shapes = {name: shard.shape for name, shard in shards.items()}
        version: WeightsVersion = self._ask("open_version", of_training, age, shapes)
        for batch in _batches(shards):
            if not batch:
                continue
            received: Parts = self._ask("ranges", version.age, [(name, at, part.numel()) for name, at, part in batch])
            self._count("shards_received", received.nbytes)
            with torch.no_grad():
                for (_, _, target), part in zip(batch, received.checked(), strict=True):
                    target.copy_(part.tensor().view(target.shape))
        self._ask("close_version", version.age)
        return version


class RemoteFiles(TensorFiles):
    """Safetensors files of the daemon's machine; arguments: those of `TensorFiles`."""

    def __init__(self, ask: Ask, count: Count, files: Iterable[Path] | Path, where: str) -> None:
        self._ask = ask
        self._count = count
        self._where = where
        self._number: int
        self._shapes: Shapes
        self._number, self._shapes = ask("open_files", files if isinstance(files, Path) else [*files], where)

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._shapes)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._shapes[name]

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Return rows of a tensor that has some; a tensor without a dimension whole."""
        shape = self._shapes[name]
        # At most 8 bytes an element.
        at_once = max(1, _PART_BYTES // (8 * max(torch.Size(shape[1:]).numel(), 1)))
        found = []
        for row in range(first, first + count, at_once):
            received: Parts = self._ask("rows_of_files", self._number, name, row, min(at_once, first + count - row))
            self._count("shards_received", received.nbytes)
            found += [part.tensor() for part in received.checked()]
        return torch.cat(found).view((count, *shape[1:]) if shape else ())

    def close(self) -> None:
        """Close the files."""
        self._ask("close_files", self._number)


class RemoteShards(Files):
    """The versions and checkpoints of the daemon's machine, for a rank on another one.

    Args:
        ask: Calls the rank's `ShardService`.
        count: Counts bytes of shards.
    """

    def __init__(self, ask: Ask, count: Count) -> None:
        self._ask = ask
        self._count = count

    def versions(self, group: Group | None = None) -> PolicyVersions:
        """Return the published versions, for the ranks of a group."""
        return RemoteVersions(self._ask, self._count, group)

    def tensors(self, files: Iterable[Path] | Path, where: str) -> TensorFiles:
        """As `Files`."""
        return RemoteFiles(self._ask, self._count, files, where)

    def has(self, path: Path) -> bool:
        """As `Files`."""
        return bool(self._ask("has_file", path))


def _checksum(parts: Iterable[Part]) -> int:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.data.data)
    return digest.intdigest()


def _batches(shards: Mapping[str, Shard]) -> Iterator[list[tuple[str, int, Tensor]]]:
    """Yield views of a rank's shards, each with its name and first element, that together have a part's bytes.

    No batch has two views of one tensor, and one is yielded even if the rank has no element at all.
    """
    batch: list[tuple[str, int, Tensor]] = []
    nbytes = 0
    for name, shard in shards.items():
        start, local = shard.start, shard.local
        if not local.numel():
            continue
        width = shard.dtype.itemsize * (local.numel() // len(local) if local.dim() else 1)
        for view in local.split(max(1, _PART_BYTES // width)) if local.dim() else (local,):
            batch.append((name, start, view))
            start, nbytes = start + view.numel(), nbytes + view.numel() * shard.dtype.itemsize
            if nbytes >= _PART_BYTES or view.numel() < local.numel():
                yield batch
                batch, nbytes = [], 0
    yield batch


def _on_meta(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without their values: names, shapes and dtypes."""
    return {name: tensor.detach().to("meta") for name, tensor in tensors.items()}


def _shards(shapes: Shapes, parts: Parts | None) -> dict[str, Shard]:
    """Return shards of all tensors: the parts, and of other tensors empty ranges."""
    none = torch.empty(0)
    found = {name: Shard(none, shape, 0, torch.float32) for name, shape in shapes.items()}
    for part in () if parts is None else parts.checked():
        tensor = part.tensor()
        found[part.name] = Shard(tensor, shapes[part.name], part.start, tensor.dtype)
    return found
