"""A worker whose engine alone holds the actor, with the real vLLM: its weights, and the proof that they are in use."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.errors import WeightsError, WeightsMismatchError
from pipeline.models.loading import load_actor, load_tokenizer
from pipeline.models.weights.probe import answer
from pipeline.models.weights.store import WeightsPublisher, WeightsReader, flatten
from pipeline.prompts.rendering import first_tokens
from pipeline.rollout.generation.interface import Request, Sampling
from pipeline.rollout.generation.vllm import engine as vllm_engine
from pipeline.rollout.generation.weights import EngineWeights
from pipeline.rollout.loader import load_roller
from pipeline.rollout.prompt_batch import sample_all
from pipeline.rollout.remote import NodeTelemetry
from tests.rollout.generation.vllm.models import log_probs_of
from tests.support.proving import prove
from tests.support.told import events_of

pytestmark = [pytest.mark.vllm, pytest.mark.integration]

CPU = torch.device("cpu")


def stepped_from(state, by):
    noise = torch.Generator().manual_seed(0)
    return {name: tensor + by * torch.randn(tensor.shape, generator=noise) for name, tensor in state.items()}


@pytest.fixture(scope="module")
def held(task, forkserver):
    """The roller of a worker that computes no log-probs: PPO, with a critic from the actor."""
    config = Config.model_validate(
        {
            "model": {"actor": str(task / "model"), "reference_device": "trainer"},
            "prompts": {"path": str(task / "prompts.jsonl")},
            "rollout": {
                "engine": "vllm", "algorithm": "ppo", "log_probs": "trainer", "max_length": 24,
                "cache_bytes": 64 << 20, "kl_coef": 0.0,
            },
        }
    )  # fmt: skip
    telemetry, tokenizer = NodeTelemetry(), load_tokenizer(config.model.actor)
    with pytest.MonkeyPatch.context() as patched:
        # As in an instance, whose supervisor has started one.
        patched.setattr(vllm_engine, "engines_socket", lambda _: forkserver)
        roller = load_roller(config, tokenizer, telemetry, texts=True, device=CPU)
    model = load_actor(task / "model", dtype="float32", device=CPU)
    yield SimpleNamespace(
        roller=roller, weights=roller.weights, model=model, telemetry=telemetry,
        first={name: tensor.clone() for name, tensor in model.state_dict().items()},
        critic={name: tensor.clone() for name, tensor in roller.maker.critic.state_dict().items()},
        tokens=first_tokens(config.prompts, config.daemon.seed, tokenizer),
    )  # fmt: skip
    roller.close()


@pytest.fixture
def versions(held, tmp_path):
    """Publishes versions in two slots, the trainer's answer with each, and hands them to the worker."""
    held.model.load_state_dict(held.first)
    held.telemetry.take()
    tensors = flatten(actor=held.model.state_dict(), critic=held.critic)
    publisher, readers = WeightsPublisher(tmp_path / "weights", tensors, slots=2), []

    def publish(version, by=0.0, *, probe=True):
        held.model.load_state_dict(stepped_from(held.first, by))
        published = flatten(actor=held.model.state_dict(), critic=stepped_from(held.critic, by))
        publisher.publish(version, published, probe=answer(held.model, held.tokens, CPU) if probe else None)

    def take(*, was_sent=False):
        readers[:] = readers or [WeightsReader(tmp_path / "weights")]
        fetched = held.weights.fetch(readers[0].copy() if was_sent else readers[0])
        prove(held.weights, fetched.version)
        return fetched.version

    yield SimpleNamespace(publish=publish, take=take)
    held.weights.engine.update_weights(held.first, 0)
    held.weights._source = held.weights.probe._before = held.weights.probe.published = None
    publisher.close()
    for reader in readers:
        reader.close()


def judged(held):
    return [verdict for verdict, _ in events_of(held.telemetry.take(), "engine_judged")]


