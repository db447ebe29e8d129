"""Untrained Llamas of given sizes."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM


def llama(hidden: int, layers: int, vocabulary: int, **more: Any) -> LlamaForCausalLM:
    """Return a Llama, its heads 32 wide and its MLP 8/3 as wide as the model; `more` has other values of its config."""
    usual = {
        "intermediate_size": hidden * 8 // 3,
        "num_attention_heads": hidden // 32,
        "max_position_embeddings": 4096,
    }
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": vocabulary}
    return LlamaForCausalLM(LlamaConfig(**sizes, **usual | more)).eval()
