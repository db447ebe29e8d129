"""A daemon whose worker generates with the real vLLM: what it learns, and deaths of engine, worker and supervisor."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from pipeline.trainer import setup
from tests.daemon import test_vision
from tests.daemon.test_kills import SETTINGS as ENDLESS
from tests.daemon.test_kills import balanced
from tests.rollout.generation.vllm.models import small_vl
from tests.support import tiny_vision
from tests.support.daemon import (
    END_TIMEOUT_S,
    Daemon,
    descendants,
    is_alive,
    only_run,
    parent,
    telling_reward,
    title,
    total,
    wait_until,
)

pytestmark = [pytest.mark.vllm, pytest.mark.integration]

SETTINGS = ("rollout.engine=vllm", "rollout.max_attempts=1", "daemon.restart_delay_s=0.05")
# From a low start the reward of short prompts rises within some twenty steps.
LEARNING = (
    "trainer.max_steps=50", "trainer.learning_rate=1e-3", "trainer.warmup_steps=5", "trainer.decay_steps=0",
    "buffer.sample_batch_size=128", "rollout.max_length=10", "rollout.cache_bytes=64MiB",
)  # fmt: skip
WARMUP_STEPS, DIGITS = 22, 3
ENDS, GAIN = 8, 0.25
# Nothing asks for an actor in the worker.
ALONE = ("rollout.log_probs=trainer", "model.reference_device=trainer")
LORA = ("model.lora_rank=4", "trainer.learning_rate=2e-3")
# On a CPU a step of the engine takes a second with them: few rows a ticket.
EIGHT_BITS = (
    "rollout.quantization=fp8", "model.dtype=bfloat16", "rollout.max_length=10", "rollout.batch_size=2",
    "rollout.num_generations=4", "buffer.sample_batch_size=16", "rollout.cache_bytes=64MiB",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_cache(monkeypatch):
    """What vLLM keeps between its starts is that of this home: each state folder is a new one."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The embedded task: its model after a third of its warm-up, and its prompts of three digits."""
    folder = tmp_path_factory.mktemp("task") / "sort-digits"
    setup.prepare(folder, warmup_steps=WARMUP_STEPS)
    lines = (folder / "prompts.jsonl").read_text().splitlines(keepends=True)
    (folder / "prompts.jsonl").write_text("".join(line for line in lines if len(json.loads(line)["answer"]) == DIGITS))
    return folder


@pytest.mark.parametrize(
    "alone",
    [
        pytest.param((), id="beside the worker's actor"),
        # The run of the kills below is of this kind.
        pytest.param(ALONE, id="the engine alone has the actor", marks=pytest.mark.variant),
    ],
)
def test_the_embedded_task_is_learned_with_vllm(tmp_path, task, record_property, alone):
    with Daemon(tmp_path, *SETTINGS, *LEARNING, *alone, task=task) as daemon:
        assert daemon.wait() == 0, daemon.errors[-4000:]
        lines = (only_run(daemon.state_dir) / "metrics.jsonl").read_text().splitlines()

    rewards = [json.loads(line)["reward_mean"] for line in lines]
    first, last = sum(rewards[:ENDS]) / ENDS, sum(rewards[-ENDS:]) / ENDS
    record_property("shown", f"mean reward {first:.3f} in the first {ENDS} steps, {last:.3f} in the last {ENDS}")
    assert last - first >= GAIN, rewards
    assert "the engine does not" not in daemon.errors and "old weights" not in daemon.errors, "each version passes"
    assert "is not compared" not in daemon.errors, "and is asked"
    assert ("the engine alone holds the actor" in daemon.errors) == bool(alone)


