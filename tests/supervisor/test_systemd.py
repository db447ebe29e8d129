from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.supervisor.systemd import Notifier, Service, status_line


@pytest.fixture(params=["file", "abstract"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    address = str(tmp_path / "notify") if request.param == "file" else f"@rlhfd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        bound.setblocking(False)
        yield bound, address


def heard(listener: socket.socket) -> list[str]:
    """Return all that has been told, a line each."""
    lines: list[str] = []
    while True:
        try:
            lines += listener.recv(1 << 16).decode().split("\n")
        except BlockingIOError:
            return lines


def test_fields_arrive_at_sockets_in_files_and_abstract_ones(listener: tuple[socket.socket, str]) -> None:
    bound, address = listener

    told = Notifier(address).send(READY=1, STATUS="step 3 – récompense\nWATCHDOG=trigger")

    assert told
    assert heard(bound) == ["READY=1", "STATUS=step 3 – récompense WATCHDOG=trigger"]


def test_a_child_cannot_inherit_the_way_to_the_manager() -> None:
    environ = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "6000000", "WATCHDOG_PID": str(os.getpid()), "PATH": "/bin"}

    notifier = Notifier.from_environ(environ)

    assert environ == {"PATH": "/bin"}
    assert notifier.is_connected and notifier.watchdog_s == 6.0


@pytest.mark.parametrize(("pid", "usec"), [("1", "6000000"), ("", ""), ("", "soon")])
def test_a_watchdog_of_somebody_else_or_none_is_not_answered(pid: str, usec: str) -> None:
    environ = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": usec, "WATCHDOG_PID": pid}

    assert Notifier.from_environ(environ).watchdog_s == 0.0


def test_without_a_manager_nothing_is_sent_and_with_a_dead_one_it_is_said(tmp_path: Path) -> None:
    assert Notifier().send(READY=1)
    assert not Notifier(str(tmp_path / "gone")).send(READY=1)


def status_of(state: str, ready: int = 0, workers: int = 0, **values: float) -> dict[str, Any]:
    processes = [{"role": "rollout", "state": "ready" if index < ready else "starting"} for index in range(workers)]
    return {"state": state, "reward_mean": None, "tokens_per_s": None, "processes": processes} | values


class Told:
    """A service on a socket of the test's, with the status that it reports."""

    def __init__(self, listener: tuple[socket.socket, str], *, watchdog_s: float = 8.0) -> None:
        self._bound, address = listener
        self.status = status_of("starting", 0, 2)
        self.silent = False
        self.limits: list[float] = []
        self.service = Service(
            Notifier(address, watchdog_s), status=lambda: self.status, is_buffer_silent=self._is_silent
        )

    def _is_silent(self, limit_s: float) -> bool:
        self.limits.append(limit_s)
        return self.silent

    def tick(self, now_s: float, *, is_ending: bool = False, has_failed: bool = False) -> list[str]:
        self.service.tick(now_s, is_ending=is_ending, has_failed=has_failed)
        return heard(self._bound)


@pytest.fixture
def told(listener: tuple[socket.socket, str]) -> Told:
    return Told(listener)


def test_a_start_asks_for_time_until_it_is_ready_and_says_so_once(told: Told) -> None:
    first = told.tick(0.0)
    told.status = status_of("starting", 1, 2)
    again = told.tick(0.25)
    later = told.tick(1.0)
    told.status = status_of("ready", 2, 2)
    # Within the second in which no other line is shown: none of the start's is left once systemd calls it active.
    ready, after = told.tick(1.5), told.tick(2.5)

    assert first == ["EXTEND_TIMEOUT_USEC=30000000", "STATUS=starting: step 0, workers 0 of 2", "WATCHDOG=1"]
    assert again == []
    assert later == ["EXTEND_TIMEOUT_USEC=30000000", "STATUS=starting: step 0, workers 1 of 2"]
    assert ready == ["READY=1", "STATUS=ready: step 0, workers 2 of 2"]
    assert after == ["WATCHDOG=1"]


def test_the_watchdog_is_answered_four_times_a_period_while_the_buffer_moves(told: Told) -> None:
    answered = [now_s for now_s in (0.0, 1.0, 2.0, 3.0, 4.0) if "WATCHDOG=1" in told.tick(now_s)]
    told.silent = True
    withheld = [now_s for now_s in (6.0, 8.0, 10.0) if "WATCHDOG=1" in told.tick(now_s)]
    told.silent = False

    assert answered == [0.0, 2.0, 4.0]
    assert withheld == []
    assert "WATCHDOG=1" in told.tick(11.0)
    # Half the watchdog's time for the buffer, so that both together are no more than one and a half of it.
    assert set(told.limits) == {4.0}


def test_an_end_asks_for_time_as_long_as_it_takes(told: Told) -> None:
    told.status = status_of("ready")
    told.tick(0.0)
    told.status = status_of("draining")

    assert told.tick(1.0, is_ending=True)[:2] == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=30000000"]
    assert "EXTEND_TIMEOUT_USEC=30000000" in told.tick(2.0, is_ending=True)


def test_an_end_in_order_during_the_start_is_no_failed_start_but_a_failure_is(
    listener: tuple[socket.socket, str],
) -> None:
    asked, failed = Told(listener), Told(listener)
    asked.status = failed.status = status_of("draining")

    told_by_it = asked.tick(0.0, is_ending=True)
    assert (told_by_it[0], told_by_it[2]) == ("READY=1", "STOPPING=1")
    assert "READY=1" not in failed.tick(0.0, is_ending=True, has_failed=True)


def test_the_status_line_names_step_reward_speed_and_workers() -> None:
    status = status_of("ready", 3, 4, step=1200, max_steps=5000, reward_mean=0.43412, tokens_per_s=805.4)

    assert status_line(status) == "ready: step 1,200 of 5,000, reward 0.4341, 805 tokens/s, workers 3 of 4"
