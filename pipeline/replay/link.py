"""A client's way to the server of a `DetachedReplayBuffer`: the folder in shared memory, the client's lock and sockets.

arena           ledger and experience               settings.json   what the buffer was made with
owner.lock      held by the process that made it    client-N.lock   held by a client; says which lease it was given last
buffer.sock     the server's mail                   client-N.*.sock the client's
*.kind          what every row has in common        closed          why there is no server any more

Locks are flock's: the kernel drops them with their process, however it dies.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import random
import secrets
import shutil
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from pipeline.arena import Arena
from pipeline.errors import ArenaFullError, BufferClosedError, ConfigError, DeadlineError, UnreachableError
from pipeline.ledger_records import LedgerLayout
from pipeline.messages import Join, Message, Refused, Welcome
from pipeline.replay.queue import client_name
from pipeline.transport import BUFFER, Mailbox, Outbox

SHARED_MEMORY = Path("/dev/shm")
CALL_S = 30.0
"""Longest wait for the answer to a message that the server can answer at once."""

_MOST_CLIENTS = 1 << 15
_LOOK_S = 0.25
_REPEAT_S = 0.5
_UNANSWERED_S = 30.0
_ABANDONED_S = 60.0
_LEASE = struct.Struct("<q")

_locks: set[int] = set()


class Settings(msgspec.Struct, frozen=True):
    """What a buffer was made with."""

    sample_batch_size: int
    limit: int
    owner_pid: int
    extents: int
    rows_per_extent: int

    @property
    def layout(self) -> LedgerLayout:
        """The ledger's."""
        return LedgerLayout(self.extents, self.rows_per_extent)

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """Return those of the buffer in `folder`.

        Raises:
            BufferClosedError: If there is none.
        """
        try:
            return msgspec.json.decode((folder / "settings.json").read_bytes(), type=cls)
        except (FileNotFoundError, NotADirectoryError):
            raise BufferClosedError(f"no replay buffer in {folder}: it was closed, or its owner died") from None


def make_folder(settings: Settings, arena_bytes: int) -> tuple[Path, int]:
    """Make a buffer's folder, whole or not at all; return it and the owner's lock.

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
        # Locked and whole under this name, so that no other process takes it for one that was left behind.
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        unlock(lock)
        raise
    return folder, lock


def sweep() -> None:
    """Remove the folders of this user's buffers whose owner is dead and whose server did not live to do it."""
    for folder in SHARED_MEMORY.glob(f"{_prefix()}*"):
        with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError):
            unfinished = folder.suffix == ".new" and time.time() - folder.stat().st_mtime < _ABANDONED_S
            if not unfinished and folder.stat().st_uid == os.getuid():
                lock = _lock(folder / "owner.lock", create=False)
                shutil.rmtree(folder, ignore_errors=True)
                unlock(lock)


def write_private(path: Path, data: bytes) -> bool:
    """Make a file of mode 0600, at once whole; return False and leave it alone where there is one already."""
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
        # Shared, so that two who look at once do not take each other for the holder.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def remember_lease(folder: Path, client: str, lease: int) -> None:
    """Write down which lease a client is given."""
    descriptor = os.open(folder / f"{client}.lock", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, _LEASE.pack(lease), 0)
    finally:
        os.close(descriptor)


def remembered_leases(folder: Path) -> dict[str, int]:
    """Return the lease that each client was given last."""
    found = {path.stem: path.read_bytes() for path in folder.glob("client-*.lock")}
    return {client: _LEASE.unpack(data)[0] for client, data in found.items() if len(data) == _LEASE.size}


def unlock(descriptor: int) -> None:
    """Let go of a lock."""
    _locks.discard(descriptor)
    os.close(descriptor)


def _prefix() -> str:
    return f"rlhfd-replay-{os.getuid()}-"


def _lock(path: Path, *, create: bool = True) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT * create | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    _locks.add(descriptor)
    return descriptor


def _after_fork() -> None:
    # A lock lives as long as any copy of its descriptor: a forked child must not keep its dead parent's.
    for descriptor in _locks:
        os.close(descriptor)
    _locks.clear()


os.register_at_fork(after_in_child=_after_fork)