@pytest.mark.variant
@pytest.mark.parametrize("lora", [(), LORA], ids=["whole", "adapters"])
def test_prompts_with_images_are_trained_on_and_the_engine_says_of_them_as_the_trainer(tmp_path, lora):
    task = tmp_path / "task"
    tiny_vision.save(task / "model", made=small_vl("qwen2_vl", 0, test_vision.PATCH), patch=test_vision.PATCH)
    test_vision.write_prompts(task)
    more = (
        "trainer.max_steps=4",
        "trainer.learning_rate=1e-3",
        "rollout.cache_bytes=64MiB",
        "buffer.sample_batch_size=16",
        *SETTINGS,
        *lora,
    )
    with Daemon(tmp_path / "run", *test_vision.settings(tmp_path / "run", task, *more)) as daemon:
        daemon.wait_step(3)
        metrics = daemon.metrics()
        assert daemon.wait() == 0, daemon.errors[-4000:]
        steps = (only_run(daemon.state_dir) / "metrics.jsonl").read_text().splitlines()

    gaps = [json.loads(step)["behaviour_gap_nats"] for step in steps]
    assert len(gaps) == 4 and 0 < max(gaps) < 1e-4, gaps
    assert total(metrics, "rlhfd_engine_probes_total", verdict="ok") >= 2
    assert total(metrics, "rlhfd_items_unaccounted") == 0
    assert "the engine does not" not in daemon.errors and "old weights" not in daemon.errors, "each version passes"
    assert "is not compared" not in daemon.errors, "and is asked"


def engine_of(daemon):
    """The pid of the engine's process."""

    def engines():
        return [pid for pid in daemon.family() if b"rollout 0 vllm" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    (pid,) = daemon.wait_until(engines, "the worker has started its engine")
    return pid


def below_a_guard(pid):
    """Whether an engine is a fork of the forkserver of engines."""
    return title(parent(pid)) == "rlhfd: guard of an engine"


def another_worker(daemon, pid):
    daemon.wait_replaced("rollout-0", pid)
    daemon.wait_ready()
    daemon.wait_step(daemon.status()["step"] + 3)


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(("engine",), id="engine and supervisor"),
        # That the engine of a killed worker is dead is shown beside the engine's own tests, too.
        pytest.param(("engine", "worker"), id="engine, worker and supervisor", marks=pytest.mark.variant),
        pytest.param(("forkserver", "engine"), id="forkserver, engine and supervisor", marks=pytest.mark.variant),
    ],
)
def test_engine_worker_and_supervisor_are_killed_nothing_is_lost_and_nothing_is_left(tmp_path, task, victims):
    settings = (*ENDLESS, *SETTINGS, *LORA, *ALONE, *telling_reward(tmp_path))
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)
        assert "the engine alone holds the actor" in daemon.errors

        worker, engine = daemon.pids()["rollout-0"], engine_of(daemon)
        assert below_a_guard(engine)
        if "forkserver" in victims:
            (forkserver,) = [pid for pid in daemon.family() if title(pid) == "rlhfd: forkserver of engines"]
            os.kill(forkserver, signal.SIGKILL)
            daemon.wait_until(lambda: daemon.errors.count("ready: process=engines") == 2, "there is another one")
        os.kill(engine, signal.SIGKILL)
        daemon.wait_logged("engine vllm: its process was killed by signal 9; the log may say why")
        another_worker(daemon, worker)

        if "worker" in victims:
            engine = engine_of(daemon)
            worker = daemon.signal(signal.SIGKILL, "rollout-0")
            daemon.wait_until(lambda: not is_alive(engine), "the engine is dead")
            another_worker(daemon, worker)

        assert below_a_guard(engine_of(daemon))
        (worker,) = [process for process in daemon.status()["processes"] if process["role"] == "rollout"]
        assert worker["engine"]["room"] == 256 and worker["engine"]["tokens_out_per_s"] > 0
        metrics = daemon.metrics()
        assert total(metrics, "rlhfd_engine_tokens_total", direction="out") > 0
        assert total(metrics, "rlhfd_engine_probes_total", verdict="ok") > 3
        assert total(metrics, "rlhfd_engine_probes_total") == total(metrics, "rlhfd_engine_probes_total", verdict="ok")
        killed = victims.count("worker")
        assert total(metrics, "rlhfd_process_exits_total", role="rollout", reason="signal") == killed
        assert total(metrics, "rlhfd_process_starts_total", role="rollout") == 2 + killed
        assert total(metrics, "rlhfd_items_dropped_total") == 0
        assert total(metrics, "rlhfd_tickets_total", result="failed") == 0, "no ticket is at fault"
        assert balanced(metrics)

        family = [*daemon.family(), engine_of(daemon)]
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        wait_until(lambda: not any(map(is_alive, family)), END_TIMEOUT_S, "no process of it is left")
        shutil.rmtree(daemon.shm_dir)


