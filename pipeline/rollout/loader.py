"""What a rollout worker rolls out with: models, reward, engine and prompts of one configuration, loaded and tried.

A worker has them in its own process, or on another machine (`pipeline.rollout.remote`); it cannot tell.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from pipeline.config.schema import Config
from pipeline.errors import ConfigError, RewardError
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.critic import Critic
from pipeline.models.loading import load_actor, load_critic, load_reward_model, sees_images
from pipeline.models.lora import adapt, published
from pipeline.models.weights.probe import answer, check
from pipeline.prompts import PromptSource, first_tokens
from pipeline.rollout.generation.engines import load_engine
from pipeline.rollout.generation.interface import ResponseGenerator
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.reward_pool import RewardPool
from pipeline.rollout.rewards import FunctionReward, load_reward_function
from pipeline.rollout.roller import Rolled, Roller, refuse_broken_reward
from pipeline.rollout.vision_prompts import VisionPrompts
from pipeline.storage.weights_header import Probe, WeightsVersion

Scored = Callable[[Sequence[float] | None], None]
"""Told the parts of each row's reward, in order; None for a row without one."""


class Telemetry(Protocol):
    """Whom the work tells how it goes: `RolloutMetrics`, or what stands for it on another machine."""

    def activity(self, name: str) -> AbstractContextManager[None]:
        """Spend the block on an activity."""

    def beat(self) -> None:
        """Note that the work goes on."""

    def reward_errored(self, reason: str) -> None:
        """Count a row whose functions gave no reward."""


class WeightsSource(Protocol):
    """Where weights come from: shared memory (`WeightsReader`), or a copy that was sent (`WeightsCopy`)."""

    def fetch(self, into: Mapping[str, torch.Tensor]) -> WeightsVersion:
        """Copy the newest version into tensors, by published name."""


@dataclasses.dataclass(frozen=True)
class RolloutModels:
    """Rolls prompts out, with weights that are replaced in place.

    Attributes:
        roller: Makes experience of prompts.
        engine: What generates; it is paused while weights are copied, and told of them.
        targets: The tensors that published weights are copied into, by published name.
        check: Called with each version fetched; raises WeightsMismatchError if the model does not compute with it.
    """

    roller: Roller
    engine: ResponseGenerator | None
    targets: Mapping[str, torch.Tensor]
    check: Callable[[WeightsVersion], None] = lambda fetched: None

    def roll(self, position: int, prompts: int) -> Rolled:
        """Roll out the prompts from a position on; see `Roller.roll`."""
        return self.roller.roll(position, prompts)

    def fetch(self, source: WeightsSource) -> WeightsVersion:
        """Compute with the newest weights from here on; return which they are.

        Raises:
            WeightsMismatchError: If the model does not compute what they say.
            WeightsError: If they are torn, or not this model's.
        """
        if self.engine is not None:
            self.engine.pause()
        fetched = source.fetch(self.targets)
        if self.engine is not None:
            self.engine.update_weights(_of_actor(self.targets))
            self.engine.resume()
        self.check(fetched)
        return fetched

    def close(self) -> None:
        """Close the prompts."""
        self.roller.close()


