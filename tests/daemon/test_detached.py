"""A run of `rlhfd init` that is started with `--detach`, listed, attached to and stopped; and starts that fail."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.runtime import lock
from tests.support.daemon import (
    END_TIMEOUT_S,
    HASTY_SETUP,
    PROGRAM,
    clean_environment,
    is_alive,
    loaded_first,
    rlhfd,
    wait_until,
)
from tests.support.folders import save_certificate

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder made by `rlhfd init`, with a free port; the instance in it is ended."""
    assert rlhfd("init", "my", folder=tmp_path).returncode == 0
    folder = tmp_path / "my"
    with (folder / "grpo.toml").open("a") as file:
        file.write("\n[metrics]\nport = 0\n")
    yield folder
    if pid := lock.holder(folder / "run"):
        # The test has failed before its end.
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), END_TIMEOUT_S, "it has ended")
        shutil.rmtree(lock.shm_directory(folder / "run"), ignore_errors=True)


def attached(folder: Path, *, until: bytes) -> tuple[int, bytes]:
    """Run `rlhfd attach` on a terminal, interrupt it once a text is shown; return exit code and output."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    shown = b""
    with subprocess.Popen(
        [str(PROGRAM), "attach", "--config", "grpo.toml"],
        cwd=folder, stdin=slave, stdout=slave, stderr=slave, env=clean_environment() | {"TERM": "xterm"},
        start_new_session=True,
    ) as screen:  # fmt: skip
        os.close(slave)
        while until not in shown:
            assert select.select([master], [], [], END_TIMEOUT_S)[0], shown
            shown += os.read(master, 1 << 16)
        screen.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            while part := os.read(master, 1 << 16):
                shown += part
        code = screen.wait(END_TIMEOUT_S)
    os.close(master)
    return code, shown


@pytest.mark.needs("openssl")
def test_a_run_of_init_is_started_detached_listed_attached_to_and_stopped(folder: Path) -> None:
    save_certificate(folder)
    with (folder / "grpo.toml").open("a") as file:
        file.write('tls_cert = "cert.pem"\ntls_key = "key.pem"\n')

    first = loaded_first(folder, HASTY_SETUP)
    started = rlhfd("start", "--detach", "--config", "grpo.toml", folder=folder, environment=first)

    pid = lock.holder(folder / "run")
    assert started.returncode == 0 and pid, started.stderr
    assert started.stdout.startswith(f"rlhfd runs: pid {pid}, https://127.0.0.1:")
    assert os.getsid(pid) == pid, "no terminal's end reaches it"

    listed = [one for one in json.loads(rlhfd("ps", "--json", folder=folder).stdout) if one["pid"] == pid]
    assert [(one["state"], one["runtime_dir"]) for one in listed] == [("ready", str(folder / "run"))]
    assert listed[0]["config"] == str(folder / "grpo.toml")

    code, shown = attached(folder, until=b"policy")
    assert code == 0 and b"rlhfd \x1b[32mready" in shown and b"Traceback" not in shown
    assert f"left; the instance goes on: pid {pid}".encode() in shown
    assert is_alive(pid), "Ctrl-C has ended the panel alone"

    with subprocess.Popen(
        [str(PROGRAM), "attach", "--config", "grpo.toml"], cwd=folder, env=clean_environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as piped:  # fmt: skip
        assert piped.stdout is not None
        first = piped.stdout.readline()
        assert rlhfd("stop", "--config", "grpo.toml", folder=folder).returncode == 0
        rest, errors = piped.communicate(timeout=END_TIMEOUT_S)
    assert first.startswith("state=ready step=") and " loss=" in first
    assert all(line.startswith("state=") for line in rest.splitlines())
    assert piped.returncode == 0 and errors.endswith("`rlhfd logs` shows its last lines\n")

    wait_until(lambda: not is_alive(pid), END_TIMEOUT_S, "it has ended")
    log = (folder / "state/log/rlhfd.log").read_text()
    assert "training ended" in log and "Traceback" not in log
    assert [json.loads(line)["step"] for line in step_log_of(folder).read_text().splitlines()]


def step_log_of(folder: Path) -> Path:
    (path,) = folder.glob("state/runs/*/metrics.jsonl")
    return path


@pytest.mark.variant
def test_a_detached_start_that_fails_shows_its_error_and_exit_code(folder: Path) -> None:
    def start(*sets: str) -> subprocess.CompletedProcess[str]:
        words = [word for item in sets for word in ("--set", item)]
        return rlhfd("start", "--detach", "--config", "grpo.toml", *words, folder=folder)

    wrong = start("rollout.workers=0")
    assert wrong.returncode == 78 and wrong.stderr.startswith("--set rollout.workers: ")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        in_use = start(f"metrics.port={taken.getsockname()[1]}")
    assert in_use.returncode == 78 and "metrics.port" in in_use.stderr.splitlines()[-1]

    (folder / "my_rewards.py").write_text("def other(): pass\n")
    late = start()
    assert late.returncode == 78 and "has no function score" in late.stderr
    assert lock.holder(folder / "run") is None
    both = start("trainer.max_steps=1"), rlhfd("start", "--detach", "--serial", folder=folder)
    assert [one.returncode for one in both] == [78, 2]


@pytest.mark.variant
def test_a_detached_run_of_one_step_succeeds_and_ends_by_itself(folder: Path) -> None:
    """It has ended before it is seen ready, or it ends after the command: both are a success."""
    ended = rlhfd("start", "--detach", "--config", "grpo.toml", "--set", "trainer.max_steps=1", folder=folder)

    assert ended.returncode == 0, ended.stderr
    assert lock.wait_until_released(folder / "run", END_TIMEOUT_S)
    assert len(step_log_of(folder).read_text().splitlines()) == 1