def ranks_of(daemon):
    below = descendants(daemon.pids()["rollout-0"])
    return [pid for pid in below if b"::Worker_TP" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.variant
def test_a_killed_rank_of_an_engine_costs_no_ticket_and_nothing_is_left_after_the_supervisor(tmp_path, task):
    settings = (*ENDLESS, *SETTINGS, *ALONE, "rollout.tensor_parallel=2", "rollout.cache_bytes=64MiB")
    with Daemon(tmp_path, *settings, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(3)
        worker, ranks = daemon.pids()["rollout-0"], ranks_of(daemon)
        assert len(ranks) == 2

        os.kill(ranks[0], signal.SIGKILL)
        daemon.wait_logged("engine vllm: its process was killed by signal 9; the log may say why")
        daemon.wait_until(lambda: not any(map(is_alive, ranks)), "the other rank is dead")
        another_worker(daemon, worker)

        metrics = daemon.metrics()
        assert total(metrics, "rlhfd_engine_probes_total", verdict="ok") > 3
        assert total(metrics, "rlhfd_engine_probes_total") == total(metrics, "rlhfd_engine_probes_total", verdict="ok")
        assert total(metrics, "rlhfd_process_starts_total", role="rollout") == 2
        assert total(metrics, "rlhfd_tickets_total", result="failed") == 0, "no ticket is at fault"
        assert balanced(metrics)

        # The first worker's folder of sockets is gone with its successor's start.
        assert len(list(daemon.shm_dir.glob("rlhfd-vllm-*"))) == 1
        family = [*daemon.family(), *descendants(daemon.pids()["rollout-0"])]
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        wait_until(lambda: not any(map(is_alive, family)), END_TIMEOUT_S, "no process of it is left")
        shutil.rmtree(daemon.shm_dir)


@pytest.mark.variant
def test_weights_of_8_bits_are_corrected_for_and_a_killed_engine_of_theirs_costs_no_ticket(tmp_path, task):
    with Daemon(tmp_path, *ENDLESS, *SETTINGS, *EIGHT_BITS, task=task) as daemon:
        daemon.wait_ready()
        daemon.wait_step(2)
        worker = daemon.pids()["rollout-0"]
        os.kill(engine_of(daemon), signal.SIGKILL)
        daemon.wait_logged("engine vllm: its process was killed by signal 9; the log may say why")
        another_worker(daemon, worker)
        metrics = daemon.metrics()
        steps = (only_run(daemon.state_dir) / "metrics.jsonl").read_text().splitlines()

    gaps = [json.loads(step)["behaviour_gap_nats"] for step in steps]
    assert len(gaps) >= 5 and all(0.001 < gap < 0.5 for gap in gaps), gaps
    assert total(metrics, "rlhfd_engine_probes_total", verdict="ok") >= 2, "each engine's at least once"
    assert total(metrics, "rlhfd_engine_probes_total") == total(metrics, "rlhfd_engine_probes_total", verdict="ok")
    assert total(metrics, "rlhfd_process_starts_total", role="rollout") == 2
    assert total(metrics, "rlhfd_tickets_total", result="failed") == 0, "no ticket is at fault"
    assert balanced(metrics)
