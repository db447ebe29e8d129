"""The evaluation of one model outside a run: engine, rewards and numbers are those of a run's evaluation."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from pipeline.config.evaluation import held_out
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, FieldError, RewardError, ShapeError
from pipeline.models.loading import load_tokenizer
from pipeline.progress import Telemetry
from pipeline.rollout.first_rollouts import note_first_prompts
from pipeline.rollout.loader import new_roller
from pipeline.rollout.reward.row_rewards import RowRewards
from pipeline.rollout.roller import LocalRoller
from pipeline.runtime.evaluation_plan import EvaluationPlan
from pipeline.telemetry.evaluations import Evaluation, PromptResult

log = logging.getLogger(__name__)


def evaluate(
    config: Config,
    *,
    on_progress: Callable[[int, int], None] = lambda done, prompts: None,
    on_result: Callable[[int, PromptResult], None] = lambda file, result: None,
) -> Evaluation:
    """Return the evaluation of `model.actor` on `evaluation.files`.

    Args:
        config: A configuration with at least one file; critic and reference are not read, of the training prompts the
            first one.
        on_progress: Called after each ticket with the prompts done and all prompts.
        on_result: Called with the number of a file in `evaluation.files`, and a result of it.

    Raises:
        ConfigError: If a model, a file or a reward function cannot be loaded, or no prompt gets a result.
    """
    plan = EvaluationPlan.of(config)
    assert plan is not None
    with contextlib.ExitStack() as stack:
        roller = _roller(config, stack)
        results: list[list[PromptResult]] = [[] for _ in plan.names]
        done, problem = 0, ""
        for file, position, prompts in plan.tickets():
            try:
                rolled = roller.of(file).roll(position, prompts)
                results[file] += rolled.results
                for result in rolled.results:
                    on_result(file, result)
                problem = problem or _problem_of(roller) or str(rolled.refused or "")
            except (RewardError, FieldError, ShapeError) as error:
                problem = problem or _problem_of(roller) or str(error)
                log.warning("held-out prompts without a result: file=%s position=%d prompts=%d reason=%s",
                            plan.names[file], position, prompts, error)  # fmt: skip
            done += prompts
            on_progress(done, sum(plan.prompts))
    if not any(results):
        raise ConfigError(f"evaluation.files: no prompt has a result: {problem or 'no row has a reward'}")
    return plan.evaluation(-1, "", results, unix_s=time.time())


def _problem_of(roller: LocalRoller) -> str:
    """Return why a row of the last ticket has no reward; empty if each has one."""
    if roller.turns is not None and (failed := roller.turns.pool.problem) is not None:
        return f"rollout.environment: {failed.text}"
    reward: RowRewards | None = roller.maker.reward_model
    return reward.problem.text if reward is not None and reward.problem is not None else ""


def _roller(config: Config, stack: contextlib.ExitStack) -> LocalRoller:
    """Return a roller with those of the held-out files; `stack` closes them."""
    tokenizer = load_tokenizer(config.model.actor)
    note_first_prompts(config, tokenizer)
    # Samples and rewards alone: no critic, no reference, no log-probs, and the adapters of a run are in its weights.
    # `EvaluationRoller` sets the number of responses.
    config = config.changed(
        "rollout", algorithm="grpo", num_generations=2, advantages=None, kl_coef=0.0, log_probs="trainer"
    )
    config = config.changed("trainer", kl_coef=0.0).changed("model", lora_rank=0)
    telemetry = Telemetry(log_texts=config.daemon.log_texts)
    return new_roller(config, tokenizer, telemetry, stack, prompts=held_out(config, config.evaluation.files[0]))
