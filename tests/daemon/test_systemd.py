"""The service under a real systemd, booted in namespaces: each test brings the unit to where it needs it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.runtime.lock import shm_directory
from tests.support import daemon
from tests.support.daemon import PROGRAM
from tests.support.daemon import task as task
from tests.support.systemd_box import SystemdBox, booted_box

pytestmark = [
    pytest.mark.integration,
    pytest.mark.needs("systemctl", "systemd-analyze", "nsenter", "setpriv"),
    pytest.mark.timeout(240),
]

START_TIMEOUT_S = 90.0
# Each look starts nsenter and systemctl: at the pace of other tests they would take a core from the awaited process.
POLL_S = 0.2
# Of the tests of the watchdog alone: a machine with more work than cores keeps the buffer silent for seconds.
WATCHDOG_S = 16
CONFIG = """
[daemon]
name = "{name}"
drain_timeout_s = 20
hang_timeout_s = 0
[model]
actor = "/etc/rlhfd/task/model"
[prompts]
path = "/etc/rlhfd/task/prompts.jsonl"
[rollout]
num_generations = 4
reward_timeout_s = 0
[[rewards]]
name = "telling:score"
[buffer]
sample_batch_size = 32
[trainer]
kind = "{kind}"
[metrics]
port = {port}
"""
# By which responses differ; the first says so, as a function of the user's own may.
REWARD = """
print("a line of a reward function")
def score(input_ids, attention_mask, *, response_start, **_):
    return float(input_ids[response_start] % 5)
"""


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    daemon.wait_until(condition, timeout_s, what, poll_s=POLL_S)


class Unit:
    """One unit in the box."""

    def __init__(self, box: SystemdBox, name: str, folder: str) -> None:
        self.box = box
        self.name = name
        self.runtime_dir = f"/run/{folder}"
        self.state_dir = f"/var/lib/{folder}"

    def shown(self, name: str) -> str:
        return self.box.show(self.name, name)[name]

    @property
    def pid(self) -> int:
        return int(self.shown("MainPID"))

    def wait(self, name: str, value: str, timeout_s: float = START_TIMEOUT_S) -> None:
        wait_until(lambda: self.shown(name) == value, timeout_s, f"{name} of {self.name} is {value}")

    def begin(self) -> None:
        """Start it if it does not run, and do not wait."""
        self.box.run("systemctl", "reset-failed", self.name, check=False)
        self.box.run("systemctl", "start", "--no-block", self.name)

    def ensure_active(self) -> None:
        """Start it if it does not run; systemd calls it active once it has said READY."""
        # What other tests started and killed counts towards no limit.
        self.box.run("systemctl", "reset-failed", self.name, check=False)
        if self.shown("ActiveState") != "active":
            self.begin()
            self.wait("ActiveState", "active")

    def wait_restarted(self, pid: int) -> None:
        """Wait until systemd has put another process in the place of `pid`, and that is ready."""
        wait_until(lambda: self.pid not in (0, pid), START_TIMEOUT_S, f"{self.name} is restarted")
        self.wait("ActiveState", "active")

    def kill(self, signal: str, pid: int | None = None) -> None:
        self.box.run("kill", f"-{signal}", str(pid or self.pid))

    def rlhfd(self, *words: str, check: bool = True) -> str:
        found = self.box.run(str(PROGRAM), *words, "--runtime-dir", self.runtime_dir, check=False)
        if check and found.returncode:
            journal = self.box.run("journalctl", f"--unit={self.name}", "--no-pager", "--lines=60").stdout
            raise AssertionError(f"{words}: {found.returncode}\n{found.stdout}{found.stderr}{journal}")
        return found.stdout + found.stderr

    def process(self, role: str) -> int:
        status = json.loads(self.rlhfd("status", "--json"))
        return next(int(process["pid"]) for process in status["processes"] if process["role"] == role)

    def logged(self, text: str, *fields: str) -> list[dict[str, str]]:
        """Return the journal's entries of this unit that hold a text."""
        lines = self.box.run("journalctl", f"--unit={self.name}", "--output=json", "--no-pager", *fields).stdout
        return [entry for entry in map(json.loads, lines.splitlines()) if text in str(entry["MESSAGE"])]


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, task: Path) -> Iterator[SystemdBox]:
    """A systemd with both units installed by the documented command, and a drop-in that makes them quick."""
    quick = (
        "[Unit]\nStartLimitBurst=3\n[Service]\nRestartSec=0.1\n"
        f"Environment=PYTHONPATH={Path(__file__).parents[2]} OMP_NUM_THREADS=1\n"
    )
    with booted_box(tmp_path_factory.mktemp("box")) as booted:
        booted.run("mkdir", "-p", "/etc/rlhfd")
        booted.run("cp", "-r", str(task), "/etc/rlhfd/task")
        booted.write("/etc/rlhfd/rlhfd.toml", CONFIG.format(name="rlhfd", kind="builtin", port=9477))
        booted.write("/etc/rlhfd/b.toml", CONFIG.format(name="rlhfd-b", kind="external", port=9478))
        booted.write("/etc/rlhfd/telling.py", REWARD)
        for unit in ("rlhfd.service", "rlhfd@.service"):
            booted.write(f"/etc/systemd/system/{unit}.d/quick.conf", quick)
        booted.run(str(PROGRAM), "systemd", "install", "--config", "/etc/rlhfd/rlhfd.toml")
        booted.run(str(PROGRAM), "systemd", "install", "--instance", "b")
        yield booted


