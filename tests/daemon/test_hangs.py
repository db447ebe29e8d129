"""A real daemon whose processes hang without dying: the hung process is named and replaced, and the run continues."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest

from pipeline.runtime import control, lock
from pipeline.runtime.latest_checkpoint import read_latest
from pipeline.telemetry.reader import MetricsReader
from pipeline.telemetry.slab import MetricsSlab
from tests.daemon.test_kills import balanced, finish, spooled_rows
from tests.support.daemon import (
    HASTY_SETUP,
    PROGRAM,
    SMALL,
    Daemon,
    is_alive,
    is_stopped,
    loaded_first,
    stopping_at_a_checkpoint,
    stopping_at_a_rename,
    total,
    wait_until,
)

pytestmark = pytest.mark.integration
HANG_S = 4.0
SETTINGS = (
    *SMALL,
    "trainer.max_steps=0",
    "rewards=['hanging:score']",
    # Called in the worker itself, where nothing else ends one that hangs.
    "rollout.reward_timeout_s=0",
)
REWARD = """
import pathlib, threading

from pipeline.sort_digits import exact_answer

calls = 0

def score(*row, **named):
    global calls
    calls += 1
    {when}
    return exact_answer(*row, **named)

def wait_for_what_never_comes():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
"""
ONCE = """try:
        pathlib.Path("hang").unlink()
    except FileNotFoundError:
        return exact_answer(*row, **named)
    wait_for_what_never_comes()"""
ALWAYS_FOR_ONE_ANSWER = """poison = pathlib.Path("poison")
    if pathlib.Path("hang").exists():
        poison.write_text(named["gt_answer"])
        pathlib.Path("hang").unlink()
    if poison.exists() and poison.read_text() == named["gt_answer"]:
        wait_for_what_never_comes()"""
AT_THE_START = """if calls == 1 and pathlib.Path("hang").exists():
        wait_for_what_never_comes()"""
START_S = 15.0
AFTER_THE_START = """if calls > 4:  # one prompt is tried before the first ticket
        wait_for_what_never_comes()"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "hanging.py").write_text(REWARD.format(when=ONCE))
    return tmp_path


@contextlib.contextmanager
def short_silence(daemon):
    """Take `HANG_S` without progress for a hang meanwhile; a process that is only slow beside others must not be."""
    (daemon.folder / "run.toml").write_text(f"[daemon]\nhang_timeout_s = {HANG_S}\n")
    answer = control.request(lock.find(daemon.runtime_dir), "reload", 60.0)
    assert answer["ok"], answer
    yield
    (daemon.folder / "run.toml").write_text("")
    # A daemon that was told to end may have ended by now.
    daemon.process.send_signal(signal.SIGHUP)


def configured(folder, *sets, **options):
    """A daemon whose configuration file a test may write anew."""
    (folder / "run.toml").touch()
    return Daemon(folder, *SETTINGS, *sets, arguments=("--config", "run.toml"), **options)


def hang_and_go_on(daemon, name, hang, *, steps=3, times=1):
    """Let a process hang; wait until it is named and replaced and training goes on; return the metrics then."""
    before, pid = daemon.status(), daemon.pids()[name]
    with short_silence(daemon):
        hang()
        daemon.wait_logged(f"hung: role={name.removesuffix('-0') if name == 'buffer-0' else name} pid={pid} stage=")
    daemon.wait_replaced(name, pid)
    # The daemon as a whole has been ready all along, and rows that wait are steps without the process.
    daemon.wait_until(lambda: state_of(daemon, name) == "ready", f"{name} is ready again")
    daemon.wait_step(before["step"] + steps)
    metrics = daemon.metrics()
    assert balanced(metrics), metrics
    assert total(metrics, "rlhfd_process_exits_total", role=name.partition("-")[0], reason="watchdog") == times
    assert not is_alive(pid)
    return metrics


