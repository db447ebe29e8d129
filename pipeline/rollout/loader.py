"""Loading of a roller: models, reward, engine and prompts of one configuration, tried on one prompt.

It is loaded in the worker's own process, or on another machine (`pipeline.rollout.remote`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pipeline.config.losses import log_probs_by, worker_holds_actor
from pipeline.config.prompts import PromptsConfig
from pipeline.config.rewards import function_labels, reward_functions
from pipeline.config.schema import Config
from pipeline.errors import ConfigError, RewardError, WeightsMismatchError
from pipeline.experience.running_moments import SCORES
from pipeline.models.compiled_layers import Uses, compile_layers
from pipeline.models.critic import Critic
from pipeline.models.device import free_cached, process_device
from pipeline.models.float32_logits import compute_in_float32, use_float32_logits
from pipeline.models.fused_kernels import fuse
from pipeline.models.inputs import eval_mode
from pipeline.models.loading import (
    critic_of,
    load_actor,
    refuse_large_tokenizer,
    sees_images,
    shell,
)
from pipeline.models.lora import adapt, published
from pipeline.models.packing import pack_scored_rows, packs_scored_rows
from pipeline.models.pass_size import default_tokens
from pipeline.models.shared_prefix import prepare_shared_prefix
from pipeline.models.weights.probe import answer, check, tolerance_nats_a_token
from pipeline.models.weights.store import joined
from pipeline.progress import Telemetry
from pipeline.prompts.rendering import first_tokens, rendering_of
from pipeline.prompts.source import PromptSource
from pipeline.rollout.environment.pool import EnvironmentPool
from pipeline.rollout.environment.turns import TurnSettings
from pipeline.rollout.evaluation.roller import EvaluationRoller
from pipeline.rollout.first_rollouts import refuse_broken_reward
from pipeline.rollout.generation.engine_probe import (
    FP8_GAP_NATS,
    FP8_LEAST_MOVE_NATS,
    Judging,
    ModelProbe,
    PublishedProbe,
)
from pipeline.rollout.generation.engines import load_engine
from pipeline.rollout.generation.interface import Engine
from pipeline.rollout.generation.vllm.engine import EngineProcess
from pipeline.rollout.generation.vllm.engine import begin as begin_vllm
from pipeline.rollout.generation.weights import EngineWeights, ModelWeights, WorkerWeights
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.response_text import ResponseText, hidden_ids
from pipeline.rollout.reward.functions import FunctionReward, load_reward_function
from pipeline.rollout.reward.pool import RewardPool
from pipeline.rollout.reward.row_rewards import RewardProblems, RowRewards
from pipeline.rollout.reward.summed import load_reward
from pipeline.rollout.roller import LocalRoller
from pipeline.rollout.sampling import sampling_of
from pipeline.rollout.shaping import shaping_of
from pipeline.rollout.vision_prompts import VisionPrompts
from pipeline.runtime.run_inputs import changed_since_start
from pipeline.storage.weights_header import Probe, WeightsVersion

# A first prompt that cannot be rendered has no tokens; the engine can be asked about any.
_ANY_TOKENS = (0, 1)

log = logging.getLogger(__name__)


def load_roller(
    config: Config,
    tokenizer: Any,
    telemetry: Telemetry,
    *,
    texts: bool,
    device: torch.device | None = None,
    before_engine: Callable[[], None] = lambda: None,
) -> LocalRoller:
    """Return a roller that is ready for the first ticket: models and reward are tried on one prompt.

    `texts` says whether the error may quote the message of a reward function; the others are those of `new_roller`.

    Raises:
        ConfigError: If one cannot be loaded, or the reward function does not return one finite number a row.
    """
    with contextlib.ExitStack() as undone:
        roller = new_roller(
            config, tokenizer, telemetry, undone, device=device, begin=begin_vllm, before_engine=before_engine
        )
        _try_reward(config, roller, texts=texts)
        undone.pop_all()
        return roller


def new_roller(
    config: Config,
    tokenizer: Any,
    telemetry: Telemetry,
    stack: contextlib.ExitStack,
    *,
    prompts: PromptsConfig | None = None,
    device: torch.device | None = None,
    begin: Callable[[Config, torch.device], EngineProcess | None] = lambda config, device: None,
    before_engine: Callable[[], None] = lambda: None,
) -> LocalRoller:
    """Return the roller of a configuration; its reward has not been tried.

    Args:
        config: The instance's.
        tokenizer: The actor's.
        telemetry: Receives progress and events.
        stack: Closes the roller, or what has been loaded of it.
        prompts: The prompts of its tickets; None for those of the run.
        device: The models'; None for this process's.
        begin: Begins the engine's process, before the models are loaded.
        before_engine: Called before the engine takes memory of the card.

    Raises:
        ConfigError: If a part cannot be loaded.
    """
    vision = load_vision(config, tokenizer)
    # Before the models, which take long: a reward that cannot be loaded fails at once. And before the device: the
    # functions' processes are forks of this one as long as it has no GPU.
    functions = load_functions(config, tokenizer, telemetry, stack)
    environment = load_environment(config, tokenizer, telemetry, stack)
    device = device or process_device()
    # After the forks, which would hold its link open.
    if (begun := begin(config, device)) is not None:
        stack.callback(begun.close)
    reward = load_reward(config, tokenizer, device, functions, telemetry)
    tokens = first_tokens(config.prompts, config.daemon.seed, tokenizer)
    models = _load_models(config, tokenizer, tokens, device)
    # Such as of an actor that a critic was made of: the engine takes what is free.
    free_cached()
    before_engine()
    engine = load_engine(config, models.actor, device, telemetry, begun)
    stack.callback(engine.close)
    if config.rollout.deterministic and not getattr(engine, "deterministic", False):
        log.warning("replays will not repeat bit for bit, the engine cannot be deterministic: engine=%s device=%s",
                    config.rollout.engine, device)  # fmt: skip
    maker = _new_maker(config, models, reward, tokenizer, telemetry)
    sampling = sampling_of(config, tokenizer, models.vocabulary)
    roller = LocalRoller(
        maker,
        PromptSource(prompts or config.prompts, config.daemon.seed),
        tokenizer,
        _weights_of(config, models, engine, maker, tokens, device),
        seed=config.daemon.seed,
        lengths=config.lengths,
        vocabulary=models.vocabulary,
        template=rendering_of(config.prompts),
        sampling=sampling,
        vision=vision,
        turns=environment,
        cuts_prompts=config.rollout.long_prompts == "cut_left",
        telemetry=telemetry,
    )
    held_out = [EvaluationRoller(roller, config, file) for file in range(len(config.evaluation.files))]
    roller = dataclasses.replace(roller, evaluations=held_out)
    stack.callback(roller.close)
    return roller


class _Models(NamedTuple):
    """The models of a worker.

    Attributes:
        actor: The policy; an outline without weights if the engine alone holds them.
        reference: The reference of the KL: None if the worker has none, the actor itself with LoRA.
        critic: PPO's value model, else None.
        holds_actor: Whether the actor has weights.
    """

    actor: Any
    reference: Any
    critic: Critic | None
    holds_actor: bool

    @property
    def vocabulary(self) -> int:
        """Tokens of the actor's vocabulary."""
        return int(self.actor.config.get_text_config().vocab_size)


