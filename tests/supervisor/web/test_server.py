from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.config.sections import MetricsConfig
from pipeline.errors import ConfigError
from pipeline.supervisor.web import server as module
from pipeline.supervisor.web.access import Access
from pipeline.supervisor.web.server import HttpServer, instance_routes, page_routes, wants_openmetrics
from tests.support.folders import save_certificate

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


class Shown:
    """A page whose data are the requests that it got."""

    def live(self, after_s: float) -> bytes:
        return json.dumps({"after_s": after_s}).encode()

    def samples(self, cursor: str) -> bytes:
        return json.dumps({"cursor": cursor}).encode()


@contextlib.asynccontextmanager
async def served(
    metrics: Callable[[bool], bytes] = exposition,
    health: Callable[[], tuple[bool, dict[str, Any]]] = healthy,
    ready: Callable[[], tuple[bool, dict[str, Any]]] = is_ready,
    access: Access | None = None,
    page: Shown | None = None,
) -> AsyncIterator[HttpServer]:
    server = HttpServer.bind("127.0.0.1", 0, access)
    await server.start([*instance_routes(metrics, health, ready), *([] if page is None else page_routes(page))])
    try:
        yield server
    finally:
        await server.stop()


async def get(server: HttpServer, path: str, accept: str = "*/*") -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(server.url + path, headers={"accept": accept}, timeout=10)


async def test_metrics_come_in_the_format_asked_for() -> None:
    async with served() as server:
        text, openmetrics = await get(server, "/metrics"), await get(server, "/metrics", OPENMETRICS)

    assert (text.status_code, text.content) == (200, b"up 1\n")
    assert text.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert (openmetrics.status_code, openmetrics.content) == (200, b"# EOF\n")
    assert openmetrics.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("text/plain;version=0.0.4", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=0.0.1", False),
        ("application/openmetrics-text; version=latest", False),
        (
            "application/openmetrics-text;version=1.0.0;q=0.8,application/openmetrics-text;version=0.0.1;q=0.75,*/*",
            True,
        ),
        ("application/vnd.google.protobuf;q=0.7,application/openmetrics-text;version=1.0.0;q=0.6,*/*;q=0.1", True),
    ],
)
def test_a_scraper_gets_the_format_that_it_accepts(accept: str, openmetrics: bool) -> None:
    assert wants_openmetrics(accept) is openmetrics


async def test_health_answers_while_the_instance_is_not_ready() -> None:
    async with served(ready=not_ready) as server:
        health, readiness = await get(server, "/healthz"), await get(server, "/readyz")

    assert (health.status_code, health.json()) == (200, healthy()[1])
    assert (readiness.status_code, readiness.json()) == (503, not_ready()[1])


async def test_health_of_an_instance_that_hangs_is_503() -> None:
    async with served(health=hung) as server:
        health = await get(server, "/healthz")

    assert (health.status_code, health.json()) == (503, hung()[1])


async def test_ready_instance_answers_200() -> None:
    async with served() as server:
        readiness = await get(server, "/readyz")

    assert (readiness.status_code, readiness.json()) == (200, {"state": "ready"})


async def test_unknown_path_is_404_and_no_redirect_is_sent() -> None:
    async with served() as server:
        codes = [(await get(server, path)).status_code for path in ("/", "/metrics/x", "/metrics")]

    assert codes == [404, 404, 200]


async def test_failing_handler_is_logged_and_the_next_request_served(caplog: pytest.LogCaptureFixture) -> None:
    broken = True

    def metrics(openmetrics: bool) -> bytes:
        if broken:
            raise ZeroDivisionError
        return b"up 1\n"

    with caplog.at_level(logging.ERROR):
        async with served(metrics) as server:
            failed = await get(server, "/metrics")
            broken = False
            served_again = await get(server, "/metrics")

    assert (failed.status_code, served_again.status_code) == (500, 200)
    assert "ZeroDivisionError" in caplog.text


