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
import base64
import binascii
import contextlib
import dataclasses
import errno
import hmac
import ipaddress
import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeline.config.schema import MetricsConfig
from pipeline.errors import ConfigError
from pipeline.supervisor.web.connections import Door

TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
MOST_CONNECTIONS: Final = 256
_GRACE_S: Final = 0.5
_STOP_TIMEOUT_S: Final = 5.0
_BACKLOG: Final = 128
_KEEP_ALIVE_S: Final = 75
_REQUEST_TIMEOUT_S: Final = 10.0
_MOST_HEADER_BYTES: Final = 16 << 10
_MOST_TOKEN_BYTES: Final = 4096
_OPEN_PATHS: Final = ("/healthz", "/readyz")
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


@dataclasses.dataclass(frozen=True)
class Access:
    """Who may ask: everybody who reaches the port, unless there is a token; in the clear, unless there is TLS."""

    tls: ssl.SSLContext | None = None
    token: bytes = dataclasses.field(default=b"", repr=False)

    @classmethod
    def of(cls, config: MetricsConfig) -> Access:
        """Read what a configuration names.

        Raises:
            ConfigError: If a file cannot be read or used, or others than its user may read what is secret.
        """
        token = b""
        if config.token_file is not None:
            token = _secret("metrics.token_file", config.token_file).strip()
            if not token or len(token) > _MOST_TOKEN_BYTES:
                raise ConfigError(f"metrics.token_file: {config.token_file} holds no token of 1 to 4,096 bytes")
        if config.tls_cert is None or config.tls_key is None:
            return cls(None, token)
        _secret("metrics.tls_key", config.tls_key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _load_certificate(context, config)
        return cls(context, token)

    def admits(self, scope: Scope) -> bool:
        """Whether a request may be answered."""
        if not self.token or scope["path"] in _OPEN_PATHS:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(_token_of(given[0]), self.token)


def _token_of(authorization: bytes) -> bytes:
    """Return the token of a request: a bearer's, or the password that a browser asks its user for."""
    scheme, _, credentials = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return credentials
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _load_certificate(context: ssl.SSLContext, config: MetricsConfig) -> None:
    assert config.tls_cert is not None
    try:
        # A password is asked for on the terminal otherwise.
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"metrics.tls_cert: cannot use {config.tls_cert} and its key: {error}") from error


def _secret(key: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(f"{key}: {path} is open to other users, it must have mode 0600")
            return file.read(1 << 20)
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error


class HttpServer:
    """Listens from `bind` on, answers from `start` on; requests that come in between wait."""

    def __init__(self, listener: socket.socket, access: Access) -> None:
        self._listener = listener
        self._access = access
        self._guard: _Guard | None = None
        self._server: _Server | None = None
        self._door: Door | None = None
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
            _load_certificate(self._access.tls, config)
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
        self._guard = _Guard(Starlette(routes=routes), self._access, names_are_refused=self.is_loopback)
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
        self._door = Door(
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


class _Guard:
    """Lets through what `Access` admits; on the loopback address, what the page asks for under its own name only.

    A page from elsewhere, whose owner points its name to 127.0.0.1, would otherwise be of the same origin.
    """

    def __init__(self, application: ASGIApp, access: Access, *, names_are_refused: bool) -> None:
        self._application = application
        self.access = access
        self._names_are_refused = names_are_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.access.admits(scope):
            refused = PlainTextResponse("a bearer token is needed\n", 401, headers={"WWW-Authenticate": "Bearer"})
            # A browser asks for a password then; any user's name will do. It takes one way a line.
            refused.headers.append("WWW-Authenticate", 'Basic realm="rlhfd: the password is the token"')
            await refused(scope, receive, send)
        elif self._names_are_refused and scope["path"].startswith("/api/") and not _is_own_name(scope):
            await PlainTextResponse("ask for localhost or an address\n", 421)(scope, receive, send)
        else:
            await self._application(scope, receive, send)


def _is_own_name(scope: Scope) -> bool:
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    host = hosts[0].rpartition("]")[0].lstrip("[") or hosts[0].partition(":")[0] if len(hosts) == 1 else ""
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return host.lower() == "localhost"


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
