"""Files on disk and in shared memory: allocated whole, written whole or not at all, flushed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import msgspec

from pipeline.errors import ConfigError
from pipeline.storage.control_groups import memory_limit_bytes, memory_room_bytes

FULL_DISK: Final = (errno.ENOSPC, errno.EDQUOT)
NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of flock on a file system without locks, as some NFS, Lustre without the option flock, and FUSE."""


def round_up(nbytes: int, multiple: int) -> int:
    """Return `nbytes` rounded up to a multiple of `multiple`."""
    return (nbytes + multiple - 1) // multiple * multiple


def refuse_larger_than_free(folder: Path, nbytes: int, name: str) -> None:
    """Raise ConfigError if shared memory has less than `nbytes` free; `name` is for the message.

    Less is free than the file system of `folder` has where a control group limits the memory of this process.
    """
    system = os.statvfs(folder)
    if nbytes > system.f_bavail * system.f_frsize:
        raise no_room(folder, nbytes, name)
    room_bytes = memory_room_bytes()
    if room_bytes is not None and nbytes > room_bytes:
        raise ConfigError(
            f"{name} of {nbytes:,} B does not fit: {room_bytes:,} B free of the {memory_limit_bytes():,} B of memory "
            "that the control group of this process (a container, a job, a service) may have, /dev/shm included"
        )


def no_room(folder: Path, nbytes: int, name: str) -> ConfigError:
    """Return the error for a file that does not fit; the message has its size and the file system's free bytes."""
    system = os.statvfs(folder)
    # Some file systems count no inodes.
    if system.f_files and not system.f_favail:
        return ConfigError(
            f"{name} does not fit: all {system.f_files:,} inodes of the file system of {folder} are taken"
        )
    free_bytes, total_bytes = system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize
    return ConfigError(f"{name} of {nbytes:,} B does not fit: {free_bytes:,} B free of {total_bytes:,} B on {folder}")


def allocate(descriptor: int, nbytes: int, name: str) -> None:
    """Allocate every page of a shared file, or raise ConfigError with both sizes."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno == errno.EFBIG:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            raise ConfigError(
                f"{name} of {nbytes:,} B is above the limit of a file's size, {limit:,} B: raise it "
                "(ulimit -f, LimitFSIZE=)"
            ) from error
        if error.errno != errno.ENOSPC:
            raise
        raise no_room(Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent, nbytes, name) from error


@contextlib.contextmanager
def replacing(path: Path, *, temporary: Path | None = None, mode: int = 0o600, flush: bool = False) -> Iterator[int]:
    """Write a file under a temporary name and rename it to `path` at the end of the ``with`` block.

    A reader of `path` finds the old file or the whole new one, also if the writer is killed at any moment. If the block
    raises, the temporary file is removed and `path` is unchanged.

    Args:
        path: The file to make or to replace.
        temporary: Name until the rename, in the same folder; by default `path` with the suffix ``.new``. A file of that
            name, left by a killed writer, is removed first.
        mode: Permissions of the new file, less the umask.
        flush: Whether file and name are flushed to disk, the file before the rename.

    Yields:
        A descriptor open for reading and writing; closed at the end of the block.

    Raises:
        OSError: If the file cannot be made, flushed or renamed.
    """
    temporary = path.with_suffix(".new") if temporary is None else temporary
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            yield descriptor
            if flush:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
        if flush:
            flush_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(
    path: Path, data: bytes, temporary: Path | None = None, *, mode: int = 0o600, flush: bool = True
) -> None:
    """Write a file, whole or not at all; see `replacing`."""
    with (
        replacing(path, temporary=temporary, mode=mode, flush=flush) as descriptor,
        open(descriptor, "wb", closefd=False) as file,
    ):
        file.write(data)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all bytes at an offset of a file; a disk that is nearly full may take a part of them first."""
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, memoryview(data)[written:], offset + written)


def write_at_end(descriptor: int, data: bytes, end: int, *, flush: bool = False) -> None:
    """Write behind the bytes of a file, all or nothing: after an error it has `end` bytes again.

    Raises:
        OSError: If the data cannot be written or, with `flush`, not be flushed to disk.
    """
    try:
        write_at(descriptor, data, end)
        if flush:
            os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, end)
        raise


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether a path is still that of an open file, which another program may have moved or removed."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def not_taken(path: Path) -> Path:
    """Return a path, or the first with a number behind its name, from 2 on, at which nothing is."""
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return next(each for each in itertools.chain([path], names) if not each.exists())


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, kind: int) -> bool:
    """Take an flock, ``LOCK_EX`` or ``LOCK_SH``, without a wait; return False if another process has it.

    The kernel releases it when its holder dies, for any cause.

    Raises:
        OSError: If the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_where_possible(file: IO[bytes]) -> None:
    """Wait for the exclusive lock of an open file, where its file system has locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All exceptions of msgspec for bytes that do not hold the expected type, ill-formed text and deep nesting included."""