@pytest.fixture
def unit(box: SystemdBox) -> Unit:
    return Unit(box, "rlhfd.service", "rlhfd")


@pytest.fixture
def watched(other: Unit) -> Iterator[Unit]:
    """A unit with a short watchdog, stopped before and afterwards: a running service keeps the one that it has."""
    unit = other
    file = f"/etc/systemd/system/{unit.name}.d/watchdog.conf"

    def renewed() -> None:
        unit.box.run("systemctl", "daemon-reload")
        unit.box.run("systemctl", "stop", unit.name, timeout_s=90.0)

    unit.box.write(file, f"[Service]\nWatchdogSec={WATCHDOG_S}\n")
    renewed()
    yield unit
    unit.box.run("rm", file)
    renewed()


@pytest.fixture
def other(box: SystemdBox) -> Unit:
    return Unit(box, "rlhfd@b.service", "rlhfd-b")


def test_a_service_shows_its_step_and_logs_each_process_with_its_fields(unit: Unit) -> None:
    unit.ensure_active()
    wait_until(lambda: "reward" in unit.shown("StatusText"), START_TIMEOUT_S, "a step is in the status line")

    assert unit.box.run("systemctl", "is-active", unit.name).stdout == "active\n"
    state, _, rest = unit.shown("StatusText").partition(": step ")
    assert state == "ready" and int(rest.split(",")[0]) >= 1 and "workers 1 of 1" in rest
    (ready, *_) = unit.logged("ready: process=rollout-0", "RLHFD_ROLE=supervisor")
    assert ready["PRIORITY"] == "6" and ready["RLHFD_PROCESS"] == "rollout-0"
    assert ready["RLHFD_EVENT"] == "ready" and ready["SYSLOG_IDENTIFIER"] == "rlhfd-supervisor"
    assert ready["_SYSTEMD_UNIT"] == unit.name and ready["_TRANSPORT"] == "journal"
    # The last: the unit may have run before.
    (*_, printed) = unit.logged("a line of a reward function", "RLHFD_ROLE=rollout", "RLHFD_WORKER=0")
    assert int(printed["RLHFD_PID"]) == unit.process("rollout")
    shown = unit.rlhfd("logs", "rollout-0", "-n", "5")
    assert "rlhfd-rollout-0[" in shown and "rlhfd-supervisor[" not in shown


