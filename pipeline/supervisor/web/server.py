"""The HTTP server of an instance: metrics for Prometheus, health and readiness for whoever watches, a page for people.

It runs inside the supervisor's event loop, and a request costs that loop no more than its handler: no client, however
slow, holds up another one. Connections are bounded: the oldest goes when one too many comes, and one that has not
shaken hands or sent a whole request in time. What is no HTTP is answered with 400 and not logged, for it would be a
line for each.

The page is files of `pipeline/supervisor/web/static` and two answers in JSON that it asks for again and again. Its policy lets it load
nothing from elsewhere, run no script that is not such a file, and take no text for markup.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeline.config.schema import MetricsConfig
from pipeline.errors import ConfigError
from pipeline.supervisor.web.access import Access, AccessCheck, load_certificate
from pipeline.supervisor.web.connections import ConnectionLimiter

TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
MOST_CONNECTIONS: Final = 256
_GRACE_S: Final = 0.5
_STOP_TIMEOUT_S: Final = 5.0
_BACKLOG: Final = 128
_KEEP_ALIVE_S: Final = 75
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


class Page(Protocol):
    """What the page asks for, as JSON (`pipeline.supervisor.page`)."""

    def live(self, after_s: float) -> bytes:
        """Return the run at this moment, and its history after a Unix time."""

    def samples(self, cursor: str) -> bytes:
        """Return the rollouts that came after a cursor."""


class HttpServer:
    """Listens from `bind` on, answers from `start` on; requests that come in between wait."""

    def __init__(self, listener: socket.socket, access: Access) -> None:
        self._listener = listener
        self._access = access
        self._guard: AccessCheck | None = None
        self._server: _Server | None = None
        self._door: ConnectionLimiter | None = None
        self._task: asyncio.Task[None] | None = None
        self.host: str
        self.port: int
        self.host, self.port = listener.getsockname()[:2]

    @classmethod
    def bind(cls, host: str, port: int, access: Access | None = None) -> HttpServer:
        """Take the address; port 0 takes any that is free. One that others reach is warned of, unless there is a token.

        Raises:
            ConfigError: If it is in use, or none of this machine's.
        """
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            server = cls(socket.create_server((host, port), family=family, backlog=_BACKLOG), access or Access())
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"metrics.port {port} on {host} is in use") from error
            where = f"metrics.port {port} on {host}" if error.errno == errno.EACCES else f"metrics.host {host}"
            raise ConfigError(f"{where} cannot be bound: {error.strerror or error}") from error
        if not server._access.token and not server.is_loopback:
            log.warning(
                "metrics are open to everybody who reaches %s: metrics.token_file asks for a token", server.host
            )
        return server

    @property
    def url(self) -> str:
        """Where it is reached, without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self._access.tls is None else 'https'}://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(self.host).is_loopback

    def renew(self, config: MetricsConfig) -> None:
        """Read token, certificate and key again, for every request and connection from now on.

        Raises:
            ConfigError: If they cannot be read or used; those in use stay.
        """
        access = Access.of(config)
        if self._access.tls is not None and access.tls is not None:
            # The listener keeps its context: a new certificate goes into that one.
            load_certificate(self._access.tls, config)
        self._access = dataclasses.replace(access, tls=self._access.tls)
        if self._guard is not None:
            self._guard.access = self._access

    async def start(self, metrics: Metrics, health: Health, ready: Ready, page: Page | None = None) -> None:
        """Answer requests from now on.

        Args:
            metrics: Gives the exposition, in OpenMetrics if its argument is true.
            health: Gives whether the instance goes on (200, else 503) and what /healthz says.
            ready: Gives whether the instance is ready (200, else 503) and what /readyz says.
            page: Gives what the page shows; without it there is none.
        """
        routes = [*_routes(metrics, health, ready), *([] if page is None else _page_routes(page))]
        self._guard = AccessCheck(Starlette(routes=routes), self._access, names_are_refused=self.is_loopback)
        config = uvicorn.Config(
            self._guard,
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
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
        )
        config.load()
        self._server = server = _Server(config)
        self._task = asyncio.create_task(server.serve(sockets=[]))
        self._task.add_done_callback(_report)
        self._door = ConnectionLimiter(
            self._listener,
            lambda: _Connection(config, server.server_state, {}),
            tls=self._access.tls,
            most_connections=MOST_CONNECTIONS,
            handshake_timeout_s=_REQUEST_TIMEOUT_S,
        )

    async def stop(self) -> None:
        """End within about a second, and leave no connection behind."""
        if self._server is None or self._task is None or self._door is None:
            self.close()
            return
        self._door.close()
        self._server.should_exit = True
        await asyncio.wait({self._task}, timeout=_GRACE_S)
        # Whoever has not taken its answer by now does not get it.
        self._door.cut_all()
        await asyncio.wait({self._task}, timeout=_STOP_TIMEOUT_S)
        self._task.cancel()

    def close(self) -> None:
        """Give the address back, where `start` was never reached."""
        self._listener.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: SIGTERM and SIGINT are the supervisor's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """One connection, cut when it sends no whole request in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._due = self.loop.call_later(_REQUEST_TIMEOUT_S, self._cut_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        self._due.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is None or self.cycle.response_complete:
            super().send_400_response(msg)
        else:
            # Behind a request whose answer is not out yet: no 400 fits in between, and that answer would be an error.
            self.cycle.disconnected = True
            self.transport.abort()

    def _cut_silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("HTTP server ended: error=%r", error)


def _routes(metrics: Metrics, health: Health, ready: Ready) -> list[Route]:
    # Coroutines all: Starlette would run plain functions in a thread of their own.
    async def show_metrics(request: Request) -> Response:
        openmetrics = wants_openmetrics(request.headers.get("accept", ""))
        return Response(metrics(openmetrics), headers={"content-type": OPENMETRICS_TYPE if openmetrics else TEXT_TYPE})

    async def show_health(request: Request) -> Response:
        is_healthy, state = health()
        return JSONResponse(state, status_code=200 if is_healthy else 503)

    async def show_readiness(request: Request) -> Response:
        is_ready, state = ready()
        return JSONResponse(state, status_code=200 if is_ready else 503)

    return [
        Route("/metrics", show_metrics),
        Route("/healthz", show_health),
        Route("/readyz", show_readiness),
    ]


def _page_routes(page: Page) -> list[Route]:
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
    """Whether an Accept header takes OpenMetrics 1.0.0 or later; read as prometheus_client reads it."""
    for entry in accept.split(","):
        media, *parameters = (part.strip() for part in entry.split(";"))
        if media == "application/openmetrics-text":
            versions = [value for value in parameters if value.startswith("version=")]
            if not versions or versions[0].removeprefix("version=").split(".")[0].lstrip("0"):
                return True
    return False
