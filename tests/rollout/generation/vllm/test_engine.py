"""The vLLM engine against the real vLLM, in its own process: the interface of an engine, weights, and deaths."""

import contextlib
import copy
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.errors import ConfigError, FieldError, RlhfdError, WeightsError, WeightsMismatchError
from pipeline.models.weights.store import WeightsPublisher, WeightsReader, flatten
from pipeline.progress import Telemetry
from pipeline.rollout.generation.engine_probe import Judging, ModelProbe
from pipeline.rollout.generation.interface import Request, Sampling, Span
from pipeline.rollout.generation.vllm import new_engine, wire
from pipeline.rollout.generation.vllm.engine import VllmEngine
from pipeline.rollout.generation.weights import ModelWeights
from pipeline.trainer.checkpoints import save_checkpoint
from tests.rollout.generation.vllm.models import EOS, begin, finish, log_probs_of, small_llama
from tests.support.daemon import is_alive, wait_until
from tests.support.proving import prove
from tests.support.told import Told
from tests.support.vllm_engines import forked_engine
from tests.trainer.test_checkpoints import Tokenizer, note, state

pytestmark = [pytest.mark.vllm, pytest.mark.integration]

PROMPT = torch.tensor([5, 6, 7])
MAX_LENGTH, MAX_ROWS = 400, 8


@pytest.fixture(scope="module")
def models():
    return SimpleNamespace(first=small_llama(0), second=small_llama(1))


@pytest.fixture(scope="module")
def directory(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    models.first.save_pretrained(folder)
    return folder


def settings(directory, **changes):
    values = {
        "directory": str(directory), "dtype": "float32", "on_cpu": True, "max_length": MAX_LENGTH,
        "max_rows": MAX_ROWS, "cache_bytes": 32 << 20, "log_level": "info", "log_json": False, "title": "test vllm",
    }  # fmt: skip
    return wire.Settings(**(values | changes))


@pytest.fixture(scope="module")
def shared(directory, forkserver):
    engine = forked_engine(settings(directory), forkserver)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared, models):
    """The engine with the first model's weights; tests leave nothing in hand."""
    shared.update_weights(models.first.state_dict(), 0)
    yield shared
    shared.cancel(range(100))


def request(key=0, prompt=PROMPT, *, group_size=4, room=20, first_row=0, **sampling):
    values = {"max_length": 0, "pad_token_id": 0, "eos_token_ids": (EOS,), "seed": 5, **sampling}
    return Request(key, prompt, group_size, room, Sampling(**values), first_row)


def run(engine, *requests):
    for one in requests:
        engine.submit(one)
    return finish(engine, len(requests))


def ids(responses):
    return [tuple(response.token_ids.tolist()) for response in responses]


def test_a_checkpoint_is_loaded_as_the_model_that_it_holds(models, tmp_path, forkserver):
    folder = save_checkpoint(tmp_path, note(7), actor=models.second, tokenizer=Tokenizer(), state=state())

    with contextlib.closing(forked_engine(settings(folder), forkserver)) as engine:
        (response,) = run(engine, request(group_size=1))[0]

    expected = log_probs_of(models.second, PROMPT, response.token_ids)
    assert torch.allclose(response.log_probs, expected, rtol=0, atol=1e-4)


# The interface.


def test_greedy_takes_the_most_probable_token_each_time(engine, models):
    (response,) = run(engine, request(group_size=1, do_sample=False))[0]
    (hot,) = run(engine, request(group_size=1, do_sample=False, temperature=0.5))[0]

    with torch.no_grad():
        logits = models.first(input_ids=torch.cat([PROMPT, response.token_ids])[None]).logits[0]
    assert torch.equal(logits[len(PROMPT) - 1 : -1].argmax(-1), response.token_ids)
    torch.testing.assert_close(
        response.log_probs, log_probs_of(models.first, PROMPT, response.token_ids), rtol=0, atol=1e-4
    )
    assert torch.equal(hot.token_ids, response.token_ids)
    assert hot.log_probs is None, "vLLM's are at temperature 1"


