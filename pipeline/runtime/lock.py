"""The lock and the record of a running instance, by which commands find it.

    runtime_dir/lock            flock of the live supervisor, contains its pid; one left by a kill is taken over
    state_dir/lock              the same for a state directory; contains runtime directory and run, too
    runtime_dir/instance.json   the record: pid, folder in shared memory, address, place of the log
    shm_dir/                    flock of the live supervisor on the folder itself, where containers share /dev/shm
    shm_dir/control.sock        a JSON line out for each JSON line in (`pipeline.runtime.control`)

Sockets lie in shared memory rather than in the runtime directory: the path of a unix socket has at most 107 bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from pipeline.errors import ConfigError, NotRunningError, UnreachableError
from pipeline.runtime.signals import refuse_stopped
from pipeline.storage.files import NO_LOCKS, UNREADABLE, is_at, try_lock, write_whole

_SHM = Path("/dev/shm")
_LOCK = "lock"
_RECORD = "instance.json"
_UNFINISHED_RECORD = ".instance.json.new"
# `find` holds the lock shared for microseconds; a start retries.
_LOCK_TIMEOUT_S = 0.5
_POLL_S = 0.02

log = logging.getLogger(__name__)


class FolderLock:
    """The lock that makes a process the one user of a folder; a context manager.

    The kernel releases the lock at any death of the process; programs that it starts do not inherit it.

    Args:
        folder: The folder; it is made if there is none.
        key: The configuration key that names it, for errors.
        needs_locks: Whether a file system without locks is refused; else a warning says that nothing guards the folder.
        notes: Further lines of the lock's file, after the pid.
    """

    def __init__(self, folder: Path, key: str, *notes: str, needs_locks: bool = True) -> None:
        self._folder = folder
        self._key = key
        self._needs_locks = needs_locks
        self._notes = notes
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        """Take the lock.

        Raises:
            ConfigError: If another process holds it, or the folder cannot be used.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse()
        except OSError as error:
            raise ConfigError(f"{self._key}: cannot use {self._folder}: {error.strerror}") from error
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while (descriptor := self._locked()) is None:
            if time.monotonic() > deadline:
                raise ConfigError(f"{self._key}: {self._folder} is in use by {self._holder()}")
            time.sleep(_POLL_S)
        try:
            self._write(descriptor)
        except OSError as error:
            (self._folder / _LOCK).unlink(missing_ok=True)
            os.close(descriptor)
            raise ConfigError(f"{self._key}: cannot use {self._folder}: {error.strerror}") from error
        self._descriptor = descriptor
        return self

    def _locked(self) -> int | None:
        """Open and lock the file; return None if another process holds it, or has just removed it."""
        path = self._folder / _LOCK
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{self._key}: cannot use {path}: {error.strerror}") from error
        try:
            is_held = try_lock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if self._needs_locks or error.errno not in NO_LOCKS:
                os.close(descriptor)
                raise ConfigError(
                    f"{self._key}: {self._folder} cannot be locked ({error.strerror}): choose a folder on a local disk"
                ) from error
            log.warning("%s: %s cannot be locked (%s), so nothing keeps a second instance out of it",
                        self._key, self._folder, error.strerror)  # fmt: skip
            return descriptor
        if is_held and is_at(descriptor, path):
            return descriptor
        os.close(descriptor)
        return None

    def _write(self, descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, "".join(f"{line}\n" for line in (os.getpid(), *self._notes)).encode(), 0)

    def _refuse(self) -> None:
        """Raise ConfigError if the folder may not be used."""

    def _holder(self) -> str:
        return _named(holder(self._folder))

    def retake(self) -> bool:
        """Take the lock again, in a folder made anew if need be, where its file is gone, as after a cleaner of folders.

        Returns:
            Whether it was gone: what lay beside it may be gone, too.

        Raises:
            ConfigError: If another process holds the lock at the path, or the folder cannot be used.
        """
        lost = self._descriptor
        if lost is None or is_at(lost, self._folder / _LOCK):
            return False
        self.__enter__()
        os.close(lost)
        return True

    def __exit__(self, *_: object) -> None:
        """Remove the lock file and release the lock."""
        if self._descriptor is not None:
            # Before the release: a process that opens the path from here on makes and locks a new file.
            if is_at(self._descriptor, self._folder / _LOCK):
                # On a file system that is read-only by now the file stays: nobody holds it.
                with contextlib.suppress(OSError):
                    (self._folder / _LOCK).unlink()
            os.close(self._descriptor)
            self._descriptor = None