def test_a_reload_waits_for_its_result_and_a_wrong_file_changes_nothing(unit: Unit) -> None:
    unit.ensure_active()
    pid, path = unit.pid, "/etc/rlhfd/rlhfd.toml"
    right = unit.box.run("cat", path).stdout

    unit.box.write(path, right.replace("drain_timeout_s = 20", "drain_timeout_s = 21"))
    good = unit.box.run("systemctl", "reload", unit.name, check=False)
    unit.box.write(path, right.replace("drain_timeout_s = 20", "drain_timeout_s = -1"))
    bad = unit.box.run("systemctl", "reload", unit.name, check=False)
    unit.box.write(path, right)
    back = unit.box.run("systemctl", "reload", unit.name, check=False)

    told = f"{good.stderr}{back.stderr}" + unit.box.run("journalctl", f"--unit={unit.name}", "--lines=60").stdout
    assert (good.returncode, back.returncode) == (0, 0) and bad.returncode != 0, told
    assert unit.logged("in force: daemon.drain_timeout_s = 21.0, was 20.0")
    assert unit.logged("/etc/rlhfd/rlhfd.toml:4:19: daemon.drain_timeout_s")
    assert (unit.shown("ActiveState"), unit.pid) == ("active", pid)


@pytest.mark.variant
def test_a_killed_daemon_is_started_again_and_takes_the_arena_over(unit: Unit) -> None:
    unit.ensure_active()
    pid = unit.pid
    taken_over = len(unit.logged("arena taken over"))

    unit.kill("KILL")
    unit.wait_restarted(pid)

    assert len(unit.logged("arena taken over")) == taken_over + 1


@pytest.mark.parametrize("role", [pytest.param("supervisor", marks=pytest.mark.variant), "buffer"])
def test_systemd_restarts_it_when_the_supervisor_or_the_buffer_hangs(watched: Unit, role: str) -> None:
    unit = watched
    unit.ensure_active()
    pid = unit.pid
    texts = ("Fatal Python error: Aborted", "arena taken over", "Watchdog timeout")
    dumps, taken_over, timeouts = (len(unit.logged(text)) for text in texts)

    unit.kill("STOP", pid if role == "supervisor" else unit.process(role))
    wait_until(lambda: len(unit.logged("Watchdog timeout")) > timeouts, 4.0 * WATCHDOG_S, "the watchdog strikes")
    unit.wait_restarted(pid)

    # Where it hung, thread by thread.
    assert len(unit.logged("Fatal Python error: Aborted")) == dumps + 1
    assert len(unit.logged("arena taken over")) == taken_over + 1
    if role == "buffer":
        assert unit.logged("systemd's watchdog is not answered while the buffer is silent", "PRIORITY=3")


def test_a_stop_drains_within_its_time_and_a_start_goes_on(unit: Unit) -> None:
    unit.ensure_active()
    wait_until(lambda: "reward" in unit.shown("StatusText"), START_TIMEOUT_S, "a step is taken")

    unit.box.run("systemctl", "stop", unit.name, timeout_s=90.0)

    assert unit.box.show(unit.name, "ActiveState", "Result", "ExecMainStatus") == {
        "ActiveState": "inactive",
        "Result": "success",
        "ExecMainStatus": "0",
    }
    assert unit.logged("draining: SIGTERM received")
    assert unit.box.run("ls", unit.runtime_dir, check=False).returncode == 2
    assert str(shm_directory(unit.runtime_dir)) not in unit.box.run("sh", "-c", "ls -d /dev/shm/*", check=False).stdout
    assert unit.box.run("sh", "-c", f"ls -d {unit.state_dir}/runs/*/checkpoints/step-*").stdout
    assert "draining: SIGTERM received" in unit.rlhfd("logs", "supervisor", "-n", "20")


def test_a_wrong_configuration_is_not_restarted(other: Unit) -> None:
    other.box.run("systemctl", "stop", other.name)
    # At its limit, another test may have left it, it would not be started at all.
    other.box.run("systemctl", "reset-failed", other.name, check=False)
    right = other.box.run("cat", "/etc/rlhfd/b.toml").stdout

    other.box.write("/etc/rlhfd/b.toml", right.replace("num_generations", "num_generation"))
    found = other.box.run("systemctl", "start", other.name, check=False)
    other.box.write("/etc/rlhfd/b.toml", right)

    assert found.returncode != 0
    assert other.box.show(other.name, "ActiveState", "ExecMainStatus", "NRestarts") == {
        "ActiveState": "failed",
        "ExecMainStatus": "78",
        "NRestarts": "0",
    }
    assert other.logged("/etc/rlhfd/b.toml:11:1: unknown key rollout.num_generation, did you mean num_generations?")


