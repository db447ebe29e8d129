from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from prometheus_client.exposition import choose_encoder

from pipeline.errors import ConfigError
from pipeline.page import OPENMETRICS_TYPE, TEXT_TYPE, HttpServer, wants_openmetrics

OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def exposition(openmetrics: bool) -> bytes:
    return b"# EOF\n" if openmetrics else b"up 1\n"


def healthy() -> tuple[bool, dict[str, Any]]:
    return True, {"state": "ready", "pid": 7}


def hung() -> tuple[bool, dict[str, Any]]:
    return False, {"state": "stuck", "pid": 7, "hung": "buffer"}


def is_ready() -> tuple[bool, dict[str, Any]]:
    return True, {"state": "ready"}


def not_ready() -> tuple[bool, dict[str, Any]]:
    return False, {"state": "starting", "waiting_for": ["trainer-0"]}


@contextlib.asynccontextmanager
async def served(
    metrics: Callable[[bool], bytes] = exposition,
    health: Callable[[], tuple[bool, dict[str, Any]]] = healthy,
    ready: Callable[[], tuple[bool, dict[str, Any]]] = is_ready,
) -> AsyncIterator[HttpServer]:
    server = HttpServer.bind("127.0.0.1", 0)
    await server.start(metrics, health, ready)
    try:
        yield server
    finally:
        await server.stop()


async def get(server: HttpServer, path: str, accept: str = "*/*") -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(server.url + path, headers={"accept": accept}, timeout=10)


def in_loop(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), timeout=30)

    asyncio.run(bounded())


def test_metrics_come_in_the_format_asked_for() -> None:
    async def check() -> None:
        async with served() as server:
            text, openmetrics = await get(server, "/metrics"), await get(server, "/metrics", OPENMETRICS)

        assert (text.status_code, text.content) == (200, b"up 1\n")
        assert text.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert (openmetrics.status_code, openmetrics.content) == (200, b"# EOF\n")
        assert openmetrics.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"

    in_loop(check)


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "*/*",
        "text/html,application/xhtml+xml,*/*;q=0.8",
        "text/plain;version=0.0.4",
        OPENMETRICS,
        "application/openmetrics-text",
        "application/openmetrics-text; version=0.0.1",
        "application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;q=0.8,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.7,"
        "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
    ],
)
def test_format_is_negotiated_as_prometheus_client_does(accept: str) -> None:
    theirs = choose_encoder(accept)[1].partition("; escaping")[0]

    assert theirs == (OPENMETRICS_TYPE if wants_openmetrics(accept) else TEXT_TYPE)


def test_health_answers_while_the_instance_is_not_ready() -> None:
    async def check() -> None:
        async with served(ready=not_ready) as server:
            health, readiness = await get(server, "/healthz"), await get(server, "/readyz")

        assert (health.status_code, health.json()) == (200, healthy()[1])
        assert (readiness.status_code, readiness.json()) == (503, not_ready()[1])

    in_loop(check)


def test_health_of_an_instance_that_hangs_is_503() -> None:
    async def check() -> None:
        async with served(health=hung) as server:
            health = await get(server, "/healthz")

        assert (health.status_code, health.json()) == (503, hung()[1])

    in_loop(check)


def test_ready_instance_answers_200() -> None:
    async def check() -> None:
        async with served() as server:
            readiness = await get(server, "/readyz")

        assert (readiness.status_code, readiness.json()) == (200, {"state": "ready"})

    in_loop(check)


def test_unknown_path_is_404_and_no_redirect_is_sent() -> None:
    async def check() -> None:
        async with served() as server:
            codes = [(await get(server, path)).status_code for path in ("/", "/metrics/x", "/metrics")]

        assert codes == [404, 404, 200]

    in_loop(check)


def test_failing_handler_is_logged_and_the_next_request_served(caplog: pytest.LogCaptureFixture) -> None:
    broken = True

    def metrics(openmetrics: bool) -> bytes:
        if broken:
            raise ZeroDivisionError
        return b"up 1\n"

    async def check() -> None:
        nonlocal broken
        async with served(metrics) as server:
            failed = await get(server, "/metrics")
            broken = False
            served_again = await get(server, "/metrics")

        assert (failed.status_code, served_again.status_code) == (500, 200)

    with caplog.at_level(logging.ERROR):
        in_loop(check)
    assert "ZeroDivisionError" in caplog.text


def test_address_is_ours_before_anything_is_served() -> None:
    server = HttpServer.bind("127.0.0.1", 0)

    with pytest.raises(ConfigError, match=rf"^metrics\.port {server.port} on 127\.0\.0\.1 is in use$"):
        HttpServer.bind("127.0.0.1", server.port)

    assert server.url == f"http://127.0.0.1:{server.port}"
    server.close()


def test_request_that_comes_before_start_is_answered_after_it() -> None:
    async def check() -> None:
        server = HttpServer.bind("127.0.0.1", 0)
        early = asyncio.create_task(get(server, "/healthz"))
        await asyncio.sleep(0)
        await server.start(exposition, healthy, is_ready)

        assert (await early).status_code == 200
        await server.stop()

    in_loop(check)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"^metrics\.host {host} cannot be bound: "):
        HttpServer.bind(host, 0)


def test_slow_clients_do_not_hold_up_a_scrape_nor_the_end(caplog: pytest.LogCaptureFixture) -> None:
    large = b"x" * 50_000_000

    async def check() -> None:
        server = HttpServer.bind("127.0.0.1", 0)
        await server.start(lambda openmetrics: large if openmetrics else b"up 1\n", healthy, is_ready)
        silent = await asyncio.open_connection("127.0.0.1", server.port)
        stuck = await asyncio.open_connection("127.0.0.1", server.port)
        stuck[1].write(f"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: {OPENMETRICS}\r\n\r\n".encode())
        half = await asyncio.open_connection("127.0.0.1", server.port)
        half[1].write(b"GET /metrics HTT")

        assert (await get(server, "/metrics")).content == b"up 1\n"

        started_s = time.monotonic()
        await server.stop()
        assert time.monotonic() - started_s < 4
        for _, writer in (silent, stuck, half):
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", server.port)) != 0

    in_loop(check)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_stop_is_prompt_when_nobody_is_connected() -> None:
    async def check() -> None:
        async with served() as server:
            await get(server, "/healthz")
            started_s = time.monotonic()
        assert time.monotonic() - started_s < 1.5

    in_loop(check)


def test_stop_before_start_gives_the_address_back() -> None:
    async def check() -> None:
        server = HttpServer.bind("127.0.0.1", 0)
        await server.stop()

        HttpServer.bind("127.0.0.1", server.port).close()

    in_loop(check)


def test_signals_stay_the_supervisors() -> None:
    async def check() -> None:
        received: asyncio.Queue[int] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, received.put_nowait, number)
        async with served() as server:
            await get(server, "/healthz")
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
                assert await received.get() == number

            assert (await get(server, "/healthz")).status_code == 200

    in_loop(check)
