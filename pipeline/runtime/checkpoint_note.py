"""A checkpoint's description of itself, and its verification; without torch.

step-000070/trainer_state.json    `CheckpointNote`, sealed (`pipeline.storage.sealed_json`)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from pipeline.errors import CheckpointError
from pipeline.progress import Telemetry
from pipeline.runtime.latest_checkpoint import Latest
from pipeline.storage import sealed_json
from pipeline.storage.files import UNREADABLE

NOTE = "trainer_state.json"
_READ_BYTES = 1 << 24


class FileNote(msgspec.Struct, frozen=True):
    """A file's size in bytes and its xxh3-64, in hexadecimal."""

    nbytes: int
    xxh3: str


class CheckpointNote(msgspec.Struct, frozen=True):
    """The description that a checkpoint holds of itself: the fields of `Latest`, and more.

    Attributes:
        digest: Digest of all experience that all ranks trained on, in hexadecimal.
        fingerprint: Fingerprint of the weights as published, in hexadecimal.
        config: The configuration in force.
        written_by: Versions of torch and transformers.
        files: Every other file in the folder.
    """

    identity: str
    step: int
    version: int
    position: int
    complete: bool
    digest: str
    fingerprint: str
    config: dict[str, Any]
    run: str = ""
    written_by: dict[str, str] = {}
    files: dict[str, FileNote] = {}

    def latest(self, folder: Path) -> Latest:
        """Return the record for `latest.json` that names this checkpoint."""
        return Latest(
            self.identity, self.step, self.version, self.position, self.complete, folder.name, self.run,
            self.fingerprint,
        )  # fmt: skip


def read_note(folder: Path) -> CheckpointNote:
    """Return the description of a checkpoint.

    Raises:
        CheckpointError: If the description is missing, does not decode, or is not the one that was written.
    """
    try:
        return sealed_json.decode((folder / NOTE).read_bytes(), CheckpointNote)
    except (OSError, *UNREADABLE) as error:
        raise CheckpointError(f"{folder / NOTE}: {error}") from error


def verify(folder: Path, note: CheckpointNote, telemetry: Telemetry = Telemetry.none()) -> None:
    """Read every file of a checkpoint and compare its size and checksum.

    Args:
        folder: The checkpoint.
        note: Description of the checkpoint.
        telemetry: Told of progress while bytes are read.

    Raises:
        CheckpointError: If a file is missing, has another size, or another checksum.
    """
    for name, written in note.files.items():
        path = folder / name
        try:
            found = path.stat().st_size
            if found != written.nbytes:
                raise CheckpointError(f"{path} has {found:,} B, {written.nbytes:,} B were written")
            if checksum(path, telemetry) != written.xxh3:
                raise CheckpointError(f"{path} is damaged: its checksum is not the one that was written")
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error


def checksum(path: Path, telemetry: Telemetry = Telemetry.none()) -> str:
    """Return the xxh3-64 of a file's bytes, in hexadecimal."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
            telemetry.progress()
    return digest.hexdigest()


def earlier_of_run(root: Path, latest: Latest) -> Iterator[Path]:
    """Yield the latest checkpoint's folder, then the earlier ones of its run, the newest first."""
    yield root / latest.path
    yield from reversed([folder for step, folder in of_run(root, latest.run) if step < latest.step])


def of_run(root: Path, run: str) -> list[tuple[int, Path]]:
    """Return step and folder of each checkpoint of a run, the oldest first."""
    return sorted((note.step, folder) for folder, note in heads_in(root) if note.run == run)


def heads_in(root: Path) -> Iterator[tuple[Path, CheckpointNote]]:
    """Yield folder and description of each checkpoint in a folder, by name.

    One without a readable description belongs to no run, and one of another name, such as ``step-000050.bak``, is a
    copy of the user's: both are left out, and neither used nor removed.
    """
    for folder in sorted(root.glob("step-*")):
        if (head := head_of(folder)) is not None and folder.name == folder_name(head.step):
            yield folder, head


def folder_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:06d}"


def head_of(folder: Path) -> CheckpointNote | None:
    """Return the description of a checkpoint; None if a folder has none that can be read."""
    with contextlib.suppress(CheckpointError):
        return read_note(folder)
    return None
