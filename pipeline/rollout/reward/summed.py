"""The reward of a run with reward models: the weighted sum of their scores and of the functions'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.config.rewards import RewardModel, reward_models
from pipeline.config.schema import Config
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.reward_model import SequenceReward
from pipeline.progress import Telemetry
from pipeline.prompts.types import Prompt
from pipeline.rollout.reward.functions import FunctionReward
from pipeline.rollout.reward.own_tokenizer import OwnTokenizerReward, reward_model_of
from pipeline.rollout.reward.pool import RewardPool


class SummedReward:
    """The weighted sum of the scores of reward models and functions. A row without one of the scores has no reward.

    Args:
        models: The reward models with their settings, at least one.
        functions: The functions; None: there are none.
        telemetry: Told of progress after each model.

    Attributes:
        models: The reward models.
        model: The largest of their networks, which bounds the rows of a call.
        labels: Names of the parts: those of the functions, then those of the models.
        numbers: Further numbers of each row of the last call, those of the functions.
        parts: ``(B, parts)`` float32, of the last call, before weights.
        exact: ``(B,)`` float64, the sums of the last call.
    """

    def __init__(
        self,
        models: Sequence[tuple[RewardModel, SequenceReward]],
        functions: FunctionReward | RewardPool | None = None,
        telemetry: Telemetry = Telemetry.none(),
    ) -> None:
        self._telemetry = telemetry
        self.models = [model for _, model in models]
        self._weights = [settings.weight for settings, _ in models]
        self.model = max((model.model for model in self.models), key=_parameters)
        self._functions = functions
        if functions is not None:
            # The models' scores stand alone where no function applies.
            functions.may_be_absent = True
        self.labels = [*([] if functions is None else functions.labels), *(settings.label for settings, _ in models)]
        self.numbers: list[dict[str, float]] = []
        self.parts = torch.empty(0, len(self.labels))
        self.exact = torch.empty(0, dtype=torch.float64)

    def begin(self, prompts: Sequence[Prompt], group_size: int) -> None:
        """Set the prompts of the rows that are scored next, each of `group_size` rows."""
        for model in self.models:
            if isinstance(model, OwnTokenizerReward):
                model.begin(prompts, group_size)

    def __call__(
        self, *, vision: VisionRows | None = None, columns: Sequence[Mapping[str, Any]] | None = None, **row: Any
    ) -> Tensor:
        """Return the sums, ``(B,)`` float32; arguments as for a `FunctionReward`."""
        found = []
        for model in self.models:
            found.append(model(**row).float().cpu())
            self._telemetry.progress()
        scores = torch.stack(found, dim=1)
        # Only now: a call of which any model runs out of memory is made again, by all models.
        for model in self.models:
            if isinstance(model, OwnTokenizerReward):
                model.advance(len(scores))
        weighted = torch.tensor(self._weights, dtype=torch.float64) * scores.double()
        self.parts, self.exact = scores, weighted.sum(dim=1)
        self.numbers = [{} for _ in scores]
        if self._functions is not None:
            self._functions(**row, vision=vision, columns=columns)
            self.numbers = self._functions.numbers
            self.parts = torch.cat([self._functions.parts, scores], dim=1)
            self.exact = self.exact + self._functions.exact
        return self.exact.float()


def load_reward(
    config: Config,
    tokenizer: Any,
    device: torch.device,
    functions: FunctionReward | RewardPool | None,
    telemetry: Telemetry,
) -> SummedReward | FunctionReward | RewardPool | None:
    """Return the reward of a run: the functions, or the sum of the reward models and the functions.

    Args:
        config: The configuration.
        tokenizer: The actor's.
        device: The device of the models.
        functions: The functions of the configuration; None if it has none.
        telemetry: Told of progress.

    Raises:
        ConfigError: If a model or its tokenizer cannot be loaded.
    """
    models = [(one, reward_model_of(one, config, tokenizer, device)) for one in reward_models(config)]
    return SummedReward(models, functions, telemetry) if models else functions


def _parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