def state_of(daemon, name):
    """Return the state of a process, such as ``ready``, as the status shows it."""
    return next(row["state"] for row in daemon.processes() if f"{row['role']}-{row['index']}" == name)


def stop_and_go_on(daemon, name, file):
    """Stop a process; it is named with its stacks and replaced; the others live on."""
    pids = daemon.pids()

    metrics = hang_and_go_on(daemon, name, lambda: daemon.signal(signal.SIGSTOP, name))

    (verdict,) = verdicts(daemon)
    assert verdict.endswith("reason=stopped")
    assert total(metrics, "rlhfd_items_dropped_total") == 0
    run = re.compile(r'\w.* \| .*/process\.py", line \d+ in run')
    stacks = [*filter(run.fullmatch, daemon.errors.splitlines())]
    slot = name.replace("buffer-0", "buffer")
    assert any(line.startswith(f"{slot} | ") and file in line for line in stacks), "it was let go to write them"
    assert len({line.partition(" | ")[0] for line in stacks}) == 3, "and so did the others"
    others = pids.keys() - {name}
    assert {other: daemon.pids()[other] for other in others} == {other: pids[other] for other in others}


def verdicts(daemon):
    """Return the lines that name a process which hangs, in their order."""
    return [line for line in daemon.errors.splitlines() if "hung: role=" in line]


@pytest.mark.variant
@pytest.mark.parametrize(("name", "file"), [("buffer-0", "buffer/process.py"), ("trainer-0", "trainer/process.py")])
def test_a_stopped_process_is_named_and_replaced(folder, task, name, file):
    with configured(folder, task=task, program=PROGRAM) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)
        stop_and_go_on(daemon, name, file)
        finish(daemon)


def test_a_worker_that_is_stopped_and_a_reward_that_never_returns_are_named_and_the_worker_replaced(folder, task):
    with configured(folder, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)
        stop_and_go_on(daemon, "rollout-0", "rollout/process.py")
        before = total(daemon.metrics(), "rlhfd_tickets_total", result="reissued")

        metrics = hang_and_go_on(daemon, "rollout-0", (folder / "hang").touch, times=2)

        (_, verdict) = verdicts(daemon)
        assert "stage=reward ticket=" in verdict and "ticket=-1" not in verdict
        assert verdict.endswith("reason=no progress")
        assert "in wait_for_what_never_comes" in daemon.errors
        assert total(metrics, "rlhfd_tickets_total", result="reissued") > before
        finish(daemon)


def test_prompts_whose_reward_hangs_every_time_are_set_aside_and_the_run_goes_on(tmp_path, task):
    (tmp_path / "hanging.py").write_text(REWARD.format(when=ALWAYS_FOR_ONE_ANSWER))
    with configured(tmp_path, "rollout.max_attempts=2", task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)

        with short_silence(daemon):
            (tmp_path / "hang").touch()
            daemon.wait_until(
                lambda: total(daemon.metrics(), "rlhfd_tickets_total", result="failed"), "the ticket is given up"
            )
        daemon.wait_step(daemon.status()["step"] + 3)

        metrics = daemon.metrics()
        assert total(metrics, "rlhfd_process_exits_total", role="rollout", reason="watchdog") == 2
        verdicts = [line.partition("stage=")[2].split()[:2] for line in daemon.errors.splitlines() if "hung: " in line]
        assert len(verdicts) == 2 and verdicts[0] == verdicts[1], "the same ticket"
        assert balanced(metrics)
        finish(daemon)


@pytest.fixture
def starter(tmp_path):
    """A folder in which a worker's start hangs at its first reward while there is a file `hang`."""
    (tmp_path / "hanging.py").write_text(REWARD.format(when=AT_THE_START))
    return tmp_path


def shorten_starts(daemon):
    """Let a start take little from now on; the first one had to load everything."""
    (daemon.folder / "run.toml").write_text(f"[daemon]\nstartup_timeout_s = {START_S}\n")
    assert daemon.ask("reload").returncode == 0
    (daemon.folder / "hang").touch()


