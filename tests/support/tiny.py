"""Models small enough for a test, built from configurations with fixed weights; nothing is loaded from anywhere."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY_SIZE = 23
PAD = 0
EOS = 1


class Tokenizer:
    """As much of a tokenizer as the maker reads."""

    pad_token_id: int | None = PAD
    eos_token_id: int | None = EOS


class Letters(Tokenizer):
    """A tokenizer: a letter a token, a tilde none."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 60 for letter in text if letter != "~"]}


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
    return seeded(LlamaForCausalLM, config, seed)


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
    return seeded(GPT2LMHeadModel, config, seed)


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
    return seeded(Qwen2ForCausalLM, config, seed)


def mistral(seed: int = 0, *, window: int = 4) -> MistralForCausalLM:
    """A Mistral, each of whose layers slides a window."""
    config = MistralConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=window,
        max_position_embeddings=128,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    return seeded(MistralForCausalLM, config, seed)


def gemma3(seed: int = 0, *, window: int = 5) -> Gemma3ForCausalLM:
    """A Gemma 3, whose first and last layers slide a window, the one between them does not."""
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=128,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    return seeded(Gemma3ForCausalLM, config, seed)


def with_windows_in_masks_alone(model: PreTrainedModel) -> PreTrainedModel:
    """A Mistral whose layers do not give their windows to the attention, as those of some models do not."""

    class Config:
        sliding_window = None

        def __getattr__(self, name: str) -> object:
            return getattr(model.config, name)

    for layer in model.base_model.layers:
        layer.self_attn.config = Config()
    return model


def seeded(model_class: Any, config: Any, seed: int, spread: float = 0.5) -> Any:
    """A model whose matrices are drawn with this deviation."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, spread)
    return model.eval()
