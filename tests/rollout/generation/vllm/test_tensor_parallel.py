"""vLLM with its model over two ranks: what it samples, the weights of each rank, and deaths.

On a CPU a rank is a process that exchanges by gloo; on cards it has a card of its own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from pipeline.errors import EngineKilledError, WeightsError, WeightsMismatchError
from pipeline.models.weights.store import WeightsPublisher, flatten
from pipeline.rollout.generation.interface import Span
from pipeline.rollout.generation.vllm.engine import VllmEngine
from tests.rollout.generation.vllm.models import begin, finish, log_probs_of, small_llama
from tests.rollout.generation.vllm.test_engine import PROMPT, Weights, request, run, settings, stepped_from
from tests.support.daemon import descendants, is_alive, wait_until
from tests.support.proving import prove

pytestmark = [pytest.mark.vllm, pytest.mark.integration]

RANKS = 2
# Of 48 tokens each rank has 32 places of the vocabulary; of the heads of keys and values one.
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}


@pytest.fixture(scope="module")
def models():
    return SimpleNamespace(first=small_llama(0, **SIZES), second=small_llama(1, **SIZES))


@pytest.fixture(scope="module")
def directory(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    models.first.save_pretrained(folder)
    return folder


def of_ranks(directory, scratch, **changes):
    return settings(directory, tensor_parallel=RANKS, scratch=str(scratch), title="test tp", **changes)


@pytest.fixture(scope="module")
def engine(directory, tmp_path_factory):
    engine = VllmEngine(of_ranks(directory, tmp_path_factory.mktemp("scratch") / "files"))
    yield engine
    engine.close()


def ranks_of(pid):
    """Pids of the ranks; the tracker of shared memory is a child, too."""
    found = [child for child in descendants(pid) if b"tracker" not in Path(f"/proc/{child}/cmdline").read_bytes()]
    return [child for child in found if "Worker_TP" in Path(f"/proc/{child}/cmdline").read_text()]


def shared_files(pids):
    """Files in /dev/shm that processes map, by name; one without a name is followed by (deleted)."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return set(re.findall(r" (/dev/shm/.*)$", maps, re.MULTILINE))


def assert_is(model, version, responses):
    for response in responses:
        assert response.spans == (Span(version, 0, len(response.token_ids)),)
        expected = log_probs_of(model, PROMPT, response.token_ids)
        torch.testing.assert_close(response.log_probs, expected, rtol=0, atol=1e-4)


def test_published_weights_reach_each_rank_and_the_log_probs_are_those_of_the_whole_model(engine, models, tmp_path):
    path = tmp_path / "weights"
    first, second = (flatten(actor=model.state_dict()) for model in (models.first, models.second))
    publisher = WeightsPublisher(path, first, slots=2)
    publisher.publish(3, first)
    publisher.publish(4, second)

    assert engine.fetch_weights(path) == (4, 0)
    assert_is(models.second, 4, run(engine, request())[0])
    for _ in range(2):
        assert engine.fetch_weights(path, (3, 0)) == (3, 0)
        assert_is(models.first, 3, run(engine, request())[0])
    publisher.publish(5, second)
    with pytest.raises(WeightsError, match="version 3 is no longer held"):
        engine.fetch_weights(path, (3, 0))
    assert_is(models.first, 3, run(engine, request())[0])
    publisher.close()


def test_weights_change_in_flight_between_two_steps_of_all_ranks(engine, models):
    engine.update_weights(models.first.state_dict(), 6)
    begin(engine, request(room=200, eos_token_ids=()))

    engine.update_weights(models.second.state_dict(), 7)
    responses = finish(engine, 1)[0]

    for response in responses:
        before, after = response.spans
        assert (before.version, before.start, after.version, after.end) == (6, 0, 7, 200)
        of_first = log_probs_of(models.first, PROMPT, response.token_ids)[: before.end]
        of_second = log_probs_of(models.second, PROMPT, response.token_ids)[after.start :]
        torch.testing.assert_close(response.log_probs, torch.cat([of_first, of_second]), rtol=0, atol=1e-4)


