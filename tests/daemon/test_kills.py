"""A real daemon whose processes are killed with SIGKILL; the others continue, and the counts of rows add up."""

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import sys

import msgspec
import pytest

from pipeline.buffer.spool import SpoolTotals
from pipeline.runtime.latest_checkpoint import read_latest
from pipeline.storage import extent_file
from pipeline.telemetry.samples import SampleReader, folder_of
from pipeline.telemetry.slab import MetricsSlab
from tests.support.daemon import (
    END_TIMEOUT_S,
    PROGRAM,
    SMALL,
    Daemon,
    is_alive,
    is_stopped,
    stopping_at_a_checkpoint,
    telling_reward,
    total,
    wait_until,
)

pytestmark = pytest.mark.integration
# Steps slow enough to be hit, a run long enough to be hit twice.
SETTINGS = (*SMALL, "trainer.max_steps=0")


def balanced(metrics) -> bool:
    held = sum(total(metrics, "rlhfd_buffer_items", state=state) for state in ("ready", "leased"))
    sealed, trained = total(metrics, "rlhfd_items_sealed_total"), total(metrics, "rlhfd_items_trained_total")
    return (
        sealed == trained + total(metrics, "rlhfd_items_dropped_total") + held
        and total(metrics, "rlhfd_items_unaccounted") == 0
    )


def at_rest(metrics) -> bool:
    """Whether nothing is under way, and no whole batch of 32 rows waits."""
    ready, leased = (total(metrics, "rlhfd_buffer_items", state=state) for state in ("ready", "leased"))
    return not total(metrics, "rlhfd_tickets_outstanding") and not leased and ready < 32


def kill_and_go_on(daemon, name, *, steps=5):
    """Kill a process, wait until another one is in its place and training has gone on; return the metrics then."""
    step = daemon.status()["step"]
    pid = daemon.signal(signal.SIGKILL, name)
    daemon.wait_replaced(name, pid)
    daemon.wait_ready()
    daemon.wait_step(step + steps)
    metrics = daemon.metrics()
    assert balanced(metrics), metrics
    return metrics


def finish(daemon):
    """Stop in order; nothing may be left."""
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0, daemon.errors
    assert not daemon.shm_dir.exists()
    assert list(daemon.runtime_dir.iterdir()) == []


def one_line_a_step(daemon):
    """Whether `metrics.jsonl` of a run that has ended has each step once, and all its rows."""
    lines = [json.loads(line) for line in (daemon.run_dir / "metrics.jsonl").read_text().splitlines()]
    return (
        [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        and f"training ended: steps={len(lines)} " in daemon.errors
        and all(line["rows"] == 32 and line["response_length_mean_tokens"] >= 1 for line in lines)
    )


def test_a_killed_worker_buffer_or_trainer_is_replaced_and_nothing_is_lost(tmp_path, task):
    """With a stop string, which a successor of the worker knows too."""
    ends = ('rollout.stop=["34"]', "samples.per_minute=6000")
    with Daemon(tmp_path, *SETTINGS, *ends, task=task, program=PROGRAM) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)
        daemon.wait_until(
            lambda: total(daemon.metrics(), "rlhfd_tickets_outstanding") > 0, "a ticket is with the worker"
        )

        for name, deaths in (("rollout-0", 1), ("buffer-0", 1), ("trainer-0", 1), ("buffer-0", 2)):
            others = {other: pid for other, pid in daemon.pids().items() if other != name}
            metrics = kill_and_go_on(daemon, name)
            role = name.partition("-")[0]
            assert total(metrics, "rlhfd_process_exits_total", role=role, reason="signal") == deaths
            assert total(metrics, "rlhfd_process_starts_total", role=role) == deaths + 1
            assert total(metrics, "rlhfd_items_dropped_total") == 0
            assert {other: pid for other, pid in daemon.pids().items() if other != name} == others, "they live on"

        # At rest: amid a step the trainer may know of a version before the buffer does, or of none for a batch yet.
        assert daemon.ask("pause").returncode == 0
        daemon.wait_until(lambda: at_rest(daemon.metrics()), "all that was rolled out is trained")
        metrics = daemon.metrics()
        trained = total(metrics, "rlhfd_items_trained_total")
        version = total(metrics, "rlhfd_policy_version", role="trainer")
        assert trained / 32 == version, "each version is one batch of 32 rows, none skipped, none twice"
        stopped, cut = (total(metrics, "rlhfd_responses_total", finish_reason=reason) for reason in ("stop", "length"))
        finish(daemon)
        assert one_line_a_step(daemon)
        kept = [response for sample in SampleReader(folder_of(daemon.run_dir)).read() for response in sample.responses]
        texts = ["".join(response.pieces) for response in kept]
        assert [response.stop for response in kept] == ["34" if text.endswith("34") else "" for text in texts]
        assert {"", "34"} == {response.stop for response in kept} and all("34" not in text[:-2] for text in texts)
        assert stopped + cut >= trained and stopped > 0


