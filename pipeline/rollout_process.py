"""A rollout worker's process: models, prompts and reward around `pipeline.rollout`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.arena import Arena
from pipeline.config import Config
from pipeline.devices import process_device
from pipeline.errors import ConfigError, ExitCode, MistrustedError, RewardError
from pipeline.experience_maker import NaiveExperienceMaker
from pipeline.generation.engines import load_engine
from pipeline.lora import adapt, published
from pipeline.models import Critic, load_actor, load_critic, load_reward_model, load_tokenizer, sees_images
from pipeline.pinned import pin_arena
from pipeline.probe import answer, check, probe_tokens
from pipeline.prompts import PromptSource
from pipeline.reward_pool import RewardPool
from pipeline.rewards import FunctionReward, load_reward_function
from pipeline.role import Report, RoleContext, monotonic_s, reward_source
from pipeline.roller import Roller, refuse_broken_reward
from pipeline.rollout import RolloutWorker
from pipeline.rollout_metrics import RolloutMetrics
from pipeline.rollout_samples import RolloutSamples
from pipeline.transport import BUFFER, Mailbox, Outbox, Sender, Traffic, worker_name
from pipeline.vision_prompts import VisionPrompts
from pipeline.vision_rows import VisionRows
from pipeline.weights_header import Probe, WeightsVersion

_IDLE_S = 0.25

log = logging.getLogger(__name__)


def run(config: Config, context: RoleContext) -> ExitCode:
    """Roll out tickets until told to stop."""
    torch.set_num_threads(config.rollout.threads)
    arena = Arena(context.folder / "arena")
    arena.populate()
    pinned = pin_arena(arena, process_device())
    context.metrics.gauge("rlhfd_arena_pinned_bytes").set(0 if pinned is None else pinned.nbytes)
    metrics = RolloutMetrics(context.metrics, reward_source=reward_source(config))
    traffic = Traffic(context.metrics)
    mailbox = Mailbox(context.folder, worker_name(context.index), traffic)
    outbox = Outbox(context.folder, BUFFER, traffic)
    worker = new_worker(config, context, arena, outbox, metrics)
    context.ready()
    waiting_since_s = monotonic_s()
    try:
        while not worker.finished:
            context.metrics.beat()
            context.reloaded()
            worker.draining |= context.stopping
            for message in mailbox.receive(0.0):
                worker.handle(message)
            if not worker.idle:
                metrics.ticket_came(monotonic_s() - waiting_since_s)
                worker.step()
                waiting_since_s = monotonic_s()
                continue
            metrics.in_flight(0)
            with metrics.waiting():
                for message in mailbox.receive(_IDLE_S):
                    worker.handle(message)
        return ExitCode.OK
    except MistrustedError:
        context.report(Report(state="mistrusted"))
        raise
    finally:
        worker.close()
        if pinned is not None:
            pinned.close()
        outbox.close(linger_s=1.0)
        mailbox.close()


def new_worker(
    config: Config, context: RoleContext, arena: Arena, sender: Sender, metrics: RolloutMetrics
) -> RolloutWorker:
    """Load the models and the reward, try both on one prompt, and introduce the worker to the buffer.

    Raises:
        ConfigError: If the reward function does not give one finite number a row.
    """
    device = process_device()
    tokenizer = load_tokenizer(config.model.actor)
    vision = VisionPrompts(config.model.actor, tokenizer) if sees_images(config.model.actor) else None
    # Before the models: a reward that does not load should not take as long as they do to say so.
    samples = RolloutSamples.of(config, tokenizer, context.index, monotonic_s)
    reward = load_reward(config, tokenizer, device, metrics, samples)
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
        on_progress=context.metrics.beat,
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
        # In float32 the sampler's own log-probs are the trainer's to 1e-5; below that they are taken anew.
        reuse_sampling_log_probs=config.model.dtype == "float32",
        drop_errored=True,
        # The insert gate looks at all of it, and what it refuses is kept for a look.
        refuse_not_finite=False,
        generator=engine,
        stage=metrics.activity,
        on_progress=context.metrics.beat,
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
    try:
        refuse_broken_reward(roller, config.row_bytes)
    except RewardError as error:
        # At the first start somebody looks on, who needs the whole of it.
        texts = config.daemon.log_texts or context.generation <= 1
        problem = reward.problem if isinstance(reward, RewardPool) else None
        told = error.told(texts=texts) if problem is None else problem.text if texts else problem.bare or problem.text
        raise ConfigError(f"rollout.reward_functions: {told}") from error
    return RolloutWorker(
        roller,
        arena,
        context.folder / "weights",
        targets,
        sender,
        metrics,
        index=context.index,
        clock=monotonic_s,
        group_size=config.group_size,
        checksum=config.buffer.checksum,
        log_texts=config.daemon.log_texts,
        samples=samples,
        engine=engine,
        check=weights_check(config, actor, tokenizer, device),
        initial_version=0 if config.trainer.kind == "external" else -1,
    )


def weights_check(config: Config, actor: Any, tokenizer: Any, device: torch.device) -> Callable[[WeightsVersion], None]:
    """Return what compares the actor's answer with the one that was published with its weights, if one was."""
    tokens = probe_tokens(config, tokenizer)

    def check_fetched(fetched: WeightsVersion) -> None:
        if fetched.probe is not None:
            mine = answer(actor, tokens, device) if tokens else Probe(0.0, 0)
            check(fetched, mine, next(actor.parameters()).dtype)

    return check_fetched


def load_reward(
    config: Config,
    tokenizer: Any,
    device: torch.device,
    metrics: RolloutMetrics,
    samples: RolloutSamples | None = None,
) -> Any:
    """Return the configured reward model, or functions, or both added up; progress is told once a row."""
    functions = reward_functions(config, tokenizer, metrics, samples) if config.rollout.reward_functions else None
    if config.model.reward is None:
        return functions
    model = load_reward_model(config.model.reward, dtype=config.model.dtype, device=device)
    if functions is None:
        return model

    def both(*, vision: VisionRows | None = None, **row: Any) -> torch.Tensor:
        return model(**row) + functions(**row, vision=vision).to(device)

    return both


def reward_functions(
    config: Config, tokenizer: Any, metrics: RolloutMetrics, samples: RolloutSamples | None = None
) -> FunctionReward | RewardPool:
    """Return the reward functions: in processes that can be killed, unless they are this package's own.

    Raises:
        ConfigError: If one cannot be loaded.
    """
    rollout = config.rollout
    scored: Callable[[Sequence[float] | None], None] = (lambda parts: None) if samples is None else samples.scored
    if not rollout.reward_timeout_s or all(name.startswith("pipeline.") for name in rollout.reward_functions):
        loaded = [load_reward_function(name) for name in rollout.reward_functions]
        return FunctionReward(loaded, tokenizer, metrics.beat, scored)
    pool = RewardPool(
        rollout.reward_functions,
        config.model.actor,
        timeout_s=rollout.reward_timeout_s,
        processes=rollout.reward_processes,
        on_problem=metrics.reward_errored,
        on_progress=metrics.beat,
        on_row=scored,
        log_texts=config.daemon.log_texts,
    )
    pool.wait_ready()
    return pool
