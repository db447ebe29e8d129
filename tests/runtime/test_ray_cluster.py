"""A gateway without its cluster: an error at the first start, a wait at a later one."""

from __future__ import annotations

import re
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.runtime import ray_cluster
from pipeline.runtime.ray_cluster import NoRoomError, await_room, join
from pipeline.runtime.role import Report, RoleContext

NOBODY = Config.model_validate({"cluster": {"engine": "ray", "address": "127.0.0.1:9"}})


@pytest.fixture
def gateway(tmp_path: Path):
    """A gateway at a later start, and its reports."""
    reports: list[Report] = []
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]

    def report(told: Report) -> None:
        reports.append(told)
        # Its handler is in place by now.
        threading.Timer(0.1, signal.raise_signal, [signal.SIGTERM]).start()

    yield RoleContext("rollout", 0, tmp_path, None, report, generation=2), reports  # type: ignore[arg-type]
    for number, handler in handlers:
        signal.signal(number, handler)


def test_at_the_first_start_the_address_is_wrong(gateway) -> None:
    context, reports = gateway
    context.generation = 1
    with pytest.raises(ConfigError, match=r"cluster.address: no Ray cluster at 127.0.0.1:9 "):
        join(NOBODY, context)
    assert reports == []


def test_at_a_later_start_it_waits_without_a_deadline_and_says_so_until_a_shutdown(gateway, caplog) -> None:
    context, reports = gateway
    with pytest.raises(NoRoomError):
        join(NOBODY, context)
    assert context.stopping
    assert reports == [Report(state="pending")]
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(" that this")[0] for text in told] == [
        "waits for the cluster: cluster.address: no Ray cluster at 127.0.0.1:9"
    ]


@pytest.mark.needs("ray")
def test_a_gone_cluster_that_ray_finds_by_itself_is_waited_for_too(gateway, monkeypatch, caplog) -> None:
    """Ray itself tries a head that has ended for a quarter of an hour, without a word."""
    context, reports = gateway
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    started_s = time.monotonic()

    with pytest.raises(NoRoomError):
        join(Config.model_validate({"cluster": {"engine": "ray", "address": "auto"}}), context)

    assert time.monotonic() - started_s < 30.0
    assert reports == [Report(state="pending")]
    assert re.search(r"waits for the cluster: cluster\.address: no Ray cluster at \S+:9 that", caplog.text)


@pytest.mark.needs("ray")
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_cluster_that_asks_for_a_token_is_told(gateway, monkeypatch, is_wrapped) -> None:
    import ray
    from ray.exceptions import AuthenticationError

    def refuse(**_: object) -> None:
        refused = AuthenticationError("InvalidAuthToken: it is missing")
        if not is_wrapped:
            raise refused
        # As Ray 2.60 does.
        tried = RuntimeError(f"Failed to connect to GCS. Last connection error: Traceback:\n  a line\n{refused}\n")
        raise ConnectionError("Failed to connect to Ray cluster") from tried

    context, _ = gateway
    context.generation = 1
    monkeypatch.setattr(ray, "init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"no Ray cluster at {address} .*InvalidAuthToken: it is missing.*token"):
            join(Config.model_validate({"cluster": {"engine": "ray", "address": address}}), context)


@pytest.mark.needs("ray")
@pytest.mark.parametrize(
    ("port", "reports"), [(38733, []), *((port, [Report(state="pending"), Report(state="placed")]) for port in (0, 77))]
)
def test_an_actor_that_starts_slowly_does_not_wait_for_room(gateway, monkeypatch, caplog, port, reports) -> None:
    import ray
    from ray._private import state

    context, told = gateway
    context.report = told.append
    answers = iter([[]] * 3)
    monkeypatch.setattr(ray, "wait", lambda references, timeout: (next(answers, references), []))
    monkeypatch.setattr(ray, "available_resources", dict)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeManagerPort": 77}])
    monkeypatch.setattr(state, "actors", lambda actor_id: {"State": "PENDING_CREATION", "Address": {"Port": port}})
    monkeypatch.setattr(ray_cluster, "_PENDING_S", 0.0)

    await_room("answered", context, "gpus=1 cpus=1", SimpleNamespace(_actor_id=b"4"))

    assert told == reports
    assert ("waits for room" in caplog.text) == bool(reports)