@pytest.mark.variant
def test_word_of_a_death_that_a_killed_buffer_had_not_read_is_said_again(tmp_path, task):
    """A worker that is not started again leaves tickets, which no other worker may roll out until the buffer knows."""
    limits = ("rollout.workers=2", "buffer.max_staleness=0", "daemon.restart_limit=2", "daemon.restart_delay_s=0.05")
    with Daemon(tmp_path, *SETTINGS, *limits, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)
        first = daemon.signal(signal.SIGKILL, "rollout-1")
        daemon.wait_replaced("rollout-1", first)
        daemon.wait_ready()
        daemon.wait_step(daemon.status()["step"] + 2)
        slab = MetricsSlab.attach(daemon.shm_dir / "metrics")
        daemon.wait_until(lambda: slab.progress("rollout", 1).working_on >= 0, "it works on a ticket")
        slab.close()
        pids = daemon.pids()

        os.kill(pids["buffer-0"], signal.SIGSTOP)
        os.kill(pids["rollout-1"], signal.SIGKILL)
        daemon.wait_logged("rollout-1 ended (killed by signal 9) too often, it is not started again")
        os.kill(pids["buffer-0"], signal.SIGKILL)

        daemon.wait_replaced("buffer-0", pids["buffer-0"])
        daemon.wait_step(daemon.status()["step"] + 5)
        assert balanced(daemon.metrics())
        finish(daemon)


@pytest.mark.variant
def test_a_killed_rank_takes_the_other_with_it_and_both_go_on(tmp_path, task):
    with Daemon(tmp_path, *SETTINGS, "trainer.world_size=2", "rollout.workers=2", task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)
        pids = daemon.pids()

        daemon.signal(signal.SIGKILL, "trainer-1")
        daemon.wait_until(
            lambda: {daemon.pids().get(f"trainer-{rank}") for rank in (0, 1)}.isdisjoint(
                {None, pids["trainer-0"], pids["trainer-1"]}
            ),
            "both ranks are started again",
        )
        daemon.wait_ready()
        daemon.wait_step(daemon.status()["step"] + 5)

        assert balanced(daemon.metrics())
        finish(daemon)


def test_a_rank_killed_at_its_last_checkpoint_comes_back_with_the_one_that_has_ended(tmp_path, task):
    settings = ("trainer.world_size=2", "rollout.workers=2", "trainer.max_steps=2", "trainer.save_every=0")
    environment = stopping_at_a_checkpoint(tmp_path)
    with Daemon(tmp_path, *SETTINGS, *settings, task=task, environment=environment) as daemon:
        daemon.wait_answering()
        unfinished = daemon.run_dir / "checkpoints"
        daemon.wait_until(lambda: is_stopped(daemon.pids().get("trainer-0", 0)), "the first rank writes its checkpoint")
        assert list(unfinished.glob(".step-*")) and read_latest(unfinished) is None
        daemon.wait_until(lambda: "trainer-1" not in daemon.pids(), "the other rank has ended")

        daemon.signal(signal.SIGKILL, "trainer-0")

        assert daemon.wait() == 0, daemon.errors
    assert "trainer-0 ended (killed by signal 9)" in daemon.errors
    latest = read_latest(unfinished)
    assert latest is not None and (latest.step, latest.complete) == (2, True)


def spooled_rows(daemon):
    return [int(rows) for rows in re.findall(r"undelivered experiences spooled: rows=(\d+)", daemon.errors)]