class InstanceLock(FolderLock):
    """The lock of a runtime directory: one instance for each."""

    def __init__(self, runtime_dir: Path) -> None:
        super().__init__(runtime_dir, "daemon.runtime_dir")

    def _refuse(self) -> None:
        if self._folder.stat().st_mode & 0o002:
            raise ConfigError(f"daemon.runtime_dir: {self._folder} can be written by everybody")


class StateLock(FolderLock):
    """The lock of a state directory: an instance of another runtime directory may not write there meanwhile.

    Args:
        state_dir: The state directory.
        runtime_dir: Runtime directory of this instance, for the message to another one.
        run: Name of this instance's run.
    """

    def __init__(self, state_dir: Path, runtime_dir: Path, run: str) -> None:
        super().__init__(state_dir, "daemon.state_dir", os.path.abspath(runtime_dir), run, needs_locks=False)

    def _write(self, descriptor: int) -> None:
        # A full disk does not stop a start: checkpoints may fit again later.
        with contextlib.suppress(OSError):
            super()._write(descriptor)

    def _holder(self) -> str:
        user = user_of(self._folder)
        return (
            _named(holder(self._folder)) if user is None else f"pid {user.pid}, daemon.runtime_dir {user.runtime_dir}"
        )


class SharedMemoryLock:
    """The lock of an instance's folder in shared memory, a flock of the folder itself; a context manager.

    Containers may share /dev/shm, as with ``--ipc=host``, and have the same paths in it: the lock of the runtime
    directory, which lies in the container, does not keep them apart.

    Args:
        folder: The folder; it may not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        """Take the lock if there is a folder; errors: those of `hold`."""
        self.hold()
        return self

    def hold(self) -> None:
        """Take the lock of the folder that is there now, which may be another one than before.

        Raises:
            ConfigError: If another process holds it.
        """
        try:
            descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            # None yet, or not this user's, which `Workspace.prepare` refuses.
            return
        if self._descriptor is not None and os.path.sameopenfile(descriptor, self._descriptor):
            os.close(descriptor)
            return
        if not try_lock(descriptor, fcntl.LOCK_EX):
            os.close(descriptor)
            raise ConfigError(
                f"daemon.runtime_dir: {self._folder} is in use by an instance of another container, which has the same "
                "path: give this one another daemon.runtime_dir"
            )
        self._release()
        self._descriptor = descriptor

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self._release()

    def _release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class StateUser(NamedTuple):
    """The live instance that uses a state directory."""

    pid: int
    runtime_dir: str
    run: str


def user_of(state_dir: Path) -> StateUser | None:
    """Return the live instance that uses a state directory; None without one, or before it is written."""
    try:
        if not holder(state_dir):
            return None
        pid, runtime_dir, run = (state_dir / _LOCK).read_text().splitlines()
        return StateUser(int(pid), runtime_dir, run)
    except (OSError, ValueError):
        return None


class InstanceRecord(msgspec.Struct, frozen=True):
    """The record of a running instance, read by commands.

    Attributes:
        pid: Pid of the supervisor.
        shm_dir: Folder of the instance in shared memory.
        url: Address of the HTTP server, empty if there is none.
        log: Place of its log, as in `pipeline.telemetry.run_log`.
    """

    pid: int
    shm_dir: str
    url: str = ""
    log: str = ""

    def write(self, runtime_dir: Path) -> None:
        """Write the record into the runtime directory in one rename; the caller holds its lock.

        Raises:
            ConfigError: If it cannot be written: no command would find the instance.
        """
        # A constant name: the unfinished file of a killed process is replaced by the next record.
        data = msgspec.json.encode(self) + b"\n"
        try:
            write_whole(runtime_dir / _RECORD, data, runtime_dir / _UNFINISHED_RECORD, flush=False)
        except OSError as error:
            raise ConfigError(f"daemon.runtime_dir: cannot use {runtime_dir}: {error.strerror}") from error

    @classmethod
    def read(cls, runtime_dir: Path) -> InstanceRecord:
        """Return the record in the runtime directory, of a live or a dead instance.

        Raises:
            FileNotFoundError: If there is none.
            UnreachableError: If it cannot be read.
        """
        path = runtime_dir / _RECORD
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except UNREADABLE as error:
            raise UnreachableError(f"{path} is no record of an instance: {error}") from error
        except PermissionError as error:
            raise UnreachableError(f"cannot read {path}: {error.strerror}") from error

    @staticmethod
    def is_there(runtime_dir: Path) -> bool:
        """Return whether there is a record in the runtime directory."""
        return (runtime_dir / _RECORD).exists()

    @staticmethod
    def remove(runtime_dir: Path) -> None:
        """Remove the record, if there is one, and an unfinished one; on a read-only file system both stay."""
        for name in (_UNFINISHED_RECORD, _RECORD):
            with contextlib.suppress(OSError):
                (runtime_dir / name).unlink()


def shm_directories() -> list[Path]:
    """Return the folders in shared memory of all instances of this user, killed ones included."""
    return sorted(_SHM.glob(f"rlhfd-{os.geteuid()}-*"))


def engines_socket(shm_dir: Path) -> Path:
    """Return the path of the socket of an instance's forkserver of engines."""
    return shm_dir / "engines.sock"


