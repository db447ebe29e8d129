"""Loading of a roller: models, reward, engine and prompts of one configuration, tried on one prompt.

It is loaded in the worker's own process, or on another machine (`pipeline.rollout.remote`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from pipeline.config.schema import Config
from pipeline.errors import ConfigError, RewardError
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.critic import Critic
from pipeline.models.device import process_device
from pipeline.models.loading import load_actor, load_critic, load_reward_model, refuse_large_tokenizer, sees_images
from pipeline.models.lora import adapt, published
from pipeline.models.reward_model import SequenceReward
from pipeline.models.weights.probe import answer, check
from pipeline.prompts import PromptSource, first_tokens
from pipeline.rollout.generation.engines import load_engine
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.reward.functions import FunctionReward, load_reward_function
from pipeline.rollout.reward.pool import RewardPool
from pipeline.rollout.reward.problems import RewardProblems
from pipeline.rollout.roller import LocalRoller, ModelWeights, refuse_broken_reward
from pipeline.rollout.vision_prompts import VisionPrompts
from pipeline.storage.weights_header import Probe, WeightsVersion

RowCallback = Callable[[Sequence[float] | None], None]
"""Called with the parts of each row's reward, in the order of rows; None for a row without a reward."""


class Telemetry(Protocol):
    """Progress callbacks: `RolloutMetrics` locally, `NodeTelemetry` remotely."""

    def activity(self, name: str) -> AbstractContextManager[None]:
        """Return a context that counts the time of its block for an activity."""

    def beat(self, *, rows_done: int = 0, rows: int = 0, tokens: int | None = None) -> None:
        """Write a heartbeat, and show the progress of the stage if `rows` is above 0."""

    def out_of_memory(self, during: str) -> None:
        """Count a call that ran out of the device's memory."""

    def reward_errored(self, reason: str) -> None:
        """Count a row without a reward."""


def load_roller(
    config: Config,
    tokenizer: Any,
    telemetry: Telemetry,
    on_row: RowCallback,
    *,
    texts: bool,
    device: torch.device | None = None,
) -> LocalRoller:
    """Load the models and the reward, and try both on one prompt.

    Args:
        config: The instance's.
        tokenizer: The actor's.
        telemetry: Receives progress.
        on_row: Called with the parts of each reward.
        texts: Whether the error may quote the message of a reward function.
        device: The models'; None for this process's.

    Returns:
        The roller, ready for the first ticket.

    Raises:
        ConfigError: If one cannot be loaded, or the reward function does not return one finite number a row.
    """
    vision = VisionPrompts(config.model.actor, tokenizer) if sees_images(config.model.actor) else None
    # Before the models, which take long: a reward that cannot be loaded fails at once. And before the device: the
    # functions' processes are forks of this one as long as it has no GPU.
    functions = reward_functions(config, tokenizer, telemetry, on_row) if config.rollout.reward_functions else None
    device = device or process_device()
    reward = load_reward(config, device, functions)
    actor = load_actor(config.model.actor, dtype=config.model.dtype, device=device)
    reference = load_reference(config, actor, device)
    critic = None
    if config.rollout.algorithm == "ppo":
        critic = (
            Critic.from_actor(actor)
            if config.model.critic is None
            else load_critic(config.model.critic, dtype=config.model.dtype, device=device)
        )
    refuse_large_tokenizer(tokenizer, actor.config.get_text_config().vocab_size, config.model.actor)
    # After the critic, which is made of the unadapted backbone.
    adapt(actor, config.model, seed=config.daemon.seed)
    targets = {f"actor.{name}": tensor for name, tensor in published(actor).items()}
    if critic is not None:
        targets |= {f"critic.{name}": tensor for name, tensor in critic.state_dict().items()}
    rollout = config.rollout
    engine = load_engine(
        rollout.engine,
        actor,
        directory=Path(config.model.actor),
        device=device,
        on_progress=telemetry.beat,
    )
    maker = NaiveExperienceMaker(
        actor,
        critic,
        reward,
        reference,
        tokenizer,
        kl_coef=config.rollout_kl_coef,
        gamma=rollout.gamma,
        lam=rollout.lam,
        use_grpo=rollout.algorithm == "grpo",
        num_generation=rollout.num_generations,
        inference_batch_size=rollout.inference_batch_size,
        logits_forward_batch_size=rollout.logits_forward_batch_size,
        # In float32 the sampler's log-probs equal the trainer's up to rounding; in lower precision they are recomputed.
        reuse_sampling_log_probs=config.model.dtype == "float32",
        drop_errored=True,
        # The insert gate checks all values, and refused rows are kept in quarantine.
        refuse_not_finite=False,
        generator=engine,
        stage=telemetry.activity,
        on_progress=telemetry.beat,
        on_out_of_memory=telemetry.out_of_memory,
    )
    weights = ModelWeights(targets, engine, weights_check(config, actor, tokenizer, device))
    source = PromptSource(config.prompts.path, config.daemon.seed)
    roller = LocalRoller(
        maker,
        source,
        tokenizer,
        weights,
        seed=config.daemon.seed,
        lengths=config.lengths,
        vocabulary=actor.config.get_text_config().vocab_size,
        template=config.prompts.template,
        generate_kwargs={
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "stop_token_ids": rollout.stop_token_ids,
        },
        vision=vision,
        log_texts=config.daemon.log_texts,
    )
    if isinstance(functions, RewardPool):
        problems, group_size = functions.problems, config.group_size
        roller.on_prompts = lambda prompts: problems.begin([prompt.place for prompt in prompts], group_size)
    with contextlib.ExitStack() as undone:
        undone.callback(roller.close)
        try:
            refuse_broken_reward(roller, config.row_bytes)
        except RewardError as error:
            problem = functions.problem if isinstance(functions, RewardPool) else None
            message = (
                error.told(texts=texts) if problem is None else problem.text if texts else problem.bare or problem.text
            )
            raise ConfigError(f"rollout.reward_functions: {message}, prompt {roller.last_place}") from error
        undone.pop_all()
    return roller