@pytest.mark.variant
def test_a_worker_that_is_stopped_in_its_start_is_replaced_as_soon_as_one_that_works(starter, task):
    """Generating for a first prompt, it looks like one at work; the campaign of kills came to stop such a one."""
    with configured(starter, "rollout.workers=2", task=task) as daemon:
        daemon.wait_ready()
        (starter / "hang").touch()
        killed = daemon.pids()["rollout-0"]
        daemon.signal(signal.SIGKILL, "rollout-0")
        slab = MetricsSlab.attach(daemon.shm_dir / "metrics")
        daemon.wait_until(
            lambda: slab.pid("rollout", 0) != killed and slab.progress("rollout", 0).activity == "reward",
            "the new one tries the reward",
        )
        pid = slab.pid("rollout", 0)
        slab.close()
        (starter / "hang").unlink()

        with short_silence(daemon):
            daemon.signal(signal.SIGSTOP, "rollout-0")
            daemon.wait_logged(f"hung: role=rollout-0 pid={pid} stage=start ticket=-1")

        daemon.wait_until(lambda: daemon.pids().get("rollout-0") not in (None, killed, pid), "it is started again")
        daemon.wait_ready()
        assert not is_alive(pid)
        (verdict,) = [line for line in daemon.errors.splitlines() if "hung: role=" in line]
        assert verdict.endswith("reason=stopped")
        assert balanced(daemon.metrics())
        finish(daemon)


@pytest.mark.variant
def test_starts_that_take_too_long_leave_their_stacks_and_are_tried_once_more(starter, task):
    names = ("rollout-0", "rollout-1")
    with configured(starter, "rollout.workers=2", task=task) as daemon:
        daemon.wait_ready()
        shorten_starts(daemon)
        for name in names:
            daemon.signal(signal.SIGKILL, name)

        for name in names:
            daemon.wait_logged(f"hung: role={name} ")
        (starter / "hang").unlink()

        daemon.wait_ready()
        daemon.wait_step(daemon.status()["step"] + 3)
        metrics = daemon.metrics()
        verdicts = [line for line in daemon.errors.splitlines() if "hung: role=" in line]
        assert len(verdicts) == 2 and all(line.endswith("reason=not ready in time") for line in verdicts)
        stacks = [line for line in daemon.errors.splitlines() if "in wait_for_what_never_comes" in line]
        assert sorted(line.partition(" | ")[0] for line in stacks) == [*names]
        assert total(metrics, "rlhfd_process_exits_total", role="rollout", reason="watchdog") == 2
        assert balanced(metrics)
        finish(daemon)


def test_a_role_that_is_never_ready_in_time_ends_the_run_with_the_reason(starter, task):
    with configured(starter, task=task) as daemon:
        daemon.wait_ready()
        family = daemon.family()
        shorten_starts(daemon)
        daemon.signal(signal.SIGKILL, "rollout-0")

        assert daemon.wait() == 70

        assert daemon.errors.count("reason=not ready in time") == 2
        reason = f"not ready within {START_S:g} s (daemon.startup_timeout_s)"
        assert f"rollout-0 failed (killed by signal 9, watchdog): {reason}; its last line: " in daemon.errors
        assert not any(map(is_alive, family))
        assert not daemon.shm_dir.exists()


def test_a_setup_that_is_killed_twice_is_started_again_and_the_first_start_goes_on(tmp_path):
    settings = (*SMALL, "daemon.restart_delay_s=0.02", "trainer.max_steps=2")
    with Daemon(tmp_path, *settings, environment=loaded_first(tmp_path, HASTY_SETUP)) as daemon:
        ended = set()
        for _ in range(2):
            (setup,) = daemon.wait_until(
                lambda: [pid for pid in daemon.family() if pid not in ended and is_setup(pid)],
                "the model is being made",
            )
            os.kill(setup, signal.SIGKILL)
            ended.add(setup)

        assert daemon.wait() == 0, daemon.errors

        assert daemon.errors.count("setup ended (killed by signal 9), restart in 0.0 s: ") == 2
        assert "training ended: steps=2" in daemon.errors
        assert not daemon.shm_dir.exists()


