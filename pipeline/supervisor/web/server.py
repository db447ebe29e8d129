"""The HTTP server of an instance: metrics for Prometheus, health and readiness for monitors, a page for people.

`rlhfd page` serves the page alone. The server runs inside its caller's event loop, the supervisor's for an instance. A
request costs that loop no more than its handler: no client, however slow, holds up another one. uvicorn bounds the
connections and answers 503 beyond the bound, and the listener closes those beyond twice the bound at once, so that
silent ones take no descriptor that a child's start needs; one that has not sent its whole request in time is aborted.
A proxy in front does all further hardening. Bytes that are not HTTP are answered with 400 and not logged, because each
such request would be a line.

The page consists of the files in `pipeline/supervisor/web/static` and two JSON answers that it polls. Its content
security policy forbids it to load anything from other hosts, to run a script that is not such a file, and to insert
text as markup.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeline.config.sections import MetricsConfig
from pipeline.errors import ConfigError
from pipeline.supervisor.web.access import Access, AccessCheck, load_certificate
from pipeline.supervisor.web.port_holder import port_holder

if TYPE_CHECKING:
    from pipeline.supervisor.ended_page import EndedPage
    from pipeline.supervisor.page import PageData

TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
MOST_CONNECTIONS: Final = 256
_GRACE_S: Final = 0.5
_STOP_TIMEOUT_S: Final = 5.0
_BACKLOG: Final = 128
_KEEP_ALIVE_S: Final = 75
_DATE_S: Final = 1.0
_REQUEST_TIMEOUT_S: Final = 10.0
_MOST_HEADER_BYTES: Final = 16 << 10
_WEB: Final = Path(__file__).with_name("static")
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}

log = logging.getLogger(__name__)

Metrics = Callable[[bool], bytes]
Health = Callable[[], tuple[bool, dict[str, Any]]]
Ready = Callable[[], tuple[bool, dict[str, Any]]]


class HttpServer:
    """Listens from `bind` on and answers from `start` on; requests between the two wait."""

    def __init__(self, listener: socket.socket, access: Access) -> None:
        self._listener = listener
        self._access = access
        self._access_check: AccessCheck | None = None
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.host: str
        self.port: int
        self.host, self.port = listener.getsockname()[:2]

    @classmethod
    def bind(cls, host: str, port: int, access: Access | None = None, *, key: str = "metrics.port") -> HttpServer:
        """Bind the address; port 0 takes any free port. Warn of an address that other machines reach without a token.

        Args:
            host: Address of this machine.
            port: The port.
            access: Access rules; None admits every client.
            key: Key or option that names the port, for errors.

        Raises:
            ConfigError: If the address is in use, or not one of this machine's.
        """
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
            server = cls(_Listener(fileno=listener.detach()), access or Access())
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                holder = port_holder(port)
                by = f" by {holder}" if holder else ""
                raise ConfigError(f"{key} {port} on {host} is in use{by}; {key} = 0 takes any free port") from error
            where = f"{key} {port} on {host}" if error.errno == errno.EACCES else f"metrics.host {host}"
            raise ConfigError(f"{where} cannot be bound: {error.strerror or error}") from error
        server._warn_if_open()
        return server

    @property
    def url(self) -> str:
        """The server's URL without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self._access.tls is None else 'https'}://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether the server is reachable from this machine only."""
        return ipaddress.ip_address(self.host).is_loopback

    def renew(self, config: MetricsConfig) -> None:
        """Read token, certificate and key again; they apply to every later request and connection.

        Raises:
            ConfigError: If they cannot be read or used; the previous ones stay in use.
        """
        access, before = Access.of(config), self._access
        if before.tls is not None and access.tls is not None:
            # The listener keeps its context: the new certificate is loaded into it.
            load_certificate(before.tls, config)
        self._access = dataclasses.replace(access, tls=before.tls)
        if before.token:
            self._warn_if_open()
        if self._access_check is not None:
            self._access_check.access = self._access

    def _warn_if_open(self) -> None:
        if not self._access.token and not self.is_loopback:
            log.warning(
                "metrics are open to every client that reaches %s: metrics.token_file requires a token", self.host
            )

    async def start(self, routes: Sequence[Route]) -> None:
        """Answer requests from now on; see `instance_routes` and `page_routes`."""
        self._access_check = AccessCheck(Starlette(routes=routes), self._access, names_are_refused=self.is_loopback)
        config = uvicorn.Config(
            self._access_check,
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            headers=list(_HEADERS.items()),
            h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
        )
        config.load()
        config.ssl = self._access.tls
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        self._task.add_done_callback(_report)

    async def stop(self) -> None:
        """Stop within about a second; no connection is left open."""
        if self._server is None or self._task is None:
            self.close()
            return
        self._server.leave()
        await asyncio.wait({self._task}, timeout=_GRACE_S)
        # A client that has not read its answer by now does not get it.
        self._server.cut_all()
        await asyncio.wait({self._task}, timeout=_STOP_TIMEOUT_S)
        self._task.cancel()

    def close(self) -> None:
        """Release the address if `start` was never called."""
        self._listener.close()


