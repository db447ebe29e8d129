"""An instance that is forked from a warm process has the processes, codes and errors of one that is executed.

Its bits: `test_one_worker_two_workers_and_serial_give_the_same_bit_for_bit`, where one run is executed.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.daemon import PROGRAM, SMALL, Daemon, is_alive, title, wait_until
from tests.support.warm import WarmProcess

pytestmark = pytest.mark.integration


def test_a_forked_instance_has_the_processes_and_the_errors_of_the_program(tmp_path: Path, task: Path) -> None:
    errors = []
    for program in (None, PROGRAM):
        with Daemon(tmp_path, "rollout.top_p=2", program=program) as refused:
            assert isinstance(refused.process, WarmProcess) is (program is None)
            assert refused.wait() == 78
        errors.append(refused.errors)
    assert errors[0] == errors[1] != ""

    with Daemon(tmp_path, *SMALL, "trainer.max_steps=0", task=task) as daemon:
        daemon.wait_ready()
        assert title(daemon.pid) == f"{PROGRAM} start"
        titles = {title(pid): pid for pid in daemon.family()}
        assert sorted(titles) == ["rlhfd: buffer 0", "rlhfd: forkserver", "rlhfd: rollout 0", "rlhfd: trainer 0"]
        for pid in (daemon.pid, *titles.values()):
            assert Path(f"/proc/{pid}/cwd").resolve() == tmp_path
            held = {path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
            assert (pid == daemon.pid) is ("daemon.err" in held), "children write into pipes of the supervisor"
        os.kill(daemon.pid, signal.SIGKILL)

        assert daemon.wait() == -signal.SIGKILL
        for pid in titles.values():
            wait_until(lambda pid=pid: not is_alive(pid), 10.0, f"pid {pid} ends with it")
        shutil.rmtree(daemon.shm_dir)
