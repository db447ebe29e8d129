"""The watchdog's answer to roles that are late at their start; the children are real processes that do nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pipeline.runtime.signals import stop_signal
from pipeline.supervisor.fleet import Slot
from pipeline.supervisor.watchdog import Watchdog
from pipeline.telemetry.log import JsonFormatter
from tests.supervisor.test_fleet import Idlers

LIMIT_S = 100.0


class Watch:
    """A fleet and its watchdog, with a clock that the test advances.

    Attributes:
        ended: Each slot that ended, with its exit code.
    """

    def __init__(self, folder: Path) -> None:
        self.fleet = Idlers(folder)
        self.ended: list[tuple[str, int]] = []
        self.fleet.ended = lambda slot, code: self.ended.append((slot.name, code))
        self.fleet.reload(self.fleet.config.changed("daemon", startup_timeout_s=LIMIT_S))
        self.watchdog = Watchdog(self.fleet, state=lambda: "starting", gave_up=lambda reason: pytest.fail(reason))
        self._now_s = time.monotonic()

    def stand_still(self, seconds: float) -> None:
        """Let time pass in one tick of the watchdog."""
        self._now_s += seconds
        self.watchdog.tick(self._now_s, 0.0, 0.0)

    def pass_s(self, seconds: float) -> None:
        """Let time pass, the watchdog ticking without a pause."""
        until_s = self._now_s + seconds
        while self._now_s < until_s:
            self._now_s = min(self._now_s + 10.0, until_s)
            self.watchdog.tick(self._now_s, 0.0, 0.0)

    async def all_end(self) -> None:
        """Wait until no child is left."""
        await self.fleet.until(lambda: not self.fleet.alive())


@asynccontextmanager
async def watching(folder: Path) -> AsyncIterator[Watch]:
    """Two ranks that start, and never say that they are ready unless they are told to."""
    watch = Watch(folder)
    watch.pass_s(0.1)
    try:
        yield watch
    finally:
        watch.fleet.signal(watch.fleet.slots, signal.SIGKILL)
        await watch.all_end()


async def test_a_supervisor_that_stood_still_says_for_how_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with watching(tmp_path) as watch:
        watch.pass_s(60.0)
        assert not caplog.messages

        watch.stand_still(25.0)
        watch.pass_s(60.0)

    (said,) = caplog.messages
    assert said.startswith("the supervisor stood still") and said.endswith("seconds=25.0")


async def test_of_ranks_that_are_late_together_each_is_asked_for_its_stacks(tmp_path: Path) -> None:
    async with watching(tmp_path) as watch:
        for rank in watch.fleet.ranks:
            watch.fleet.start(rank)
        watch.pass_s(LIMIT_S - 1.0)
        assert not any(rank.error for rank in watch.fleet.ranks)

        watch.pass_s(2.0)
        await watch.all_end()

        # What does not know the signal dies of it: both got it.
        assert sorted(watch.ended) == [("trainer-0", -signal.SIGUSR1), ("trainer-1", -signal.SIGUSR1)]
        for rank in watch.fleet.ranks:
            assert rank.error.startswith("not ready within 100 s (daemon.startup_timeout_s); its last line: ")
            assert (rank.ended_by, rank.late_starts) == ("watchdog", 1)


async def test_one_that_is_ready_before_it_is_killed_is_let_live(tmp_path: Path) -> None:
    async with watching(tmp_path) as watch:
        watch.fleet.ignored = signal.SIGUSR1
        for rank in watch.fleet.ranks:
            watch.fleet.start(rank)
        watch.pass_s(LIMIT_S + 1.0)
        assert all(rank.is_late for rank in watch.fleet.ranks)

        for rank in watch.fleet.ranks:
            watch.fleet.say_ready(rank)
        await watch.fleet.until(lambda: all(rank.state == "ready" for rank in watch.fleet.ranks))
        watch.pass_s(10.0)

        assert watch.ended == []
        assert [(rank.error, rank.ended_by, rank.is_late) for rank in watch.fleet.ranks] == [("", "", False)] * 2


async def test_the_second_late_start_in_a_row_is_the_last_and_one_in_between_begins_anew(tmp_path: Path) -> None:
    async with watching(tmp_path) as watch:
        rank = watch.fleet.ranks[0]
        watch.fleet.ranks[1].state = "ended"
        watch.fleet.slots.remove(watch.fleet.ranks[1])

        async def start(*, is_late: bool) -> float | None:
            watch.fleet.start(rank)
            if is_late:
                watch.pass_s(LIMIT_S + 1.0)
            else:
                os.kill(watch.fleet.started[0][-1], signal.SIGKILL)
            await watch.all_end()
            return watch.fleet.retry(rank)

        assert await start(is_late=True) is not None
        assert await start(is_late=False) is not None
        assert await start(is_late=True) is not None, "not the second in a row"
        assert await start(is_late=True) is None
        assert rank.state == "failed"


async def test_one_that_a_cluster_is_pending_for_is_neither_late_nor_waited_for(tmp_path: Path) -> None:
    async with watching(tmp_path) as watch:
        pending, other = watch.fleet.ranks

        def all_ready(role: str = "rollout") -> bool:
            # The pending one in that role, and a worker that needs no process of its own for it.
            worker, slots = dataclasses.replace(other, role="rollout", state="ready"), [*watch.fleet.slots]
            watch.fleet.slots[:] = [
                *(dataclasses.replace(slot, role=role) if slot is pending else slot for slot in slots),
                worker,
            ]
            try:
                return watch.fleet.all_ready()
            finally:
                watch.fleet.slots[:] = slots

        for rank in watch.fleet.ranks:
            watch.fleet.start(rank)
        watch.fleet.say_ready(other)
        await watch.fleet.until(lambda: other.state == "ready")
        assert not all_ready()

        watch.fleet.say_ready(pending, "pending")
        await watch.fleet.until(lambda: pending.is_pending)
        watch.pass_s(3 * LIMIT_S)
        assert not pending.is_late and all_ready()
        assert not all_ready("trainer"), "without a rank nothing is trained"

        watch.fleet.say_ready(pending, "placed")
        await watch.fleet.until(lambda: not pending.is_pending)
        assert not all_ready()
        watch.pass_s(LIMIT_S)
        assert pending.is_late, "from there on it may be"


async def test_a_forkserver_that_is_late_is_replaced(tmp_path: Path) -> None:
    async with watching(tmp_path) as watch:
        (forkserver,) = watch.fleet.of("forkserver")
        ends: list[tuple[Slot, int]] = []
        watch.fleet.ended = lambda slot, code: ends.append((slot, code))
        watch.fleet.start(forkserver)

        watch.pass_s(LIMIT_S + 1.0)
        await watch.all_end()

        assert ends == [(forkserver, -signal.SIGUSR1)]
        assert watch.fleet.retry(forkserver) is not None


async def test_a_forkserver_that_waits_for_requests_does_not_hang(tmp_path: Path) -> None:
    async with watching(tmp_path) as watch:
        (forkserver,) = watch.fleet.of("forkserver")
        watch.fleet.start(forkserver)
        watch.fleet.say_ready(forkserver)
        await watch.fleet.until(lambda: forkserver.state == "ready")

        watch.pass_s(watch.fleet.config.daemon.hang_timeout_s + 10.0)

        assert (forkserver.error, watch.watchdog.is_stuck) == ("", False)


async def test_one_that_is_stopped_as_it_starts_is_let_go_on_to_write_its_stacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with watching(tmp_path) as watch:
        for rank in watch.fleet.ranks:
            watch.fleet.start(rank)
        (pid,) = watch.fleet.started[1]
        os.kill(pid, signal.SIGSTOP)
        await watch.fleet.until(lambda: stop_signal(pid) is not None)

        watch.pass_s(LIMIT_S + 1.0)
        await watch.fleet.until(lambda: bool(watch.ended))

        # It got to take the signal, and the rank that waits for it is not blamed.
        assert watch.ended == [("trainer-1", -signal.SIGUSR1)]
        assert watch.fleet.ranks[1].error == "hung in start: stopped"
        assert [rank.from_outside for rank in watch.fleet.ranks] == [False, True]
        assert watch.fleet.ranks[0].error == ""

    (found,) = [record for record in caplog.records if record.msg.startswith("hung")]
    fields = json.loads(JsonFormatter("supervisor").format(found))
    assert (fields["event"], fields["role"], fields["pid"]) == ("hung", "trainer-1", pid)
    assert (fields["lease"], fields["reason"]) == (-1, "stopped")