def _load_models(config: Config, tokenizer: Any, tokens: Sequence[int], device: torch.device) -> _Models:
    """Return the worker's models, adapted and prepared for their passes.

    Raises:
        ConfigError: If one cannot be loaded, or the tokenizer has more tokens than the actor.
    """
    whole = functools.partial(load_actor, config.model.actor, dtype=config.model.dtype, device=device)
    holds_actor = worker_holds_actor(config)
    # The trainer's answer to the probe is of all these tokens, and the engine's row must have room for them.
    if not holds_actor and not 2 <= len(tokens) < config.lengths.row:
        log.warning("the actor is loaded, the engine cannot be asked about the first prompt: tokens=%d row_tokens=%d",
                    len(tokens), config.lengths.row)  # fmt: skip
        holds_actor = True
    actor = whole() if holds_actor else shell(config.model.actor, dtype=config.model.dtype)
    reference = load_reference(config, actor, device)
    critic = None
    if config.rollout.algorithm == "ppo":
        has_weights = holds_actor or config.model.critic is not None
        made_of = actor if has_weights else whole()
        critic = critic_of(made_of, config.model.critic, dtype=config.model.dtype, device=device)
    models = _Models(actor, reference, critic, holds_actor)
    refuse_large_tokenizer(tokenizer, models.vocabulary, config.model.actor)
    # After the critic, which is made of the unadapted backbone.
    adapt(actor, config.model, seed=config.daemon.seed)
    if config.trainer.kind == "builtin":
        # As in the trainer; one's own has the model's own operations.
        own = (actor if holds_actor else None, None if reference is actor else reference, critic)
        fuse([model for model in own if model is not None], device)
    # After the adapters, as in the trainer: that of the head is float32 too. Without the actor the reference alone
    # computes logits here.
    if (measured := actor if holds_actor else reference) is not None:
        in_float32 = with_float32_logits(config, measured, tokens, device)
        if in_float32 and reference is not None and reference is not measured:
            compute_in_float32(reference)
    prepare_passes(config, actor, reference, critic, device)
    compile_passes(config, actor, reference, critic, device)
    return models


