"""The reward of a run with reward models: the weighted sum of their scores and of the functions'."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

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
from pipeline.rollout.reward.problems import RewardProblems
from pipeline.rollout.reward.row_rewards import is_reward, too_large
from pipeline.rollout.reward.wire import RowScore, row_score


class SummedReward:
    """The weighted sum of the scores of reward models and functions. A row without one of the scores has no reward.

    Args:
        models: The reward models with their settings, at least one.
        functions: The functions; None: there are none.
        telemetry: Told of progress after each model, and of each row to which the functions give a score, and the sum
            is none.

    Attributes:
        models: The reward models.
        model: The largest of their networks, which bounds the rows of a call.
        labels: Names of the parts: those of the functions, then those of the models.
        numbers: Further numbers of each row of the last call, those of the functions.
        parts: ``(B, parts)`` float32, of the last call, before weights.
        exact: ``(B,)`` float64, the sums of the last call.
        problem: The first row without a score of the last call; None if all had one.
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
        self.problem: RowScore | None = None
        self._problems = RewardProblems(telemetry)
        self._names = [settings.label for settings, _ in models]

    def begin(self, prompts: Sequence[Prompt], group_size: int) -> None:
        """Set the prompts of the rows that are scored next, each of `group_size` rows."""
        self._problems.begin([prompt.location for prompt in prompts], group_size)
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
        self.problem, of_functions = None, torch.zeros(len(scores), dtype=torch.float64)
        if self._functions is not None:
            self._functions(**row, vision=vision, columns=columns)
            self.numbers, self.problem = self._functions.numbers, self._functions.problem
            self.parts = torch.cat([self._functions.parts, scores], dim=1)
            of_functions = self._functions.exact
            self.exact = self.exact + of_functions
        self._report(of_functions.tolist(), scores.tolist(), weighted.tolist())
        return self.exact.float()

    def _report(self, of_functions: list[float], scores: list[list[float]], weighted: list[list[float]]) -> None:
        """Count and log the rows without a sum; the functions have told of those without theirs."""
        found = []
        for row, (own, total) in enumerate(zip(of_functions, self.exact.tolist(), strict=True)):
            if math.isfinite(own) and not is_reward(total):
                beyond = row_score([too_large([own, *weighted[row]])], is_joint=False)
                found.append((row, self._problem_of(row, scores[row]) or beyond))
                self._telemetry.reward_errored(found[-1][1].problem)
        self.problem = self.problem or (found[0][1] if found else None)
        self._problems.report(len(scores), found)

    def _problem_of(self, row: int, scores: list[float]) -> RowScore | None:
        """Return why a row lacks the score of a model; None if it has those of all."""
        for name, model, score in zip(self._names, self.models, scores, strict=True):
            if isinstance(model, OwnTokenizerReward) and row in model.problems:
                return model.problems[row]
            if not math.isfinite(score):
                said = f"reward model {name} gave no finite score"
                return RowScore(problem="invalid", text=f"{said}: {score}", cause=said)
        return None


Reward: TypeAlias = SummedReward | FunctionReward | RewardPool


def load_reward(
    config: Config,
    tokenizer: Any,
    device: torch.device,
    functions: FunctionReward | RewardPool | None,
    telemetry: Telemetry,
) -> Reward | None:
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