@pytest.mark.parametrize(("filters", "most"), [({"top_k": 3}, 3), ({"top_p": 0.4}, 10), ({"min_p": 0.5}, 0)])
def test_filters_bound_the_tokens_and_there_are_no_log_probs_of_before_them(engine, models, filters, most):
    responses = run(engine, request(group_size=8, **filters))[0]

    for response in responses:
        assert response.log_probs is None
        with torch.no_grad():
            logits = models.first(input_ids=torch.cat([PROMPT, response.token_ids])[None]).logits[
                0, len(PROMPT) - 1 : -1
            ]
        probs, order = logits.softmax(-1).sort(descending=True)
        rank = (order == response.token_ids[:, None]).int().argmax(-1)
        if "top_k" in filters:
            assert int(rank.max()) < most
        elif "min_p" in filters:
            assert float((probs.gather(1, rank[:, None])[:, 0] / probs[:, 0]).min()) > 0.499
        else:
            # The mass before a token that is sampled from is below top_p.
            before = probs.cumsum(-1).gather(1, rank[:, None])[:, 0] - probs.gather(1, rank[:, None])[:, 0]
            assert float(before.max()) < 0.4


def test_without_requests_a_step_returns_at_once(engine):
    started_s = time.monotonic()

    assert [engine.step() for _ in range(400)] == [[]] * 400
    assert time.monotonic() - started_s < 10, "a step with requests waits for .05 s, which would be 20 s"


def test_the_load_counts_what_runs_what_waits_and_the_free_cache(engine):
    assert (engine.load.running, engine.load.waiting, engine.load.free_cache) == (0, 0, 1.0)

    first, *others = (request(key, room=300, eos_token_ids=()) for key in range(4))
    engine.submit(first)
    assert engine.load.running + engine.load.waiting == 4, "those on their way wait"
    begin(engine, *others, running=MAX_ROWS)

    load = engine.load
    assert (load.running, load.waiting, load.room_rows) == (MAX_ROWS, 16 - MAX_ROWS, MAX_ROWS)
    assert 0 < load.free_cache < 1
    assert len(finish(engine, 4)) == 4


def test_the_heartbeat_is_called_for_steps_with_progress_and_not_while_paused(directory, engine):
    told, before = Told(), engine._telemetry
    engine._telemetry = told

    engine.pause()
    engine.submit(request(room=300, eos_token_ids=()))
    for _ in range(10):
        assert engine.step() == []
    assert told.beats == []
    engine.resume()
    finish(engine, 1)
    assert len(told.beats) >= 2
    engine._telemetry = before


@pytest.mark.parametrize("stop_sequences", [(), ((44, 45, 46),)])
def test_tokens_are_told_as_they_are_sampled_and_a_cancelled_request_takes_none_back(engine, stop_sequences):
    told, before = [], engine._telemetry
    engine._telemetry = SimpleNamespace(progress=lambda *, tokens: told.append(tokens))
    (first,) = run(engine, request(room=8)).values()
    start = told[-1] - sum(len(response.token_ids) for response in first)

    (ended,) = run(engine, request(room=300, eos_token_ids=(), stop_sequences=stop_sequences)).values()
    first_tokens = start + sum(len(response.token_ids) for response in (*first, *ended))
    assert told == sorted(told) and told[-1] == first_tokens
    assert len(set(told)) > 3

    engine.submit(request(0, room=380, eos_token_ids=()))
    wait_until(lambda: (engine.step(), told[-1] > first_tokens)[1], 60, "some tokens of a long request")
    engine.cancel([0])
    wait_until(lambda: (engine.step(), engine._receive(0.05), engine.load.running == 0)[2], 30, "nothing runs")
    cancelled_at = told[-1]
    last = run(engine, request(1, room=5, eos_token_ids=()))[1]

    assert told == sorted(told) and cancelled_at > first_tokens
    assert told[-1] == cancelled_at + sum(len(response.token_ids) for response in last)
    engine._telemetry = before


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"room": MAX_LENGTH - 2}, "a prompt of 3 tokens and a response of 398 do not fit the engine's rows of 400"),
        ({"prompt": torch.tensor([5, 48])}, "a prompt has the token 48; the model has 48"),
        ({"temperature": 0.001}, "temperature is 0.001; vLLM samples from 0.01 on"),
    ],
)
def test_a_request_that_the_engine_cannot_run_is_refused(engine, wrong, problem):
    with pytest.raises(FieldError, match=problem):
        engine.submit(request(**wrong))

    assert engine.load.waiting == 0