def shm_directory(runtime_dir: str | os.PathLike[str], uid: int | None = None) -> Path:
    """Return the path of the folder in shared memory of the instance of `runtime_dir`; the folder is not made.

    Args:
        runtime_dir: The instance's runtime directory.
        uid: The instance's user; this process's by default.
    """
    digest = hashlib.blake2b(os.fsencode(os.path.realpath(runtime_dir))).hexdigest()
    return _SHM / f"rlhfd-{os.geteuid() if uid is None else uid}-{digest[:10]}"


def holder(runtime_dir: Path) -> int | None:
    """Return the pid of the supervisor that holds a folder, 0 before it is written, None without a holder.

    Args:
        runtime_dir: A runtime directory, or a state directory.

    Raises:
        UnreachableError: If this user may not read the lock.
    """
    path = runtime_dir / _LOCK
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise UnreachableError(f"cannot read {path}: {error.strerror}") from error
    try:
        if try_lock(descriptor, fcntl.LOCK_SH):
            return None
        text = os.pread(descriptor, 32, 0).partition(b"\n")[0].strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(descriptor)


def find(runtime_dir: Path) -> InstanceRecord:
    """Return the record of the instance that runs in a runtime directory.

    Raises:
        NotRunningError: If none runs there.
        UnreachableError: If one runs there without a readable record.
    """
    pid = holder(runtime_dir)
    if pid is None:
        left = shm_directory(runtime_dir)
        killed = f"; one was killed, and has left {left} to the next start" if (left / "run.json").exists() else ""
        raise NotRunningError(f"no instance runs in {runtime_dir}{killed}")
    with contextlib.suppress(FileNotFoundError):
        # A record with another pid is of a killed instance.
        if (record := InstanceRecord.read(runtime_dir)).pid == pid:
            return record
    refuse_stopped(pid)
    raise UnreachableError(f"{_named(pid)} in {runtime_dir} does not answer: it starts or ends, or runs with --serial")


def terminate(runtime_dir: Path) -> None:
    """Send SIGTERM to the supervisor that holds the runtime directory, and to no other process.

    Raises:
        NotRunningError: If no process holds it.
        UnreachableError: If this user may not signal the process.
    """
    not_running = f"no instance runs in {runtime_dir}"
    if not (pid := holder(runtime_dir)):
        raise NotRunningError(not_running)
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        raise NotRunningError(not_running) from None
    try:
        # The pid in the file may be of a dead process, and assigned to another process since.
        if not _has_open(pid, runtime_dir / _LOCK):
            raise NotRunningError(not_running)
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it has exited by itself, which is the purpose
    except PermissionError as error:
        raise UnreachableError(f"{_named(pid)} in {runtime_dir} belongs to another user") from error
    finally:
        os.close(descriptor)


def wait_until_released(runtime_dir: Path, timeout_s: float) -> bool:
    """Wait until no process holds the runtime directory; return False after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while holder(runtime_dir) is not None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _has_open(pid: int, path: Path) -> bool:
    try:
        return any(entry.exists() and entry.samefile(path) for entry in Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        return False


def _named(pid: int | None) -> str:
    return f"pid {pid}" if pid else "an instance"
