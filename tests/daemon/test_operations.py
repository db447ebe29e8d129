"""A real daemon that is reloaded, paused and resumed while it trains."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeline.runtime import lock
from tests.support.daemon import PROGRAM, SMALL, Daemon, rlhfd, status_of, telling_reward, total

pytestmark = pytest.mark.integration
FILE = """
[daemon]
log_level = "{log_level}"
hang_timeout_s = {hang_timeout_s}
[rollout]
num_generations = 4
temperature = {temperature}
[buffer]
sample_batch_size = 32
[metrics]
token_file = "token"
"""


def write(folder: Path, text: str = FILE, **values: object) -> None:
    (folder / "run.toml").write_text(
        text.format(**{"log_level": "info", "hang_timeout_s": 300, "temperature": 1.0, **values})
    )


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, task: Path) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("operations")
    write(folder)
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text("first")
    # A row takes its time, without a core: the daemon is only asked, for a minute or two.
    reward = telling_reward(folder, pause_s=0.05)
    short = "rollout.max_length=16"
    with Daemon(folder, *reward, short, task=task, arguments=("--config", "run.toml")) as daemon:
        daemon.wait_ready()
        daemon.wait_step(1)
        yield daemon
        # Drain while paused: an orderly end, and nothing is left behind.
        assert daemon.ask("pause").returncode == 0
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0, daemon.errors
        assert not daemon.shm_dir.exists()


@pytest.fixture(autouse=True)
def as_it_was(daemon: Daemon) -> Iterator[None]:
    yield
    write(daemon.folder)
    assert daemon.ask("resume").returncode == daemon.ask("reload").returncode == 0


def scraped(daemon: Daemon, name: str, token: str = "first", **labels: str) -> float:
    return total(daemon.metrics(token), name, **labels)


def test_live_keys_hold_at_once_and_the_others_are_named(daemon: Daemon) -> None:
    before_s = time.time()
    write(daemon.folder, log_level="debug", hang_timeout_s=77.0, temperature=0.5)

    answer = daemon.ask("reload")

    assert answer.returncode == 0
    assert answer.stderr == ""
    assert answer.stdout.splitlines() == [
        'in force: daemon.log_level = "debug", was "info"',
        "in force: daemon.hang_timeout_s = 77.0, was 300.0",
        "needs a restart: rollout.temperature = 0.5, was 1.0",
    ]
    assert daemon.status()["needs_restart"] == ["rollout.temperature"]
    assert "needs a restart" in daemon.ask("status").stdout
    assert scraped(daemon, "rlhfd_config_last_reload_successful") == 1
    assert scraped(daemon, "rlhfd_config_last_reload_success_timestamp_seconds") >= before_s
    for name in ("buffer-0", "rollout-0", "trainer-0"):
        daemon.wait_logged(f" INFO {name} pipeline.runtime.role: configuration taken up")

    # Asked again, the restart is still wanting; taken back, nothing is.
    assert daemon.ask("reload").stdout == "needs a restart: rollout.temperature = 0.5, was 1.0\n"
    write(daemon.folder, log_level="debug", hang_timeout_s=77.0)
    assert daemon.ask("reload").stdout == f"{daemon.folder}/run.toml: nothing has changed\n"
    assert daemon.status()["needs_restart"] == []


def test_a_reload_says_which_values_are_those_of_another_run(daemon: Daemon) -> None:
    """A restart, which the answer asks for, would leave the run behind."""
    write(daemon.folder, FILE.replace("num_generations = 4", "num_generations = 8"))

    answer = daemon.ask("reload")

    note = "a start with these values is another run, from step 0: rollout.num_generations"
    assert answer.stdout == "needs a restart: rollout.num_generations = 8, was 4\n"
    assert (answer.returncode, answer.stderr.startswith(f"note: {note}")) == (0, True)
    daemon.wait_logged(note)


def test_a_reload_names_the_code_that_has_changed_and_is_not_loaded_again(daemon: Daemon) -> None:
    code = daemon.folder / "telling.py"
    before = code.read_text()
    assert daemon.ask("reload").stderr == ""
    code.write_text(f"{before}# changed\n")

    answer = daemon.ask("reload")

    note = "code is not loaded again, it is in force after a restart: code of telling:score"
    assert (answer.returncode, answer.stderr) == (0, f"note: {note}\n")
    daemon.wait_logged(note)
    code.write_text(before)
    assert daemon.ask("reload").stderr == ""


def test_a_broken_file_changes_nothing_and_says_so(daemon: Daemon) -> None:
    pids, config = daemon.pids(), (daemon.shm_dir / "config.json").read_bytes()
    (daemon.folder / "run.toml").write_text('[daemon]\nlog_level = "debug"\nhang_timeout = 3\n[rollout]\ntop_p = 2\n')

    answer = daemon.ask("reload")

    errors = [
        f"{daemon.folder}/run.toml:3:1: unknown key daemon.hang_timeout, did you mean hang_timeout_s?",
        f"{daemon.folder}/run.toml:5:9: rollout.top_p: must be at most 1, got 2",
    ]
    assert (answer.returncode, answer.stdout, answer.stderr.splitlines()) == (78, "", errors)
    assert all(f"the previous one stays in force: {error}" in daemon.errors for error in errors)
    assert scraped(daemon, "rlhfd_config_last_reload_successful") == 0
    assert (daemon.shm_dir / "config.json").read_bytes() == config
    assert daemon.pids() == pids and daemon.status()["state"] == "ready"


def test_a_new_token_counts_from_the_reload_on_and_a_bad_one_changes_nothing(daemon: Daemon) -> None:
    token = daemon.folder / "token"
    try:
        token.chmod(0o640)
        answer = daemon.ask("reload")
        assert (answer.returncode, answer.stderr) == (
            78, f"{daemon.folder}/run.toml:11:14: metrics.token_file: {token} is open to other users, "
            f"it must have mode 0600: chmod 600 {token}\n",
        )  # fmt: skip
        token.chmod(0o600)
        token.write_text("second")
        assert daemon.get("/metrics", token="first")[0] == 200

        assert daemon.ask("reload").returncode == 0

        assert [daemon.get("/metrics", token=word)[0] for word in ("first", "second")] == [401, 200]
    finally:
        token.chmod(0o600)
        token.write_text("first")


def test_sighup_does_the_same(daemon: Daemon) -> None:
    write(daemon.folder, hang_timeout_s=55.0)

    os.kill(daemon.pid, signal.SIGHUP)

    daemon.wait_logged("configuration reloaded: key=daemon.hang_timeout_s before=300.0 after=55.0")
    assert daemon.status()["state"] == "ready"


def test_signals_by_which_schedulers_warn_end_no_process_and_the_first_is_told(daemon: Daemon) -> None:
    before, everything = daemon.pids(), daemon.family()
    for pid in everything:
        os.kill(pid, signal.SIGUSR2)
    for pid in (daemon.pid, *before.values()):
        os.kill(pid, signal.SIGUSR1)

    daemon.wait_logged("SIGUSR1 received, by which this process ends nothing: SIGTERM")
    assert daemon.pids() == before and daemon.family() == everything


def test_paused_issues_no_ticket_trains_the_rest_and_survives_the_buffer(daemon: Daemon) -> None:
    write(daemon.folder, temperature=1.0)

    answer = daemon.ask("pause")

    assert (answer.returncode, answer.stdout) == (0, "paused\n")
    # A run that stands still for so long would be judged, were it not paused. On a slow machine a step takes longer.
    write(daemon.folder, FILE.replace("[rollout]", "progress_timeout_s = 1.0\n[rollout]"))
    assert daemon.ask("reload").returncode == 0
    assert status_of(daemon.ask("status", "--json"))["state"] == "paused"
    assert scraped(daemon, "rlhfd_paused") == 1
    assert daemon.get("/readyz")[0] == 200

    def at_rest() -> bool:
        status = daemon.status()
        buffer = status["buffer"]
        # A step acknowledges its batch first and is counted after.
        counted = buffer["trained"] == 32 * status["step"]
        return counted and buffer["reserved_items"] == buffer["leased_items"] == 0 and buffer["ready_items"] < 32

    daemon.wait_until(at_rest, "all rows are trained")
    assert daemon.why()["sentences"][0] == "The run is paused: no tickets are issued until `rlhfd resume`."
    step, pids = daemon.status()["step"], daemon.pids()
    daemon.wait_replaced("buffer-0", daemon.signal(signal.SIGKILL, "buffer-0"))
    daemon.wait_until(lambda: scraped(daemon, "rlhfd_paused") == 1, "the new buffer is paused too")
    # Beyond progress_timeout_s, told by the clock that judges it.
    rested_s = time.monotonic()
    daemon.wait_until(lambda: time.monotonic() - rested_s > 2.5, "it rests")
    shown = daemon.status()
    assert (shown["state"], shown["step"], shown["buffer"]["reserved_items"]) == ("paused", step, 0)
    assert {name: pid for name, pid in daemon.pids().items() if name != "buffer-0"} == {
        name: pid for name, pid in pids.items() if name != "buffer-0"
    }, "no process was taken for hung"

    write(daemon.folder)
    assert daemon.ask("reload").returncode == 0
    assert daemon.ask("resume").stdout == "resumed\n"

    daemon.wait_step(step + 1)
    assert daemon.status()["state"] == "ready"
    assert scraped(daemon, "rlhfd_paused") == scraped(daemon, "rlhfd_items_unaccounted") == 0


def test_status_and_metrics_show_the_device_that_computes(daemon: Daemon) -> None:
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    daemon.wait_ready()

    assert {one["role"]: one["device"] for one in daemon.status()["processes"]} == {
        "buffer": "", "trainer": name, "rollout": name,
    }  # fmt: skip
    assert [dict(labels) for metric, labels in daemon.metrics("first") if metric == "rlhfd_device_info"] == [
        {"role": role, "worker": "0", "device": name} for role in ("trainer", "rollout")
    ]
    daemon.wait_logged(f" device={name}")


def test_top_shows_every_process_and_leaves_the_run_alone(daemon: Daemon) -> None:
    piped = daemon.ask("top")

    head, *lines = piped.stdout.splitlines()
    assert piped.returncode == 0 and head.split()[:4] == ["process", "pid", "state", "doing"]
    assert {line.split()[0] for line in lines} == {"buffer", "rollout", "trainer"}
    assert {int(line.split()[2]) for line in lines} == set(daemon.pids().values())
    both = json.loads(daemon.ask("top", "--json").stdout)
    assert both["status"]["pid"] == daemon.pid and {"sentences", "processes"} <= set(both["why"])

    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    shown = b""
    with subprocess.Popen(
        [str(PROGRAM), "top", "--runtime-dir", str(daemon.runtime_dir), "--interval-s", "0.1"],
        stdin=slave, stdout=slave, stderr=slave, env=os.environ | {"TERM": "xterm"}, start_new_session=True,
    ) as screen:  # fmt: skip
        os.close(slave)
        while b"Ctrl-C leaves" not in shown:
            assert select.select([master], [], [], 30.0)[0], shown
            shown += os.read(master, 1 << 16)
        screen.send_signal(signal.SIGINT)
        # What it still writes has to be read, or it would wait for that.
        with contextlib.suppress(OSError):
            while part := os.read(master, 1 << 16):
                shown += part
        assert screen.wait(20.0) == 0
    os.close(master)
    assert b"trainer 0" in shown and b"reward" in shown
    assert shown.startswith(b"\x1b[?1049h") and b"\x1b[?1049l" in shown, "the screen is given back as it was"
    assert daemon.status()["state"] == "ready"


def test_collect_env_tells_of_the_run_and_of_no_secret(daemon: Daemon) -> None:
    daemon.wait_logged("trainer-0")
    (daemon.folder / "run.toml").write_text("[rollout]\ntop_p = 2\n")
    assert daemon.ask("reload").returncode == 78
    write(daemon.folder)
    environment = {"HF_TOKEN": "hf_secretsecret", "RLHFD_ROLLOUT__TOP_P": "0.9"}

    told = subprocess.run(
        [str(PROGRAM), "collect-env", "--config", "run.toml", "--runtime-dir", str(daemon.runtime_dir)],
        cwd=daemon.folder, env=os.environ | environment, capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip

    parts = dict(part.partition("\n")[::2] for part in told.removeprefix("## ").split("\n## "))
    assert list(parts) == [
        "rlhfd", "machine", "GPUs", "packages", "limits", "shared memory and disks", "runs", "environment",
        "configuration", "instance", "configuration in force", "last warnings and errors",
    ]  # fmt: skip
    assert "torch: 2." in parts["packages"] and "/dev/shm: " in parts["shared memory and disks"]
    assert str(daemon.shm_dir) in parts["shared memory and disks"]
    assert (
        'token_file = "' in parts["configuration"] and "top_p = 0.9  # RLHFD_ROLLOUT__TOP_P" in parts["configuration"]
    )
    assert f"pid {daemon.pid}" in parts["instance"]
    assert "rollout.num_generations: 4\n" in parts["configuration in force"]
    assert "rollout.top_p" not in parts["configuration in force"], "set here, not for the daemon"
    assert f"{daemon.status()['run']}: running, step " in parts["runs"]
    assert "configuration not reloaded" in parts["last warnings and errors"]
    assert "not available" not in told
    assert "HF_TOKEN: (hidden)" in parts["environment"]
    for secret in ("hf_secretsecret", "first\n", (daemon.folder / "token").read_text()):
        assert secret not in told
    prompts = Path(daemon.status()["model"]).parent / "prompts.jsonl"
    for line in prompts.read_text().splitlines()[:20]:
        assert json.loads(line)["prompt"] not in told


def test_why_says_what_each_is_waiting_for_within_a_second(daemon: Daemon) -> None:
    daemon.wait_ready()
    pid = daemon.signal(signal.SIGSTOP, "rollout-0")
    try:
        answer = daemon.wait_until(lambda: "is stopped" in daemon.why()["sentences"][0] and daemon.why(), "it says so")
        took_s = [took_to_say_why_s(daemon) for _ in range(5)]
    finally:
        os.kill(pid, signal.SIGCONT)

    assert answer["sentences"][0].startswith(f"rollout-0 (pid {pid}) is stopped (SIGSTOP), kill -CONT {pid}: ")
    assert answer["sentences"][-1].startswith("The last minute: rollout ")
    assert 1 <= len(answer["sentences"]) <= 5
    assert sum(answer["last_minute"]["trainer"].values()) == pytest.approx(1.0, abs=0.01)
    # Other programs can only make it slower.
    assert min(took_s) < 1.0
    daemon.wait_until(lambda: "is stopped" not in daemon.why()["sentences"][0], "it goes on")


def took_to_say_why_s(daemon: Daemon) -> float:
    started_s = time.monotonic()
    daemon.why()
    return time.monotonic() - started_s


def test_health_says_that_the_buffer_hangs(daemon: Daemon) -> None:
    daemon.wait_ready()
    assert daemon.get("/healthz")[0] == 200
    pid = daemon.signal(signal.SIGSTOP, "buffer-0")
    try:
        code, text = daemon.wait_until(
            lambda: (answer := daemon.get("/healthz"))[0] == 503 and answer, "health tells of it"
        )
    finally:
        os.kill(pid, signal.SIGCONT)

    assert (code, '"hung":"buffer"' in text) == (503, True)
    daemon.wait_until(lambda: daemon.get("/healthz")[0] == 200, "it goes on")
    daemon.wait_step(daemon.status()["step"] + 2)
    assert scraped(daemon, "rlhfd_items_unaccounted") == 0


def test_a_runtime_directory_in_use_is_refused_and_its_instance_goes_on(daemon: Daemon, task: Path) -> None:
    with Daemon(daemon.folder, *SMALL, task=task, name="second") as second:
        assert second.wait() == 78
    in_use = f"--set daemon.runtime_dir: {daemon.runtime_dir} is in use by pid {daemon.pid}"
    assert second.errors.splitlines() == [in_use]

    daemon.wait_step(daemon.status()["step"] + 2)


def test_a_removed_runtime_directory_is_made_again_and_commands_find_the_instance(daemon: Daemon) -> None:
    before = daemon.status()
    # In one step: the daemon looks each tick, and makes a file again while others are being removed.
    daemon.runtime_dir.rename(removed := daemon.runtime_dir.with_name("removed"))
    shutil.rmtree(removed)

    daemon.wait_logged("the runtime directory had been removed, and is made again: path=")

    after = status_of(rlhfd("status", "--json", "--runtime-dir", str(daemon.runtime_dir), folder=daemon.folder))
    assert after["run_id"] == before["run_id"] and after["uptime_s"] >= before["uptime_s"]
    daemon.wait_step(daemon.status()["step"] + 2)
    (daemon.runtime_dir / "instance.json").unlink()
    daemon.wait_logged("the record of this instance had been removed, and is made again: path=")
    after = status_of(rlhfd("status", "--json", "--runtime-dir", str(daemon.runtime_dir), folder=daemon.folder))
    assert after["run_id"] == before["run_id"]


def test_a_removed_lock_of_the_state_directory_is_taken_again_and_steps_keep_their_lines(daemon: Daemon) -> None:
    (daemon.state_dir / "lock").unlink()
    lines = daemon.run_dir / "metrics.jsonl"
    lines.rename(moved := lines.with_name("moved.jsonl"))

    daemon.wait_logged("the lock of the state directory had been removed, and is made again")

    assert (lock.holder(daemon.state_dir), lock.user_of(daemon.state_dir).run) == (daemon.pid, daemon.run_dir.name)
    daemon.wait_step(daemon.status()["step"] + 2)
    daemon.wait_logged(f"the file of steps' lines was moved or removed, they go to a new one: path={lines}")
    steps = [json.loads(line)["step"] for path in (moved, lines) for line in path.read_text().splitlines()]
    assert steps == [*range(1, len(steps) + 1)] and len(lines.read_text().splitlines()) >= 1


def test_nobody_there_exits_with_3(tmp_path: Path) -> None:
    for command in ("reload", "pause", "resume"):
        assert rlhfd(command, "--runtime-dir", str(tmp_path), folder=tmp_path).returncode == 3