def test_a_daemon_that_dies_at_each_start_is_left_dead_at_the_limit(other: Unit) -> None:
    other.box.run("systemctl", "stop", other.name)
    other.begin()

    def fails() -> bool:
        if pid := other.pid:
            other.box.run("kill", "-KILL", str(pid), check=False)
        return other.shown("ActiveState") == "failed"

    wait_until(fails, START_TIMEOUT_S, "systemd gives up")

    # StartLimitBurst=3: the first start and two restarts; the third is refused.
    assert other.shown("NRestarts") == "3"
    assert other.logged("Start request repeated too quickly")


@pytest.mark.variant
def test_a_second_instance_runs_beside_and_uninstall_leaves_only_state(unit: Unit, other: Unit) -> None:
    unit.begin()
    other.begin()
    unit.ensure_active()
    other.ensure_active()

    assert other.process("buffer") != unit.process("buffer")
    assert other.logged("ready: process=rollout-0")[0]["RLHFD_NAME"] == "rlhfd-b"
    assert not unit.logged("rlhfd-b")
    done = other.box.run(str(PROGRAM), "systemd", "uninstall", "--instance", "b", timeout_s=90.0).stdout
    assert "/var/lib/rlhfd-b stays" in done
    assert unit.shown("ActiveState") == "active"
    pids = other.box.run("pgrep", "--full", "--count", "run/rlhfd-b|rlhfd-b:", check=False).stdout
    assert pids == "0\n"
    for folder in ("/run", "/var/cache", "/etc/systemd/system"):
        assert not re.search("rlhfd[-@]b", other.box.run("ls", folder).stdout)
    other.box.run(str(PROGRAM), "systemd", "install", "--instance", "b")


def test_the_unit_is_hardened_and_says_what_it_relaxed(unit: Unit) -> None:
    written = unit.box.run("cat", "/etc/systemd/system/rlhfd.service").stdout
    installed = unit.box.run(str(PROGRAM), "systemd", "install", "--config", "/etc/rlhfd/rlhfd.toml")

    rating = unit.box.run("systemd-analyze", "security", "--offline=true", "--threshold=25", unit.name)
    assert "Overall exposure level" in rating.stdout
    for strict, relaxed in (("ProtectHome=yes", "ProtectHome=read-only"), ("PrivateTmp=yes", "PrivateTmp=no")):
        assert (strict in written) != (f"note: {relaxed}" in installed.stderr)


def test_the_code_of_responses_is_isolated_in_a_service_too(unit: Unit) -> None:
    written = unit.box.run("cat", "/etc/systemd/system/rlhfd.service").stdout
    python = str(PROGRAM.with_name("python"))
    source = "from pipeline.rollout.reward.code import isolation; print(isolation())"
    service = written[written.index("[Service]\n") : written.index("[Install]")]
    # Nor its runtime directory: systemd removes that at the end of the trial, and `unit` may run in it.
    left_out = "Type|Exec|Watchdog|Restart|Notify|RuntimeDirectory"
    kept = [line for line in service.splitlines() if not re.match(left_out, line)]
    own = ("Type=oneshot", f"Environment=PYTHONPATH={Path(__file__).parents[2]}", f"ExecStart={python} -c '{source}'")
    unit.box.write("/etc/systemd/system/trial.service", "\n".join([*kept, *own]))
    unit.box.run("systemctl", "daemon-reload")

    unit.box.run("systemctl", "start", "trial.service")

    shown = unit.box.run("journalctl", "--unit=trial.service", "--output=cat", "--no-pager").stdout
    assert "Landlock" in shown.splitlines()