class Link:
    """One client of the server, with one request under way at a time.

    Attributes:
        incarnation: Another one for each server it meets, so that answers of a dead one are known for what they are.
        request: Number of the request under way.
        ticket: The ticket in hand, -1 without one; `lease` likewise.
        busy: Whether a request is under way, or something in hand. Closed like that, the server takes it for dead.
        cancelled: Whether this process has closed its end meanwhile.
    """

    def __init__(self, folder: Path, owner_pid: int) -> None:
        self._folder = folder
        self._owner_pid = owner_pid
        self.name, self._descriptor = _lock_client(folder)
        self.incarnation = random.getrandbits(62)
        self._server = 0
        # Never a name that another had: ZeroMQ removes the file of a closed socket some time later.
        self._socket = f"{self.name}.{self.incarnation:x}"
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

    def ask(self, make: Callable[[], Message], is_answer: Callable[[Message], bool], deadline_s: float) -> Message:
        """Send what `make` returns, and again to a server that may not have it, until the answer comes.

        Args:
            make: Builds the message; called again after the link has got another incarnation.
            is_answer: Tells the answer.
            deadline_s: Monotonic time at which the server has refused at the latest.

        Raises:
            ArenaFullError: If it does not fit, and never will.
            BufferClosedError: If the buffer was closed.
            DeadlineError: If the server said that the deadline is over.
            UnreachableError: If it said nothing for long after the deadline.
        """
        self.request += 1
        self.busy = True
        if not self._server:
            self._join()
        said_s = self._say(make)
        while True:
            while self._mail:
                message = self._mail.popleft()
                if isinstance(message, Welcome):
                    if message.incarnation != self._server:
                        self._meet(message.incarnation)
                        said_s = self._say(make)
                elif isinstance(message, Refused):
                    if (message.to, message.request) == (self.incarnation, self.request):
                        self._raise(message)
                elif getattr(message, "to", None) == self.incarnation and is_answer(message):
                    return message
            self._mail.extend(self._mailbox.receive(_LOOK_S))
            if not self._mail:
                self._look(deadline_s)
                if time.monotonic() - said_s > _REPEAT_S:
                    # One server may have died with it; a server that has it already takes no note.
                    self._join()
                    said_s = self._say(make)

    def done(self) -> None:
        """Nothing is under way or in hand any more."""
        self.busy = False
        self.ticket = self.lease = -1

    def close(self) -> None:
        """Disconnect; what was under way is void."""
        self._outbox.close(linger_s=1.0)
        self._mailbox.close()
        unlock(self._descriptor)

    def _say(self, make: Callable[[], Message]) -> float:
        self._outbox.send(make())
        return time.monotonic()

    def _join(self) -> None:
        self._outbox.send(Join(self.name, self.incarnation, self._socket, self._server, self.ticket, self.lease))

    def _meet(self, server: int) -> None:
        self._server = server
        self.incarnation = random.getrandbits(62)
        self._join()

    def _raise(self, refused: Refused) -> NoReturn:
        self.done()
        if refused.kind == "deadline":
            raise DeadlineError(refused.reason)
        if refused.kind == "arena":
            raise ArenaFullError(refused.reason)
        raise BufferClosedError(f"replay buffer {self._folder.name}: {refused.reason}")

    def _look(self, deadline_s: float) -> None:
        """Raise if no answer will ever come."""
        if self.cancelled:
            raise BufferClosedError(f"replay buffer {self._folder.name}: this process has closed its end")
        refuse_closed(self._folder, self._owner_pid)
        if time.monotonic() > deadline_s + _UNANSWERED_S:
            raise UnreachableError(f"the server of replay buffer {self._folder.name} does not answer")


def refuse_closed(folder: Path, owner_pid: int) -> None:
    """Raise BufferClosedError if the buffer is closed or nobody is there to serve it."""
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
            return client_name(index), _lock(folder / f"{client_name(index)}.lock")
    raise ConfigError(f"{_MOST_CLIENTS:,} clients are connected to {folder}, and that is the most")


class Links:
    """This process's links, as many as it has calls under way at once. Safe for threads, and after a fork."""

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
        """Lend a link; one that something went wrong with in the middle of a request is closed."""
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
            # The folder may have gone since we looked.
            refuse_closed(self._folder, self._owner_pid)
            raise

    def close(self) -> None:
        """Close the idle links now, and each other one when its call ends, which is soon."""
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, []
            for link in self._busy:
                link.cancelled = True
        for link in idle:
            link.close()

    def forget(self) -> None:
        """Leave all links to the process that this one was forked from: ZeroMQ does not survive a fork."""
        self._idle, self._busy, self._lock = [], set(), threading.Lock()


_all_links: weakref.WeakSet[Links] = weakref.WeakSet()


def _forget_links() -> None:
    for links in _all_links:
        links.forget()


os.register_at_fork(after_in_child=_forget_links)
