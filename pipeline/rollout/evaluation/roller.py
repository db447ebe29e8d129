"""The rollers of held-out files: prompts in, results out, with the models and the engine of a worker's own roller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from pipeline.config.evaluation import held_out
from pipeline.config.schema import Config
from pipeline.prompts.rendering import rendering_of
from pipeline.prompts.source import PromptSource
from pipeline.rollout.environment.turn_rows import actions_of
from pipeline.rollout.generation.interface import Completed, Responses
from pipeline.rollout.prompt_batch import PromptBatch
from pipeline.rollout.roller import Begun, LocalRoller, Rolled, SplitMaker
from pipeline.telemetry.evaluations import PromptResult


class ScoringMaker(SplitMaker, Protocol):
    """A maker that can score responses alone."""

    def scores(self, batch: PromptBatch, responses: Responses) -> Tensor:
        """Return the raw rewards, ``(rows,)`` float32, NaN for a row without one."""


class EvaluationRoller(LocalRoller):
    """Samples and scores the prompts of one held-out file.

    Its samples depend on the run's seed, the file's number and the position alone. So they are the same for each
    version, and on each worker.
    """

    def __init__(self, base: LocalRoller, maker: ScoringMaker, config: Config, file: int) -> None:
        """Take over the models of another roller.

        Args:
            base: The worker's own roller.
            maker: Its maker.
            config: The instance's.
            file: Number of the file in `evaluation.files`.
        """
        evaluation, seed = config.evaluation, config.daemon.seed
        super().__init__(
            maker,
            PromptSource(held_out(config, evaluation.files[file]), seed),
            base.tokenizer,
            base.weights,
            seed=xxhash.xxh3_64_intdigest(f"{seed}:evaluation:{file}".encode()) >> 1,
            lengths=base.lengths,
            vocabulary=base.vocabulary,
            template=rendering_of(config.prompts),
            generate_kwargs=_sampling(config),
            vision=base.vision,
            log_texts=config.daemon.log_texts,
        )
        self.turns = base.turns
        self._scoring = maker
        self._group_size = evaluation.num_generations
        self._pass_reward = evaluation.pass_reward
        self._response_tokens = evaluation.max_new_tokens

    def begin(self, position: int, prompts: int, *, response_tokens: int | None = None) -> Begun:
        """Render and pad prompts; as `LocalRoller.begin`."""
        return super().begin(position, prompts, response_tokens=response_tokens or self._response_tokens)

    def batch_of(self, begun: Begun) -> PromptBatch:
        """Return prompts with their sampling parameters, for the engine; as `LocalRoller.batch_of`."""
        return super().batch_of(begun).with_group_size(self._group_size)

    def finish(self, begun: Begun, batch: PromptBatch, completed: Sequence[Completed]) -> Rolled:
        """Score the responses; a prompt with a row without a reward has no result.

        Raises:
            RewardError: If a reward function of this package raised, or no row has a reward.
        """
        self._announce(begun)
        scores = self._scoring.scores(batch, batch.joined(completed)).double().reshape(-1, self._group_size)
        results = []
        for (prompt, _), rewards, request in zip(begun.kept, scores, completed, strict=True):
            if not bool(torch.isfinite(rewards).all()):
                continue
            lengths = [actions_of(response) for response in request.responses]
            results.append(
                PromptResult(
                    prompt.position,
                    self._group_size,
                    int((rewards >= self._pass_reward).sum()),
                    float(rewards.mean()),
                    sum(lengths) / len(lengths),
                    sum(response.finish_reason == "length" for response in request.responses),
                )
            )
        versions = {span.version for request in completed for response in request.responses for span in response.spans}
        failed = begun.prompts - len(results)
        return Rolled(None, failed, begun.refused, versions=tuple(sorted(versions)), results=tuple(results))

    def close(self) -> None:
        """Close the file; engine and models are the other roller's."""
        self._source.close()


def _sampling(config: Config) -> Mapping[str, Any]:
    evaluation, rollout = config.evaluation, config.rollout
    temperature = rollout.temperature if evaluation.temperature is None else evaluation.temperature
    return {
        **({"temperature": temperature} if temperature else {"do_sample": False}),
        "top_p": rollout.top_p if evaluation.top_p is None else evaluation.top_p,
        "top_k": rollout.top_k if evaluation.top_k is None else evaluation.top_k,
        "stop_token_ids": rollout.stop_token_ids,
    }
