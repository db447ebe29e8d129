"""As in a container: process 1 of a PID namespace of its own, with a /dev/shm of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import (
    END_TIMEOUT_S,
    PROGRAM,
    SMALL,
    START_TIMEOUT_S,
    clean_environment,
    descendants,
    task_settings,
    wait_until,
)

pytestmark = [pytest.mark.integration, pytest.mark.needs("unshare", "mount")]


@contextlib.contextmanager
def container(folder: Path, task: Path, *, shm: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the daemon as process 1; its output is `folder`'s file ``out``."""
    sets = (
        *SMALL,
        *task_settings(task),
        f"daemon.runtime_dir={folder / 'run'}",
        f"daemon.state_dir={folder / 'state'}",
    )
    words = [word for item in (*sets, "metrics.port=0", "trainer.max_steps=0") for word in ("--set", item)]
    inside = f'mount -t tmpfs -o size={shm} none /dev/shm && exec {PROGRAM} "$@"'
    command = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
        "sh",
        "-c",
        inside,
        "sh",
        "start",
    ]
    with (folder / "out").open("wb") as output:
        process = subprocess.Popen(
            [*command, *words],
            cwd=folder,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(END_TIMEOUT_S)


def test_the_64_mb_that_containers_have_are_refused_with_the_size_that_is_needed(tmp_path, task):
    with container(tmp_path, task, shm="64m") as process:
        assert process.wait(START_TIMEOUT_S) == 78

    assert "does not fit: 67,108,864 B free of 67,108,864 B on /dev/shm" in (tmp_path / "out").read_text()


def test_process_1_of_a_container_drains_at_sigterm_and_writes_its_checkpoint(tmp_path, task):
    def output() -> str:
        return (tmp_path / "out").read_text()

    with container(tmp_path, task, shm="256m") as process:
        wait_until(lambda: "state=ready step=2" in output() or process.poll() is not None, START_TIMEOUT_S, "step 2")
        assert process.poll() is None, output()
        first = descendants(process.pid)[0]
        os.kill(first, signal.SIGTERM)

        assert process.wait(END_TIMEOUT_S) == 0, output()
    assert "checkpoint written: step=" in output()
    assert list((tmp_path / "run").iterdir()) == []
