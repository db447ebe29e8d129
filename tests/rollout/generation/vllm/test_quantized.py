"""vLLM with weights of 8 bits: what it samples from after each update, parts that are missing, updates it ignores.

On a CPU PyTorch multiplies for it, some 0.1 s a step of these models.
"""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.errors import RlhfdError, WeightsMismatchError
from pipeline.models.weights.store import WeightsPublisher, flatten
from pipeline.progress import Telemetry
from pipeline.rollout.generation.engine_probe import FP8_GAP_NATS, FP8_LEAST_MOVE_NATS
from pipeline.rollout.generation.vllm.engine import VllmEngine
from pipeline.rollout.loader import judging_of
from tests.rollout.generation.vllm.models import log_probs_of, small_llama
from tests.rollout.generation.vllm.test_engine import PROMPT, Weights, ids, request, run, settings, stepped_from
from tests.support.proving import prove
from tests.support.vllm_engines import forked_engine

pytestmark = [pytest.mark.vllm, pytest.mark.integration]

MOST_E4M3 = 448.0


def small(seed):
    """A model with biases, which stay as published."""
    model, draws = small_llama(seed, attention_bias=True), torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0.0, 0.15, generator=draws)
    return model.to(torch.bfloat16)


@pytest.fixture(scope="module")
def models():
    return SimpleNamespace(first=small(0), second=small(1))


@pytest.fixture(scope="module")
def directory(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    models.first.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(directory, forkserver):
    engine = forked_engine(settings(directory, dtype="bfloat16", quantization="fp8"), forkserver)
    yield engine
    engine.close()


def eight_bits(values):
    """The values as e4m3, and the scale of each row."""
    scale = values.float().abs().amax(-1, keepdim=True) / MOST_E4M3
    return (values.float() / scale).to(torch.float8_e4m3fn), scale


def rounded(values):
    quantized, scale = eight_bits(values)
    return quantized.float() * scale


def in_float32(model):
    return copy.deepcopy(model).float()


def linear_layers(model):
    return [layer for layer in model.model.layers.modules() if isinstance(layer, torch.nn.Linear)]


def quantized(model):
    """The model whose linear layers have 8 bits: those of weights once, those of inputs at each pass."""
    made = in_float32(model)
    for layer in linear_layers(made):
        layer.weight.data = rounded(layer.weight.data)
        layer.register_forward_pre_hook(lambda layer, inputs: (rounded(inputs[0]),))
    return made


def gap(model, responses):
    """Mean difference of the engine's log-probs and a model's, in nats a token."""
    gaps = [(one.log_probs - log_probs_of(model, PROMPT, one.token_ids)).abs() for one in responses]
    return float(torch.cat(gaps).mean())


def sampled_from(engine, key=0):
    return run(engine, request(key, group_size=8, room=16, eos_token_ids=()))[key]


def test_each_update_is_quantized_anew_and_the_log_probs_are_those_of_the_rounded_weights(
    engine, models, tmp_path, record_property
):
    path = tmp_path / "weights"
    first, second = (flatten(actor=model.state_dict()) for model in (models.first, models.second))
    sampled, gaps = [], []
    with contextlib.closing(WeightsPublisher(path, first, slots=2)) as publisher:
        for version, model, tensors in (
            (1, models.second, second), (2, models.first, first), (3, models.second, second),
        ):  # fmt: skip
            publisher.publish(version, tensors)
            assert engine.fetch_weights(path) == (version, 0)
            responses = sampled_from(engine)
            of_rounded, of_published = gap(quantized(model), responses), gap(in_float32(model), responses)
            record_property("shown", f"fp8: gap {of_rounded:.4f} to rounded weights, {of_published:.4f} to published")
            gaps.append((of_rounded, of_published))
            assert of_published < FP8_GAP_NATS
            assert {span.version for one in responses for span in one.spans} == {version}
            sampled.append(responses)

    of_rounded, of_published = map(sum, zip(*gaps, strict=True))
    assert of_rounded < 0.75 * of_published, "they are quantized, and as expected"
    assert ids(sampled[0]) == ids(sampled[2]) != ids(sampled[1]), "nothing is left of the version between"
    for before, after in zip(sampled[0], sampled[2], strict=True):
        assert torch.equal(before.log_probs, after.log_probs)


def stepped_within_rounding(model):
    """The model after the least step of half its weights in bfloat16 that the 8 bits of each one hide."""
    later = copy.deepcopy(model)
    for layer in linear_layers(later):
        bits = layer.weight.data.view(torch.int16)
        _, scale = eight_bits(layer.weight.data)
        below, above = (((bits + step).view(torch.bfloat16) / scale).to(torch.float8_e4m3fn) for step in (-1, 2))
        hidden = (below.float() == above.float()) & (layer.weight.data.abs() < 0.99 * MOST_E4M3 * scale)
        bits[hidden] += 1
    return later


def judging(directory):
    config = Config.model_validate({
        "model": {"actor": str(directory), "dtype": "bfloat16"},
        "rollout": {"engine": "vllm", "quantization": "fp8", "engine_gap_action": "resync"},
    })  # fmt: skip
    return judging_of(config, small(0), Telemetry.none())


def test_an_ignored_update_is_found_as_soon_as_the_change_is_beyond_that_of_rounding(
    engine, models, directory, tmp_path, monkeypatch
):
    held = Weights(tmp_path, engine, models.first, actor=small(0), judging=judging(directory))
    held.take(1, models.first)
    before = sampled_from(engine)
    held.take(2, hidden := stepped_within_rounding(models.first))
    after = sampled_from(engine)
    assert all(torch.equal(one.log_probs, other.log_probs) for one, other in zip(before, after, strict=True))
    moved = [
        log_probs_of(hidden, PROMPT, one.token_ids) - log_probs_of(models.first, PROMPT, one.token_ids) for one in after
    ]
    assert 1e-3 < float(torch.cat(moved).abs().mean()) < FP8_LEAST_MOVE_NATS, (
        "the actor's have changed, the engine's not"
    )
    held.take(3, seen := stepped_from(hidden, 3e-3))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "fetch_weights", lambda path, age: age)
        patch.setattr(engine, "update_weights", lambda actor, version: None)
        with pytest.raises(WeightsMismatchError, match="the engine computes with old weights"):
            held.take(4, stepped_from(seen, 3e-3))

    held.weights.hand_over_again(4)
    prove(held.weights, 4)

    assert [verdict for verdict, _ in held.told.verdicts] == ["ok", "ok", "ok", "stale", "stale", "ok"]


