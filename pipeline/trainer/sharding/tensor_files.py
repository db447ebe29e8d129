"""Safetensors files, read by slices and written a tensor at a time: no whole model in memory, on any rank.

A file is 8 bytes of header length, a JSON header with dtype, shape and byte range of each tensor, then the tensors.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.config.model_files import INDEX, WHOLE, weight_files
from pipeline.errors import CheckpointError, ConfigError
from pipeline.models.weights.shards import Shard

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNMENT = 8


class Entry(NamedTuple):
    """A tensor of a file that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorFiles:
    """The safetensors files of one model, by tensor name.

    Args:
        files: The files, or the folder of a model in Hugging Face's format.
        where: Folder of the files, for error messages.

    Raises:
        CheckpointError: If the folder has no safetensors files, or they cannot be opened.
    """

    def __init__(self, files: Iterable[Path] | Path, where: str) -> None:
        self._where = where
        self._stack = contextlib.ExitStack()
        self._file_of: dict[str, Any] = {}
        try:
            for path in _files_of_model(files) if isinstance(files, Path) else files:
                opened: Any = self._stack.enter_context(safe_open(path, "pt", device="cpu"))
                self._file_of |= dict.fromkeys(opened.keys(), opened)
        except (OSError, SafetensorError) as error:
            self._stack.close()
            raise CheckpointError(f"{where}: {error}") from error

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._file_of)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Return rows of a tensor that has some; a tensor without a dimension whole."""
        file = self._file_of[name]
        found: Tensor = file.get_slice(name)[first : first + count] if self.shape_of(name) else file.get_tensor(name)
        return found

    def check(self, targets: Mapping[str, Shard], sources: Mapping[str, str] | None = None) -> None:
        """Compare the shapes of tensors with those of shards; arguments: those of `fill`.

        Raises:
            CheckpointError: If a tensor is missing or has another shape.
        """
        for target, shard in targets.items():
            name = target if sources is None else sources[target]
            if name not in self.names():
                raise CheckpointError(f"{self._where}: {name} is missing")
            if (found := self.shape_of(name)) != shard.shape:
                raise CheckpointError(f"{self._where}: {name} is {found}, expected {shard.shape}")

    def fill(self, targets: Mapping[str, Shard], sources: Mapping[str, str] | None = None) -> None:
        """Copy a rank's range of each tensor; only the bytes of its rows are read.

        Args:
            targets: The shards to fill, by name.
            sources: The tensor's name in the files, by the target's name; None if they are the same.

        Raises:
            CheckpointError: If a tensor is missing, has another shape, or cannot be read; in the first two cases no
                shard is changed.
        """
        self.check(targets, sources)
        try:
            with torch.no_grad():
                for target, shard in targets.items():
                    self._fill(target if sources is None else sources[target], shard)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._where}: {error}") from error

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, name: str, shard: Shard) -> None:
        if not shard.local.numel():
            return
        rows = shard.local.shape[0] if shard.shape else 1
        first = shard.start // (shard.local.numel() // rows)
        shard.local.copy_(self.rows(name, first, rows))


def _files_of_model(folder: Path) -> list[Path]:
    try:
        files = weight_files(folder)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX}: {error}") from error
    if not files:
        raise CheckpointError(f"{folder}: no {WHOLE} and no {INDEX}; a sharded trainer reads no other files")
    return files


class Files:
    """Opens the files of a model or a checkpoint: those of this machine."""

    def tensors(self, files: Iterable[Path] | Path, where: str) -> TensorFiles:
        """Return safetensors files; arguments and errors: those of `TensorFiles`."""
        return TensorFiles(files, where)

    def has(self, path: Path) -> bool:
        """Return whether a file exists."""
        return path.is_file()


HERE = Files()
"""The files of this machine."""


def write_tensors(path: Path, entries: Iterable[Entry], tensors: Iterable[Tensor]) -> None:
    """Write a safetensors file, with one of its tensors in memory at a time.

    Args:
        path: The file, created.
        entries: All of its tensors.
        tensors: The tensors, each of its entry's dtype and shape, in the order of the entries; made when they are
            written.

    Raises:
        OSError: If the file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        nbytes = torch.Size(entry.shape).numel() * entry.dtype.itemsize
        header[entry.name] = {
            "dtype": _DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": [offset, offset + nbytes],
        }  # fmt: skip
        offset += nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            if tensor.numel():
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def sources_of(
    names: Iterable[str], files: TensorFiles, prefix: str, twins: Mapping[str, str], field: str
) -> dict[str, str]:
    """Return the name in the files of each tensor of a model.

    Args:
        names: The model's names.
        files: The files; they may be of the model with its head, or of its backbone alone.
        prefix: The name under which a model with a head holds its backbone, as "model".
        twins: The other name of a tied tensor.
        field: The configuration field that names the folder, for the error.

    Raises:
        ConfigError: If a tensor has none of the names that it may have.
    """
    there, found = files.names(), {}
    for name in names:
        own = [name, *([twins[name]] if name in twins else [])]
        tried = [candidate for one in own for candidate in (one, f"{prefix}.{one}", one.removeprefix(f"{prefix}."))]
        source = next((candidate for candidate in tried if candidate in there), None)
        if source is None:
            raise ConfigError(
                f"{field}: its files have no tensor {name}, which a sharded trainer reads by name: "
                'trainer.sharding = "none" loads the model whole'
            )
        found[name] = source
    return found
