"""The HTTP server of an instance: metrics for Prometheus, health and readiness for whoever watches.

It runs inside the supervisor's event loop, and a request costs that loop no more than its handler: no client, however
slow, holds up another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.errors import ConfigError

TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_GRACE_S: Final = 0.5
_STOP_TIMEOUT_S: Final = 5.0
_BACKLOG: Final = 128
_KEEP_ALIVE_S: Final = 75

log = logging.getLogger(__name__)

Metrics = Callable[[bool], bytes]
Health = Callable[[], tuple[bool, dict[str, Any]]]
Ready = Callable[[], tuple[bool, dict[str, Any]]]


class HttpServer:
    """Listens from `bind` on, answers from `start` on; requests that come in between wait."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.host: str
        self.port: int
        self.host, self.port = listener.getsockname()[:2]

    @classmethod
    def bind(cls, host: str, port: int) -> HttpServer:
        """Take the address; port 0 takes any that is free.

        Raises:
            ConfigError: If it is in use, or none of this machine's.
        """
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            return cls(socket.create_server((host, port), family=family, backlog=_BACKLOG))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"metrics.port {port} on {host} is in use") from error
            where = f"metrics.port {port} on {host}" if error.errno == errno.EACCES else f"metrics.host {host}"
            raise ConfigError(f"{where} cannot be bound: {error.strerror or error}") from error

    @property
    def url(self) -> str:
        """Where it is reached, without a path."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    async def start(self, metrics: Metrics, health: Health, ready: Ready) -> None:
        """Answer requests from now on.

        Args:
            metrics: Gives the exposition, in OpenMetrics if its argument is true.
            health: Gives whether the instance goes on (200, else 503) and what /healthz says.
            ready: Gives whether the instance is ready (200, else 503) and what /readyz says.
        """
        config = uvicorn.Config(
            _application(metrics, health, ready),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        self._task.add_done_callback(_report)

    async def stop(self) -> None:
        """End within about a second, and leave no connection behind."""
        if self._server is None or self._task is None:
            self.close()
            return
        self._server.should_exit = True
        await asyncio.wait({self._task}, timeout=_GRACE_S)
        # Whoever has not taken its answer by now does not get it.
        self._server.abort_connections()
        await asyncio.wait({self._task}, timeout=_STOP_TIMEOUT_S)
        self._task.cancel()
        self.close()

    def close(self) -> None:
        """Give the address back, where `start` was never reached."""
        self._listener.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: SIGTERM and SIGINT are the supervisor's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def abort_connections(self) -> None:
        for connection in [*self.server_state.connections]:
            connection.transport.abort()


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("HTTP server ended: error=%r", error)


def _application(metrics: Metrics, health: Health, ready: Ready) -> Starlette:
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

    return Starlette(
        routes=[
            Route("/metrics", show_metrics),
            Route("/healthz", show_health),
            Route("/readyz", show_readiness),
        ]
    )


def wants_openmetrics(accept: str) -> bool:
    """Whether an Accept header takes OpenMetrics 1.0.0 or later; read as prometheus_client reads it."""
    for entry in accept.split(","):
        media, *parameters = (part.strip() for part in entry.split(";"))
        if media == "application/openmetrics-text":
            versions = [value for value in parameters if value.startswith("version=")]
            if not versions or versions[0].removeprefix("version=").split(".")[0].lstrip("0"):
                return True
    return False