def test_address_is_ours_before_anything_is_served() -> None:
    server = HttpServer.bind("127.0.0.1", 0)

    by = rf"pid {os.getpid()} \(.*\); metrics\.port = 0 takes any free port"
    with pytest.raises(ConfigError, match=rf"^metrics\.port {server.port} on 127\.0\.0\.1 is in use by {by}$"):
        HttpServer.bind("127.0.0.1", server.port)

    assert server.url == f"http://127.0.0.1:{server.port}"
    server.close()


async def test_request_that_comes_before_start_is_answered_after_it() -> None:
    server = HttpServer.bind("127.0.0.1", 0)
    early = asyncio.create_task(get(server, "/healthz"))
    await asyncio.sleep(0)
    await server.start(instance_routes(exposition, healthy, is_ready))

    assert (await early).status_code == 200
    await server.stop()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"^metrics\.host {host} cannot be bound: "):
        HttpServer.bind(host, 0)


def test_slow_clients_do_not_hold_up_a_scrape_nor_the_end(caplog: pytest.LogCaptureFixture) -> None:
    large = b"x" * 50_000_000

    async def check() -> None:
        server = HttpServer.bind("127.0.0.1", 0)
        metrics: Callable[[bool], bytes] = lambda openmetrics: large if openmetrics else b"up 1\n"  # noqa: E731
        await server.start(instance_routes(metrics, healthy, is_ready))
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

    asyncio.run(asyncio.wait_for(check(), 30))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_stop_is_prompt_when_nobody_is_connected() -> None:
    async with served() as server:
        await get(server, "/healthz")
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 1.5


async def test_stop_does_not_wait_for_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DATE_S", 60.0)

    async with served() as server:
        await get(server, "/healthz")
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 4.0, "the server is cancelled after 5.5 s"


async def test_answers_have_the_present_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DATE_S", 0.01)

    async with served() as server:
        first = (await get(server, "/healthz")).headers["date"]
        for _ in range(500):
            if (await get(server, "/healthz")).headers["date"] != first:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("five seconds later the date is the same")


async def test_stop_before_start_gives_the_address_back() -> None:
    server = HttpServer.bind("127.0.0.1", 0)
    await server.stop()

    HttpServer.bind("127.0.0.1", server.port).close()


async def test_signals_stay_the_supervisors() -> None:
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


# Who may ask.


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("a-token-of-the-test\n")
    return path


def test_with_a_token_all_but_health_and_readiness_ask_for_it(token_file: Path) -> None:
    access = Access.of(MetricsConfig(token_file=token_file))

    async def check() -> None:
        async with served(access=access) as server, httpx.AsyncClient(trust_env=False, base_url=server.url) as client:

            async def code(path: str, *headers: tuple[str, str]) -> int:
                return (await client.get(path, headers=[*headers])).status_code

            right = ("Authorization", "Bearer a-token-of-the-test")
            assert await code("/metrics", right) == 200
            assert [await code(path) for path in ("/healthz", "/readyz", "/metrics", "/")] == [200, 200, 401, 401]
            for wrong in ("Bearer a-token-of-the-tes", "Bearer a-token-of-the-testt", "Bearer", "Basic eDp5", ""):
                assert await code("/metrics", ("Authorization", wrong)) == 401
            assert await code("/metrics", right, ("Authorization", "Bearer x")) == 401
            ways = (await client.get("/metrics")).headers.get_list("www-authenticate")
            assert ways == ["Bearer", 'Basic realm="rlhfd: the password is the token"']

    asyncio.run(asyncio.wait_for(check(), 30))
    assert "a-token" not in repr(access)


@pytest.mark.parametrize(
    ("mode", "text", "words"),
    [
        (0o640, "token", "is open to other users, it must have mode 0600"),
        (0o604, "token", "is open to other users, it must have mode 0600"),
        (0o600, " \n", "holds no token"),
        (0o600, "x" * 5000, "holds no token of 1 to 4,096 bytes"),
        (None, "", "No such file or directory"),
    ],
    ids=["group", "others", "empty", "long", "missing"],
)
def test_a_token_file_that_is_no_secret_is_refused(token_file: Path, mode: int | None, text: str, words: str) -> None:
    token_file.write_text(text)
    if mode:
        token_file.chmod(mode)
    else:
        token_file.unlink()

    with pytest.raises(ConfigError, match=rf"^metrics\.token_file: .*{words}"):
        Access.of(MetricsConfig(token_file=token_file))