class _Listener(socket.socket):
    """A listening socket that closes new connections while it holds too many, those in a TLS handshake included."""

    _held: tuple[socket.socket, ...] = ()

    def accept(self) -> tuple[socket.socket, Any]:
        """Return a connection and its address.

        Raises:
            ConnectionAbortedError: If too many are open; asyncio goes on with the next one.
        """
        connection, address = super().accept()
        self._held = tuple(held for held in self._held if held.fileno() >= 0)
        if len(self._held) >= 2 * MOST_CONNECTIONS:
            connection.close()
            raise ConnectionAbortedError(f"{len(self._held):,} connections are open")
        self._held = (*self._held, connection)
        return connection, address


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, and with a tick a second: its own ten take CPU of an idle daemon.

    The supervisor handles SIGTERM and SIGINT.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """End the main loop."""
        self.should_exit = True
        self._leaving.set()

    def cut_all(self) -> None:
        """Abort every connection."""
        for connection in [*self.server_state.connections]:
            connection.transport.abort()

    async def main_loop(self) -> None:
        """Set the date of the answers once a second, until `leave` is called."""
        # uvicorn sets it at each tick whose number is a multiple of ten.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), _DATE_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """One connection, aborted if it does not send each of its requests whole in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._due.cancel()
        elif self._due.cancelled():
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._due.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is None or self.cycle.response_complete:
            super().send_400_response(msg)
        else:
            # An earlier request is still unanswered: no 400 may be sent before its answer, which would then be wrong.
            self.cycle.disconnected = True
            self.transport.abort()

    def _expect_request(self) -> None:
        self._due = self.loop.call_later(_REQUEST_TIMEOUT_S, self.transport.abort)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("HTTP server ended: error=%r", error)


def instance_routes(metrics: Metrics, health: Health, ready: Ready) -> list[Route]:
    """Return the routes of a running instance but its page.

    Args:
        metrics: Returns the exposition, in OpenMetrics if its argument is true.
        health: Returns whether the instance is healthy (200, else 503) and the body of /healthz.
        ready: Returns whether the instance is ready (200, else 503) and the body of /readyz.
    """

    # All are coroutines: Starlette would run plain functions in threads.
    async def show_metrics(request: Request) -> Response:
        openmetrics = wants_openmetrics(request.headers.get("accept", ""))
        return Response(metrics(openmetrics), headers={"content-type": OPENMETRICS_TYPE if openmetrics else TEXT_TYPE})

    async def show_state(request: Request) -> Response:
        is_good, state = states[request.url.path]()
        return JSONResponse(state, status_code=200 if is_good else 503)

    states = {"/healthz": health, "/readyz": ready}
    return [Route("/metrics", show_metrics), *(Route(path, show_state) for path in states)]


def page_routes(page: PageData | EndedPage) -> list[Route]:
    """Return the routes of a page, of a running instance or of a run that has ended: its files and its data."""
    files = {
        "/" if path.name == "index.html" else f"/{path.name}": path for path in _WEB.iterdir() if path.suffix in _TYPES
    }

    async def show_file(request: Request) -> Response:
        path = files[request.url.path]
        headers = {"content-type": _TYPES[path.suffix], "cache-control": "no-cache"}
        return Response(path.read_bytes(), headers=headers)

    async def show_live(request: Request) -> Response:
        try:
            after_s = float(request.query_params.get("after_s", "0"))
        except ValueError:
            return PlainTextResponse("after_s is no number\n", 400)
        return _json(page.live(after_s))

    async def show_samples(request: Request) -> Response:
        return _json(page.samples(request.query_params.get("cursor", "")))

    return [
        *(Route(path, show_file) for path in files),
        Route("/api/live", show_live),
        Route("/api/samples", show_samples),
    ]


def _json(text: bytes) -> Response:
    return Response(text, headers={"content-type": "application/json", "cache-control": "no-store"})


def wants_openmetrics(accept: str) -> bool:
    """Return whether an Accept header accepts OpenMetrics 1.0.0 or later."""
    try:
        return choose_encoder(accept)[1].startswith("application/openmetrics-text")
    except (TypeError, ValueError):
        # A version that is none, which prometheus_client compares with its own.
        return False