@pytest.mark.variant
def test_a_setup_that_hangs_is_killed_and_started_again(tmp_path):
    with Daemon(tmp_path, *SMALL, f"daemon.hang_timeout_s={HANG_S}", "trainer.max_steps=2") as daemon:
        setup = daemon.wait_until(lambda: [pid for pid in daemon.family() if is_setup(pid)], "the model is being made")
        os.kill(setup[0], signal.SIGSTOP)

        assert daemon.wait() == 0, daemon.errors

        assert f"hung: role=setup pid={setup[0]} stage=start" in daemon.errors
        assert daemon.errors.count("setup ended (killed by signal 9, watchdog), restart in ") == 1


def is_setup(pid):
    """Whether a process is the one that makes the embedded model."""
    try:
        return b": setup" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_of_two_ranks_the_one_that_is_stopped_is_named_and_not_the_one_that_waits_for_it(folder, task):
    with configured(folder, "trainer.world_size=2", "rollout.workers=2", task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)
        pids = daemon.pids()

        hang_and_go_on(daemon, "trainer-1", lambda: daemon.signal(signal.SIGSTOP, "trainer-1"))

        verdicts = [line for line in daemon.errors.splitlines() if "hung: role=" in line]
        assert len(verdicts) == 1 and f"role=trainer-1 pid={pids['trainer-1']}" in verdicts[0]
        # The step that a status shows is up to a tick old: the ranks may be on their way still.
        daemon.wait_until(
            lambda: daemon.pids().get("trainer-0") not in (None, pids["trainer-0"]), "ranks start together"
        )
        finish(daemon)


@pytest.mark.variant
def test_a_supervisor_that_was_stopped_takes_its_own_pause_for_nobodys_hang(folder, task):
    with configured(folder, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)
        pids, step = daemon.pids(), daemon.status()["step"]
        slab = MetricsSlab.attach(daemon.shm_dir / "metrics")
        reader = MetricsReader(slab)

        with short_silence(daemon):
            daemon.signal(signal.SIGSTOP)
            since_s = time.monotonic()
            wait_until(
                lambda: (
                    (reader.read().value("rlhfd_train_steps_total") or 0) >= step + 3
                    and time.monotonic() - since_s > 2 * HANG_S
                ),
                60.0,
                "training goes on without it",
            )
            daemon.signal(signal.SIGCONT)
            # It has looked at all of them since.
            daemon.wait_step(step + 3)
        slab.close()
        daemon.wait_step(step + 10)

        assert daemon.pids() == pids
        assert "hung: " not in daemon.errors
        assert balanced(daemon.metrics())
        finish(daemon)


