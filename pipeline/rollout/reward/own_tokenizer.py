"""A reward model with a tokenizer of its own: each row becomes a text, and the text the token ids of the reward model.

A chat goes through the reward model's own chat template, with the response as the last message; any other row is the
text of its prompt without special tokens, and its response as reward functions get it. A row that cannot be scored so
has no reward: NaN.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.config.positions import row_limit
from pipeline.config.rewards import RewardModel
from pipeline.config.schema import Config
from pipeline.config.vocabularies import NO_IMAGES
from pipeline.errors import ConfigError, PromptError, RlhfdError
from pipeline.models.loading import load_reward_model, load_tokenizer, sees_images
from pipeline.models.reward_model import SequenceReward
from pipeline.prompts.rendering import Rendering, conversation, rendering_of
from pipeline.prompts.types import Prompt
from pipeline.rollout.response_text import ResponseText, hidden_ids, special_ids
from pipeline.rollout.reward.wire import RowScore


class OwnTokenizerReward(SequenceReward):
    """A reward model that gets texts, by its own tokenizer; see `SequenceReward`.

    Args:
        model: The reward model.
        tokenizer: The reward model's own.
        policy_tokenizer: The tokenizer of the rows.
        text: Decodes responses.
        rendering: The use of the chat template by the prompts.
        key: Key of the model, for messages.

    Attributes:
        problems: Why rows of the last call have no score, by their numbers.
    """

    def __init__(
        self, model: Any, tokenizer: Any, policy_tokenizer: Any, text: ResponseText, rendering: Rendering, *, key: str
    ) -> None:
        super().__init__(model)
        self._key = key
        self._tokenizer, self._text = tokenizer, text
        self._special = special_ids(policy_tokenizer)
        # The arguments are those of the policy's template.
        self._rendering = dataclasses.replace(rendering, arguments={})
        limit = row_limit(model.config.to_dict())
        self._most_tokens = None if limit is None else limit.tokens
        self._prompts: list[Prompt] = []
        self.problems: dict[int, RowScore] = {}

    def begin(self, prompts: Sequence[Prompt], group_size: int) -> None:
        """Set the prompts of the rows that are scored next in one call, each of `group_size` rows."""
        self._prompts = [prompt for prompt in prompts for _ in range(group_size)]

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, **row: Any) -> Tensor:
        """Return the scores of the rows of `begin`, ``(B,)`` float32, NaN for a row that cannot be scored.

        Args:
            input_ids: ``(B, S)`` int64, right-padded, of the policy's tokenizer.
            attention_mask: ``(B, S)``.
            **row: `response_start` and `response_end`, ``(B,)`` int64; others are ignored.

        Raises:
            RlhfdError: If the prompts of these rows are not known.
        """
        prompts = self._prompts
        if len(prompts) != len(input_ids):
            raise RlhfdError(f"the prompts of {len(prompts)} of {len(input_ids)} rows are known to the reward model")
        bounds = zip(row["response_start"].tolist(), row["response_end"].tolist(), strict=True)
        found = [
            self._ids(prompt, ids, *bound)
            for prompt, ids, bound in zip(prompts, input_ids.tolist(), bounds, strict=True)
        ]
        self.problems = {row: one for row, one in enumerate(found) if isinstance(one, RowScore)}
        missing = torch.tensor([row in self.problems for row in range(len(found))])
        # One token in place of a row without a score.
        padding = [self._tokenizer.pad_token_id]
        rows = [torch.tensor(padding if isinstance(ids, RowScore) else ids) for ids in found]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self._tokenizer.pad_token_id)
        mask = torch.arange(padded.shape[1]) < torch.tensor([len(ids) for ids in rows]).unsqueeze(1)
        scores = super().__call__(padded, mask.long())
        return scores.masked_fill(missing.to(scores.device), math.nan)

    def _ids(self, prompt: Prompt, ids: list[int], start: int, end: int) -> list[int] | RowScore:
        """Return the reward model's ids of a row, at least one; or why it cannot be scored."""
        try:
            found = conversation(prompt, self._text(ids[start:end]), self._tokenizer, self._rendering)
        except PromptError as error:
            return self._problem("its chat template refuses the row", str(error), error.bare)
        if found is None:
            # Decoded as one: a text's first space may be no part of it.
            shown = [token for token in ids[:start] if token not in self._special] + ids[start:end]
            found = list(self._tokenizer(self._text(shown))["input_ids"])
        if not found:
            return self._problem("the row has no tokens", prompt.named)
        if self._most_tokens is not None and len(found) > self._most_tokens:
            long = f"{prompt.named} has {len(found)} tokens with its response, the model takes {self._most_tokens}"
            return self._problem("the row is too long", long)
        return found

    def _problem(self, cause: str, text: str, bare: str = "") -> RowScore:
        said = f"no score of {self._key}, {cause}"
        return RowScore(problem="invalid", text=f"{said}: {text}", bare=f"{said}: {bare or text}", cause=said)


def reward_model_of(settings: RewardModel, config: Config, tokenizer: Any, device: torch.device) -> SequenceReward:
    """Return a reward model.

    Args:
        settings: Its folder and its tokenizer.
        config: The configuration.
        tokenizer: The actor's.
        device: The device of the weights.

    Raises:
        ConfigError: If model or tokenizer cannot be loaded, or the actor takes images and the tokenizer is its own.
    """
    if settings.tokenizer == "own" and sees_images(config.model.actor):
        raise ConfigError(f"{settings.tokenizer_key}: {NO_IMAGES}")
    reward = load_reward_model(settings.path, dtype=config.model.dtype, device=device, field=settings.key)
    if settings.tokenizer == "policy":
        return reward
    own = load_tokenizer(settings.path, field=settings.key)
    text = ResponseText(tokenizer, hidden_ids(config, tokenizer))
    return OwnTokenizerReward(reward.model, own, tokenizer, text, rendering_of(config.prompts), key=settings.key)
