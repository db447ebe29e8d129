"""The rollers of held-out files: prompts in, results out, with the models and the engine of a worker's own roller."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from pipeline.config.evaluation import held_out
from pipeline.config.rewards import part_names
from pipeline.config.schema import Config
from pipeline.prompts.source import PromptSource
from pipeline.rollout.environment.turn_rows import actions_of
from pipeline.rollout.generation.interface import Completed
from pipeline.rollout.prompt_batch import PromptBatch
from pipeline.rollout.roller import Begun, LocalRoller, Rolled, versions_of
from pipeline.rollout.sampling import held_out_sampling
from pipeline.telemetry.evaluations import PromptResult

_ROWS_BELOW = 8

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Below:
    """Says once that all rewards so far lie below the bound: it may be the bound that makes pass@1 0."""

    file: str
    bound: float
    function: str | None
    rows: int = 0
    largest: float = -math.inf
    has_said: bool = False

    def count(self, values: Tensor) -> None:
        if not len(values):
            return
        self.rows += len(values)
        self.largest = max(self.largest, float(values.float().max()))
        if not self.has_said and self.rows >= _ROWS_BELOW and self.largest < self.bound:
            self.has_said = True
            log.warning(
                "no response is right, all rewards are below evaluation.pass_reward: file=%s rows=%d largest=%g "
                "pass_reward=%g of=%s; evaluation.pass_function names the part that counts, beside penalties",
                self.file, self.rows, self.largest, self.bound, self.function or "the whole reward",
            )  # fmt: skip


class EvaluationRoller(LocalRoller):
    """Samples and scores the prompts of one held-out file.

    Its samples depend on the run's seed, the file's number and the position alone. So they are the same for each
    version, and on each worker.
    """

    def __init__(self, base: LocalRoller, config: Config, file: int) -> None:
        """Take over the models of another roller.

        Args:
            base: The worker's own roller.
            config: The instance's.
            file: Number of the file in `evaluation.files`.
        """
        evaluation, seed = config.evaluation, config.daemon.seed
        super().__init__(
            **{field.name: getattr(base, field.name) for field in dataclasses.fields(base) if field.init}
            | {
                "source": PromptSource(held_out(config, evaluation.files[file]), seed),
                "seed": xxhash.xxh3_64_intdigest(f"{seed}:evaluation:{file}".encode()) >> 1,
                "sampling": held_out_sampling(config, base.sampling, base.tokenizer),
                "group_size": evaluation.num_generations,
            }
        )
        # As float32 on both sides: 0.7 of a reward model is 0.7.
        self._pass_reward = torch.tensor(evaluation.pass_reward, dtype=torch.float32)
        self._pass_part = (
            None if evaluation.pass_function is None else part_names(config).index(evaluation.pass_function)
        )
        self._below = _Below(str(evaluation.files[file]), float(self._pass_reward), evaluation.pass_function)
        self._response_tokens = evaluation.max_new_tokens

    def begin(self, position: int, prompts: int, *, response_tokens: int | None = None) -> Begun:
        """Render prompts; as `LocalRoller.begin`."""
        return super().begin(position, prompts, response_tokens=response_tokens or self._response_tokens)

    def finish(self, begun: Begun, batch: PromptBatch, completed: Sequence[Completed]) -> Rolled:
        """Score the responses; a prompt with a row without a reward has no result.

        Raises:
            RewardError: If a reward function of this package raised, or no row has a reward.
        """
        self._announce(begun, batch.group_size)
        found = self.maker.scores(batch, batch.joined(completed)).double()
        scores = found.reshape(-1, batch.group_size)
        counted = scores
        if self._pass_part is not None:
            counted = self.maker.reward_model.parts[:, self._pass_part].reshape(scores.shape)
        self._below.count(counted[scores.isfinite()])
        results = []
        for (prompt, _), rewards, passing, request in zip(begun.kept, scores, counted, completed, strict=True):
            if not bool(torch.isfinite(rewards).all()):
                continue
            lengths = [actions_of(response) for response in request.responses]
            results.append(
                PromptResult(
                    prompt.position,
                    batch.group_size,
                    int((passing.float() >= self._pass_reward).sum()),
                    float(rewards.mean()),
                    sum(lengths) / len(lengths),
                    sum(response.finish_reason == "length" for response in request.responses),
                )
            )
        failed = begun.prompts - len(results)
        return Rolled(None, failed, begun.refused, versions=versions_of(completed), results=tuple(results))

    def close(self) -> None:
        """Close the file; engine and models are the other roller's."""
        self.source.close()