# Weights.


def test_new_weights_are_in_force_from_the_next_request_on_a_cached_prompt_too(engine, models):
    """The prompt is longer than a block of the cache: with the former keys and values its log-probs would be wrong."""
    prompt = torch.arange(300) % 40 + 2
    run(engine, request(prompt=prompt, room=8, eos_token_ids=()))

    engine.update_weights(models.second.state_dict(), 7)
    responses = run(engine, request(prompt=prompt, room=8, eos_token_ids=()))[0]

    for response in responses:
        assert response.spans == (Span(7, 0, 8),)
        expected = log_probs_of(models.second, prompt, response.token_ids)
        torch.testing.assert_close(response.log_probs, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("stop_sequences", [(), ((47, 47, 47, 47, 47),)], ids=["final", "token by token"])
def test_an_update_in_flight_keeps_the_tokens_and_each_span_knows_its_version(engine, models, stop_sequences):
    long = request(room=380, eos_token_ids=(), stop_sequences=stop_sequences)
    undisturbed = run(engine, long)[0]
    begin(engine, long)

    engine.update_weights(models.second.state_dict(), 1)
    responses = finish(engine, 1)[0]

    for response, alone in zip(responses, undisturbed, strict=True):
        before, after = response.spans
        assert (before.version, before.start, after.version, after.end) == (0, 0, 1, 380)
        assert 0 < before.end == after.start < 380
        assert torch.equal(response.token_ids[: before.end], alone.token_ids[: before.end]), "none was sampled again"
        of_first = log_probs_of(models.first, PROMPT, response.token_ids)[: before.end]
        of_second = log_probs_of(models.second, PROMPT, response.token_ids)[after.start :]
        torch.testing.assert_close(response.log_probs, torch.cat([of_first, of_second]), rtol=0, atol=1e-4)


def test_published_weights_are_taken_from_shared_memory_by_their_age(engine, models, tmp_path):
    path = tmp_path / "weights"
    first, second = (flatten(actor=model.state_dict()) for model in (models.first, models.second))
    publisher = WeightsPublisher(path, first, slots=2)
    publisher.publish(3, first)
    publisher.publish(4, second)

    assert engine.fetch_weights(path) == (4, 0)
    of_second = run(engine, request())[0]
    assert engine.fetch_weights(path, (3, 0)) == (3, 0)
    of_first = run(engine, request())[0]

    for model, version, responses in ((models.second, 4, of_second), (models.first, 3, of_first)):
        for response in responses:
            assert response.spans[0].version == version
            expected = log_probs_of(model, PROMPT, response.token_ids)
            torch.testing.assert_close(response.log_probs, expected, rtol=0, atol=1e-4)
    publisher.publish(5, second)
    with pytest.raises(WeightsError, match="version 3 is no longer held"):
        engine.fetch_weights(path, (3, 0))
    assert ids(run(engine, request())[0]) == ids(of_first), "the version before is in force"
    publisher.close()


@pytest.mark.variant
def test_a_model_of_16_bits_follows_each_version(models, tmp_path, forkserver):
    """On a CPU vLLM computes with packed copies of its matrices, also of a head that is the embedding."""
    first, second = (copy.deepcopy(model).to(torch.bfloat16) for model in (models.first, models.second))
    first.save_pretrained(tmp_path / "model")
    path, tensors = tmp_path / "weights", [flatten(actor=model.state_dict()) for model in (first, second)]
    assert not any("lm_head" in name for name in tensors[0]), "the head is the embedding"
    with (
        contextlib.closing(forked_engine(settings(tmp_path / "model", dtype="bfloat16"), forkserver)) as engine,
        contextlib.closing(WeightsPublisher(path, tensors[0], slots=2)) as publisher,
    ):
        for version, model in ((1, second), (2, first)):
            publisher.publish(version, tensors[version % 2])
            assert engine.fetch_weights(path) == (version, 0)
            for response in run(engine, request())[0]:
                expected = log_probs_of(copy.deepcopy(model).float(), PROMPT, response.token_ids)
                assert float((response.log_probs - expected).abs().mean()) < 0.1, "1 and more with an old head"
        partial = {name: tensor for name, tensor in first.state_dict().items() if "1.mlp.down_proj" not in name}
        with pytest.raises(WeightsMismatchError, match=r"6,144 of 6,144 values of model.layers.1.mlp.down_proj"):
            engine.update_weights(partial, 3)


def test_damaged_weights_are_never_used(directory, models, tmp_path, forkserver):
    """Bytes of the slot are changed after the publish: the fingerprint does not match."""
    tensors = flatten(actor=models.second.state_dict())
    publisher = WeightsPublisher(tmp_path / "weights", tensors)
    publisher.publish(1, tensors)
    next(iter(publisher.slot(0).views.values()))[0, 0] += 1
    engine = forked_engine(settings(directory), forkserver)
    try:
        with pytest.raises(RlhfdError, match="no whole version of the weights in 16 attempts"):
            engine.fetch_weights(tmp_path / "weights")
        # Its parameters are of no version: it ends.
        with pytest.raises(RlhfdError, match="ended with exit code 1"):
            run(engine, request())
    finally:
        engine.close()
        publisher.close()


# The probe, and the numbers for operators.


class Weights:
    """A worker's weights over the engine: the actor's tensors, and versions in shared memory."""

    def __init__(self, folder, engine, first, *, action="resync", actor=None, judging=None):
        self.actor = small_llama(0) if actor is None else actor
        self.told = Told()
        tensors = flatten(actor=first.state_dict())
        self.publisher = WeightsPublisher(folder / "weights", tensors, slots=2)
        self.path, self.reader = folder / "weights", None
        judging = dataclasses.replace(judging or Judging(1e-3, action), telemetry=self.told)
        probe = ModelProbe(self.actor, [5, 6, 7], torch.device("cpu"), row_tokens=MAX_LENGTH, judging=judging)
        self.weights = ModelWeights(flatten(actor=self.actor.state_dict()), engine, probe=probe)

    def take(self, version, model):
        """Publish a version, fetch it, and ask the engine about it."""
        self.publisher.publish(version, flatten(actor=model.state_dict()))
        self.reader = self.reader or WeightsReader(self.path)
        prove(self.weights, self.weights.fetch(self.reader).version)


def stepped_from(model, by):
    """The model after a small step."""
    later, noise = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in later.parameters():
            parameter += by * torch.randn(parameter.shape, generator=noise)
    return later


@pytest.mark.parametrize("by", [0.05, 1e-5], ids=["beyond the limit", "by far less than the limit"])
def test_an_engine_that_ignores_an_update_is_found_at_that_version(engine, models, tmp_path, by):
    held = Weights(tmp_path, engine, models.first)
    held.take(1, models.first)
    held.take(2, stepped_from(models.first, 1e-4))
    assert [verdict for verdict, _ in held.told.verdicts] == ["ok", "ok"]
    assert max(max(gaps) for _, gaps in held.told.verdicts) < 1e-3

    fetched, updated = engine.fetch_weights, engine.update_weights
    engine.fetch_weights = lambda path, age: age
    engine.update_weights = lambda actor, version: None
    try:
        with pytest.raises(WeightsMismatchError, match=r"the engine (computes with old weights|does not compute with)"):
            held.take(3, stepped_from(models.first, by))
    finally:
        engine.fetch_weights, engine.update_weights = fetched, updated

    verdicts = [verdict for verdict, _ in held.told.verdicts]
    assert verdicts[:2] == ["ok", "ok"] and "ok" not in verdicts[2:] and len(verdicts) == 4
    held.weights.hand_over_again(3)
    prove(held.weights, 3)
    assert held.told.verdicts[-1][0] == "ok", "with its updates it passes again"


def test_tokens_and_prefix_hits_are_counted_and_a_killed_engine_raises_one_clear_error(directory, models, forkserver):
    engine = forked_engine(settings(directory, cache_bytes=2 << 20), forkserver)
    try:
        engine.update_weights(models.first.state_dict(), 0)
        # Different prompts: the rows of a group share the prompt's part of the cache.
        prompts = [torch.arange(260) * (2 * row + 1) % 40 + 2 for row in range(8)]
        ended = run(engine, *(
            request(row, prompt, group_size=1, room=120, eos_token_ids=()) for row, prompt in enumerate(prompts)
        ))  # fmt: skip
        whole = [response for key in sorted(ended) for response in ended[key]]
        first = engine.load.counts
        run(engine, request(8, prompts[7], group_size=2, room=4, eos_token_ids=()))
        second = engine.load.counts

        assert [len(response.token_ids) for response in whole] == [120] * 8
        assert (first.tokens_in, first.tokens_out, first.prefix_tokens) == (8 * 260, 8 * 120, 8 * 260)
        assert (second.tokens_in - first.tokens_in, second.tokens_out - first.tokens_out) == (2 * 260, 2 * 4)
        assert second.prefix_hits - first.prefix_hits >= 128, "whole blocks of the prompt"
        assert second.prefix_hits <= second.prefix_tokens

        engine.submit(request(room=300))
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(RlhfdError, match="engine vllm: its process was killed by signal 9; the log may say why"):
            finish(engine, 1)
        with pytest.raises(RlhfdError, match=r"was killed by signal 9"):
            engine.cancel([0])
    finally:
        engine.close()


def test_an_update_in_flight_is_no_preemption(engine, models):
    before = engine.load.counts.preemptions
    begin(engine, request(room=380, eos_token_ids=()))

    engine.update_weights(models.second.state_dict(), 1)
    finish(engine, 1)

    assert engine.load.counts.preemptions == before


@pytest.mark.timeout(300)
def test_after_sleep_and_wake_an_engine_samples_with_the_weights_that_come_then(engine, models):
    """On a CPU vLLM frees nothing: this holds the orders, and that weights find their places after them."""
    before = ids(run(engine, request())[0])
    engine.update_weights(models.second.state_dict(), 1)
    other = ids(run(engine, request())[0])
    assert other != before

    for version, model, expected in ((2, models.first, before), (3, models.second, other)):
        engine.sleep()
        engine.wake()
        engine.pause()
        engine.update_weights(model.state_dict(), version)
        engine.resume()
        responses = run(engine, request())[0]
        assert ids(responses) == expected
        assert {span.version for response in responses for span in response.spans} == {version}


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_an_engine_that_sleeps_has_its_memory_of_the_card_free(directory, models):
    def used_bytes():
        free, total = torch.cuda.mem_get_info()
        return total - free

    cache_bytes = 1 << 30
    before = used_bytes()
    engine = VllmEngine(settings(directory, on_cpu=False, cache_bytes=cache_bytes, sleeps=True))
    try:
        engine.update_weights(models.first.state_dict(), 0)
        expected, awake = ids(run(engine, request())[0]), used_bytes()
        assert awake - before > cache_bytes
        for version in (1, 2):
            engine.sleep()
            assert awake - used_bytes() > 0.9 * cache_bytes
            engine.wake()
            engine.pause()
            engine.update_weights(models.first.state_dict(), version)
            engine.resume()
            assert ids(run(engine, request())[0]) == expected
    finally:
        engine.close()


# Deaths, and what vLLM cannot load.


WORKER = """
import sys, time, torch
from pipeline.rollout.generation.interface import Request, Sampling
from pipeline.rollout.generation.vllm import wire
from pipeline.rollout.generation.vllm.engine import EngineProcess, VllmEngine
from pathlib import Path
import msgspec
from tests.support.daemon import wait_until
settings = msgspec.json.decode(sys.argv[1], type=wire.Settings)
begun = EngineProcess(settings)
maps = Path(f"/proc/{begun.child.pid}/maps")
wait_until(lambda: "/vllm/_C" in maps.read_text(), 120, "vLLM is imported before the settings are there")
engine = VllmEngine(settings, process=begun)
engine.submit(Request(0, torch.tensor([5, 6, 7]), 4, 380, Sampling(max_length=0, pad_token_id=0)))
while not engine.load.running:
    engine.step()
print(engine.pid, flush=True)
time.sleep(600)
"""


def test_the_engine_of_a_killed_worker_is_dead_at_once_and_its_start_is_in_the_log(directory, capfd):
    import msgspec

    arguments = [sys.executable, "-c", WORKER, msgspec.json.encode(settings(directory)).decode()]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4]) as worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        assert is_alive(pid)

        worker.kill()
        worker.wait()

    wait_until(lambda: not is_alive(pid), 60, "the engine is dead")
    phases = re.search(r"vLLM has started: imports_s=(\S+) engine_s=(\S+)", capfd.readouterr().err)
    assert phases is not None and all(0.1 <= float(seconds) < 600 for seconds in phases.groups())