@pytest.mark.parametrize("was_sent", [False, True], ids=["shared memory", "a copy from another machine"])
def test_the_worker_has_no_memory_for_the_actor_and_rolls_out_with_the_versions(held, versions, was_sent):
    assert isinstance(held.weights, EngineWeights)
    assert {parameter.device.type for parameter in held.roller.maker.actor.parameters()} == {"meta"}
    assert held.weights.beside and all(name.startswith("critic.") for name in held.weights.beside)

    for version, by in ((1, 0.0), (2, 0.01), (3, 1e-5)):
        versions.publish(version, by)
        assert versions.take(was_sent=was_sent) == version
        experience = held.roller.roll(4, 2).rows.padded()
        assert experience.action_log_probs is None
        critic = held.roller.maker.critic.state_dict()
        for name, tensor in stepped_from(held.critic, by).items():
            assert torch.equal(critic[name], tensor), name
        for row in range(2):
            ids, mask = experience.sequences[row], experience.attention_mask[row].bool()
            actions = int(experience.action_mask[row].sum())
            row_ids = ids[mask]
            expected = log_probs_of(held.model, row_ids[:-actions], row_ids[-actions:])
            found = experience.behaviour_log_probs[row][experience.action_mask[row]]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)

    assert judged(held) == ["ok"] * 3


def test_log_probs_of_a_prompt_are_the_models_own_also_of_one_in_the_prefix_cache(held, versions):
    prompt = torch.arange(20) % 9 + 2
    request = Request(0, prompt, 2, 2, Sampling(0, pad_token_id=0, do_sample=False), prompt_log_probs=True)
    for _ in range(2):
        responses = sample_all(held.weights.engine, [request])[0].responses
        expected = log_probs_of(held.model, prompt[:1], prompt[1:])
        torch.testing.assert_close(responses[0].prompt_log_probs, expected, rtol=0, atol=1e-4)
        assert responses[1].prompt_log_probs is None
    plain = sample_all(held.weights.engine, [dataclasses.replace(request, prompt_log_probs=False)])[0].responses
    assert plain[0].prompt_log_probs is None


@pytest.mark.parametrize("by", [0.02, 1e-3])
def test_an_engine_that_ignores_an_update_is_found_at_that_version(held, versions, monkeypatch, by):
    versions.publish(1)
    versions.take()
    monkeypatch.setattr(held.weights.engine, "fetch_weights", lambda path, age: age)

    versions.publish(2, by)
    with pytest.raises(WeightsMismatchError, match=r"the engine (computes with old weights|does not compute with)"):
        versions.take()

    verdicts = judged(held)
    assert verdicts[0] == "ok" and "ok" not in verdicts[1:] and len(verdicts) == 3, "asked again after a resync"
    monkeypatch.undo()
    held.weights.hand_over_again(2)
    prove(held.weights, 2)
    assert judged(held) == ["ok"]


def test_a_version_that_is_overwritten_before_the_engine_has_it_is_left_for_the_newest(held, versions, monkeypatch):
    versions.publish(1)
    engine, asked = held.weights.engine, []
    fetch = engine.fetch_weights

    def late(path, age):
        asked.append(age[0])
        if len(asked) == 1:
            versions.publish(2, 0.01)
            versions.publish(3, 0.02)
        return fetch(path, age)

    monkeypatch.setattr(engine, "fetch_weights", late)
    assert versions.take() == 3
    assert asked == [1, 3]
    assert judged(held) == ["ok"]

    # All are overwritten before the worker must hand its version over again.
    versions.publish(4, 0.01)
    versions.publish(5, 0.01)
    with pytest.raises(WeightsError, match="the engine must have version 3 again, and shared memory holds it no more"):
        held.weights.hand_over_again(3)
    engine.resume()


def test_an_engine_that_has_taken_another_version_is_given_this_one(held, versions, monkeypatch):
    """The engine's version was overwritten during the copy: it says which one it has."""
    versions.publish(1)
    assert versions.take() == 1
    versions.publish(2, 0.03)
    engine, answers = held.weights.engine, [(1, 0)]
    fetch = engine.fetch_weights
    monkeypatch.setattr(engine, "fetch_weights", lambda path, age: fetch(path, answers.pop() if answers else age))

    assert versions.take() == 2

    assert not answers and judged(held) == ["ok"] * 2


def test_a_version_without_the_trainers_answer_is_taken_and_the_log_says_that_it_is_not_compared(
    held, versions, caplog
):
    versions.publish(1, 0.01, probe=False)

    assert versions.take() == 1

    assert "the engine is not compared with the trainer: version=1 reason=the trainer has published no" in caplog.text
    assert judged(held) == []
