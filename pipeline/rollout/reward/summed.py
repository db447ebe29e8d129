"""The reward of a run with reward models: the weighted sum of their scores and of the functions'."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pipeline.config.rewards import RewardModel, reward_models
from pipeline.config.schema import Config
from pipeline.models.packing import pack_scored_rows
from pipeline.models.reward_model import SequenceReward
from pipeline.progress import Telemetry
from pipeline.prompts.types import Prompt
from pipeline.rollout.reward.given_rows import GivenRows
from pipeline.rollout.reward.own_tokenizer import OwnTokenizerReward, reward_model_of
from pipeline.rollout.reward.row_rewards import RewardProblems, RowRewards
from pipeline.rollout.reward.wire import RowScore


class SummedReward(RowRewards):
    """The weighted sum of the scores of functions and reward models; see `RowRewards` for attributes.

    Args:
        models: The reward models with their settings, at least one.
        functions: The functions; None: there are none. Where none of them applies to a row, the models' scores stand
            alone.
        telemetry: As for `RowRewards`.

    Attributes:
        models: The reward models.
    """

    def __init__(
        self,
        models: Sequence[tuple[RewardModel, SequenceReward]],
        functions: RowRewards | None = None,
        telemetry: Telemetry = Telemetry.none(),
    ) -> None:
        labels = [settings.label for settings, _ in models]
        super().__init__(
            [*(functions._names if functions else []), *labels],
            telemetry,
            weights=[*(functions._weights if functions else []), *(settings.weight for settings, _ in models)],
            labels=[*(functions.labels if functions else []), *labels],
            problems=RewardProblems(telemetry),
        )
        self.models = [model for _, model in models]
        self._functions = functions

    def begin(self, prompts: Sequence[Prompt], group_size: int) -> None:
        """Set the prompts of the rows that are scored next in one call, each of `group_size` rows."""
        super().begin(prompts, group_size)
        for model in self.models:
            if isinstance(model, OwnTokenizerReward):
                model.begin(prompts, group_size)

    def bound(self, most_rows: int | None) -> None:
        """Set the most rows that the functions get at once; the models cut their own passes."""
        if self._functions is not None:
            self._functions.bound(most_rows)

    def _scores(self, rows: GivenRows, first: int) -> list[RowScore]:
        row = rows._asdict()
        scores = torch.stack([model(**row).cpu() for model in self.models], dim=1).tolist()
        own = [RowScore()] * len(scores) if self._functions is None else self._functions._divided(rows)
        return [
            one if one.problem else self._with_models(at, one, of_models)
            for at, (one, of_models) in enumerate(zip(own, scores, strict=True))
        ]

    def _with_models(self, row: int, functions: RowScore, scores: list[float]) -> RowScore:
        """Return the score of a row with those of the models, or why it lacks one of these."""
        names = self._names[-len(scores) :]
        for name, model, score in zip(names, self.models, scores, strict=True):
            if isinstance(model, OwnTokenizerReward) and row in model.problems:
                return model.problems[row]
            if not math.isfinite(score):
                said = f"reward model {name} gave no finite score"
                return RowScore(problem="invalid", text=f"{said}: {score}", cause=said)
        return RowScore(parts=[*functions.parts, *scores], numbers=functions.numbers)


def load_reward(
    config: Config,
    tokenizer: Any,
    device: torch.device,
    functions: RowRewards | None,
    telemetry: Telemetry,
) -> RowRewards | None:
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
    if config.trainer.packing is not False:
        pack_scored_rows([one.model for _, one in models if one.reads_last_token], device)
    return SummedReward(models, functions, telemetry) if models else functions
