"""The bound on open connections: a connection counts from its accept until its descriptor is free.

asyncio's own server accepts a hundred connections in one turn of its loop, before any of them can be refused, and does
not report those in their TLS handshake.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

_PAUSE_S: Final = 1.0
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger(__name__)

_Making = asyncio.Task[tuple[asyncio.Transport, asyncio.Protocol]]


class ConnectionLimiter:
    """Accepts one connection a turn of the loop; if too many are open, the oldest is aborted first."""

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        *,
        tls: ssl.SSLContext | None,
        most_connections: int,
        handshake_timeout_s: float,
    ) -> None:
        """Accept connections from now on.

        Args:
            listener: The listening socket; `close` closes it.
            protocol: Returns the protocol of a new connection.
            tls: TLS context of the handshake, None for plain connections.
            most_connections: Most connections open at once, those in their handshake included.
            handshake_timeout_s: Longest handshake.
        """
        self._listener = listener
        self._protocol = protocol
        self._tls = tls
        self._most_connections = most_connections
        self._handshake_timeout_s = handshake_timeout_s if tls else None
        self._loop = asyncio.get_running_loop()
        self._held: dict[socket.socket, _Making] = {}
        listener.setblocking(False)
        self._open()

    def close(self) -> None:
        """Accept no more connections; open ones stay, unless they are in their handshake."""
        self._is_open = False
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for making in self._held.values():
            making.cancel()

    def cut_all(self) -> None:
        """Abort every connection; its descriptor is free some turns of the loop later."""
        for making in self._held.values():
            _cut(making)

    def _open(self) -> None:
        self._is_open = True
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        self._held = {connection: making for connection, making in self._held.items() if connection.fileno() >= 0}
        if len(self._held) >= self._most_connections:
            # The new connection waits at the listener until that descriptor is free.
            _cut(next(iter(self._held.values())))
            return
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._pause(error)
            return
        making = self._loop.create_task(self._make(connection))
        making.add_done_callback(functools.partial(_close_failed, connection))
        self._held[connection] = making

    async def _make(self, connection: socket.socket) -> tuple[asyncio.Transport, asyncio.Protocol]:
        return await self._loop.connect_accepted_socket(
            self._protocol, connection, ssl=self._tls, ssl_handshake_timeout=self._handshake_timeout_s
        )

    def _pause(self, error: OSError) -> None:
        """Retry later: the listener stays readable, and the loop would do nothing else."""
        log.warning("no connection can be accepted now: error=%s", error.strerror)
        self._loop.remove_reader(self._listener)
        self._loop.call_later(_PAUSE_S, self._reopen)

    def _reopen(self) -> None:
        if self._is_open:
            self._open()


def _cut(making: _Making) -> None:
    """Abort a connection, unless that is under way."""
    if not making.done():
        making.cancel()
    elif not making.cancelled() and making.exception() is None:
        making.result()[0].abort()


def _close_failed(connection: socket.socket, making: _Making) -> None:
    """Free a connection's descriptor if its handshake failed or never began."""
    if making.cancelled() or making.exception() is not None:
        connection.close()
