"""A client's connection to the server of a `DetachedReplayBuffer`: the folder in shared memory, its lock and sockets.

arena           ledger and experience               settings.json   the arguments of the buffer
owner.lock      held by the process that made it    client-N.lock   held by a client; holds the number of its last lease
buffer.sock     the server's socket                 client-N.*.sock the client's socket
*.kind          the schema that all rows share      closed          the reason why there is no server any more

Locks are flocks: the kernel releases them when their process dies, for any cause.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import secrets
import shutil
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from pipeline.errors import ArenaFullError, BufferClosedError, ConfigError, DeadlineError, UnreachableError
from pipeline.replay.queue import client_name
from pipeline.runtime.messages import (
    Ack,
    Books,
    Damaged,
    Delivered,
    Failed,
    Join,
    Lease,
    Message,
    Refused,
    Sealed,
    Settled,
    Ticket,
    Welcome,
)
from pipeline.runtime.peer import Peer
from pipeline.runtime.transport import BUFFER, Mailbox, Outbox
from pipeline.storage.arena import Arena
from pipeline.storage.files import try_lock
from pipeline.storage.layout import LedgerLayout

SHARED_MEMORY = Path("/dev/shm")
CALL_S = 30.0
"""Longest wait for the answer to a message that the server can answer at once."""

ROWS_PER_EXTENT = 1024
_LEAST_EXTENTS = 2048
_MOST_CLIENTS = 1 << 15
_CHECK_S = 0.25
_REPEAT_S = 0.5
_UNANSWERED_S = 30.0
_ABANDONED_S = 60.0
Request = Callable[[tuple[str, int, int]], Message]
Answer = TypeVar("Answer", Ticket, Lease, Books, Settled, Delivered)
_LEASE = struct.Struct("<q")

_locks: set[int] = set()


class Settings(msgspec.Struct, frozen=True):
    """The arguments that a buffer was made with, and the layout that follows from them."""

    sample_batch_size: int
    limit: int
    owner_pid: int

    @property
    def layout(self) -> LedgerLayout:
        """Layout of the ledger."""
        return LedgerLayout(max(_LEAST_EXTENTS, 2 * self.sample_batch_size), ROWS_PER_EXTENT)

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """Return the settings of the buffer in `folder`.

        Raises:
            BufferClosedError: If there is no buffer in `folder`.
        """
        try:
            return msgspec.json.decode((folder / "settings.json").read_bytes(), type=cls)
        except (FileNotFoundError, NotADirectoryError):
            raise BufferClosedError(f"no replay buffer in {folder}: it was closed, or its owner died") from None


def make_folder(settings: Settings, arena_bytes: int) -> tuple[Path, int]:
    """Make a buffer's folder, whole or not at all; return the folder and the descriptor of the owner's lock.

    Raises:
        ConfigError: If shared memory has no room for the arena.
    """
    folder = SHARED_MEMORY / f"{_prefix()}{secrets.token_hex(8)}"
    unfinished = folder.with_suffix(".new")
    unfinished.mkdir(mode=0o700)
    lock = _lock(unfinished / "owner.lock")
    try:
        layout = settings.layout
        Arena.create(
            unfinished / "arena", payload_bytes=arena_bytes, ledger_bytes=layout.nbytes, layout=layout.identity
        )
        write_private(unfinished / "settings.json", msgspec.json.encode(settings))
        # Renamed once locked and whole: another process never takes the folder for an abandoned one.
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        unlock(lock)
        raise
    return folder, lock


def sweep() -> None:
    """Remove the folders of this user's buffers whose owner died and whose server died before it could remove them.

    One without a lock is not made whole, or not removed whole, by a process that died.
    """
    for folder in SHARED_MEMORY.glob(f"{_prefix()}*"):
        with contextlib.suppress(OSError):
            unfinished = folder.suffix == ".new" and time.time() - folder.stat().st_mtime < _ABANDONED_S
            if not unfinished and folder.stat().st_uid == os.getuid():
                lock = _lock(folder / "owner.lock")
                shutil.rmtree(folder, ignore_errors=True)
                unlock(lock)


def write_private(path: Path, data: bytes) -> bool:
    """Make a file of mode 0600 that appears whole; return False and leave an existing file unchanged."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, data)
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        os.close(descriptor)
        temporary.unlink()
    return True