def test_a_run_in_which_nothing_moves_gives_up_with_the_reason(tmp_path, task):
    (tmp_path / "hanging.py").write_text(REWARD.format(when=AFTER_THE_START))
    limits = ("daemon.hang_timeout_s=0", "daemon.progress_timeout_s=12")
    with Daemon(tmp_path, *SETTINGS, *limits, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_until(lambda: "in reward on ticket 0" in daemon.ask("why").stdout, "`rlhfd why` names the reward")
        family = daemon.family()
        daemon.wait_until(lambda: daemon.status()["state"] == "stuck", "the status says that it is stuck")

        assert daemon.wait() == 70

        (verdict,) = [line for line in daemon.errors.splitlines() if "hung: role=" in line]
        assert "role=rollout-0" in verdict and verdict.endswith("reason=the run stands still")
        told = [line for line in daemon.errors.splitlines() if "a restart did not help" in line]
        last = [line for line in told if " ERROR " in line]
        assert len(last) == 1 and told[0].split()[1] == "INFO", "at the failure, and at the end as the error"
        assert "no progress for 12 s" in last[0]
        assert "in reward on ticket 0" in last[0]
        assert not any(map(is_alive, family))
        assert not daemon.shm_dir.exists()
        assert list(daemon.runtime_dir.iterdir()) == []


@pytest.mark.variant
def test_a_buffer_that_hangs_during_a_stop_is_named_and_another_one_spools_its_rows(folder, task):
    settings = ("buffer.max_staleness=2",)
    # Before it is killed a stopped process is continued for its stacks: it must not use that time to end in order.
    stopping = stopping_at_a_rename(folder, "/spool/", for_ever=True)
    with configured(folder, *settings, task=task, environment=stopping) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)
        pid = daemon.pids()["buffer-0"]
        with short_silence(daemon):
            daemon.signal(signal.SIGTERM)
            daemon.wait_logged(f"hung: role=buffer pid={pid} ")

        assert daemon.wait() == 0, daemon.errors

        (verdict,) = [line for line in daemon.errors.splitlines() if "hung: role=" in line]
        assert f"role=buffer pid={pid} " in verdict and verdict.endswith("reason=stopped")
        assert "buffer ended (-9) before it had written the undelivered rows, restart: hung in" in daemon.errors
        assert any(line.startswith("buffer | ") and "buffer/process.py" in line for line in daemon.errors.splitlines())
        rows = spooled_rows(daemon)[-1]
        assert rows > 0
        assert len(list((daemon.run_dir / "spool").iterdir())) == 1, "the next start takes it in"
        assert list(daemon.runtime_dir.iterdir()) == []


def test_a_trainer_that_hangs_during_a_stop_is_named_and_another_one_writes_its_checkpoint(folder, task):
    with configured(folder, "trainer.save_every=0", "daemon.drain_timeout_s=1", task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)
        step, pid = daemon.status()["step"], daemon.pids()["trainer-0"]
        with short_silence(daemon):
            os.kill(pid, signal.SIGSTOP)
            daemon.signal(signal.SIGTERM)
            daemon.wait_logged(f"hung: role=trainer-0 pid={pid} ")

        assert daemon.wait() == 0, daemon.errors

        (verdict,) = [line for line in daemon.errors.splitlines() if "hung: role=" in line]
        assert f"role=trainer-0 pid={pid} " in verdict and verdict.endswith("reason=stopped")
        assert any(line.startswith("trainer-0 | ") for line in daemon.errors.splitlines())
    latest = read_latest(daemon.run_dir / "checkpoints")
    assert latest is not None and latest.step >= step


@pytest.mark.variant
def test_a_checkpoint_that_takes_longer_than_rollouts_get_is_written_to_its_end(folder, task):
    limits = ("daemon.drain_timeout_s=1", "trainer.save_every=0")
    with Daemon(folder, *SETTINGS, *limits, task=task, environment=stopping_at_a_checkpoint(folder)) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)
        step, pid = daemon.status()["step"], daemon.pids()["trainer-0"]
        checkpoints = daemon.run_dir / "checkpoints"
        daemon.signal(signal.SIGTERM)
        since_s = time.monotonic()
        daemon.wait_until(lambda: is_stopped(pid), "it is about to put its checkpoint in place")
        assert list(checkpoints.glob(".step-*")) and read_latest(checkpoints) is None

        wait_until(lambda: time.monotonic() - since_s > 5.0, 10.0, "the time of rollouts is over")
        assert is_alive(pid) and daemon.returncode is None, daemon.errors
        os.kill(pid, signal.SIGCONT)

        assert daemon.wait() == 0, daemon.errors
        assert "trainer-0 ended" not in daemon.errors and "hung: " not in daemon.errors
    latest = read_latest(checkpoints)
    assert latest is not None and latest.step >= step