def load_reference(config: Config, actor: Any, device: torch.device) -> Any:
    """Return the reference model: None if no KL weight is above 0, and with LoRA the actor, whose base is frozen."""
    if config.rollout_kl_coef == 0 and config.trainer_kl_coef == 0:
        return None
    path = config.model.reference or config.model.actor
    if config.model.lora_rank and path == config.model.actor:
        return actor
    return load_actor(path, dtype=config.model.dtype, device=device, field="model.reference")


def weights_check(config: Config, actor: Any, tokenizer: Any, device: torch.device) -> Callable[[WeightsVersion], None]:
    """Return a function that compares the actor's answer to the probe with the published one; without one it passes."""
    tokens = first_tokens(config.prompts.path, config.daemon.seed, config.prompts.template, tokenizer)

    def check_fetched(fetched: WeightsVersion) -> None:
        if fetched.probe is not None:
            own = answer(actor, tokens, device) if tokens else Probe(0.0, 0)
            check(fetched, own, next(actor.parameters()).dtype)

    return check_fetched


def load_reward(config: Config, device: torch.device, functions: FunctionReward | RewardPool | None) -> Any:
    """Return the configured reward model, or the functions, or the sum of both."""
    if config.model.reward is None:
        return functions
    model = load_reward_model(config.model.reward, dtype=config.model.dtype, device=device)
    if functions is None:
        return model
    return SummedReward(model, functions)


class SummedReward:
    """The sum of a reward model's score and of the functions'.

    Attributes:
        model: The reward model's network, which bounds the rows of a call.
    """

    def __init__(self, reward_model: SequenceReward, functions: FunctionReward | RewardPool) -> None:
        self.model = reward_model.model
        self._reward_model = reward_model
        self._functions = functions

    def __call__(self, *, vision: VisionRows | None = None, **row: Any) -> torch.Tensor:
        """Return the sums, ``(B,)``; arguments as for a `FunctionReward`."""
        scores = self._reward_model(**row)
        return scores + self._functions(**row, vision=vision).to(scores.device)


def reward_functions(
    config: Config, tokenizer: Any, telemetry: Telemetry, on_row: RowCallback = lambda parts: None
) -> FunctionReward | RewardPool:
    """Return the reward functions, in processes that can be killed unless all are this package's own.

    A heartbeat is written once a row.

    Raises:
        ConfigError: If one cannot be loaded.
    """
    rollout = config.rollout
    if not rollout.reward_timeout_s or all(name.startswith("pipeline.") for name in rollout.reward_functions):
        loaded = [load_reward_function(name) for name in rollout.reward_functions]
        return FunctionReward(loaded, tokenizer, telemetry.beat, on_row)
    pool = RewardPool(
        rollout.reward_functions,
        config.model.actor,
        timeout_s=rollout.reward_timeout_s,
        processes=rollout.reward_processes,
        on_problem=telemetry.reward_errored,
        on_progress=telemetry.beat,
        on_row=on_row,
        problems=RewardProblems(log_texts=config.daemon.log_texts),
        may_fork=True,
    )
    pool.wait_ready()
    return pool
