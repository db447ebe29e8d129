"""Small models that vLLM takes, what a model says of a response, and the responses of an engine."""

import time

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.support import tiny, tiny_vision

VOCABULARY_SIZE, EOS = 48, 1


def small_llama(seed, **changes):
    """A Llama with heads of 32: the least that vLLM's kernels on a CPU take."""
    settings = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, **changes}
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE, max_position_embeddings=512, pad_token_id=0, bos_token_id=None,
        eos_token_id=EOS, tie_word_embeddings=True, **settings,
    )  # fmt: skip
    return tiny.seeded(LlamaForCausalLM, config, seed, 0.15)


MIXTURES = {
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "intermediate_size": 32}),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM, {
        "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
    }),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {
        "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 32,
    }),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, {"num_experts": 4, "intermediate_size": 32}),
}  # fmt: skip
"""Mixtures of experts by type: configuration, model and settings, with 4 experts of 32 in each layer."""


def small_mixture(kind, seed):
    """A mixture of 4 experts, 2 of which read a token."""
    configuration, model_class, settings = MIXTURES[kind]
    config = configuration(
        vocab_size=VOCABULARY_SIZE, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        num_experts_per_tok=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=None, eos_token_id=EOS,
        tie_word_embeddings=False, **settings,
    )  # fmt: skip
    return tiny.seeded(model_class, config, seed, 0.15)


def small_vl(kind, seed, patch=tiny_vision.PATCH):
    """The models of `tests.support.tiny_vision` with heads of 32 in both parts."""
    sections = {**tiny_vision.ROTATION, "mrope_section": [4, 6, 6]}
    text = {**tiny_vision.TEXT, "hidden_size": 128, "head_dim": 32, "rope_parameters": sections}
    sight = {**tiny_vision.SIGHT, "patch_size": patch, "depth": 2}
    if kind == "qwen2_vl":
        sight |= {"embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2}
        configuration, model_class = Qwen2VLConfig, Qwen2VLForConditionalGeneration
    else:
        sight |= {"hidden_size": 64, "out_hidden_size": 128, "intermediate_size": 96}
    if kind == "qwen2_5_vl":
        sight |= {"window_size": 4 * patch, "fullatt_block_indexes": [1]}
        configuration, model_class = Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    if kind == "qwen3_vl":
        text["rope_parameters"] = {**sections, "mrope_interleaved": True}
        sight |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        configuration, model_class = Qwen3VLConfig, Qwen3VLForConditionalGeneration
    config = configuration(text_config=text, vision_config=sight, **tiny_vision.TOKENS)
    return tiny.seeded(model_class, config, seed, 0.15)


@torch.no_grad()
def log_probs_of(model, prompt, token_ids, temperature=1.0):
    """The log-probs of a response's tokens at the temperature, by one pass of the model."""
    ids = torch.cat([prompt, token_ids])
    logits = model(input_ids=ids[None]).logits[0].float() / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, token_ids[:, None])[:, 0]


def finish(engine, count):
    """Return the responses of so many requests by their keys, once these have ended."""
    ended, deadline_s = {}, time.monotonic() + 120
    while len(ended) < count:
        assert time.monotonic() < deadline_s, engine.load
        ended |= {completed.key: completed.responses for completed in engine.step()}
    return ended


def begin(engine, *requests, running=None):
    """Submit requests, and return while all their rows run, or `running` of them: none has ended by then.

    The engine goes on for a few steps at a time until it reports so many rows. On a busy machine all may have ended
    by the next look: then they begin once more.
    """
    running = sum(request.group_size for request in requests) if running is None else running
    deadline_s = time.monotonic() + 120
    engine.pause()
    for request in requests:
        engine.submit(request)
    while engine.load.running != running:
        assert time.monotonic() < deadline_s, engine.load
        if not engine.load.running + engine.load.waiting:
            finish(engine, len(requests))
            for request in requests:
                engine.submit(request)
        engine.resume()
        time.sleep(0.005)
        engine.pause()
        # A report comes each 0.1 s at most.
        time.sleep(0.05)
    engine.resume()
