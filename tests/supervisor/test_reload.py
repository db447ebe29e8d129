"""The changes of a reload, the keys that it leaves, and the meaning of SIGHUP."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import load as config_load
from pipeline.config.advice import SECTIONS
from pipeline.config.changes import Change, compare, is_live, with_live
from pipeline.config.load import load
from pipeline.config.schema import BufferConfig, Config, DaemonConfig, RolloutConfig
from pipeline.errors import ConfigError
from pipeline.runtime.role import Report, RoleContext
from pipeline.supervisor.reload import Reload
from pipeline.telemetry.slab import MetricsSlab
from tests.support.slabs import SLOTS, begun

RUNNING = Config()


def test_which_keys_are_live_is_what_is_written_here() -> None:
    keys = [f"{section}.{name}" for section, model in SECTIONS.items() for name in type(model).model_fields]

    assert {key for key in keys if is_live(key)} == {
        "daemon.log_level", "daemon.drain_timeout_s", "daemon.startup_timeout_s", "daemon.hang_timeout_s",
        "daemon.progress_timeout_s", "daemon.restart_delay_s", "daemon.restart_limit", "rollout.ticket_timeout_s",
        "rollout.max_attempts", "trainer.save_every", "metrics.token_file",
    }  # fmt: skip


def test_live_keys_are_taken_and_the_others_stay() -> None:
    wanted = RUNNING.model_copy(
        update={
            "daemon": DaemonConfig(log_level="debug", seed=7, state_dir=Path("/other")),
            "rollout": RolloutConfig(max_attempts=9, temperature=0.5),
        }
    )

    changes = compare(RUNNING, wanted)
    config = with_live(RUNNING, wanted)

    assert changes.live == [Change("daemon.log_level", "info", "debug"), Change("rollout.max_attempts", 3, 9)]
    assert changes.restart == [
        Change("daemon.state_dir", "state", "/other"),
        Change("daemon.seed", 0, 7),
        Change("rollout.temperature", 1.0, 0.5),
    ]
    assert compare(RUNNING, config).restart == []
    assert (config.daemon.log_level, config.rollout.max_attempts) == ("debug", 9)
    # As a process reads it: whole, and right by itself.
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_what_does_not_go_together_with_what_stays_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.config import changes as config_changes

    external = RUNNING.model_copy(update={"trainer": RUNNING.trainer.model_copy(update={"kind": "external"})})
    wanted = RUNNING.model_copy(update={"buffer": BufferConfig(journal_interval_s=5)})
    # No live key takes part in a conflict yet; were this one live, it would.
    monkeypatch.setattr(config_changes, "is_live", lambda key: key == "buffer.journal_interval_s")

    with pytest.raises(ConfigError, match=r"^buffer\.journal_interval_s: must be 0 .* need a restart unchanged$"):
        with_live(external, wanted)


def test_a_file_that_never_answers_holds_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.toml"
    file.touch()
    loaded = load(file, (), {})
    writer = begun(MetricsSlab.create(tmp_path / "metrics", SLOTS), "supervisor")
    # Without a writer it answers no more than a file of a network's disk that is gone.
    file.unlink()
    os.mkfifo(file)

    loop, asked, load_again = asyncio.new_event_loop(), asyncio.Event(), config_load.load_again

    def read(*arguments: Any) -> Any:
        loop.call_soon_threadsafe(asked.set)
        return load_again(*arguments)

    monkeypatch.setattr(config_load, "load_again", read)

    async def reload() -> None:
        Reload(loaded, loaded.config, None, None, writer, on_reloaded=lambda config: None).schedule()  # type: ignore[arg-type]
        await asked.wait()

    runner = asyncio.Runner(loop_factory=lambda: loop)

    def run_to_its_end() -> None:
        with runner:
            runner.run(reload())

    run = threading.Thread(target=run_to_its_end)
    run.start()
    run.join(5.0)
    is_held = run.is_alive()
    os.close(os.open(file, os.O_WRONLY))
    run.join()

    assert not is_held


class TestInAProcess:
    @pytest.fixture
    def context(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RoleContext:
        self.write(tmp_path, RUNNING)
        return RoleContext("buffer", 0, tmp_path, None, lambda report: Report)  # type: ignore[arg-type]

    def write(self, folder: Path, config: Config) -> None:
        staged = folder / "config.json.new"
        staged.write_text(config.model_dump_json())
        staged.replace(folder / "config.json")

    def test_the_first_look_reads_and_then_only_a_change_does(self, context: RoleContext) -> None:
        changed = RUNNING.model_copy(update={"rollout": RolloutConfig(max_attempts=9)})

        assert context.reloaded() == RUNNING
        assert context.reloaded() is None
        self.write(context.folder, changed)
        assert context.reloaded() == changed
        assert context.reloaded() is None


# The process with the terminal prints the meaning of a SIGHUP, once for each line that it is sent.
HANGUP = """
import os, signal, sys
terminal, ignored = int(sys.argv[1]), sys.argv[2] == "nohup"
if terminal >= 0:
    os.login_tty(terminal)
else:
    os.setsid()
# The disposition is set here: under nohup the test process ignores SIGHUP.
signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
from pipeline.supervisor.reload import Hangup
hangup, out = Hangup(), int(sys.argv[3])
signal.signal(signal.SIGHUP, lambda *_: os.write(out, hangup.meaning().encode() + b"\\n"))
os.write(out, b"up\\n")
while True:
    signal.pause()
"""


class Process:
    """A process that prints the meaning of SIGHUP for it."""

    def __init__(self, *, terminal: bool, how: str = "") -> None:
        self.master, slave = os.openpty() if terminal else (-1, -1)
        self.reader, writer = os.pipe()
        self.child = subprocess.Popen(
            [sys.executable, "-c", HANGUP, str(slave), how, str(writer)],
            pass_fds=[writer, *([slave] if terminal else [])],
        )
        os.close(writer)
        if terminal:
            os.close(slave)
        assert self.said() == "up"

    def said(self) -> str:
        assert select.select([self.reader], [], [], 20.0)[0], "it says nothing"
        return os.read(self.reader, 100).decode().strip()

    def close_terminal(self) -> str:
        os.close(self.master)
        self.master = -1
        return self.said()

    def end(self) -> None:
        self.child.kill()
        self.child.wait()
        for descriptor in (self.reader, self.master):
            if descriptor >= 0:
                os.close(descriptor)


@pytest.mark.parametrize(("how", "closing"), [("", "stop"), ("nohup", "nothing")])
def test_sighup_reloads_but_for_a_terminal_that_is_closed(how: str, closing: str) -> None:
    process = Process(terminal=True, how=how)
    try:
        process.child.send_signal(signal.SIGHUP)
        assert process.said() == "reload"

        assert process.close_terminal() == closing
    finally:
        process.end()


def test_sighup_without_a_terminal_reloads() -> None:
    process = Process(terminal=False)
    try:
        process.child.send_signal(signal.SIGHUP)
        assert process.said() == "reload"
    finally:
        process.end()