def _new_maker(
    config: Config, models: _Models, reward: RowRewards | None, tokenizer: Any, telemetry: Telemetry
) -> NaiveExperienceMaker:
    rollout = config.rollout
    return NaiveExperienceMaker(
        models.actor,
        models.critic,
        reward,
        models.reference,
        tokenizer,
        kl_coef=config.rollout_kl_coef,
        gamma=rollout.gamma,
        lam=rollout.lam,
        use_grpo=rollout.algorithm == "grpo",
        num_generation=rollout.num_generations,
        inference_batch_size=rollout.inference_batch_size,
        logits_forward_batch_size=rollout.logits_forward_batch_size,
        logits_forward_tokens=rollout.logits_forward_tokens,
        reuse_sampling_log_probs=log_probs_by(config) == "engine",
        shaping=shaping_of(config),
        drop_errored=True,
        # The insert gate checks all values, and refused rows are kept in quarantine.
        refuse_not_finite=False,
        telemetry=telemetry,
    )


def _weights_of(
    config: Config, models: _Models, engine: Engine, maker: NaiveExperienceMaker, tokens: Sequence[int], device: Any
) -> WorkerWeights:
    """Return the weights that a published version replaces."""
    beside_actor = joined({} if models.critic is None else {"critic": models.critic.state_dict()})
    if maker.shaping.score_moments is not None:
        beside_actor[SCORES] = maker.shaping.score_moments
    actor, judging = models.actor, judging_of(config, models.actor, maker.telemetry)
    if not models.holds_actor:
        log.info("the engine alone holds the actor: probe_tokens=%d", len(tokens))
        return EngineWeights(engine, PublishedProbe(tokens, actor.dtype, judging), beside_actor)
    probe = ModelProbe(actor, tokens or _ANY_TOKENS, device, row_tokens=config.lengths.row, judging=judging)
    targets = {**joined({"actor": published(actor)}), **beside_actor}
    return ModelWeights(targets, engine, weights_check(config, actor, tokens, device), probe)


def _try_reward(config: Config, roller: LocalRoller, *, texts: bool) -> None:
    """Score the first rollouts.

    Raises:
        ConfigError: If there is no reward for them; with `texts` it may quote the user's function.
    """
    try:
        refuse_broken_reward(roller, config.row_bytes)
    except RewardError as error:
        if roller.turns is not None and (failed := roller.turns.pool.problem) is not None:
            text = failed.text if texts else failed.bare
            raise ConfigError(f"rollout.environment: {text}, prompt {roller.last_location}") from error
        reward: RowRewards | None = roller.maker.reward_model
        problem = None if reward is None else reward.problem
        message = (
            error.told(texts=texts) if problem is None else problem.text if texts else problem.bare or problem.text
        )
        raise ConfigError(f"rewards: {message}, prompt {roller.last_location}") from error


def load_vision(config: Config, tokenizer: Any) -> VisionPrompts | None:
    """Return the reader of prompts with images; None if the actor takes none.

    Raises:
        ConfigError: If there is an environment too, or the processor of images cannot be loaded.
    """
    if not sees_images(config.model.actor):
        return None
    if config.rollout.environment is not None:
        raise ConfigError("rollout.environment: model.actor takes images, and an environment is for text alone")
    return VisionPrompts(config.model.actor, tokenizer)


def load_environment(
    config: Config, tokenizer: Any, telemetry: Telemetry, undone: contextlib.ExitStack
) -> TurnSettings | None:
    """Return the environments of a configuration, which have been imported; None if it names none.

    `undone` closes them.

    Raises:
        ConfigError: If they cannot be imported.
        RlhfdError: If one of their processes was killed before it has imported them, or is late.
    """
    rollout = config.rollout
    if rollout.environment is None:
        return None
    pool = EnvironmentPool(
        rollout.environment,
        timeout_s=rollout.environment_timeout_s,
        processes=rollout.environment_processes,
        telemetry=telemetry,
    )
    undone.callback(pool.close)
    pool.wait_ready()
    text = ResponseText(tokenizer, hidden_ids(config, tokenizer))
    return TurnSettings(pool, rollout.max_turns, rollout.max_turn_tokens, text)


def load_reference(config: Config, actor: Any, device: torch.device) -> Any:
    """Return the worker's reference model: None if it has none, and with LoRA the actor, whose base is frozen."""
    if config.reference_on != "worker":
        return None
    if (path := config.reference_folder) is None:
        return actor
    settings: Any = {"dtype": config.model.dtype, "field": "model.reference"}
    return load_actor(path, device=device, streamed=config.model.reference_device == "host", **settings)


