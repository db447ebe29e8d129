"""Files on disk and in shared memory: allocated whole, written whole or not at all, flushed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

import msgspec

from pipeline.errors import ConfigError


def refuse_larger_than_free(folder: Path, nbytes: int, what: str) -> None:
    """Raise ConfigError when `folder`'s file system cannot hold `nbytes` more."""
    system = os.statvfs(folder)
    if nbytes > system.f_bavail * system.f_frsize:
        raise no_room(folder, nbytes, what)


def no_room(folder: Path, nbytes: int, what: str) -> ConfigError:
    """Return the error that names what did not fit, and what `folder`'s file system has."""
    system = os.statvfs(folder)
    free_bytes, total_bytes = system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize
    return ConfigError(f"{what} of {nbytes:,} B does not fit: {free_bytes:,} B free of {total_bytes:,} B on {folder}")


def allocate(descriptor: int, nbytes: int, what: str) -> None:
    """Allocate every page of a shared file, or raise ConfigError naming both sizes."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise no_room(Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent, nbytes, what) from error


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_folder(folder: Path) -> None:
    """Return once the names in a folder lie on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All that msgspec raises at bytes that hold nothing of the wanted type; ill-formed text and deep nesting among it."""