@pytest.fixture
def certificate(tmp_path: Path) -> MetricsConfig:
    save_certificate(tmp_path)
    return MetricsConfig(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem")


@pytest.mark.needs("openssl")
async def test_with_a_certificate_it_speaks_tls_and_nothing_else(certificate: MetricsConfig) -> None:
    async with served(access=Access.of(certificate)) as server:
        trusted = ssl.create_default_context(cafile=certificate.tls_cert)
        async with httpx.AsyncClient(trust_env=False, verify=trusted) as client:
            assert (await client.get(f"https://127.0.0.1:{server.port}/metrics")).content == b"up 1\n"
            with pytest.raises(httpx.HTTPError):
                await client.get(f"http://127.0.0.1:{server.port}/metrics")
        with pytest.raises(httpx.ConnectError, match="certificate"):
            await get(server, "/metrics")
        assert server.url == f"https://127.0.0.1:{server.port}"


@pytest.mark.needs("openssl")
def test_a_key_that_others_may_read_or_a_file_that_is_no_certificate_is_refused(certificate: MetricsConfig) -> None:
    assert certificate.tls_key and certificate.tls_cert
    certificate.tls_key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"^metrics\.tls_key: .* is open to other users"):
        Access.of(certificate)

    certificate.tls_key.chmod(0o600)
    certificate.tls_cert.write_text("no certificate")
    with pytest.raises(ConfigError, match=r"^metrics\.tls_cert: cannot use "):
        Access.of(certificate)


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_an_address_that_others_reach_is_warned_of(host: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    HttpServer.bind(host, 0).close()
    server = HttpServer.bind(host, 0, Access(token=b"x"))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned

    # A reload takes the token away; the next one changes nothing.
    server.renew(MetricsConfig())
    server.renew(MetricsConfig())
    server.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"] * warned


async def test_answers_name_no_server_and_only_reading_is_allowed() -> None:
    async with served() as server, httpx.AsyncClient(trust_env=False, base_url=server.url) as client:
        answer = await client.get("/metrics")
        codes = [(await client.request(name, "/metrics")).status_code for name in ("HEAD", "POST", "PUT", "DELETE")]

    assert codes == [200, 405, 405, 405]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "server" not in answer.headers


def test_a_crowd_of_idle_and_dripping_clients_does_not_hold_up_a_scrape(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with served() as server:
            crowd = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(200)]
            for _, writer in crowd[100:150]:
                writer.write(b"G")
            for _, writer in crowd[150:]:
                writer.write(b"\x00\xff garbage\r\n\r\n")

            assert (await get(server, "/metrics")).content == b"up 1\n"
            # The scrape was answered while the rest of their headers was still waited for.
            held = [not reader.at_eof() for reader, _ in crowd[100:150]]
            for _, writer in crowd:
                writer.transport.abort()
            assert all(held)

    asyncio.run(asyncio.wait_for(check(), 30))
    assert [record for record in caplog.records if record.name != "httpx"] == []


@pytest.mark.needs("openssl")
@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_more_silent_clients_than_twice_the_bound_are_closed_at_once(
    monkeypatch: pytest.MonkeyPatch, certificate: MetricsConfig, is_encrypted: bool
) -> None:
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 5)

    # With TLS they do not begin the handshake.
    async with served(access=Access.of(certificate) if is_encrypted else None) as server:
        clients = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(20)]
        pending = {asyncio.create_task(reader.read()) for reader, _ in clients}
        deadline_s = time.monotonic() + 5
        while len(pending) > 10 and time.monotonic() < deadline_s:
            _, pending = await asyncio.wait(pending, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)

        assert len(pending) == 10
        for _, writer in clients:
            writer.close()
        await asyncio.wait(pending)


async def test_connections_that_have_ended_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CONNECTIONS", 5)

    async with served() as server:
        assert [(await get(server, "/metrics")).status_code for _ in range(20)] == [200] * 20