def prepare_passes(config: Config, actor: Any, reference: Any, critic: Any, device: torch.device) -> None:
    """Choose how passes of models hold rows: prompts once for all their responses, and rows end to end on a card."""
    computes = actor if log_probs_by(config) == "worker" else None
    of_actions = [model for model in dict.fromkeys([computes, reference]) if model is not None]
    for model in of_actions:
        prepare_shared_prefix([model], device, config.trainer.shared_prefix, key="trainer.shared_prefix")
    if config.trainer.packing is not False:
        pack_scored_rows([*of_actions, *([] if critic is None else [critic])], device)


def compile_passes(config: Config, actor: Any, reference: Any, critic: Any, device: torch.device) -> None:
    """Compile the layers of the models whose log-probs or values the worker computes, as configured.

    A reference that is streamed is left as it is: its layers wait for their copies, not for launches. "auto" compiles
    none of them: a worker that starts again shall soon have a row, of whose time these passes are a small part.
    """
    if config.model.compile is not True or config.shards_trainer:
        return
    uses: dict[Any, Uses] = {}
    tokens = config.rollout.logits_forward_tokens or default_tokens(actor, device, backward=False)
    scored = log_probs_by(config) == "worker"
    if scored or reference is actor:
        is_packed = packs_scored_rows(actor)
        uses[actor] = Uses(is_packed, scored=scored, without_adapters=reference is actor, tokens=tokens)
    if reference is not None and config.model.reference_device != "host":
        uses.setdefault(reference, Uses(packs_scored_rows(reference), tokens=tokens))
    if critic is not None:
        uses[critic] = Uses(packs_scored_rows(critic), tokens=tokens)
    with eval_mode(*uses):
        compile_layers(uses, device)


def with_float32_logits(config: Config, model: Any, tokens: Sequence[int], device: torch.device) -> bool:
    """Have a model compute its logits in float32 if the trainer does; return whether it does."""
    given = config.model.float32_logits
    if given is None and config.trainer.kind == "external":
        return False
    return use_float32_logits(
        model,
        tokens,
        device,
        dtype=config.model.dtype,
        given=given,
        temperature=config.rollout.temperature,
        most_columns=config.lengths.row,
    )


def judging_of(config: Config, actor: Any, telemetry: Telemetry) -> Judging:
    """Return how the engine's probe of a configuration is judged."""
    rollout = config.rollout
    if rollout.quantization == "fp8":
        limit_nats = rollout.engine_gap_nats or FP8_GAP_NATS
        return Judging(limit_nats, rollout.engine_gap_action, telemetry, FP8_LEAST_MOVE_NATS)
    limit_nats = rollout.engine_gap_nats or tolerance_nats_a_token(next(actor.parameters()).dtype)
    return Judging(limit_nats, rollout.engine_gap_action, telemetry)


def weights_check(
    config: Config, actor: Any, tokens: Sequence[int], device: torch.device
) -> Callable[[WeightsVersion], None]:
    """Return a function that compares the actor's answer to the probe with the published one; without one it passes.

    It raises `ConfigError` where files have changed since the start: trainer and worker may have read different ones.
    """

    def check_fetched(fetched: WeightsVersion) -> None:
        if fetched.probe is not None:
            own = answer(actor, tokens, device) if tokens else Probe(0.0, 0)
            try:
                check(fetched, own, next(actor.parameters()).dtype)
            except WeightsMismatchError as error:
                if not (changed := changed_since_start(config)):
                    raise
                raise ConfigError(
                    f"{', '.join(changed)} changed while the run goes on, and trainer and worker have read different "
                    f"ones: put the former files back, or start again; {error}"
                ) from error

    return check_fetched


def load_functions(
    config: Config, tokenizer: Any, telemetry: Telemetry, undone: contextlib.ExitStack
) -> RowRewards | None:
    """Return the reward functions, in processes that can be killed unless all are this package's own; None if none.

    A heartbeat is written once a row. `undone` closes the processes.

    Raises:
        ConfigError: If one cannot be loaded.
    """
    rollout = config.rollout
    if not (rewards := reward_functions(config)):
        return None
    weights, labels = [reward.weight for reward in rewards], function_labels(config)
    if not rollout.reward_timeout_s or all(reward.name.startswith("pipeline.") for reward in rewards):
        loaded = [load_reward_function(reward) for reward in rewards]
        return FunctionReward(
            loaded,
            tokenizer,
            telemetry,
            weights=weights,
            timeout_s=rollout.reward_timeout_s,
            labels=labels,
            text=ResponseText(tokenizer, hidden_ids(config, tokenizer)),
            problems=RewardProblems(telemetry),
        )
    pool = RewardPool(
        rewards,
        config.model.actor,
        timeout_s=rollout.reward_timeout_s,
        processes=rollout.reward_processes,
        telemetry=telemetry,
        may_fork=True,
        weights=weights,
        labels=labels,
        hidden=hidden_ids(config, tokenizer),
    )
    undone.callback(pool.close)
    pool.wait_ready()
    return pool
