"""A trial of the configured reward on given rows, in this process: `rlhfd try-reward`.

A row has the tokens that a run would have: the rendered prompt, the response up to a stop string, or without one the
stop token unless it was cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pipeline.config.rewards import function_labels, part_names, reward_functions, reward_models
from pipeline.config.schema import Config
from pipeline.config.user_modules import PROMPT
from pipeline.errors import PromptError, RewardError
from pipeline.models.device import process_device
from pipeline.models.loading import load_tokenizer
from pipeline.progress import Telemetry
from pipeline.prompts.rendering import render, rendering_of
from pipeline.prompts.types import Prompt
from pipeline.rollout.generation.stop_strings import StopStrings
from pipeline.rollout.response_text import ResponseText, hidden_ids
from pipeline.rollout.reward.functions import FunctionReward, checked_scores, load_reward_function
from pipeline.rollout.reward.given_rows import GivenRows
from pipeline.rollout.reward.numbers import FurtherNumbers
from pipeline.rollout.reward.own_tokenizer import OwnTokenizerReward, reward_model_of
from pipeline.rollout.reward.row_rewards import is_reward, none_applies, too_large


class Trial(NamedTuple):
    """The reward of one row.

    Attributes:
        parts: Weighted result of each function and reward model by its name (`part_names`); their sum is the reward.
        tokens: Tokens of the response that the reward was given.
        is_cut: Whether the response did not fit beside its prompt, or was given as cut.
        problem: The reason why there is no reward; empty if there is one.
        numbers: Further numbers of the functions by name.
    """

    parts: dict[str, float]
    tokens: int
    is_cut: bool
    problem: str = ""
    numbers: Mapping[str, float] = {}


class RewardTrial:
    """The configured reward, loaded once."""

    def __init__(self, config: Config) -> None:
        """Load tokenizer, functions and reward model.

        Raises:
            ConfigError: If one of them cannot be loaded.
        """
        self._config = config
        self._tokenizer: Any = load_tokenizer(config.model.actor)
        self._rendering = rendering_of(config.prompts)
        stop = config.rollout.stop
        self._strings = StopStrings(stop, self._tokenizer) if stop else None
        self._device = process_device()
        text = ResponseText(self._tokenizer, hidden_ids(config, self._tokenizer))
        timeout_s = config.rollout.reward_timeout_s
        self._functions = [
            (name, one, FunctionReward([load_reward_function(one)], self._tokenizer, text=text, timeout_s=timeout_s))
            for name, one in zip(part_names(config), reward_functions(config), strict=False)
        ]
        self._further = FurtherNumbers(function_labels(config), Telemetry.none())
        self._models = [
            (one, reward_model_of(one, config, self._tokenizer, self._device)) for one in reward_models(config)
        ]

    def score(self, prompt: Prompt, response: str, *, is_cut: bool = False) -> Trial:
        """Return the parts of a response's reward.

        Raises:
            ConfigError: If the prompts need a chat template and there is none.
        """
        try:
            prompt_ids = render(prompt, self._tokenizer, self._rendering)
        except PromptError as error:
            return Trial({}, 0, is_cut, str(error))
        if self._config.rollout.long_prompts == "cut_left":
            prompt_ids = prompt_ids[-self._config.lengths.prompt :]
        response_ids, is_cut = self._response_ids(response, len(prompt_ids), is_cut=is_cut)
        if not response_ids:
            lengths = self._config.lengths
            limit = f"rollout.max_length is {lengths.row}: no room for a response"
            if lengths.response is not None:
                limit = f"rollout.max_prompt_length is {lengths.prompt}"
            return Trial({}, 0, is_cut, f"the prompt has {len(prompt_ids)} tokens, {limit}")
        ids = torch.tensor([[*prompt_ids, *response_ids]])
        row: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "response_start": torch.tensor([len(prompt_ids)]),
            "response_end": torch.tensor([ids.shape[1]]),
            "gt_answer": [prompt.answer],
        }
        given = GivenRows(**row, columns=[{**prompt.columns, PROMPT: prompt.prompt}])
        parts: dict[str, float] = {}
        numbers: list[Mapping[str, float]] = []
        for name, settings, function in self._functions:
            try:
                (found,) = next(function.results([0], given))
            except SystemExit as end:
                return Trial(parts, len(response_ids), is_cut, f"{name} ended its process: sys.exit({end.code!r})")
            if isinstance(found, RewardError):
                return Trial(parts, len(response_ids), is_cut, str(found))
            numbers.append(found.numbers)
            if not math.isnan(found.reward):
                parts[name] = settings.weight * found.reward
        if self._functions and not parts and not self._models:
            problem = str(none_applies([settings.name for _, settings, _ in self._functions]))
            return Trial(parts, len(response_ids), is_cut, problem)
        for of_model, model in self._models:
            if isinstance(model, OwnTokenizerReward):
                model.begin([prompt], 1)
            try:
                score = float(checked_scores(model(**row), 1, of_model.label))
            except RewardError as error:
                problems = model.problems if isinstance(model, OwnTokenizerReward) else {}
                return Trial(parts, len(response_ids), is_cut, problems[0].text if problems else str(error))
            parts[of_model.label] = of_model.weight * score
        problem = "" if is_reward(sum(parts.values())) else str(too_large([*parts.values()]))
        return Trial(parts, len(response_ids), is_cut, problem, self._further.of_row(numbers))

    def _response_ids(self, response: str, prompt_tokens: int, *, is_cut: bool) -> tuple[Sequence[int], bool]:
        """Return the tokens of a response, and whether it is cut: it gets the stop token only if it is not."""
        ids = list(self._tokenizer(response, add_special_tokens=False)["input_ids"])
        if (end := None if self._strings is None else self._strings.end_of(ids)) is not None:
            ids = ids[:end]
        elif not is_cut and self._tokenizer.eos_token_id is not None:
            ids.append(self._tokenizer.eos_token_id)
        lengths = self._config.lengths
        room = 0
        if prompt_tokens <= lengths.prompt:
            room = lengths.row - prompt_tokens if lengths.response is None else lengths.response
        return ids[:room], is_cut or len(ids) > room