async def test_beyond_the_bound_a_request_is_refused_until_silent_clients_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.supervisor.web.server.MOST_CONNECTIONS", 20)

    async with served() as server:
        # Beside other work the first clients may be cut before the last one has come.
        for timeout_s in (0.2, 2.0, 20.0):
            monkeypatch.setattr("pipeline.supervisor.web.server._REQUEST_TIMEOUT_S", timeout_s)
            crowd = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(20)]
            status = (await get(server, "/metrics")).status_code
            for reader, writer in crowd:
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), timeout_s + 5) == b""
                writer.close()
            if status == 503:
                break

        assert status == 503
        assert (await get(server, "/metrics")).content == b"up 1\n"


@pytest.mark.parametrize("whole", [0, 2])
async def test_a_client_that_sends_no_whole_request_is_cut(monkeypatch: pytest.MonkeyPatch, whole: int) -> None:
    monkeypatch.setattr("pipeline.supervisor.web.server._REQUEST_TIMEOUT_S", 0.3)

    async with served() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(whole):
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"up 1" in await asyncio.wait_for(reader.readuntil(b"up 1\n"), 5)
            # Between requests a client may be silent for longer.
            await asyncio.sleep(0.5)
        writer.write(b"GET /metrics HT")
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_a_header_without_end_is_refused() -> None:
    async with served() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000)
        assert b" 400 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()


# The page.


async def test_the_page_and_its_files_are_served_with_a_policy_that_lets_nothing_in_from_elsewhere() -> None:
    async with served(page=Shown()) as server:
        answers = {path: await get(server, path) for path in ("/", "/page.css", "/page.js", "/icon.svg")}
        missing = await get(server, "/index.html"), await get(server, "/../page.py"), await get(server, "/%2e%2e/x")

    types = [answer.headers["content-type"].partition(";")[0] for answer in answers.values()]
    assert types == ["text/html", "text/css", "text/javascript", "image/svg+xml"]
    assert [answer.status_code for answer in missing] == [404, 404, 404]
    for answer in answers.values():
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert answer.status_code == 200
        assert policy["default-src"] == policy["frame-ancestors"] == policy["trusted-types"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "unsafe" not in answer.headers["content-security-policy"]


async def test_what_the_page_asks_for_is_json_that_nobody_stores() -> None:
    async with served(page=Shown()) as server:
        live, samples = await get(server, "/api/live?after_s=12.5"), await get(server, "/api/samples?cursor=a.7")
        first, wrong = await get(server, "/api/live"), await get(server, "/api/live?after_s=x")

    assert (live.json(), samples.json(), first.json()) == ({"after_s": 12.5}, {"cursor": "a.7"}, {"after_s": 0.0})
    assert live.headers["cache-control"] == samples.headers["cache-control"] == "no-store"
    assert wrong.status_code == 400


async def test_without_a_page_there_is_none() -> None:
    async with served() as server:
        paths = ("/", "/page.js", "/api/live", "/api/samples")
        assert [(await get(server, path)).status_code for path in paths] == [404] * 4


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1:9477", 200),
        ("localhost:9477", 200),
        ("LOCALHOST", 200),
        ("[::1]:9477", 200),
        ("evil.example:9477", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
async def test_a_name_that_somebody_pointed_here_is_not_answered(host: str, code: int) -> None:
    async with served(page=Shown()) as server, httpx.AsyncClient(trust_env=False) as client:
        api = await client.get(f"{server.url}/api/samples", headers={"host": host})
        metrics = await client.get(f"{server.url}/metrics", headers={"host": host})

    assert (api.status_code, metrics.status_code) == (code, 200)


async def test_a_browser_may_send_the_token_as_a_password() -> None:
    access = Access(token=b"secret")
    async with served(access=access, page=Shown()) as server, httpx.AsyncClient(trust_env=False) as client:
        refused = [await client.get(f"{server.url}/", auth=auth) for auth in (None, ("me", "wrong"), ("secret", ""))]
        damaged = await client.get(f"{server.url}/", headers={b"authorization": b"Basic \xff%"})
        admitted = await client.get(f"{server.url}/", auth=("anybody", "secret"))

    assert [answer.status_code for answer in (*refused, damaged)] == [401] * 4
    assert admitted.status_code == 200
