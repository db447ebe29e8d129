"""The supervisor's ticks: rare while the run is paused, at once when something changes; machines that it refuses."""

import asyncio
import signal
from types import SimpleNamespace

import pytest

from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, ExitCode, GaveUpError
from pipeline.supervisor import supervisor as module
from pipeline.supervisor.shutdown import Shutdown
from pipeline.supervisor.supervisor import Supervisor

PAUSED = {"phase": "paused", "is_buffer_paused": True}


@pytest.fixture
def made(monkeypatch):
    """Return a supervisor whose usual ticks follow at once, and whose rare ticks never do."""
    monkeypatch.setattr(module, "_TICK_S", 0.0)
    monkeypatch.setattr(module, "_PAUSED_TICK_S", 1e6)

    def make(*, all_ready=True, **status):
        made = Supervisor(None, None, None, None, None, None, None, None, None)
        made._status = SimpleNamespace(**PAUSED | status)
        made._fleet = SimpleNamespace(all_ready=lambda: all_ready)
        return made

    return make


@pytest.mark.parametrize(
    "state", [{"phase": "ready"}, {"phase": "draining"}, {"is_buffer_paused": None}, {"all_ready": False}], ids=str
)
def test_ticks_are_as_frequent_as_ever_unless_everything_is_paused_and_ready(made, state):
    supervisor = made(**state)

    asyncio.run(asyncio.wait_for(supervisor._until_next_tick(), 30))


async def test_news_end_the_wait_of_a_paused_run(made):
    supervisor = made()

    waiting = asyncio.create_task(supervisor._until_next_tick())
    for _ in range(50):
        await asyncio.sleep(0)
    assert not waiting.done()
    supervisor._news.set()
    await asyncio.wait_for(waiting, 30)


def test_a_drain_is_news(made):
    supervisor = made()
    supervisor._shutdown = SimpleNamespace(begin=lambda *, complete: None)

    supervisor._drain("asked to stop")

    assert supervisor._news.is_set()


@pytest.mark.parametrize("unsaved", [True, False])
def test_a_second_signal_says_whether_steps_are_given_up(made, caplog, unsaved):
    supervisor, killed = made(), []
    supervisor._shutdown = SimpleNamespace(
        under_way=True, has_unsaved=lambda: unsaved, kill_all=lambda: killed.append(True)
    )

    supervisor._stop_asked(signal.SIGINT)
    assert not killed, "a command or a failure began the drain"
    supervisor._stop_asked(signal.SIGINT)

    assert killed and ("the steps since the last checkpoint are given up" in caplog.text) == unsaved


def test_a_closed_terminal_begins_a_drain_and_cuts_none_short(made, monkeypatch):
    supervisor, calls = made(), []
    monkeypatch.setattr(supervisor._hangup, "meaning", lambda: "stop")
    shutdown = supervisor._shutdown = SimpleNamespace(
        under_way=False,
        begin=lambda *, complete: calls.append("begin"),
        kill_all=lambda: calls.append("kill"),
        has_unsaved=lambda: False,
    )

    supervisor._hung_up()
    shutdown.under_way = True
    supervisor._hung_up()
    supervisor._stop_asked(signal.SIGTERM)
    supervisor._hung_up()
    assert calls == ["begin"]
    supervisor._stop_asked(signal.SIGTERM)

    assert calls == ["begin", "kill"]


def test_a_start_that_fails_after_a_childs_end_ends_the_run(made):
    failures = []

    def start(slot, code):
        raise GaveUpError("trainer-0 cannot be started: no process is free")

    supervisor = made()
    supervisor._status = SimpleNamespace(changed=lambda slot: None)
    supervisor._exits = SimpleNamespace(handle=start)
    supervisor._fleet = SimpleNamespace(of=lambda *roles: [])
    supervisor._shutdown = SimpleNamespace(
        under_way=False,
        note_unwritten=lambda slot, code: None,
        fail=lambda code, reason: failures.append((code, reason)),
        begin_failed=lambda: failures.append("begun"),
    )

    supervisor._child_ended(SimpleNamespace(role="setup", state="ended"), 0)

    assert failures == [(ExitCode.GAVE_UP, "trainer-0 cannot be started: no process is free"), "begun"]


def test_of_a_run_that_has_published_nothing_a_failed_rank_keeps_nothing_in_shared_memory(tmp_path):
    fleet = SimpleNamespace(folder=str(tmp_path), config=Config())
    shutdown = Shutdown(fleet, None, taken_over=False)
    rank = SimpleNamespace(name="trainer-0", role="trainer", finished=True, ended_by="", from_outside=False)

    shutdown.note_unwritten(rank, ExitCode.FAILED)

    assert (shutdown.exit_code, shutdown.is_kept) == (ExitCode.FAILED, False)
    assert shutdown.reason.endswith("last checkpoint, its error is above: nothing was published since the start")


@pytest.mark.parametrize("word", ["pause", "resume"])
def test_a_command_to_pause_or_resume_is_news(made, word):
    supervisor = made()
    supervisor._shutdown = SimpleNamespace(under_way=False)

    async def turn(on, seen):
        return on

    supervisor._pause = SimpleNamespace(turn=turn)

    answer = asyncio.run(supervisor._answer({"command": word}))

    assert answer == {"in_force": word == "pause"}
    assert supervisor._news.is_set()


def test_a_machine_without_the_store_order_of_x86_64_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(module.platform, "machine", lambda: "aarch64")

    with pytest.raises(ConfigError, match="rlhfd runs on x86-64 alone, this machine is aarch64: "):
        module.run(load(None, (f"daemon.state_dir={tmp_path}/state",), {}))

    assert not any(tmp_path.iterdir())
