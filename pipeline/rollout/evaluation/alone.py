"""The evaluation of one model outside a run: engine, rewards and numbers are those of a run's evaluation."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from pipeline.config.evaluation import held_out
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, FieldError, RewardError, ShapeError
from pipeline.models.device import process_device
from pipeline.models.loading import load_actor, load_tokenizer, refuse_large_tokenizer
from pipeline.progress import Telemetry
from pipeline.prompts.rendering import first_tokens
from pipeline.rollout.first_rollouts import note_first_prompts
from pipeline.rollout.generation.engines import load_engine
from pipeline.rollout.generation.weights import ModelWeights
from pipeline.rollout.loader import (
    load_environment,
    load_functions,
    load_vision,
    new_roller,
    with_float32_logits,
)
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.reward.row_rewards import RowRewards
from pipeline.rollout.reward.summed import load_reward
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
        roller, reward = _roller(config, stack)
        results: list[list[PromptResult]] = [[] for _ in plan.names]
        done, problem = 0, ""
        for file, position, prompts in plan.tickets():
            try:
                rolled = roller.of(file).roll(position, prompts)
                results[file] += rolled.results
                for result in rolled.results:
                    on_result(file, result)
                problem = problem or _problem_of(roller, reward) or str(rolled.refused or "")
            except (RewardError, FieldError, ShapeError) as error:
                problem = problem or _problem_of(roller, reward) or str(error)
                log.warning("held-out prompts without a result: file=%s position=%d prompts=%d reason=%s",
                            plan.names[file], position, prompts, error)  # fmt: skip
            done += prompts
            on_progress(done, sum(plan.prompts))
    if not any(results):
        raise ConfigError(f"evaluation.files: no prompt has a result: {problem or 'no row has a reward'}")
    return plan.evaluation(-1, "", results, unix_s=time.time())


def _problem_of(roller: LocalRoller, reward: RowRewards | None) -> str:
    """Return why a row of the last ticket has no reward; empty if each has one."""
    if roller.turns is not None and (failed := roller.turns.pool.problem) is not None:
        return f"rollout.environment: {failed.text}"
    return reward.problem.text if reward is not None and reward.problem is not None else ""


def _roller(config: Config, stack: contextlib.ExitStack) -> tuple[LocalRoller, RowRewards | None]:
    """Return a roller with those of the held-out files, and the reward; `stack` closes them."""
    telemetry = Telemetry(log_texts=config.daemon.log_texts)
    tokenizer = load_tokenizer(config.model.actor)
    vision = load_vision(config, tokenizer)
    note_first_prompts(config, tokenizer)
    functions = load_functions(config, tokenizer, telemetry, stack)
    environment = load_environment(config, tokenizer, telemetry, stack)
    device = process_device()
    reward = load_reward(config, tokenizer, device, functions, telemetry)
    actor = load_actor(config.model.actor, dtype=config.model.dtype, device=device)
    with_float32_logits(config, actor, first_tokens(config.prompts, config.daemon.seed, tokenizer), device)
    vocabulary = actor.config.get_text_config().vocab_size
    refuse_large_tokenizer(tokenizer, vocabulary, config.model.actor)
    engine = load_engine(config, actor, device, telemetry)
    stack.callback(engine.close)
    # GRPO needs no critic; `EvaluationRoller` sets the number of responses.
    maker = NaiveExperienceMaker(
        actor,
        None,
        reward,
        None,
        tokenizer,
        kl_coef=0.0,
        use_grpo=True,
        num_generation=2,
        inference_batch_size=config.rollout.inference_batch_size,
        drop_errored=True,
        telemetry=telemetry,
    )
    roller = new_roller(
        config,
        maker,
        prompts=held_out(config, config.evaluation.files[0]),
        weights=ModelWeights({}, engine),
        environment=environment,
        vision=vision,
        vocabulary=vocabulary,
    )
    stack.callback(roller.close)
    return roller, reward