def is_held(folder: Path, name: str) -> bool:
    """Return whether a living process holds a lock."""
    try:
        descriptor = os.open(folder / f"{name}.lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # A shared lock: two processes that check at once do not take each other for the holder.
        return not try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def remember_lease(folder: Path, client: str, lease: int) -> None:
    """Record the lease that a client gets, -1 for none."""
    descriptor = os.open(folder / f"{client}.lock", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, _LEASE.pack(lease), 0)
    finally:
        os.close(descriptor)


def remembered_leases(folder: Path) -> dict[str, int]:
    """Return the last recorded lease of each client."""
    found = {path.stem: path.read_bytes() for path in folder.glob("client-*.lock")}
    return {client: _LEASE.unpack(data)[0] for client, data in found.items() if len(data) == _LEASE.size}


def unlock(descriptor: int) -> None:
    """Release a lock."""
    _locks.discard(descriptor)
    os.close(descriptor)


def _prefix() -> str:
    return f"rlhfd-replay-{os.getuid()}-"


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not try_lock(descriptor, fcntl.LOCK_EX):
        os.close(descriptor)
        raise BlockingIOError(f"{path} is locked")
    _locks.add(descriptor)
    return descriptor


def _after_fork() -> None:
    # A lock is held while any copy of its descriptor is open: a forked child must not hold the locks of a dead parent.
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_after_fork)


class Link:
    """One client of the server, with one request in flight at a time.

    Attributes:
        peer: This side of the conversation with the server; answers of a dead server are void.
        request: Number of the request in flight.
        ticket: The ticket in hand, -1 without one.
        lease: The lease in hand, -1 without one.
        busy: Whether a request is in flight, or a ticket or lease in hand. If a busy link is closed, the server handles
            the client as dead.
        cancelled: Whether this process has closed the buffer meanwhile.
    """

    def __init__(self, folder: Path, owner_pid: int) -> None:
        self._folder = folder
        self._owner_pid = owner_pid
        self.name, self._descriptor = _lock_client(folder)
        self.peer = Peer()
        # A socket name is never reused: ZeroMQ removes the file of a closed socket some time later.
        self._socket = f"{self.name}.{self.peer.incarnation:x}"
        try:
            self._mailbox = Mailbox(folder, self._socket)
        except ConfigError:
            unlock(self._descriptor)
            raise
        self._outbox = Outbox(folder, BUFFER)
        self._mail: collections.deque[Message] = collections.deque()
        self.request = 0
        self.ticket = self.lease = -1
        self.busy = False
        self.cancelled = False

    def ask(
        self,
        make: Request,
        kind: type[Answer],
        deadline_s: float,
        is_own: Callable[[Answer], bool] = lambda answer: True,
    ) -> Answer:
        """Send a request, repeat it to a server that may not have it, and return the answer.

        Args:
            make: Returns the message from the client's name, its incarnation and the request's number; called
                again after the incarnation has changed.
            kind: The type of the answer.
            deadline_s: Monotonic time at which the server refuses the request at the latest.
            is_own: Returns whether an answer is one to this request.

        Raises:
            ArenaFullError: If the rows do not fit, and never will.
            BufferClosedError: If the buffer was closed.
            DeadlineError: If the server refused the request at its deadline.
            UnreachableError: If the server has not answered 30 s after the deadline.
        """
        self.request += 1
        self.busy = True
        if self.peer.server is None:
            self._join()
        sent_s = self._send(make)
        while True:
            while self._mail:
                message = self._mail.popleft()
                if isinstance(message, Welcome):
                    if self.peer.meets(message):
                        self._join()
                        sent_s = self._send(make)
                elif isinstance(message, Refused):
                    if (message.to, message.request) == (self.peer.incarnation, self.request):
                        self._raise(message)
                elif isinstance(message, kind) and message.to == self.peer.incarnation and is_own(message):
                    return message
            self._mail.extend(self._mailbox.receive(_CHECK_S))
            if not self._mail:
                self._check_alive(deadline_s)
                if time.monotonic() - sent_s > _REPEAT_S:
                    # The server may have died with the request; a server that has it already ignores the repeat.
                    self._join()
                    sent_s = self._send(make)

    def end(self, message: Sealed | Failed | Ack | Damaged) -> None:
        """Send what ends the ticket or the lease in hand, and wait until the server has recorded it; errors: `ask`."""
        deadline_s = time.monotonic() + CALL_S
        if isinstance(message, Sealed | Failed):
            self.ask(lambda _: message, Settled, deadline_s, lambda answer: answer.ticket == message.ticket)
        else:
            self.ask(lambda _: message, Delivered, deadline_s, lambda answer: answer.lease == message.lease)
        self.done()

    def done(self) -> None:
        """End the request: nothing is in flight or in hand any more."""
        self.busy = False
        self.ticket = self.lease = -1

    def close(self) -> None:
        """Disconnect; a request in flight is void."""
        self._outbox.close(linger_s=1.0)
        self._mailbox.close()
        unlock(self._descriptor)

    def _send(self, make: Request) -> float:
        self._outbox.send(make((self.name, self.peer.incarnation, self.request)))
        return time.monotonic()

    def _join(self) -> None:
        peer = self.peer
        self._outbox.send(Join(self.name, peer.incarnation, self._socket, peer.server or 0, self.ticket, self.lease))

    def _raise(self, refused: Refused) -> NoReturn:
        self.done()
        if refused.kind == "deadline":
            raise DeadlineError(refused.reason)
        if refused.kind == "arena":
            raise ArenaFullError(refused.reason)
        raise BufferClosedError(f"replay buffer {self._folder.name}: {refused.reason}")

    def _check_alive(self, deadline_s: float) -> None:
        """Raise if no answer can come any more."""
        if self.cancelled:
            raise BufferClosedError(f"replay buffer {self._folder.name}: this process has closed its end")
        refuse_closed(self._folder, self._owner_pid)
        if time.monotonic() > deadline_s + _UNANSWERED_S:
            raise UnreachableError(f"the server of replay buffer {self._folder.name} does not answer")