def load_models(
    config: Config, tokenizer: Any, device: torch.device, telemetry: Telemetry, scored: Scored, *, texts: bool
) -> RolloutModels:
    """Load the models and the reward, and try both on one prompt.

    Args:
        config: The instance's.
        tokenizer: The actor's.
        device: Where they compute.
        telemetry: Told how the work goes.
        scored: Told the parts of each reward.
        texts: Whether the error may quote what a reward function said.

    Raises:
        ConfigError: If one cannot be loaded, or the reward function does not give one finite number a row.
    """
    vision = VisionPrompts(config.model.actor, tokenizer) if sees_images(config.model.actor) else None
    # Before the models: a reward that does not load should not take as long as they do to say so.
    reward = load_reward(config, tokenizer, device, telemetry, scored)
    actor = load_actor(config.model.actor, dtype=config.model.dtype, device=device)
    reference = load_actor(config.model.reference or config.model.actor, dtype=config.model.dtype, device=device)
    critic = None
    if config.rollout.algorithm == "ppo":
        critic = (
            Critic.from_actor(actor)
            if config.model.critic is None
            else load_critic(config.model.critic, dtype=config.model.dtype, device=device)
        )
    # After the critic, which is made of the backbone as it was.
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
        # In float32 the sampler's own log-probs are the trainer's but for rounding; below that they are taken anew.
        reuse_sampling_log_probs=config.model.dtype == "float32",
        drop_errored=True,
        # The insert gate looks at all of it, and what it refuses is kept for a look.
        refuse_not_finite=False,
        generator=engine,
        stage=telemetry.activity,
        on_progress=telemetry.beat,
    )
    source = PromptSource(config.prompts.path, config.daemon.seed)
    roller = Roller(
        maker,
        source,
        tokenizer,
        seed=config.daemon.seed,
        max_length=rollout.max_length,
        vocabulary=actor.config.get_text_config().vocab_size,
        template=config.prompts.template,
        generate_kwargs={
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "stop_token_ids": rollout.stop_token_ids,
        },
        device=device,
        vision=vision,
        log_texts=config.daemon.log_texts,
    )
    with contextlib.ExitStack() as undone:
        undone.callback(roller.close)
        try:
            refuse_broken_reward(roller, config.row_bytes)
        except RewardError as error:
            problem = reward.problem if isinstance(reward, RewardPool) else None
            told = (
                error.told(texts=texts) if problem is None else problem.text if texts else problem.bare or problem.text
            )
            raise ConfigError(f"rollout.reward_functions: {told}") from error
        undone.pop_all()
    return RolloutModels(roller, engine, targets, weights_check(config, actor, tokenizer, device))


def weights_check(config: Config, actor: Any, tokenizer: Any, device: torch.device) -> Callable[[WeightsVersion], None]:
    """Return what compares the actor's answer with the one that was published with its weights, if one was."""
    tokens = first_tokens(config.prompts.path, config.daemon.seed, config.prompts.template, tokenizer)

    def check_fetched(fetched: WeightsVersion) -> None:
        if fetched.probe is not None:
            mine = answer(actor, tokens, device) if tokens else Probe(0.0, 0)
            check(fetched, mine, next(actor.parameters()).dtype)

    return check_fetched


def load_reward(
    config: Config,
    tokenizer: Any,
    device: torch.device,
    telemetry: Telemetry,
    scored: Scored = lambda parts: None,
) -> Any:
    """Return the configured reward model, or functions, or both added up; progress is told once a row."""
    functions = reward_functions(config, tokenizer, telemetry, scored) if config.rollout.reward_functions else None
    if config.model.reward is None:
        return functions
    model = load_reward_model(config.model.reward, dtype=config.model.dtype, device=device)
    if functions is None:
        return model

    def both(*, vision: VisionRows | None = None, **row: Any) -> torch.Tensor:
        return model(**row) + functions(**row, vision=vision).to(device)

    return both


def reward_functions(
    config: Config, tokenizer: Any, telemetry: Telemetry, scored: Scored = lambda parts: None
) -> FunctionReward | RewardPool:
    """Return the reward functions: in processes that can be killed, unless they are this package's own.

    Raises:
        ConfigError: If one cannot be loaded.
    """
    rollout = config.rollout
    if not rollout.reward_timeout_s or all(name.startswith("pipeline.") for name in rollout.reward_functions):
        loaded = [load_reward_function(name) for name in rollout.reward_functions]
        return FunctionReward(loaded, tokenizer, telemetry.beat, scored)
    pool = RewardPool(
        rollout.reward_functions,
        config.model.actor,
        timeout_s=rollout.reward_timeout_s,
        processes=rollout.reward_processes,
        on_problem=telemetry.reward_errored,
        on_progress=telemetry.beat,
        on_row=scored,
        log_texts=config.daemon.log_texts,
    )
    pool.wait_ready()
    return pool


def _of_actor(targets: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("actor."): tensor for name, tensor in targets.items() if name.startswith("actor.")}