def without(tensors, part):
    """The tensors but those of a part of the model; the head is the embedding."""
    return {name: tensor for name, tensor in tensors.items() if part not in name and "lm_head" not in name}


def assert_refused(engine, tensors, message):
    with pytest.raises(WeightsMismatchError, match=message):
        engine.update_weights(tensors, 2)
    with pytest.raises(RlhfdError, match="ended with exit code 1"):
        run(engine, request())


@pytest.mark.variant
def test_weights_that_leave_a_whole_layer_out_are_refused(directory, models, forkserver):
    """It would stay as it was."""
    half = settings(directory, dtype="bfloat16", quantization="fp8")
    with contextlib.closing(forked_engine(half, forkserver)) as engine:
        engine.update_weights(without(models.second.state_dict(), "none"), 1)
        assert_refused(
            engine,
            without(models.second.state_dict(), "embed_tokens"),
            r"3,072 of 3,072 values of model.embed_tokens were not loaded",
        )


def test_weights_that_leave_a_part_of_a_fused_matrix_out_are_refused(engine, models):
    """It would be quantized with what its memory held. The last test of this engine."""
    assert_refused(
        engine,
        without(models.second.state_dict(), "layers.1.self_attn.k"),
        r"4,160 of 12,480 values of model.layers.1.self_attn.qkv_proj were not loaded",
    )


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_a_card_each_update_is_quantized_anew(models, directory, record_property):
    with_card = settings(directory, dtype="bfloat16", on_cpu=False, cache_bytes=64 << 20, quantization="fp8")
    with contextlib.closing(VllmEngine(with_card)) as engine:
        for version, model in ((1, models.second), (2, models.first)):
            engine.update_weights(model.state_dict(), version)
            responses = sampled_from(engine)
            of_rounded, of_published = gap(quantized(model), responses), gap(in_float32(model), responses)
            record_property("shown", f"fp8 on a card: gap {of_rounded:.4f} to rounded, {of_published:.4f} to published")
            assert of_rounded < 0.75 * of_published < 0.75 * FP8_GAP_NATS
