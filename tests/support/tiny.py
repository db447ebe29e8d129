"""Models small enough for a test, built from configurations with fixed weights; nothing is loaded from anywhere."""

from __future__ import annotations

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY_SIZE = 23
PAD = 0
EOS = 1


def llama(seed: int = 0, **changes: int | bool) -> LlamaForCausalLM:
    """A Llama whose distributions are far from uniform."""
    settings = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, **changes}
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        max_position_embeddings=128,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
        **settings,
    )
    return _seeded(LlamaForCausalLM, config, seed)


def gpt2(seed: int = 0, *, positions: int = 128) -> GPT2LMHeadModel:
    """A GPT-2: absolute positions, so that a left-padded row without position ids is far off."""
    config = GPT2Config(
        vocab_size=VOCABULARY_SIZE,
        n_positions=positions,
        n_embd=16,
        n_layer=2,
        n_head=2,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    return _seeded(GPT2LMHeadModel, config, seed)


def qwen2(seed: int = 0) -> Qwen2ForCausalLM:
    """A Qwen2: half as many heads of keys as of queries, biases, tied embeddings."""
    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    return _seeded(Qwen2ForCausalLM, config, seed)


def _seeded(model_class: type[PreTrainedModel], config: object, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.5)
    return model.eval()