def configuration(directory, **rollout):
    return Config.model_validate({"model": {"actor": str(directory)}, "rollout": {"engine": "vllm", **rollout}})


@pytest.mark.variant
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_length": 400, "cache_bytes": 4096}, "rollout.cache_bytes: too little for rows of 400 tokens: "),
        ({"max_length": 100_000}, "rollout.max_length: "),
    ],
)
def test_a_configuration_that_vllm_refuses_is_named_in_one_line(directory, changes, problem):
    with pytest.raises(ConfigError) as raised:
        new_engine(
            None, directory=directory, device=torch.device("cpu"), telemetry=Telemetry.none(),
            config=configuration(directory, **changes),
        )  # fmt: skip

    assert str(raised.value).startswith(problem)
    assert "\n" not in str(raised.value)


@pytest.mark.variant
def test_a_model_that_vllm_does_not_know_is_named_in_one_line_and_vllms_own_log_is_in_ours(directory, tmp_path, capfd):
    text = (directory / "config.json").read_text().replace("LlamaForCausalLM", "NoSuchForCausalLM")
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(ConfigError) as raised:
        VllmEngine(settings(tmp_path, log_level="debug"))

    assert str(raised.value).startswith(f'rollout.engine: "vllm" cannot load {tmp_path}: ')
    assert "NoSuchForCausalLM" in str(raised.value)
    assert "\n" not in str(raised.value)
    logged = capfd.readouterr().err
    assert "the engine did not start" in logged
    assert re.search(r"^\S+ DEBUG .*vllm\.", logged, re.MULTILINE) or " vllm." in logged, "vLLM's own records"


def test_weights_that_leave_a_part_of_a_fused_parameter_out_are_refused(shared, models):
    """The last test of this engine."""
    partial = {
        name: tensor for name, tensor in models.second.state_dict().items() if "layers.1.self_attn.k" not in name
    }
    with pytest.raises(WeightsMismatchError, match=r"4,096 of 12,288 values of model.layers.1.self_attn.qkv_proj"):
        shared.update_weights(partial, 1)
    with pytest.raises(RlhfdError, match="ended with exit code 1"):
        run(shared, request())