@pytest.mark.variant
def test_a_stop_while_the_buffer_is_dead_still_spools_what_is_undelivered(tmp_path, task):
    settings = (*SETTINGS, "buffer.max_staleness=2", "daemon.restart_delay_s=30")
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_step(3)
        daemon.signal(signal.SIGKILL, "buffer-0")
        daemon.wait_logged("buffer ended (killed by signal 9), restart in")

        finish(daemon)

        assert len(spooled_rows(daemon)) == 1
        assert len(list((daemon.run_dir / "spool").iterdir())) == 1


def test_a_stop_while_the_trainer_is_dead_writes_the_checkpoint_of_its_last_step(tmp_path, task):
    settings = (*SETTINGS, "trainer.save_every=0", "daemon.restart_delay_s=30")
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_step(3)
        step = daemon.status()["step"]
        daemon.signal(signal.SIGKILL, "trainer-0")
        daemon.wait_logged("trainer-0 ended (killed by signal 9), restart in")

        finish(daemon)

    latest = read_latest(daemon.run_dir / "checkpoints")
    assert latest is not None and latest.step >= step, "its first life had all steps, and none was on disk"


@pytest.mark.variant
def test_a_run_that_gives_up_while_the_trainer_is_dead_writes_the_checkpoint_of_its_last_step(tmp_path, task):
    settings = (*SETTINGS, "trainer.save_every=0", "daemon.restart_delay_s=8", "daemon.restart_limit=2")
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_step(2)
        daemon.wait_replaced("rollout-0", daemon.signal(signal.SIGKILL, "rollout-0"))
        daemon.wait_ready()
        step = daemon.status()["step"]
        daemon.signal(signal.SIGKILL, "trainer-0")
        daemon.wait_logged("trainer-0 ended (killed by signal 9), restart in")
        daemon.signal(signal.SIGKILL, "rollout-0")

        assert daemon.wait() == 70, daemon.errors

    latest = read_latest(daemon.run_dir / "checkpoints")
    assert latest is not None and latest.step >= step, daemon.errors


def test_the_steps_of_a_run_whose_trainer_dies_too_often_stay_for_the_next_start(tmp_path, task):
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    telling_reward(undisturbed)
    settings = (*SETTINGS, "trainer.save_every=0", "buffer.max_staleness=0", *telling_reward(tmp_path))
    with Daemon(tmp_path, *settings, "daemon.restart_limit=1", task=task) as daemon:
        daemon.wait_step(3)
        daemon.signal(signal.SIGKILL, "trainer-0")

        assert daemon.wait() == 70, daemon.errors
        stay = rf"weights and training state of version (\d+) stay in {daemon.shm_dir} for the next start"
        (step,) = map(int, re.findall(f"the last steps are in no checkpoint: {stay}", daemon.errors))
        assert step >= 3 and "trainer-0 failed (killed by signal 9) too often: " in daemon.errors.splitlines()[-1]

    most = f"trainer.max_steps={step + 2}"
    with Daemon(tmp_path, *settings, most, task=task, name="again") as again:
        ended = again.ended()
    assert f"resumed from shared memory: version={step} step={step}" in again.errors
    assert not again.shm_dir.exists()

    with Daemon(undisturbed, *settings, most, task=task) as daemon:
        assert daemon.ended() == ended


@pytest.mark.parametrize("arguments", [(), pytest.param(("--serial",), marks=pytest.mark.variant)])
def test_what_was_undelivered_at_a_stop_is_trained_later_though_a_start_between_fails(tmp_path, task, arguments):
    settings = (*SETTINGS, "buffer.max_staleness=2")
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_step(3)
        finish(daemon)
        (rows,) = spooled_rows(daemon)
        assert rows > 0 and f"spooled {rows}" in daemon.errors
        (spool,) = (daemon.run_dir / "spool").iterdir()
        assert stat.S_IMODE(spool.stat().st_mode) == 0o600
        step = json.loads((daemon.run_dir / "checkpoints" / "latest.json").read_bytes())["step"]

    # The module is found before anything is made; its function is missed by the worker, once the spool is taken in.
    tmp_path.joinpath("empty_rewards.py").touch()
    broken = 'rewards=["empty_rewards:score"]'
    with Daemon(tmp_path, *settings, broken, task=task, name="broken", arguments=arguments) as daemon:
        assert daemon.wait() == 78, daemon.errors
        assert f"spool taken in: rows={rows} " in daemon.errors

    # The trainer may have got to some of it before the worker's end.
    stopped_at = json.loads((daemon.run_dir / "checkpoints" / "latest.json").read_bytes())["step"]
    rows -= 32 * (stopped_at - step)
    assert spooled_rows(daemon) == [rows]
    if arguments:
        return
    (spool,) = (daemon.run_dir / "spool").iterdir()
    with Daemon(tmp_path, *settings, task=task, name="third") as daemon:
        daemon.wait_step(stopped_at + 4)
        assert f"spool taken in: rows={rows} " in daemon.errors
        metrics = daemon.metrics()
        assert balanced(metrics)
        assert total(metrics, "rlhfd_items_dropped_total") == 0, "none of it too old, none rolled back"
        assert not spool.exists()
        finish(daemon)