def test_ranks_that_ignore_an_update_are_found_at_that_version(engine, models, tmp_path, monkeypatch):
    held = Weights(tmp_path, engine, models.first, actor=small_llama(0, **SIZES))
    held.take(1, models.first)
    held.take(2, stepped_from(models.first, 1e-4))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "fetch_weights", lambda path, age: age)
        patch.setattr(engine, "update_weights", lambda actor, version: None)
        with pytest.raises(WeightsMismatchError, match="the engine computes with old weights"):
            held.take(3, stepped_from(models.first, 1e-5))

    held.weights.hand_over_again(3)
    prove(held.weights, 3)

    verdicts = [verdict for verdict, _ in held.told.verdicts]
    assert verdicts == ["ok", "ok", "stale", "stale", "ok"]


def test_a_killed_rank_ends_the_engine_by_the_same_signal_and_nothing_is_left(engine):
    """The last test of this engine."""
    ranks = ranks_of(engine.pid)
    family = [engine.pid, *descendants(engine.pid)]
    shared = shared_files([engine.pid, *ranks])
    assert len(ranks) == RANKS
    assert len(shared) >= 3 and all(name.endswith("(deleted)") for name in shared), "one to the ranks, one from each"

    begin(engine, request(room=380, eos_token_ids=()))
    os.kill(ranks[1], signal.SIGKILL)

    with pytest.raises(EngineKilledError, match="engine vllm: its process was killed by signal 9"):
        finish(engine, 1)
    wait_until(lambda: not any(map(is_alive, family)), 30, "no process is left")


@pytest.mark.variant
def test_weights_that_leave_a_shard_out_are_refused_and_the_ranks_end(directory, models, tmp_path):
    engine = VllmEngine(of_ranks(directory, tmp_path / "files"))
    family = [engine.pid, *descendants(engine.pid)]
    partial = {
        name: tensor for name, tensor in models.second.state_dict().items() if "layers.1.self_attn.k" not in name
    }
    try:
        # One head of 32 of keys, of two of queries and one of values.
        with pytest.raises(WeightsMismatchError, match=r"4,096 of 16,384 values of model.layers.1.self_attn.qkv_proj"):
            engine.update_weights(partial, 1)
        wait_until(lambda: not any(map(is_alive, family)), 30, "no process is left")
    finally:
        engine.close()
    assert not (tmp_path / "files").exists()


WORKER = """
import sys, time
import msgspec
from pipeline.rollout.generation.vllm import wire
from pipeline.rollout.generation.vllm.engine import EngineProcess, VllmEngine
process = EngineProcess(msgspec.json.decode(sys.argv[1], type=wire.Settings))
print(process.child.pid, flush=True)
engine = VllmEngine(process.settings, process=process)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("moment", [pytest.param("during its start", marks=pytest.mark.variant), "once it is ready"])
def test_with_a_killed_worker_engine_and_ranks_are_dead_and_their_memory_has_no_name(directory, tmp_path, moment):
    text = msgspec.json.encode(of_ranks(directory, tmp_path / "files")).decode()
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, text], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4],
        start_new_session=True,
    ) as worker:  # fmt: skip
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        if moment == "once it is ready":
            assert worker.stdout.readline() == "ready\n"
        else:
            wait_until(lambda: any("psm_" in name for name in shared_files([pid])), 120, "it has shared memory")
        family, named = [pid, *descendants(pid)], [name.split()[0] for name in shared_files([pid])]

        # As the guard of a worker's group does it.
        os.killpg(worker.pid, signal.SIGKILL)

    wait_until(lambda: not any(map(is_alive, family)), 60, "no process is left")
    assert named and not any(Path(name).exists() for name in named)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_two_cards_each_rank_has_its_shard_and_updates_reach_both(directory, models, tmp_path):
    if torch.cuda.device_count() < RANKS:
        pytest.skip("fewer than two CUDA devices")
    with_cards = of_ranks(directory, tmp_path / "files", on_cpu=False, cache_bytes=64 << 20)
    engine = VllmEngine(with_cards)
    family = [engine.pid, *descendants(engine.pid)]
    try:
        for version, model in ((1, models.second), (2, models.first)):
            engine.update_weights(model.state_dict(), version)
            for response in run(engine, request())[0]:
                expected = log_probs_of(model, PROMPT, response.token_ids)
                torch.testing.assert_close(response.log_probs, expected, rtol=0, atol=1e-2)
        ranks = ranks_of(engine.pid)
        assert len(ranks) == RANKS
        os.kill(ranks[1], signal.SIGKILL)
        with pytest.raises(EngineKilledError):
            run(engine, request(1))
    finally:
        engine.close()
    wait_until(lambda: not any(map(is_alive, family)), 60, "no process is left")
