"""Ways to the same experience: coati's design and plain ``generate`` here, TRL in a process of its own (`rollout_trl`).

coati's design is written from the description of `NaiveExperienceMaker`: it samples with one forward pass over whole
rows per token and no cache, keeps finished rows in the batch, and computes log-softmax of all logits of all positions,
two rows at a time. The formulas are ours, so that results can be compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benches.llama import llama

PAD, EOS = 0, 1
END: Final = {"pad_token_id": PAD, "bos_token_id": None, "eos_token_id": EOS}
TEMPERATURE = 1.0


@dataclasses.dataclass(frozen=True)
class Work:
    """One comparison: prompts, responses per prompt, and their lengths.

    Attributes:
        prompts: Number of prompts, of `prompt_tokens // 4` to `prompt_tokens` tokens.
        prompt_tokens: Tokens of the longest prompt.
        group_size: Responses per prompt.
        new_tokens: Tokens of the longest response.
        with_coati: Whether coati's design takes part, which recomputes every token of every row for each new one.
    """

    prompts: int
    prompt_tokens: int
    group_size: int
    new_tokens: int
    with_coati: bool = True

    @property
    def rows(self) -> int:
        """Number of all responses."""
        return self.prompts * self.group_size

    def inputs(self, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Return left-padded prompts and their mask."""
        draws = torch.Generator().manual_seed(3)
        lengths = torch.randint(self.prompt_tokens // 4, self.prompt_tokens + 1, (self.prompts,), generator=draws)
        lengths[0] = self.prompt_tokens
        mask = (torch.arange(self.prompt_tokens) >= self.prompt_tokens - lengths.unsqueeze(1)).long()
        return torch.randint(2, vocabulary, mask.shape, generator=draws) * mask, mask


@dataclasses.dataclass(frozen=True)
class Made:
    """The result of a way, to be compared with the others'; rows in order, columns after the lengths unused.

    Attributes:
        seconds: Wall time.
        tokens: ``(B, A)`` int64.
        lengths: ``(B,)`` int64.
        base_log_probs: ``(B, A)`` float32, under the reference.
        log_probs: The same under the actor; None if the way computes none.
        generation_s: Wall time of sampling; 0 if the way does not report it.
    """

    seconds: float
    tokens: Tensor
    lengths: Tensor
    base_log_probs: Tensor
    log_probs: Tensor | None = None
    generation_s: float = 0.0


def model(hidden: int, layers: int, vocabulary: int, *, seed: int, eos_strength: float = 2.6) -> LlamaForCausalLM:
    """Return an untrained Llama whose greedy responses have many lengths: the head of its eos is scaled."""
    torch.manual_seed(seed)
    made = llama(hidden, layers, vocabulary, **END)
    with torch.no_grad():
        made.lm_head.weight[EOS] *= eos_strength
    return made


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words "2" to "7999" and so on, one token each."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": PAD, "<eos>": EOS} | {str(token): token for token in range(2, vocabulary)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    made.padding_side = "left"
    return made


@torch.no_grad()
def coati_generate(actor: LlamaForCausalLM, input_ids: Tensor, mask: Tensor, new_tokens: int) -> Tensor:
    """Return greedy responses, ``(B, A)``: each token recomputes all rows, until every row has ended."""
    width, alive = input_ids.shape[1], torch.ones(len(input_ids), dtype=torch.bool)
    for _ in range(new_tokens):
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = actor(input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        tokens = logits[:, -1].argmax(dim=-1).where(alive, PAD)
        input_ids = torch.cat([input_ids, tokens.unsqueeze(1)], dim=1)
        mask = torch.cat([mask, torch.ones_like(tokens).unsqueeze(1)], dim=1)
        alive &= tokens != EOS
        if not alive.any():
            break
    tokens = input_ids[:, width:]
    return torch.nn.functional.pad(tokens, (0, new_tokens - tokens.shape[1]), value=PAD)


@torch.no_grad()
def all_logits_log_probs(model: LlamaForCausalLM, sequences: Tensor, mask: Tensor, num_actions: int) -> Tensor:
    """Return log-probs of the last tokens, ``(B, A)``, from the log-softmax of the logits of every position."""
    parts = []
    for ids, real in zip(sequences.split(2), mask.split(2), strict=True):
        positions = (real.cumsum(dim=1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=real, position_ids=positions, use_cache=False).logits
        log_probs = (logits[:, :-1] / TEMPERATURE).log_softmax(dim=-1)
        parts.append(log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, -num_actions:])
    return torch.cat(parts)


def lengths_of(tokens: Tensor) -> Tensor:
    """Return the number of tokens up to and including the first eos, ``(B,)``."""
    columns = torch.arange(1, tokens.shape[1] + 1)
    return torch.where(tokens == EOS, columns, tokens.shape[1]).amin(dim=1)


def texts(input_ids: Tensor, mask: Tensor) -> Sequence[str]:
    """Return the prompts as text that the tokenizer turns into the same ids."""
    return [" ".join(str(int(token)) for token in row[real != 0]) for row, real in zip(input_ids, mask, strict=True)]
