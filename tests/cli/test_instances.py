"""`rlhfd ps` and `rlhfd attach` against processes that hold a runtime directory and answer."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import main as cli
from pipeline.errors import ExitCode, RlhfdError
from pipeline.runtime import control, lock
from tests.support.instances import HOLD, SERVE, process, serving


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm: there may be instances of others on this machine."""
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(lock, "_SHM", memory)
    return memory


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, list(arguments))


def made(runtime_dir: Path) -> Path:
    """Make the folder in shared memory of an instance, with its configuration."""
    runtime_dir.mkdir()
    folder = lock.shm_directory(runtime_dir)
    folder.mkdir()
    config = {
        "daemon": {"runtime_dir": str(runtime_dir), "state_dir": str(runtime_dir / "state")},
        "model": {"actor": "/models/one/actor"},
        "trainer": {"max_steps": 150},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_each_instance_is_listed_with_its_state(tmp_path: Path, memory: Path) -> None:
    for name in ("a-serving", "b-starting", "c-killed"):
        made(tmp_path / name)
    (memory / f"rlhfd-{os.geteuid()}-0123456789").mkdir()

    with process(tmp_path / "a-serving", SERVE) as serving, process(tmp_path / "b-starting", HOLD) as starting:
        listed = json.loads(run("ps", "--json").stdout)
        table = run("ps").stdout.splitlines()

    assert [(one["runtime_dir"], one["pid"], one["state"]) for one in listed] == [
        (str(tmp_path / "a-serving"), serving.pid, "ready"),
        (str(tmp_path / "b-starting"), starting.pid, "no answer"),
        (str(tmp_path / "c-killed"), None, "killed"),
    ]
    assert table[0].split()[:4] == ["pid", "state", "step", "reward"] and len(table) == 4
    assert table[1].split()[:2] == [str(serving.pid), "ready"] and "one/actor" in table[1]
    assert str(tmp_path / "c-killed") in table[3]


def test_a_folder_that_is_no_instances_own_is_left_out(tmp_path: Path, memory: Path) -> None:
    folder = made(tmp_path / "run")
    # A copy: its configuration names the runtime directory of another folder.
    copy = memory / f"rlhfd-{os.geteuid()}-0000000000"
    copy.mkdir()
    (copy / "config.json").write_text((folder / "config.json").read_text())
    (folder / "config.json").write_text("{")

    listed = run("ps")

    assert (listed.exit_code, listed.stdout) == (0, "no instance of yours is on this machine\n")


def test_neither_an_answer_that_is_an_error_nor_another_release_hides_an_instance(tmp_path: Path) -> None:
    async def refuse(request: dict[str, Any]) -> dict[str, Any]:
        raise RlhfdError("too many clients")

    folders = [made(tmp_path / name) for name in ("a-crowded", "b-other-release", "c-killed")]
    config = json.loads((folders[1] / "config.json").read_text())
    (folders[1] / "config.json").write_text(json.dumps({"daemon": config["daemon"]}))
    with lock.InstanceLock(tmp_path / "a-crowded"), serving(tmp_path / "a-crowded", refuse) as record:
        record.write(tmp_path / "a-crowded")
        listed = json.loads(run("ps", "--json").stdout)

    assert [(one["runtime_dir"], one["pid"], one["state"]) for one in listed] == [
        (str(tmp_path / "a-crowded"), os.getpid(), "no answer"),
        (str(tmp_path / "c-killed"), None, "killed"),
    ]


def test_attach_shows_lines_in_a_pipe_until_the_instance_has_ended(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with process(tmp_path / "run", SERVE) as child:
        record = lock.find(tmp_path / "run")
        assert record.pid == child.pid
        # The answer of this instance has a state and no more; it is ended from a thread while the command waits.
        ending = threading.Timer(1.0, control.request, (record, "stop", 60.0))
        ending.start()
        shown = run("attach", "--runtime-dir", str(tmp_path / "run"))
        ending.join()

    assert shown.exit_code == 0
    assert shown.stdout.startswith("state=ready step=0 reward_mean=- ")
    assert shown.stderr == "the instance has ended; `rlhfd logs` shows its last lines\n"


def test_nobody_to_attach_to_exits_with_3(tmp_path: Path) -> None:
    shown = run("attach", "--runtime-dir", str(tmp_path))

    assert (shown.exit_code, shown.stdout) == (ExitCode.NOT_RUNNING, "")
