"""A model whose responses have lengths that the prompts choose, at the full cost of a model of its size.

Its layers compute and add nothing: the weights of their output projections are zero. The head of token t points to the
embedding of t - 1, the head of eos to the last token's. So a response to a prompt that ends with token
``VOCABULARY - n`` is the n - 1 tokens up to the last one, then eos; another one has a probability of some 1e-7 a token.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from benches.llama import llama
from benches.rollout_peers import END, EOS, tokenizer

VOCABULARY = 1024
LONGEST_PROMPT = 24
# Logit of the next token; those of others are about 0.
_LOGIT = 30.0


def model(hidden: int, layers: int, *, seed: int = 0, **more: int) -> LlamaForCausalLM:
    """Return the model, in float32; `more` has other values of its config."""
    torch.manual_seed(seed)
    made = llama(hidden, layers, VOCABULARY, max_position_embeddings=2048, **END, **more)
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        units = torch.nn.functional.normalize(torch.randn(VOCABULARY, hidden), dim=1)
        made.model.embed_tokens.weight.copy_(units)
        heads, scale = torch.zeros(VOCABULARY, hidden), _LOGIT / hidden**0.5
        heads[3:] = scale * units[2:-1]
        heads[EOS] = scale * units[-1]
        made.lm_head.weight.copy_(heads)
    return made


def last_token(response_tokens: int) -> int:
    """Return the last token of a prompt whose responses have this many tokens, eos included."""
    return VOCABULARY - response_tokens


def ragged(count: int, longest: int, *, seed: int = 0) -> list[int]:
    """Return lengths of responses from an eighth of the longest to the longest, each equally likely."""
    draws = random.Random(seed)
    return [draws.randint(max(2, longest // 8), longest) for _ in range(count)]


def straggling(count: int, length: int, *, every: int = 64) -> list[int]:
    """Return equal lengths of which one in `every` is ten times as long."""
    return [10 * length if place % every == every - 1 else length for place in range(count)]


def write(folder: Path, made: LlamaForCausalLM, lengths: Sequence[int]) -> None:
    """Write the model, its tokenizer, and a prompt file in which one prompt has responses of each of the lengths."""
    made.save_pretrained(folder / "model")
    tokenizer(VOCABULARY).save_pretrained(folder / "model")
    with (folder / "prompts.jsonl").open("w") as file:
        for words, length in zip(_beginnings(), lengths, strict=False):
            file.write(json.dumps({"prompt": f"{words} {last_token(length)}"}) + "\n")


def _beginnings() -> Iterator[str]:
    for seed in itertools.count():
        draws = random.Random(seed)
        tokens = draws.randint(LONGEST_PROMPT // 4, LONGEST_PROMPT - 1)
        yield " ".join(str(draws.randrange(2, VOCABULARY)) for _ in range(tokens))
