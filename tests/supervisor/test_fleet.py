"""Ranks are started together, even if some die meanwhile; the children are real processes that do nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import pytest

from pipeline import sort_digits
from pipeline.config.schema import Config, DaemonConfig
from pipeline.errors import ExitCode
from pipeline.runtime.child_process import Starter, cache_variables
from pipeline.runtime.latest_checkpoint import Latest, checkpoints_dir, write_latest
from pipeline.runtime.messages import Message
from pipeline.runtime.role import Report
from pipeline.supervisor.fleet import Fleet, Slot
from pipeline.supervisor.placement import Devices
from pipeline.supervisor.shutdown import Shutdown
from pipeline.telemetry.log import JsonFormatter
from pipeline.telemetry.metrics import SlotName
from pipeline.telemetry.slab import MetricsSlab
from tests.support.version_header import write_header


class Idlers(Fleet):
    """Two trainer ranks that sleep.

    Attributes:
        ended: Called at each end of one.
        started: The pids of each rank, in order.
        brief: Ranks whose next child ends by itself, a moment later.
        ignored: A signal that children started from now on do not hear.
    """

    def __init__(self, folder: Path) -> None:
        slots = [SlotName("supervisor"), SlotName("buffer"), SlotName("trainer", 0), SlotName("trainer", 1)]
        slots.append(SlotName("rollout"))
        slab = MetricsSlab.create(folder / "metrics", slots)
        slab.begin("supervisor")
        self.ended: Callable[[Slot, int], None] = lambda slot, code: None
        self.started: dict[int, list[int]] = {0: [], 1: []}
        self.brief: set[int] = set()
        self._reports: dict[int, int] = {}
        self.ignored: signal.Signals | None = None
        self.slab = slab
        super().__init__(
            str(folder),
            slab,
            sort_digits.with_paths(Config(daemon=DaemonConfig(state_dir=folder / "state"))),
            clock=time.monotonic,
            on_reaped=lambda: None,
            on_end=lambda slot, code: self.ended(slot, code),
            on_change=lambda slot: None,
            on_line=lambda slot, line: None,
        )
        self.ranks = [self.add("trainer", rank, Devices("", ())) for rank in (0, 1)]
        for forkserver in self.of("forkserver"):
            # Then roles are executed.
            forkserver.state = "failed"

    def _starter(self, slot: Slot, *, forked: bool) -> Starter:
        def ignore() -> None:
            if self.ignored is not None:
                signal.signal(self.ignored, signal.SIG_IGN)

        def start(reports: int, lines: int) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                ["sleep", "60" if slot.index not in self.brief else "0.1"], preexec_fn=ignore, pass_fds=(reports,)
            )
            self.started[slot.index].append(process.pid)
            self._reports[process.pid] = reports
            return process

        return start

    def say_ready(self, slot: Slot, state: str = "ready") -> None:
        """Report in a child's name that it is ready, or in another state."""
        assert slot.child is not None
        # By its number: other open files of a starting process, such as its libraries, may be gone a moment later.
        with Path(f"/proc/{slot.child.pid}/fd/{self._reports[slot.child.pid]}").open("wb") as reports:
            reports.write(f'{{"state":"{state}"}}\n'.encode())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something, at most a minute."""
        deadline_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.005)


class Unheard:
    """An outbox without a receiver."""

    def send(self, message: Message) -> None:
        """Do nothing."""


@contextlib.asynccontextmanager
async def stopping(folder: Path, *, brief: Iterable[int] = ()) -> AsyncIterator[tuple[Idlers, Shutdown]]:
    """Two ranks that run, and their stop, which has begun; nothing of them is left behind."""
    fleet = Idlers(folder)
    shutdown = Shutdown(fleet, Unheard(), taken_over=True)  # type: ignore[arg-type]
    fleet.ended, fleet.brief = shutdown.child_ended, set(brief)
    for rank in fleet.ranks:
        fleet.start(rank)
    fleet.brief = set()
    shutdown.begin()
    try:
        yield fleet, shutdown
    finally:
        fleet.ended = lambda slot, code: None
        shutdown.kill_all()
        await fleet.until(lambda: not fleet.alive())


@pytest.mark.parametrize(
    ("counts", "number", "engine", "ended_by", "from_outside"),
    [
        ((3, 3), signal.SIGKILL, False, "", True),
        ((3, 4), signal.SIGKILL, False, "oom", False),
        ((None, None), signal.SIGKILL, False, "", False),
        ((3, 3), signal.SIGSEGV, False, "", False),
        # The engine of a worker, which then ends by itself.
        ((3, 3), signal.SIGTERM, True, "", True),
        ((3, 4), signal.SIGTERM, True, "", False),
    ],
)
async def test_a_kill_that_the_kernel_has_not_counted_comes_from_another_program(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counts: tuple[int | None, int | None],
    number: signal.Signals,
    engine: bool,
    ended_by: str,
    from_outside: bool,
) -> None:
    found = iter(counts)
    monkeypatch.setattr("pipeline.supervisor.fleet.kill_count", found.__next__)

    fleet = Idlers(tmp_path)
    (rank, _) = fleet.ranks
    fleet.start(rank)
    if engine:
        fleet._report(rank, Report(killed=True))
    os.kill(fleet.started[0][0], number)
    await fleet.until(lambda: not fleet.alive())

    assert (rank.ended_by, rank.from_outside) == (ended_by, from_outside)


async def test_children_that_the_kernel_kills_at_once_are_each_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = 3
    monkeypatch.setattr("pipeline.supervisor.fleet.kill_count", lambda: kills)
    fleet = Idlers(tmp_path)
    for rank in fleet.ranks:
        fleet.start(rank)
    kills += 2

    for pids in list(fleet.started.values()):
        os.kill(pids[0], signal.SIGKILL)
    await fleet.until(lambda: not fleet.alive())

    assert [(rank.ended_by, rank.from_outside) for rank in fleet.ranks] == [("oom", False), ("oom", False)]


def test_prompts_of_the_embedded_task_are_counted_before_they_are_made(tmp_path: Path) -> None:
    fleet = Idlers(tmp_path)

    assert fleet.prompts == sort_digits.PROMPT_COUNT
    fleet.slab.close()


@pytest.mark.parametrize(("minutes", "ended_by"), [(0, "oom"), (1, "oom"), (3, "")])
async def test_a_kill_by_the_kernel_of_minutes_ago_was_that_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: int, ended_by: str
) -> None:
    kills = 3
    monkeypatch.setattr("pipeline.supervisor.fleet.kill_count", lambda: kills)
    fleet = Idlers(tmp_path)
    (rank, _) = fleet.ranks
    fleet.start(rank)
    kills += 1
    for minute in range(1, minutes + 1):
        fleet.tick(time.monotonic() + 60.0 * minute)

    os.kill(fleet.started[0][0], signal.SIGKILL)
    await fleet.until(lambda: not fleet.alive())

    assert (rank.ended_by, rank.from_outside) == (ended_by, not ended_by)


async def test_ranks_that_die_one_after_another_during_a_stop_meet_under_one_number(tmp_path: Path) -> None:
    async with stopping(tmp_path) as (fleet, shutdown):

        def ended(slot: Slot, code: int) -> None:
            shutdown.child_ended(slot, code)
            # The other one is not reaped yet.
            shutdown.advance(time.monotonic())

        fleet.ended = ended
        os.kill(fleet.started[1][0], signal.SIGKILL)
        await fleet.until(lambda: all(len(pids) > 1 for pids in fleet.started.values()))
        # Whatever would follow from that, follows now.
        await asyncio.sleep(0.2)

        assert {rank: len(pids) for rank, pids in fleet.started.items()} == {0: 2, 1: 2}
        assert fleet.ranks[0].generation == fleet.ranks[1].generation


async def test_a_rank_that_ends_in_order_while_another_dies_during_a_stop_comes_back_with_it(tmp_path: Path) -> None:
    async with stopping(tmp_path, brief={1}) as (fleet, shutdown):
        os.kill(fleet.started[0][0], signal.SIGKILL)
        # Both are dead before either end is heard of.
        for pids in fleet.started.values():
            os.waitid(os.P_PID, pids[0], os.WEXITED | os.WNOWAIT)
        await fleet.until(lambda: not fleet.alive())
        shutdown.advance(time.monotonic())

        assert {rank: len(pids) for rank, pids in fleet.started.items()} == {0: 2, 1: 2}
        assert fleet.ranks[0].generation == fleet.ranks[1].generation


@pytest.mark.parametrize(("ended_by", "code"), [("", ExitCode.FAILED), ("group", ExitCode.OK)])
async def test_a_rank_whose_collective_was_broken_by_another_ones_death_has_not_failed_a_stop(
    tmp_path: Path, ended_by: str, code: ExitCode
) -> None:
    async with stopping(tmp_path) as (fleet, shutdown):
        fleet.ranks[0].ended_by = ended_by
        shutdown.note_unwritten(fleet.ranks[0], ExitCode.FAILED)

        assert shutdown.exit_code == code


async def test_once_the_first_rank_has_ended_in_order_a_stop_waits_for_no_other(tmp_path: Path) -> None:
    async with stopping(tmp_path, brief={0}) as (fleet, shutdown):
        # It dies first; the other one has ended before it can be killed for that.
        os.kill(fleet.started[1][0], signal.SIGKILL)
        os.waitid(os.P_PID, fleet.started[0][0], os.WEXITED | os.WNOWAIT)
        await fleet.until(lambda: not fleet.alive())
        closed: list[str] = []
        fleet.close = lambda: closed.append("and the buffer is told to end")  # type: ignore[method-assign]
        shutdown.advance(time.monotonic())

        assert closed
        assert (shutdown.over, shutdown.exit_code) == (True, ExitCode.OK)


async def test_a_rank_that_starts_is_not_left_waiting_for_one_that_has_ended(tmp_path: Path) -> None:
    # As one does that cannot load its model.
    async with stopping(tmp_path, brief={1}) as (fleet, shutdown):
        await fleet.until(lambda: not fleet.alive())
        shutdown.advance(time.monotonic())

        assert {rank: len(pids) for rank, pids in fleet.started.items()} == {0: 2, 1: 2}


@pytest.mark.parametrize("hung", [0, 1])
async def test_a_rank_that_hangs_again_at_its_last_checkpoint_is_not_started_a_third_time(
    tmp_path: Path, hung: int
) -> None:
    async with stopping(tmp_path) as (fleet, shutdown):
        for lives in (1, 2):
            assert {rank: len(pids) for rank, pids in fleet.started.items()} == {0: lives, 1: lives}
            fleet.ranks[hung].ended_by = "watchdog"
            os.kill(fleet.started[hung][-1], signal.SIGKILL)
            await fleet.until(lambda: not fleet.alive())
            shutdown.advance(time.monotonic())

        assert {rank: len(pids) for rank, pids in fleet.started.items()} == {0: 2, 1: 2}
        assert (shutdown.over, shutdown.exit_code) == (True, ExitCode.FAILED)


def hold_steps(fleet: Idlers, *, saved: int) -> None:
    """Let shared memory hold weights and training state of version 3, and the last checkpoint this version."""
    for name in ("weights", "training"):
        write_header(Path(fleet.folder, name), 3)
    checkpoints_dir(fleet.config).mkdir(parents=True)
    write_latest(checkpoints_dir(fleet.config), Latest("", saved, saved, 0, False, f"step-{saved:06d}"))


def stays(fleet: Idlers) -> str:
    return f"weights and training state of version 3 stay in {fleet.folder} for the next start"


@pytest.mark.parametrize("saved", [2, 3])
@pytest.mark.parametrize("second", ["starting", "waiting", "failed", "ended"])
async def test_steps_that_no_rank_can_save_stay_when_a_run_gives_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, second: str, saved: int
) -> None:
    fleet = Idlers(tmp_path)
    shutdown = Shutdown(fleet, Unheard(), taken_over=False)  # type: ignore[arg-type]
    hold_steps(fleet, saved=saved)
    fleet.start(fleet.ranks[0])
    fleet.say_ready(fleet.ranks[0])
    await fleet.until(lambda: fleet.ranks[0].state == "ready")
    if second == "starting":
        fleet.start(fleet.ranks[1])
    fleet.ranks[1].state = second
    shutdown.fail(ExitCode.GAVE_UP, "trainer-1 failed too often")

    shutdown.begin_failed()
    await fleet.until(lambda: not fleet.alive())

    assert (shutdown.is_kept, shutdown.exit_code) == (saved == 2, ExitCode.GAVE_UP)
    assert (f"the last steps are in no checkpoint: {stays(fleet)}" in caplog.text) == shutdown.is_kept


async def test_steps_of_ranks_that_cannot_be_started_again_during_a_stop_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stopping(tmp_path) as (fleet, shutdown):
        hold_steps(fleet, saved=2)
        fleet.reload(fleet.config.changed("daemon", restart_limit=1))
        os.kill(fleet.started[1][0], signal.SIGKILL)
        await fleet.until(lambda: not fleet.alive())

    assert (shutdown.is_kept, shutdown.exit_code) == (True, ExitCode.FAILED)
    assert f"trainer-1 ended (-9) before its last checkpoint: {stays(fleet)}" in shutdown.reason


@pytest.mark.parametrize("saved", [2, 3])
async def test_ranks_that_wait_for_the_cluster_hold_up_no_stop_and_their_steps_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, saved: int
) -> None:
    async with stopping(tmp_path) as (fleet, shutdown):
        hold_steps(fleet, saved=saved)
        fleet.say_ready(fleet.ranks[1], "pending")
        await fleet.until(lambda: fleet.ranks[1].is_pending)
        shutdown.advance(time.monotonic() + 0.9 * fleet.config.daemon.drain_timeout_s)
        assert len(fleet.alive("trainer")) == 2, "there is time for a place"

        shutdown.advance(time.monotonic() + 1.1 * fleet.config.daemon.drain_timeout_s)
        await fleet.until(lambda: not fleet.alive())
        shutdown.advance(time.monotonic())

        assert (shutdown.over, shutdown.is_kept) == (True, saved == 2)
        assert ("the cluster has no place for the trainer ranks: " in shutdown.reason) == shutdown.is_kept
    assert "cut at daemon.drain_timeout_s, waiting for the cluster: trainer-0, trainer-1" in caplog.text


async def test_a_rank_that_is_killed_on_another_machine_during_a_stop_comes_back_with_the_others(
    tmp_path: Path,
) -> None:
    async with stopping(tmp_path) as (fleet, shutdown):
        for rank in fleet.ranks:
            rank.state = "draining"
        # Its gateway ends by an error of its own.
        fleet.ranks[1].from_outside = True
        shutdown.note_unwritten(fleet.ranks[1], ExitCode.FAILED)

        assert shutdown.exit_code == ExitCode.OK
        assert shutdown._must_restart(fleet.ranks[1], ExitCode.FAILED)
        fleet.ranks[1].from_outside = False
        assert not shutdown._must_restart(fleet.ranks[1], ExitCode.FAILED)


@pytest.mark.parametrize(("saved", "spooled"), [(2, True), (3, False), (3, True)])
async def test_after_an_error_of_the_shutdown_steps_and_rows_that_are_not_on_disk_stay(
    tmp_path: Path, saved: int, spooled: bool
) -> None:
    async with stopping(tmp_path) as (fleet, shutdown):
        hold_steps(fleet, saved=saved)
        fleet.add("buffer", 0, Devices("", ())).last_exit = ExitCode.OK if spooled else None

        shutdown.give_up()

    assert shutdown.is_kept == (saved == 2 or not spooled)


async def test_a_buffer_that_hangs_again_at_its_spool_is_not_started_a_third_time(tmp_path: Path) -> None:
    fleet = Idlers(tmp_path)
    buffer = fleet.add("buffer", 0, Devices("", ()))
    shutdown = Shutdown(fleet, Unheard(), taken_over=False)  # type: ignore[arg-type]
    fleet.ended = shutdown.child_ended
    fleet.start(buffer)
    shutdown.begin()
    for lives in (1, 2):
        assert (len(fleet.started[0]), shutdown.exit_code, shutdown.over) == (lives, ExitCode.OK, False)
        buffer.ended_by = "watchdog"
        os.kill(fleet.started[0][-1], signal.SIGKILL)
        await fleet.until(lambda: not fleet.alive())
        shutdown.advance(time.monotonic())

    assert (len(fleet.started[0]), shutdown.exit_code, shutdown.over) == (2, ExitCode.FAILED, True)


async def test_a_trainer_that_has_something_to_write_is_not_cut(tmp_path: Path) -> None:
    async with stopping(tmp_path) as (fleet, shutdown):
        late_s = time.monotonic() + 1000 * fleet.config.daemon.drain_timeout_s
        shutdown.advance(late_s)
        # A death would be heard of here.
        await asyncio.sleep(0.2)

        assert {rank: len(pids) for rank, pids in fleet.started.items()} == {0: 1, 1: 1}
        assert len(fleet.alive("trainer")) == 2


@pytest.mark.parametrize(
    ("complete", "before_s", "after_s", "line"),
    [
        (True, 0.5, 1.5, (logging.INFO, "cut, all steps are taken: rollout-0")),
        (False, 29.0, 31.0, (logging.WARNING, "cut at daemon.drain_timeout_s: rollout-0")),
    ],
    ids=["after the last step", "at a stop"],
)
async def test_a_rollout_is_cut_once_and_at_once_if_all_steps_are_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, complete: bool, before_s: float, after_s: float,
    line: tuple[int, str],
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)

    fleet = Idlers(tmp_path)
    worker = fleet.add("rollout", 0, Devices("", ()))
    fleet.reload(fleet.config.changed("daemon", drain_timeout_s=30.0))
    shutdown = Shutdown(fleet, Unheard(), taken_over=False)  # type: ignore[arg-type]
    fleet.ignored = signal.SIGTERM
    fleet.start(worker)
    began_s = time.monotonic()
    shutdown.begin(complete=complete)

    shutdown.advance(began_s + before_s)
    await asyncio.sleep(0.2)
    assert worker.alive

    for _ in range(3):
        shutdown.advance(time.monotonic() + after_s)
    await fleet.until(lambda: not fleet.alive())
    assert worker.last_exit == -signal.SIGKILL

    assert [(record.levelno, record.getMessage()) for record in caplog.records if "cut" in record.getMessage()] == [
        line
    ]


async def test_a_rank_that_a_stop_ends_is_shown_as_draining_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with stopping(tmp_path) as (fleet, shutdown):
        changes: list[tuple[int, str]] = []
        for rank in fleet.ranks:
            fleet.say_ready(rank)
        await fleet.until(lambda: all(rank.state == "ready" for rank in fleet.ranks))
        fleet.on_change = lambda slot: changes.append((slot.index, slot.state))

        shutdown.advance(time.monotonic())

        assert changes == [(0, "draining"), (1, "draining")]

    ready = [record for record in caplog.records if record.msg.startswith("ready")]
    fields = [json.loads(JsonFormatter("supervisor").format(record)) for record in ready]
    # The name "process" is the supervisor's own.
    assert [(one["event"], one["process_"]) for one in fields] == [("ready", "trainer-0"), ("ready", "trainer-1")]
    assert not any("device" in one for one in fields)


async def test_ranks_that_end_together_during_a_stop_give_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stopping(tmp_path) as (fleet, shutdown):
        os.kill(fleet.started[1][0], signal.SIGKILL)
        await fleet.until(lambda: not fleet.alive())
        shutdown.advance(time.monotonic())

    warned = [record.getMessage() for record in caplog.records if "before its last checkpoint" in record.msg]
    assert warned == ["trainer-1 ended (-9) before its last checkpoint, restart: it reported no error"]


@pytest.mark.parametrize("first", [0, 1])
async def test_a_rank_joins_the_one_that_waits_for_it(tmp_path: Path, first: int) -> None:
    fleet = Idlers(tmp_path)
    waiting, late = fleet.ranks[first], fleet.ranks[1 - first]
    # As when its forkserver did not answer, twice.
    late.generation = 2
    fleet.start(waiting)
    fleet.start(late)
    try:
        assert waiting.generation == late.generation == 3
    finally:
        fleet.signal(fleet.ranks, signal.SIGKILL)
        await fleet.until(lambda: not fleet.alive())


@pytest.mark.parametrize(("beat_s", "expected_s"), [(0.0, 0.0), (7.0, 7.0)])
async def test_what_a_child_hung_for_in_the_end_is_no_life(tmp_path: Path, beat_s: float, expected_s: float) -> None:
    fleet = Idlers(tmp_path)
    rank = fleet.ranks[0]
    fleet.start(rank)
    fleet.say_ready(rank)
    await fleet.until(lambda: rank.ready_s is not None)
    assert rank.ready_s is not None
    # It was ready for long, at most since the machine's start, and moved for that long of it.
    rank.ready_s /= 2
    fleet.slab.writer("trainer", 0).enter("wait_data", int((rank.ready_s + beat_s) * 1e9), 0)
    fleet.signal([rank], signal.SIGKILL)
    await fleet.until(lambda: not fleet.alive())

    assert rank.lived_s == pytest.approx(expected_s, abs=1e-6)
    assert fleet.retry(rank) is not None


def test_roles_get_the_caches_of_the_state_directory_and_the_users_own_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/fast/triton")
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    fleet = Idlers(tmp_path)

    environment = fleet._environment(fleet.ranks[0])

    assert environment["VLLM_CACHE_ROOT"] == cache_variables(tmp_path / "state", {})["VLLM_CACHE_ROOT"]
    assert environment["TRITON_CACHE_DIR"] == "/fast/triton"
    fleet.slab.close()
