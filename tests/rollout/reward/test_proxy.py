"""Services behind the environment's proxies: one of this machine is asked directly, errors of others name the proxy."""

from __future__ import annotations

import asyncio
import http.server
import os
import threading
from collections.abc import Iterator

import pytest

from pipeline.config.rewards import RemoteReward
from pipeline.errors import RewardError

pytest.importorskip("httpx")

from pipeline.rollout.reward.service import Service


class _Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"42")

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://user:secret@127.0.0.1:9")


def asked(url: str) -> int | RewardError:
    service = Service(url, RemoteReward(name="remote", url=url), attempts=1)
    return asyncio.run(service.ask([{}], lambda answer, number: int(answer)))[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_service_of_this_machine_is_asked_without_the_proxy(port: int, host: str) -> None:
    assert asked(f"http://{host}:{port}/score") == 42
    assert "proxy" not in str(asked(f"http://{host}:1/score"))


@pytest.mark.parametrize("name", ["http_proxy", "all_proxy"])
def test_the_error_of_a_service_behind_a_proxy_names_it_without_its_password(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, os.environ["http_proxy"])
    for other in {"http_proxy", "HTTP_PROXY"} - {name, name.upper()}:
        monkeypatch.delenv(other)

    found = asked("http://scores.example/score")

    assert f"through the proxy http://***@127.0.0.1:9 of {name}: NO_PROXY=scores.example passes it by" in str(found)