FAILING_TICK = """
import sys
from pathlib import Path

from pipeline.cli.main import main
from pipeline.supervisor.supervisor import Supervisor

_tick = Supervisor._tick


def tick(self):
    if Path("fail").exists():
        raise ValueError("nobody foresaw this")
    _tick(self)


Supervisor._tick = tick
sys.exit(main())
"""


def executable(path, text):
    path.write_text(text)
    path.chmod(0o700)
    return path


def test_after_a_killed_supervisor_and_starts_that_fail_nothing_runs_and_the_next_start_goes_on(tmp_path, task):
    """They leave what it left; so does an error that nobody foresaw."""
    settings = (*SETTINGS, "trainer.save_every=0")
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)
        family, status = daemon.family(), daemon.status()
        step, run_id, sealed = status["step"], status["run_id"], total(daemon.metrics(), "rlhfd_items_sealed_total")
        assert len(family) == 4, "forkserver, buffer, trainer, worker"
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        wait_until(lambda: not any(map(is_alive, family)), END_TIMEOUT_S, "no process of it is left")

    def fails(name, *sets, message, **options):
        with Daemon(tmp_path, *settings, *sets, task=task, name=name, **options) as daemon:
            assert daemon.wait() not in (0, None), daemon.errors
        assert message in daemon.errors
        assert (daemon.shm_dir / "arena").exists() and (daemon.shm_dir / "weights").exists(), daemon.errors

    # Room for the lock's page, and none for the record's.
    mount = f'mount -t tmpfs -o size=4k,mode=700 none {daemon.runtime_dir} && exec {PROGRAM} "$@"'
    full = executable(tmp_path / "full", f"#!/bin/sh\nexec unshare --mount sh -c '{mount}' sh \"$@\"\n")
    fails("full-disk", program=full, message="No space left on device")
    tmp_path.joinpath("empty_rewards.py").touch()
    broken = 'rewards=["empty_rewards:score"]'
    fails("serial", broken, arguments=("--serial",), message="empty_rewards has no function score")
    # Refused by buffer and trainer, so that no checkpoint is written.
    latest = daemon.run_dir / "checkpoints" / "latest.json"
    latest.parent.mkdir(exist_ok=True)
    latest.write_bytes(b"no JSON")
    fails("broken", message=str(latest))
    latest.unlink()
    (tmp_path / "fail").touch()
    failing = executable(tmp_path / "failing", f"#!{sys.executable} -P\n{FAILING_TICK}")
    fails("tick", program=failing, message="nobody foresaw")

    with Daemon(tmp_path, *settings, task=task, name="last") as last:
        status = last.wait_ready()
        assert status["run_id"] == run_id and status["step"] >= step
        assert "arena taken over from a supervisor that was killed" in last.errors
        last.wait_step(status["step"] + 3)
        metrics = last.metrics()
        assert total(metrics, "rlhfd_items_sealed_total") > sealed, "the totals went on"
        assert balanced(metrics)
        finish(last)


@pytest.mark.variant
def test_what_kills_left_half_written_goes_with_the_next_run(tmp_path, task):
    with Daemon(tmp_path, *SMALL, "trainer.max_steps=1", task=task) as daemon:
        assert daemon.wait() == 0, daemon.errors
    half = [daemon.runtime_dir / ".instance.json.new"]
    half += [daemon.run_dir / name for name in ("checkpoints/.latest.new", "quarantine/2026-torn-ticket-1.new")]
    for path in half:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_bytes(b"half")
    assert len(daemon.leftovers()) == len(half)

    with Daemon(tmp_path, *SMALL, "trainer.max_steps=2", task=task, name="second") as daemon:
        assert daemon.wait() == 0, daemon.errors

    assert daemon.leftovers() == []


