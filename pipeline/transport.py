"""ZeroMQ between the processes of one instance: each listens on one PULL socket and pushes to the others.

Sockets lie in the instance's shared-memory folder (0700), so no path is ever too long for one. Queues are unbounded on
purpose: tickets, leases and credits already bound what can be under way, and a full queue that drops or blocks would
lose an acknowledgement.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Protocol

import zmq

from pipeline.errors import ConfigError, DecodeError
from pipeline.messages import Message, decode, encode

BUFFER = "buffer"
_MAX_MESSAGE_BYTES = 64 << 20
_MAX_BURST = 1024

log = logging.getLogger(__name__)


def worker_name(index: int) -> str:
    """Return the peer name of a rollout worker."""
    return f"worker-{index}"


def trainer_name(rank: int) -> str:
    """Return the peer name of a trainer rank."""
    return f"trainer-{rank}"


class Sender(Protocol):
    """Whatever a role's messages go out through: ZeroMQ, or a queue when all roles share one process."""

    def send(self, message: Message) -> None:
        """Queue a message; never blocks."""


class Mailbox:
    """What others say to this process; owns the socket and its file.

    Attributes:
        refused: Messages that did not decode, dropped.
        received: Messages that did.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{name}.sock"
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        previous = os.umask(0o177)
        try:
            self._socket.bind(f"ipc://{self._path}")
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {self._path}: {error.strerror}") from error
        finally:
            os.umask(previous)
        self.refused = 0
        self.received = 0

    def receive(self, timeout_s: float) -> list[Message]:
        """Return what has come, waiting up to `timeout_s` for the first message."""
        deadline = time.monotonic() + timeout_s
        messages: list[Message] = []
        while len(messages) < _MAX_BURST:
            wait_ms = 0 if messages else max(0, int((deadline - time.monotonic()) * 1000 + 0.999))
            if not self._socket.poll(wait_ms):
                return messages
            data = self._socket.recv(zmq.NOBLOCK)
            try:
                messages.append(decode(data))
                self.received += 1
            except DecodeError as error:
                self.refused += 1
                log.warning("message refused: %s", error)
        return messages

    def close(self) -> None:
        """Close the socket and remove its file."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


class Outbox:
    """Sends to one peer, whether it is there already or not; keeps the order."""

    def __init__(self, folder: Path, peer: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._socket.connect(f"ipc://{folder / f'{peer}.sock'}")
        self.sent = 0

    def send(self, message: Message) -> None:
        """Queue a message; never blocks."""
        self._socket.send(encode(message), zmq.NOBLOCK)
        self.sent += 1

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close, giving what is queued up to `linger_s` to leave."""
        self._socket.close(linger=int(linger_s * 1000))
