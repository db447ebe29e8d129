"""ZeroMQ between the processes of one instance: each receives on one PULL socket and pushes to the others.

Sockets lie in the instance's shared-memory folder (0700), so no path is too long for a socket. A sender's queue is
unbounded on purpose: tickets, leases and credits bound the messages in flight, and a full queue that drops or blocks
would lose an acknowledgement. A receiver's queue is bounded: further messages wait at their sender, so a sender that
floods it uses its own memory.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol, cast

import zmq

from pipeline.errors import ConfigError, DecodeError
from pipeline.runtime.messages import Message, decode, encode
from pipeline.telemetry.writer import Counter, MetricWriter

BUFFER = "buffer"
# A plain number: the combination of an enum's flags takes half the time of a socket check.
_READABLE = int(zmq.POLLIN)
_MAX_MESSAGE_BYTES = 64 << 20
_MAX_BURST = 1024
_MAX_AHEAD = 4096
_LOG_EVERY_S = 60.0

log = logging.getLogger(__name__)


def worker_name(index: int) -> str:
    """Return the peer name of a rollout worker."""
    return f"worker-{index}"


def trainer_name(rank: int) -> str:
    """Return the peer name of a trainer rank."""
    return f"trainer-{rank}"


class Sender(Protocol):
    """The way out of a role's messages: ZeroMQ, or a queue if all roles are in one process."""

    def send(self, message: Message) -> None:
        """Queue a message; never blocks."""


class Traffic:
    """Counts one process's messages; the channel is named by its receiving end."""

    def __init__(self, metrics: MetricWriter) -> None:
        self._metrics = metrics
        # The lookup of a counter by its labels costs more than a message.
        self._counters: dict[tuple[str, str], tuple[Counter, Counter]] = {}
        self._drops: dict[str, Counter] = {}

    def count(self, peer: str, direction: Literal["sent", "received"], messages: int, nbytes: int) -> None:
        """Count messages to or from the mailbox of a peer."""
        channel = BUFFER if peer == BUFFER else "peer"
        counters = self._counters.get((channel, direction))
        if counters is None:
            counters = self._counters[channel, direction] = (
                self._metrics.counter("rlhfd_ipc_messages_total", channel=channel, direction=direction),
                self._metrics.counter("rlhfd_ipc_bytes_total", channel=channel, direction=direction),
            )
        counters[0].inc(messages)
        counters[1].inc(nbytes)

    def drop(self, peer: str, messages: int) -> None:
        """Count messages to the mailbox of a peer that do not decode or are impossible."""
        channel = BUFFER if peer == BUFFER else "peer"
        if channel not in self._drops:
            self._drops[channel] = self._metrics.counter("rlhfd_ipc_drops_total", channel=channel)
        if messages:
            self._drops[channel].inc(messages)


class Mailbox:
    """The receiving socket of this process; owns the socket and its file.

    Attributes:
        refused: Messages that did not decode, dropped.
        received: Messages that did.
    """

    def __init__(self, folder: Path, name: str, traffic: Traffic | None = None) -> None:
        self._name = name
        self._traffic = traffic
        self._logged_s = -math.inf
        self._refused_unlogged = 0
        self._path = folder / f"{name}.sock"
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_AHEAD)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        try:
            self._socket.bind(f"ipc://{self._path}")
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {self._path}: {error.strerror}") from error
        # No umask: that of the process is the one of its other threads too. The folder is this user's alone.
        self._path.chmod(0o600)
        # Kept: a new poller for each wait costs more than the wait's own call.
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self.refused = 0
        self.received = 0

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for a message; return whether there is one."""
        # Checked first: this costs less than a wait that returns at once.
        return self._has_mail() or bool(self._poller.poll(_milliseconds(timeout_s)))

    def receive(self, timeout_s: float) -> list[Message]:
        """Wait up to `timeout_s` for the first message; return all messages that have arrived."""
        deadline = time.monotonic() + timeout_s
        messages: list[Message] = []
        nbytes = refused = 0
        # Refused messages count too: endless garbage must not stop the work.
        while len(messages) + refused < _MAX_BURST:
            # Checked first: this costs less than the exception of an empty socket.
            if not self._has_mail():
                wait_ms = 0 if messages else _milliseconds(deadline - time.monotonic())
                if not (wait_ms and self._poller.poll(wait_ms)):
                    break
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                continue
            nbytes += len(data)
            try:
                messages.append(decode(data))
            except DecodeError as error:
                refused += 1
                self._log_refused(error)
        self.received += len(messages)
        self.refused += refused
        if self._traffic is not None and nbytes:
            self._traffic.count(self._name, "received", len(messages) + refused, nbytes)
            self._traffic.drop(self._name, refused)
        return messages

    def _has_mail(self) -> bool:
        return bool(cast(int, self._socket.getsockopt(zmq.EVENTS)) & _READABLE)

    def _log_refused(self, error: DecodeError) -> None:
        """Log the first refused message, then at most one line a minute with the number since the last."""
        self._refused_unlogged += 1
        if time.monotonic() - self._logged_s >= _LOG_EVERY_S:
            log.warning("message refused: to=%s count=%d reason=%s", self._name, self._refused_unlogged, str(error))
            self._logged_s, self._refused_unlogged = time.monotonic(), 0

    def close(self) -> None:
        """Close the socket and remove its file."""
        self._socket.close()
        self._path.unlink(missing_ok=True)


def _milliseconds(seconds: float) -> int:
    """Round up to whole milliseconds of a poller; at least 0, because a negative wait has no end."""
    return max(0, int(seconds * 1000 + 0.999))


class Outbox:
    """Sends to one peer, which may connect later; keeps the order."""

    def __init__(self, folder: Path, peer: str, traffic: Traffic | None = None) -> None:
        self._peer = peer
        self._traffic = traffic
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._socket.connect(f"ipc://{folder / f'{peer}.sock'}")

    def send(self, message: Message) -> None:
        """Queue a message; never blocks."""
        self.send_all([message])

    def send_all(self, messages: Sequence[Message]) -> None:
        """Queue messages, at least one, as one delivery that wakes the peer once; never blocks."""
        parts = [encode(message) for message in messages]
        self._socket.send_multipart(parts, zmq.NOBLOCK)
        if self._traffic is not None:
            self._traffic.count(self._peer, "sent", len(parts), sum(map(len, parts)))

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close; queued messages have up to `linger_s` to leave."""
        self._socket.close(linger=int(linger_s * 1000))