def test_a_start_that_fails_before_anything_is_begun_leaves_nothing(tmp_path, task):
    (tmp_path / "run" / "instance.json").mkdir(parents=True)
    (tmp_path / "run").chmod(0o700)

    with Daemon(tmp_path, *SETTINGS, task=task) as daemon:
        assert daemon.wait() == 78, daemon.errors

    assert not daemon.shm_dir.exists()


def test_after_a_crash_of_the_machine_what_its_journal_held_is_trained(tmp_path, task):
    settings = (*SETTINGS, "buffer.max_staleness=2", "buffer.journal_interval_s=0.2", "trainer.save_every=1")
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_step(3)

        def journalled():
            """Hold the trainer where it is; return the journal's path and the checkpoint once they go together."""
            daemon.signal(signal.SIGSTOP, "trainer-0")
            written = total(daemon.metrics(), "rlhfd_journal_writes_total", result="ok")
            daemon.wait_until(
                lambda: total(daemon.metrics(), "rlhfd_journal_writes_total", result="ok") > written + 2, "journals"
            )
            (path,) = (daemon.run_dir / "journal").glob(f"*{extent_file.SUFFIX}")
            file, latest = extent_file.load(path), read_latest(daemon.run_dir / "checkpoints")
            # It may have been stopped before word of its version left it.
            if file.extents and msgspec.json.decode(file.metadata["totals"], type=SpoolTotals).include(latest):
                return path, latest
            daemon.signal(signal.SIGCONT, "trainer-0")
            return None

        path, latest = daemon.wait_until(journalled, "a journal goes with the checkpoint")
        family = daemon.family()
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        wait_until(lambda: not any(map(is_alive, family)), END_TIMEOUT_S, "no process of it is left")
        shutil.rmtree(daemon.shm_dir)

    # Workers went on while the trainer stood still: the last snapshot has their rows too.
    file = extent_file.load(path)
    held = sum(len(extent.chosen) for extent in file.extents)
    newer = sum(len(extent.chosen) for extent in file.extents if extent.policy_version > latest.version)
    with Daemon(tmp_path, *settings, task=task, name="second") as daemon:
        daemon.wait_step(latest.step + 4)
        assert f"journal taken in: rows={held} " in daemon.errors
        assert f"resuming: step={latest.step} " in daemon.errors
        metrics = daemon.metrics()
        assert balanced(metrics)
        assert total(metrics, "rlhfd_items_dropped_total") == newer
        finish(daemon)
        assert list((daemon.run_dir / "journal").iterdir()) == []
        assert one_line_a_step(daemon)


@pytest.mark.variant
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_role_that_has_ended_in_order_does_not_die_of_being_told_to_end(tmp_path, task, number):
    """Between its last line and its exit lies a second in which Python unloads its modules."""
    with Daemon(tmp_path, *SETTINGS, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(1)
        pid = daemon.pids()["trainer-0"]
        daemon.signal(signal.SIGTERM)
        daemon.wait_logged("training ended")

        def has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            return not is_alive(pid)

        wait_until(has_ended, END_TIMEOUT_S, "it has ended", poll_s=0.0)
        assert daemon.wait() == 0, daemon.errors
        assert "before its last checkpoint" not in daemon.errors


@pytest.mark.variant
def test_a_trainer_killed_during_a_stop_comes_back_and_writes_its_checkpoint(tmp_path, task):
    settings = (*SETTINGS, "trainer.save_every=0", "buffer.max_staleness=0", "daemon.drain_timeout_s=120")
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)
        pids, step = daemon.pids(), daemon.status()["step"]
        # Stopped, it cannot end in order before it is killed.
        daemon.signal(signal.SIGSTOP, "trainer-0")
        daemon.signal(signal.SIGTERM)
        daemon.wait_logged("draining")
        os.kill(pids["trainer-0"], signal.SIGKILL)
        assert daemon.wait() == 0, daemon.errors
        assert "before its last checkpoint, restart" in daemon.errors

    latest = read_latest(daemon.run_dir / "checkpoints")
    assert latest is not None and latest.step >= step, "no step is lost, though none was on disk"
