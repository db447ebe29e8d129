"""Extents on disk: one safetensors file, each extent a tensor of its bytes, with its ledger record in the metadata.

The bytes are copied from file to file in pieces, so neither arena nor process grows by the size of the copy. A file
appears whole or not at all: it is written under another name, flushed to disk, then renamed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import xxhash

from pipeline.errors import DecodeError
from pipeline.progress import Telemetry
from pipeline.storage.arena import Arena
from pipeline.storage.files import UNREADABLE, replacing, round_up, write_at
from pipeline.storage.records import Chosen

SUFFIX = ".safetensors"
_LENGTH = struct.Struct("<Q")
_PIECE_BYTES = 4 << 20
_FLUSH_BYTES = 1 << 28
_HEADER_STEP_BYTES = 4096
_MOST_HEADER_BYTES = 100 << 20
_Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class SavedExtent(msgspec.Struct, frozen=True):
    """The ledger's record of an extent, the chosen rows of it, and the xxh3-64 digest of its bytes as saved."""

    ticket: int
    position: int
    prompts: int
    rows: int
    chosen: list[int]
    policy_version: int
    fingerprint: int
    checksum: int
    nbytes: int
    digest: int = 0


class _Tensor(msgspec.Struct, frozen=True):
    """One tensor entry of the safetensors header; dtype and shape are redundant and not decoded."""

    data_offsets: tuple[_Offset, _Offset]


class ExtentFile(msgspec.Struct, frozen=True):
    """A file that was read: its metadata, its extents and the offset of each extent's bytes."""

    path: Path
    metadata: dict[str, str]
    extents: list[SavedExtent]
    starts: list[int]


def save(
    path: Path,
    arena: Arena,
    chosen: Chosen,
    metadata: dict[str, str],
    telemetry: Telemetry = Telemetry.none(),
) -> int:
    """Write whole extents into one file, each with the list of its chosen rows.

    Args:
        path: Path of the file; its folder is made, with access for its user alone.
        arena: The arena of the extents; its payload need not be mapped.
        chosen: Extents, each with its rows.
        metadata: Further entries of the file's metadata.
        telemetry: Told of progress while bytes are written and flushed to disk.

    Returns:
        Size of the file in bytes.

    Raises:
        OSError: If the file cannot be written; no part of it is left then.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    extents = [
        SavedExtent(
            record.ticket, record.position, record.prompts, record.rows, rows, record.policy_version,
            record.fingerprint, record.checksum, record.nbytes,
        )
        for record, rows in chosen
    ]  # fmt: skip
    source = os.open(arena.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with replacing(path, flush=True) as target:
            # The digests are known once the bytes are written: room for them is reserved in front.
            header_bytes = _header_room(extents, metadata)
            start = flushed = _LENGTH.size + header_bytes
            for index, (record, _) in enumerate(chosen):
                digest = copy(source, arena.payload_offset + record.offset, target, start, record.nbytes, telemetry)
                extents[index] = msgspec.structs.replace(extents[index], digest=digest)
                start += record.nbytes
                # A single flush at the end would be one call of minutes without progress.
                if start - flushed >= _FLUSH_BYTES:
                    os.fdatasync(target)
                    flushed = start
                    telemetry.progress()
            header = _header(extents, metadata).ljust(header_bytes)
            write_at(target, _LENGTH.pack(header_bytes) + header, 0)
    finally:
        os.close(source)
    return start


def save_bytes(
    path: Path, extents: Sequence[tuple[SavedExtent, memoryview]], metadata: dict[str, str]
) -> tuple[int, list[SavedExtent]]:
    """Write extents from memory into one file; it is not flushed to disk.

    Args:
        path: Path of the file; its folder is made, with access for its user alone.
        extents: Extents with their bytes; size, checksum and digest are filled in here.
        metadata: Further entries of the file's metadata.

    Returns:
        Size of the file in bytes, and the extents as saved.

    Raises:
        OSError: If the file cannot be written; no part of it is left then.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    saved = []
    for extent, data in extents:
        digest = xxhash.xxh3_64_intdigest(data)
        saved.append(msgspec.structs.replace(extent, nbytes=len(data), checksum=digest, digest=digest))
    header = _header(saved, metadata)
    header = header.ljust(round_up(len(header), _HEADER_STEP_BYTES))
    with replacing(path) as target:
        start = 0
        for data in (memoryview(_LENGTH.pack(len(header)) + header), *(data for _, data in extents)):
            write_at(target, data, start)
            start += len(data)
    return start, saved


def load(path: Path) -> ExtentFile:
    """Read a file's metadata and extents, without the extents' bytes: the end of a file that is cut is not missed.

    Raises:
        DecodeError: If it is no file of extents, or ends within its header.
        OSError: If it cannot be read.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        try:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > min(size_bytes, _MOST_HEADER_BYTES):
                raise DecodeError(f"{path} states a header of {length:,} B, the file has {size_bytes:,} B")
            header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
            metadata = msgspec.json.decode(header["__metadata__"], type=dict[str, str])
            extents = msgspec.json.decode(metadata.pop("extents"), type=list[SavedExtent])
            tensors = [msgspec.json.decode(header[_name(extent)], type=_Tensor) for extent in extents]
        except (struct.error, KeyError, *UNREADABLE) as error:
            raise DecodeError(f"{path} holds no extents of this version: {error}") from error
    base = _LENGTH.size + length
    return ExtentFile(path, metadata, extents, [base + tensor.data_offsets[0] for tensor in tensors])


def read_extent(file: ExtentFile, index: int) -> bytes:
    """Return the bytes of one extent.

    Raises:
        DecodeError: If they differ from the saved bytes.
    """
    extent = file.extents[index]
    with file.path.open("rb") as opened:
        opened.seek(file.starts[index])
        data = opened.read(extent.nbytes)
    if len(data) != extent.nbytes or xxhash.xxh3_64_intdigest(data) != extent.digest:
        raise DecodeError(f"{file.path}: the extent of ticket {extent.ticket} is not the one that was saved")
    return data


def copy(
    source: int,
    source_start: int,
    target: int,
    target_start: int,
    nbytes: int,
    telemetry: Telemetry = Telemetry.none(),
) -> int:
    """Copy bytes between open files, and return their xxh3-64 digest; each piece is progress.

    Raises:
        DecodeError: If the source is shorter.
    """
    digest, done = xxhash.xxh3_64(), 0
    while done < nbytes:
        piece = os.pread(source, min(_PIECE_BYTES, nbytes - done), source_start + done)
        if not piece:
            raise DecodeError(f"{nbytes:,} B from {source_start:,} on: the file ends after {done:,} B")
        digest.update(piece)
        write_at(target, piece, target_start + done)
        done += len(piece)
        telemetry.progress()
    return digest.intdigest()


def _name(extent: SavedExtent) -> str:
    return f"ticket-{extent.ticket}"


def _header_room(extents: list[SavedExtent], metadata: dict[str, str]) -> int:
    longest = [msgspec.structs.replace(extent, digest=2**64 - 1) for extent in extents]
    return round_up(len(_header(longest, metadata)), _HEADER_STEP_BYTES)


def _header(extents: list[SavedExtent], metadata: dict[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": {**metadata, "extents": msgspec.json.encode(extents).decode()}}
    start = 0
    for extent in extents:
        header[_name(extent)] = {
            "dtype": "U8",
            "shape": [extent.nbytes],
            "data_offsets": [start, start + extent.nbytes],
        }
        start += extent.nbytes
    # Other threads wait for this call: 0.04 s for 16,384 extents, against 0.24 s with the standard library's json.
    return msgspec.json.encode(header)
