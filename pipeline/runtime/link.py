"""A socket that carries messages between two processes: msgpack, each preceded by its length in four bytes."""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import struct
import time
from typing import Final, Generic, TypeVar

import msgspec

from pipeline.errors import DecodeError, LinkEndedError, TornMessageError

M = TypeVar("M")
_MOST_BYTES: Final = 1 << 31
_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 1 << 18


class Link(Generic[M]):
    """One end of the socket.

    Args:
        end: A stream socket; closed with the link.
        decoder: Decodes the messages of the other end.
    """

    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[M]) -> None:
        end.setblocking(False)
        self._socket = end
        self._decoder = decoder
        self._read, self._unwritten = bytearray(), bytearray()
        self._poll = select.poll()

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """The events that a selector waits for: `receive` and `flush` handle them."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unwritten else 0)

    def post(self, message: msgspec.Struct) -> None:
        """Send a message as far as the socket takes it; `flush` and `receive` send the rest.

        Raises:
            DecodeError: If the message is too large.
            LinkEndedError: If the other end is closed.
        """
        body = msgspec.msgpack.encode(message)
        _check(len(body))
        self._unwritten += _LENGTH.pack(len(body))
        self._unwritten += body
        self.flush()

    def flush(self) -> None:
        """Send as much of the posted messages as the socket takes.

        Raises:
            LinkEndedError: If the other end is closed.
        """
        try:
            with contextlib.suppress(BlockingIOError):
                while self._unwritten:
                    del self._unwritten[: self._socket.send(self._unwritten)]
        except ConnectionError:
            raise LinkEndedError("the other end of a link is closed") from None

    def send(self, message: msgspec.Struct) -> None:
        """Send a whole message.

        Raises:
            DecodeError: If the message is too large.
            LinkEndedError: If the other end is closed.
        """
        self.post(message)
        while self._unwritten:
            # Two ends that both write, and read only afterwards, would wait for each other.
            for event in self._wait(select.POLLIN | select.POLLOUT, None):
                if event & select.POLLIN:
                    self._take()
                if event & select.POLLOUT:
                    self.flush()

    def receive(self, timeout_s: float | None = 0.0) -> list[M]:
        """Return the messages that have arrived; without one, wait for the first. Posted ones are sent meanwhile.

        Args:
            timeout_s: Longest wait; None: no limit.

        Raises:
            DecodeError: If a message does not decode, or is too large.
            LinkEndedError: If the other end is closed and all its messages were returned; a `TornMessageError` if the
                last one is not whole.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        messages: list[M] = []
        while True:
            while (message := self._next()) is not None:
                messages.append(message)
            left_s = 0.0 if messages else None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            wanted = select.POLLIN | (select.POLLOUT if self._unwritten else 0)
            if not (events := self._wait(wanted, left_s)):
                return messages
            try:
                if events[0] & select.POLLOUT:
                    self.flush()
                if events[0] & select.POLLIN:
                    self._take()
            except LinkEndedError:
                # What the other end sent before is read first: nobody reads what is left here.
                if self._unwritten:
                    self._unwritten.clear()
                elif messages:
                    return messages
                else:
                    raise

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _next(self) -> M | None:
        if len(self._read) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._read)
        _check(size)
        if len(self._read) < (end := _LENGTH.size + size):
            return None
        try:
            message = self._decoder.decode(bytes(self._read[_LENGTH.size : end]))
        except msgspec.DecodeError as error:
            raise DecodeError(f"a message of {size:,} B on a link does not decode: {error}") from error
        del self._read[:end]
        return message

    def _wait(self, events: int, timeout_s: float | None) -> list[int]:
        self._poll.register(self._socket, events)
        ready = self._poll.poll(None if timeout_s is None else 1000.0 * timeout_s)
        # POLLHUP and POLLERR come unasked: a read finds the end.
        return [event if event & events else select.POLLIN for _, event in ready]

    def _take(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionError:
            data = b""
        if data:
            self._read += data
        elif self._read:
            raise TornMessageError(f"the other end of a link was closed after {len(self._read):,} B of a message")
        else:
            raise LinkEndedError("the other end of a link is closed")


def _check(size: int) -> None:
    if size > _MOST_BYTES:
        raise DecodeError(f"a message of {size:,} B is too large for a link: {_MOST_BYTES:,} B at most")