def refuse_closed(folder: Path, owner_pid: int) -> None:
    """Raise BufferClosedError if the buffer is closed or its owner is dead."""
    try:
        reason = (folder / "closed").read_text()
    except FileNotFoundError:
        if not folder.exists():
            reason = f"closed by its owner, pid {owner_pid}, or ended with it"
        elif not is_held(folder, "owner"):
            reason = f"its owner, pid {owner_pid}, died"
        else:
            return
    raise BufferClosedError(f"replay buffer {folder.name}: {reason}")


def _lock_client(folder: Path) -> tuple[str, int]:
    for index in range(_MOST_CLIENTS):
        with contextlib.suppress(BlockingIOError):
            descriptor = _lock(folder / f"{client_name(index)}.lock")
            if not os.fstat(descriptor).st_size:
                _reserve_lease(descriptor)
            return client_name(index), descriptor
    raise ConfigError(f"{_MOST_CLIENTS:,} clients are connected to {folder}, and that is the most")


def _reserve_lease(descriptor: int) -> None:
    """Write the number for no lease, so that the server's later writes need no room: others may fill shared memory.

    Raises:
        ConfigError: If there is no room now.
    """
    try:
        os.pwrite(descriptor, _LEASE.pack(-1), 0)
    except OSError as error:
        unlock(descriptor)
        raise ConfigError(f"no room in {SHARED_MEMORY} to connect to a replay buffer: {error.strerror}") from error


class LinkPool:
    """This process's links, one for each concurrent call. Safe for threads, and after a fork."""

    def __init__(self, folder: Path, owner_pid: int) -> None:
        self._folder = folder
        self._owner_pid = owner_pid
        self._idle: list[Link] = []
        self._busy: set[Link] = set()
        self._lock = threading.Lock()
        self.closed = False
        _all_links.add(self)

    @contextlib.contextmanager
    def take(self) -> Iterator[Link]:
        """Lend a link; a link that is still busy afterwards, because its call failed, is closed."""
        if self.closed:
            raise BufferClosedError(f"replay buffer {self._folder.name}: closed by this process")
        refuse_closed(self._folder, self._owner_pid)
        with self._lock:
            link = self._idle.pop() if self._idle else None
        link = link or self._new_link()
        with self._lock:
            self._busy.add(link)
            link.cancelled = self.closed
        try:
            yield link
        finally:
            with self._lock:
                self._busy.discard(link)
                if keep := not (link.busy or self.closed):
                    self._idle.append(link)
            if not keep:
                link.close()

    def _new_link(self) -> Link:
        try:
            return Link(self._folder, self._owner_pid)
        except (FileNotFoundError, ConfigError):
            # The folder may have been removed since the check.
            refuse_closed(self._folder, self._owner_pid)
            raise

    def close(self) -> None:
        """Close the idle links now, and each busy link when its call ends, which is soon."""
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, []
            for link in self._busy:
                link.cancelled = True
        for link in idle:
            link.close()

    def forget(self) -> None:
        """Leave all links to the parent process: ZeroMQ does not survive a fork."""
        self._idle, self._busy, self._lock = [], set(), threading.Lock()


_all_links: weakref.WeakSet[LinkPool] = weakref.WeakSet()


def _forget_links() -> None:
    for links in _all_links:
        links.forget()


os.register_at_fork(after_in_child=_forget_links)
