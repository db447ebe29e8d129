"""Mixtures of experts in vLLM: each update is loaded whole, and laid out for the kernels."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import WeightsMismatchError
from pipeline.models.weights.store import WeightsPublisher, flatten
from pipeline.rollout.generation.vllm.checkpoint_form import CheckpointForm
from pipeline.rollout.generation.vllm.engine import VllmEngine
from tests.rollout.generation.vllm.models import MIXTURES, log_probs_of, small_llama, small_mixture
from tests.rollout.generation.vllm.test_engine import PROMPT, request, run, settings
from tests.support.vllm_engines import forked_engine

MOST_NATS = {"float32": 1e-4, "bfloat16": 0.1}


@pytest.mark.parametrize("kind", MIXTURES)
def test_published_experts_get_the_names_and_values_of_their_checkpoint(kind, tmp_path):
    model = small_mixture(kind, 0)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    published = model.state_dict()

    made = dict(CheckpointForm(str(tmp_path))(published))

    assert made.keys() == saved.keys() != published.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in made.items())


def test_the_tensors_of_a_model_without_experts_stay_as_they_are(tmp_path):
    model = small_llama(0)
    model.save_pretrained(tmp_path)
    published = model.state_dict()

    assert list(CheckpointForm(str(tmp_path))(published)) == list(published.items())


def gap(model, engine):
    """Mean difference of the engine's log-probs and a model's, in nats a token."""
    in_float32 = copy.deepcopy(model).float()
    gaps = [
        (one.log_probs - log_probs_of(in_float32, PROMPT, one.token_ids)).abs()
        for one in run(engine, request(eos_token_ids=()))[0]
    ]
    return float(torch.cat(gaps).mean())


@pytest.mark.vllm
@pytest.mark.integration
@pytest.mark.parametrize(("kind", "dtype"), [("mixtral", "float32"), ("qwen3_moe", "bfloat16")])
def test_a_mixture_follows_each_version_and_one_without_an_experts_part_is_refused(kind, dtype, tmp_path, forkserver):
    first, second = (small_mixture(kind, seed).to(getattr(torch, dtype)) for seed in (0, 1))
    first.save_pretrained(tmp_path / "model")
    path, tensors = tmp_path / "weights", [flatten(actor=model.state_dict()) for model in (first, second)]
    with (
        contextlib.closing(forked_engine(settings(tmp_path / "model", dtype=dtype), forkserver)) as engine,
        contextlib.closing(WeightsPublisher(path, tensors[0], slots=2)) as publisher,
    ):
        for version, model in ((1, second), (2, first), (3, second)):
            publisher.publish(version, tensors[version % 2])
            assert engine.fetch_weights(path) == (version, 0)
            assert gap(model, engine) < MOST_NATS[dtype], "0.5 and more with the old experts, or in an old layout"
        partial = {name: tensor for name, tensor in first.state_dict().items() if "1.mlp.experts.down" not in name}
        with pytest.raises(WeightsMismatchError, match=r"8,192 of 24,576 values of model.layers.1\S+ were not loaded"):
            engine.update_weights(partial, 4)


@pytest.mark.vllm
@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_a_card_a_mixture_follows_each_version(tmp_path, record_property):
    first, second = (small_mixture("qwen3_moe", seed).to(torch.bfloat16) for seed in (0, 1))
    first.save_pretrained(tmp_path)
    on_card = settings(tmp_path, dtype="bfloat16", on_cpu=False, cache_bytes=64 << 20)
    with contextlib.closing(VllmEngine(on_card)) as engine:
        for version, model in ((1, second), (2, first)):
            engine.update_weights(model.state_dict(), version)
            record_property("shown", f"mixture on a card: gap {(found := gap(model, engine)):.4f}")
            assert found < MOST_NATS["bfloat16"]
