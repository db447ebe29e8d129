"""The process behind a `DetachedReplayBuffer`: ZeroMQ and the arena's ledger around `pipeline.replay.queue`.

Its owner starts it, and restarts it if it dies. It ends with its owner and removes the folder.
"""

from __future__ import annotations

import collections
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from pipeline.replay.client import Settings, is_held, remember_lease, remembered_leases, unlock, write_private
from pipeline.replay.queue import ReplayQueue
from pipeline.runtime.messages import Join, Message, PeerDied
from pipeline.runtime.transport import BUFFER, Mailbox, Outbox
from pipeline.storage.allocator import ExtentAllocator
from pipeline.storage.arena import Arena
from pipeline.storage.ledger import Ledger

_CHECK_S = 0.25
_MOST_STARTS = 5
_STARTS_WITHIN_S = 60.0
_CLOSE_S = 5.0
# The package may be importable only from the owner's working directory. Its path is appended last, so that it shadows
# no other module.
_START = "import sys; sys.path.append(sys.argv[1]); from pipeline.replay.server import main; main(*sys.argv[2:])"

log = logging.getLogger(__name__)


class ReplayServer:
    """The server process and the folder, held by the owner. Closed once, by the process that made it."""

    def __init__(self, folder: Path, lock: int) -> None:
        """Start the server; if that fails, the folder is removed.

        Args:
            folder: The buffer's folder, made by `make_folder`.
            lock: Descriptor of the owner's lock.

        Raises:
            OSError: If no process can be started.
        """
        self.folder = folder
        self.owner_pid = os.getpid()
        self._lock = lock
        self._closing = threading.Event()
        self._starts: collections.deque[float] = collections.deque(maxlen=_MOST_STARTS)
        try:
            self._process = self._start()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            unlock(lock)
            raise
        self._watcher = threading.Thread(target=self._watch, name="rlhfd-replay-watch", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Process id of the newest server."""
        return self._process.pid

    def close(self) -> None:
        """End the server, which refuses every waiting request, and remove the folder. No effect in another process."""
        if self._closing.is_set() or os.getpid() != self.owner_pid:
            return
        self._closing.set()
        outbox = Outbox(self.folder, BUFFER)
        outbox.send(PeerDied("owner"))
        self._watcher.join(_CLOSE_S)
        outbox.close()
        if self._watcher.is_alive():
            self._process.kill()
            self._watcher.join()
        shutil.rmtree(self.folder, ignore_errors=True)
        unlock(self._lock)

    def _start(self) -> subprocess.Popen[bytes]:
        self._starts.append(time.monotonic())
        package_root = Path(__file__).parents[2]
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _START, str(package_root), str(self.folder), str(self.owner_pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # A session of its own: a ^C on the terminal goes to the owner, not to the server.
            start_new_session=True,
        )

    def _watch(self) -> None:
        while True:
            pid, code = self._process.pid, self._process.wait()
            if self._closing.is_set():
                return
            reason = f"its server, pid {pid}, ended with {code}"
            try:
                if len(self._starts) == _MOST_STARTS and time.monotonic() - self._starts[0] < _STARTS_WITHIN_S:
                    self._give_up(f"{reason}, for the {_MOST_STARTS}th time in a minute")
                    return
                log.warning("the replay buffer's server died and is started again: pid=%d code=%d", pid, code)
                self._process = self._start()
            except OSError as error:
                self._give_up(f"{reason}, and a new one cannot be started: {error}")
                return

    def _give_up(self, reason: str) -> None:
        log.error("replay buffer given up: folder=%s reason=%s", self.folder, reason)
        try:
            write_private(self.folder / "closed", reason.encode())
        except OSError as error:
            log.error("its clients do not get the reason: %s", error)
            # Without its folder it is closed for all of them.
            shutil.rmtree(self.folder, ignore_errors=True)


def main(folder: str, owner_pid: str) -> None:
    """Serve until the owner closes the buffer or dies."""
    import setproctitle

    from pipeline.telemetry.log import configure

    configure("replay-server")
    setproctitle.setproctitle(f"rlhfd: replay buffer of pid {owner_pid}")
    serve(Path(folder), int(owner_pid))


def serve(folder: Path, owner_pid: int) -> None:
    """Serve the buffer in `folder` as the child of its owner."""
    settings = Settings.read(folder)
    arena = Arena(folder / "arena", payload=False)
    ledger = Ledger(arena.ledger, settings.layout)
    mailbox, outboxes = Mailbox(folder, BUFFER), _Outboxes(folder)
    leases = remembered_leases(folder)
    for client, lease in leases.items():
        if lease not in ledger.leases:
            # The lease has ended, or was never made; then its number goes to another batch.
            remember_lease(folder, client, -1)
    queue = ReplayQueue(
        ledger, ExtentAllocator(arena.payload_bytes), outboxes.send,
        sample_batch_size=settings.sample_batch_size, limit=settings.limit,
        holders={lease: client for client, lease in leases.items()},
        remember=lambda client, lease: remember_lease(folder, client, lease),
        owner=f"its owner, pid {owner_pid}",
    )  # fmt: skip
    checked_s = 0.0
    try:
        while not queue.closed:
            now_s = time.monotonic()
            for message in mailbox.receive(max(0.0, min(_CHECK_S, queue.next_deadline_s() - now_s))):
                outboxes.note(message)
                queue.handle(message, time.monotonic())
            if (now_s := time.monotonic()) - checked_s >= _CHECK_S:
                checked_s = now_s
                _report_deaths(queue, folder, outboxes, now_s)
                if os.getppid() != owner_pid:
                    queue.close(f"its owner, pid {owner_pid}, died")
            queue.step(now_s)
    finally:
        outboxes.close()
        mailbox.close()
        ledger.close()
        arena.close()
        if os.getppid() != owner_pid:
            shutil.rmtree(folder, ignore_errors=True)


def _report_deaths(queue: ReplayQueue, folder: Path, outboxes: _Outboxes, now_s: float) -> None:
    for client in queue.clients:
        if not is_held(folder, client):
            queue.handle(PeerDied(client), now_s)
            outboxes.drop(client)


class _Outboxes:
    """One outbox a client, to the socket named in its `Join`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, tuple[str, Outbox]] = {}

    def note(self, message: Message) -> None:
        """Open an outbox for a client that joins."""
        if isinstance(message, Join) and self._open.get(message.client, ("",))[0] != message.socket:
            self.drop(message.client)
            self._open[message.client] = (message.socket, Outbox(self._folder, message.socket))

    def send(self, client: str, message: Message) -> None:
        """Queue a message; dropped if the client has not joined this server, as it repeats its request anyway."""
        if client in self._open:
            self._open[client][1].send(message)

    def drop(self, client: str) -> None:
        """Close a dead client's outbox, and remove its socket, whose name is never used again."""
        if client in self._open:
            socket, outbox = self._open.pop(client)
            outbox.close()
            (self._folder / f"{socket}.sock").unlink(missing_ok=True)

    def close(self) -> None:
        """Close every outbox; each has 0.5 s to send its last messages."""
        for _, outbox in self._open.values():
            outbox.close(linger_s=0.5)
