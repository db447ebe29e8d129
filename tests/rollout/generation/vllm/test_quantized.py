"""vLLM with weights of 8 bits: what it samples from after each update, parts that are missing, updates it ignores.

On a CPU vLLM multiplies by AMX, with activations as they are, or by PyTorch, with activations of 8 bits, too.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.errors import RlhfdError, WeightsMismatchError
from pipeline.models.weights.store import WeightsPublisher, flatten
from pipeline.progress import Telemetry
from pipeline.rollout.generation.engine_probe import FP8_GAP_NATS
from pipeline.rollout.generation.vllm.engine import VllmEngine
from pipeline.rollout.loader import judging_of
from tests.rollout.generation.vllm.models import log_probs_of, small_llama
from tests.rollout.generation.vllm.test_engine import PROMPT, Weights, ids, request, run, settings, stepped_from
from tests.support.proving import prove

pytestmark = [pytest.mark.vllm, pytest.mark.integration]

# Tiles of vLLM's kernels.
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}
FUSED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
         ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))  # fmt: skip
MOST_E4M3 = 448.0


@pytest.fixture(scope="module")
def models():
    return SimpleNamespace(first=small_llama(0, **SIZES), second=small_llama(1, **SIZES))


@pytest.fixture(scope="module")
def directory(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    models.first.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(directory):
    engine = VllmEngine(settings(directory, quantization="fp8"))
    yield engine
    engine.close()


def rounded(model):
    """The model whose linear layers have weights of 8 bits, one scale for each matrix of vLLM's."""
    quantized = copy.deepcopy(model)
    for layer in quantized.model.layers:
        for names in FUSED:
            weights = [layer.get_submodule(name).weight.data for name in names]
            scale = max(float(weight.abs().max()) for weight in weights) / MOST_E4M3
            for weight in weights:
                weight.copy_((weight / scale).to(torch.float8_e4m3fn).float() * scale)
    return quantized


def gap(model, responses):
    """Mean difference of the engine's log-probs and a model's, in nats a token."""
    gaps = [(one.log_probs - log_probs_of(model, PROMPT, one.token_ids)).abs() for one in responses]
    return float(torch.cat(gaps).mean())


def test_each_update_is_quantized_anew_and_the_log_probs_are_those_of_the_rounded_weights(
    engine, models, tmp_path, record_property
):
    path = tmp_path / "weights"
    first, second = (flatten(actor=model.state_dict()) for model in (models.first, models.second))
    publisher = WeightsPublisher(path, first, slots=2)
    sampled = []
    for version, model, tensors in ((1, models.second, second), (2, models.first, first), (3, models.second, second)):
        publisher.publish(version, tensors)
        assert engine.fetch_weights(path) == (version, 0)
        responses = run(engine, request(group_size=8, room=30, eos_token_ids=()))[0]
        of_rounded, of_published = gap(rounded(model), responses), gap(model, responses)
        record_property("shown", f"fp8: gap {of_rounded:.4f} to rounded weights, {of_published:.4f} to published ones")
        assert of_rounded < of_published / 2, "they are quantized, and as expected"
        assert 0 < of_published < FP8_GAP_NATS
        assert {span.version for one in responses for span in one.spans} == {version}
        sampled.append(responses)
    publisher.close()

    assert ids(sampled[0]) == ids(sampled[2]) != ids(sampled[1]), "nothing is left of the version between"
    for before, after in zip(sampled[0], sampled[2], strict=True):
        assert torch.equal(before.log_probs, after.log_probs)


def judging(directory):
    config = Config.model_validate({
        "model": {"actor": str(directory)},
        "rollout": {"engine": "vllm", "quantization": "fp8", "engine_gap_action": "resync"},
    })  # fmt: skip
    return judging_of(config, small_llama(0, **SIZES), Telemetry.none())


def test_an_ignored_update_is_found_as_soon_as_the_change_is_beyond_that_of_rounding(
    engine, models, directory, tmp_path, monkeypatch
):
    held = Weights(tmp_path, engine, models.first, actor=small_llama(0, **SIZES), judging=judging(directory))
    held.take(1, models.first)
    held.take(2, tiny := stepped_from(models.first, 1e-6))
    held.take(3, moved := stepped_from(tiny, 3e-3))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "fetch_weights", lambda path, age: age)
        patch.setattr(engine, "update_weights", lambda actor, version: None)
        with pytest.raises(WeightsMismatchError, match="the engine computes with old weights"):
            held.take(4, stepped_from(moved, 3e-3))

    held.weights.hand_over_again(4)
    prove(held.weights, 4)

    assert [verdict for verdict, _ in held.told.verdicts] == ["ok", "ok", "ok", "stale", "stale", "ok"]


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        # Of a fused matrix, and a whole layer: the first is quantized with what its memory held, the second stays.
        ("layers.1.self_attn.k", r"8,192 of 32,768 values of model.layers.1.self_attn.qkv_proj were not loaded"),
        ("embed_tokens", r"6,144 of 6,144 values of model.embed_tokens were not loaded"),
    ],
)
def test_weights_that_leave_a_part_out_are_refused(directory, models, left_out, message):
    engine = VllmEngine(settings(directory, quantization="fp8"))
    tensors = models.second.state_dict()
    kept = {name: tensor for name, tensor in tensors.items() if left_out not in name and "lm_head" not in name}
    try:
        engine.update_weights({name: tensor for name, tensor in tensors.items() if "lm_head" not in name}, 1)
        with pytest.raises(WeightsMismatchError, match=message):
            engine.update_weights(kept, 2)
        with pytest.raises(RlhfdError, match="ended with exit code 1"):
            run(engine, request())
    finally:
        engine.close()


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_a_card_each_update_is_quantized_anew(tmp_path, record_property):
    models = [small_llama(seed, **SIZES).to(torch.bfloat16) for seed in (0, 1)]
    models[0].save_pretrained(tmp_path)
    engine = VllmEngine(settings(tmp_path, dtype="bfloat16", on_cpu=False, cache_bytes=64 << 20, quantization="fp8"))
    try:
        for version, model in ((1, models[1]), (2, models[0])):
            engine.update_weights(model.state_dict(), version)
            responses = run(engine, request(group_size=8, room=30, eos_token_ids=()))[0]
            of_published = gap(model.float(), responses)
            record_property("shown", f"fp8 on a card: gap {of_published:.4f} nats a token to published weights")
            assert 0 < of_published < FP8_GAP_NATS
            model.to(torch.bfloat16)
    finally:
        engine.close()
