"""Conflicts between keys of a configuration whose values are each valid alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from pipeline.config.evaluation import conflicts_of_evaluation
from pipeline.config.lengths import conflicts_of_lengths
from pipeline.config.losses import ADVANTAGES, GROUP_ADVANTAGES, ZERO_WITHOUT_SIGNAL
from pipeline.config.prompts import conflicts_of_prompts
from pipeline.config.rewards import conflicts_of_environment, conflicts_of_rewards
from pipeline.config.types import Conflicts
from pipeline.errors import counted

if TYPE_CHECKING:
    from pipeline.config.schema import Config


class Conflict(NamedTuple):
    """Values that are each valid alone and invalid together: the keys that take part, the one to change first."""

    keys: tuple[str, ...]
    message: str


_VERSION_KEYS: Final = (
    "buffer.sample_batch_size",
    "rollout.num_generations",
    "buffer.max_staleness",
    "rollout.algorithm",
    "trainer.world_size",
    "trainer.gradient_accumulation_steps",
    "trainer.publish_every",
)
_STEP_KEYS: Final = ("buffer.sample_batch_size", "trainer.world_size", "trainer.gradient_accumulation_steps")
_VLLM_RANKS: Final = 512


def conflicts(config: Config) -> list[Conflict]:
    """Return the conflicts between keys of a configuration; empty if it can run."""
    parts = (
        _of_scores(config),
        conflicts_of_environment(config),
        conflicts_of_rewards(config),
        _of_metrics(config),
        conflicts_of_evaluation(config),
        conflicts_of_prompts(config),
        conflicts_of_lengths(config.rollout),
        _of_flow(config),
        _of_advantages(config),
        _of_updates(config),
        _of_log_probs(config),
        _of_reference(config),
        _of_engine(config),
        _of_tensor_parallel(config),
        _of_quantization(config),
        _of_sleep(config),
        _of_trainer(config),
        _of_external_trainer(config),
        _of_passes(config),
        _of_ranks(config),
        _of_rates(config),
        _of_optimizer(config),
    )
    return [Conflict(*found) for part in parts for found in part]


def _of_scores(config: Config) -> Conflicts:
    rollout, model = config.rollout, config.model
    if rollout.algorithm == "grpo" and rollout.num_generations < 2:
        message = f"must be at least 2 with GRPO, got {rollout.num_generations}"
        yield ("rollout.num_generations", "rollout.algorithm"), message
    if not config.rewards and model.reward is None and rollout.environment is None:
        message = "is empty and model.reward is not set: nothing would score a response"
        yield ("rewards", "model.reward", "rollout.environment"), message
    if model.reward_tokenizer == "own" and model.reward is None:
        yield ("model.reward_tokenizer",), "needs model.reward"


def _of_metrics(config: Config) -> Conflicts:
    metrics = config.metrics
    if len(set(metrics.tracker)) < len(metrics.tracker):
        yield ("metrics.tracker",), "must name each tracker once"
    if (metrics.tls_cert is None) != (metrics.tls_key is None):
        yield ("metrics.tls_cert", "metrics.tls_key"), "must be set together with metrics.tls_key"


def _of_flow(config: Config) -> Conflicts:
    """Yield sizes with which `pipeline.buffer.admission` could stop for ever: a ticket holds whole groups only."""
    group, rows, buffer, batch = config.group_size, config.rows_per_version, config.buffer, config.sample_batch_size
    if buffer.max_staleness == 0 and rows % group:
        message = f"must be a multiple of the group of {group} with buffer.max_staleness = 0, got {rows} rows a version"
        yield _VERSION_KEYS, message
    if buffer.max_staleness and group > rows * buffer.max_staleness:
        least = -(-group * batch // (rows * buffer.max_staleness))
        yield (
            _VERSION_KEYS,
            f"is too small for a group of {group}: {rows} rows a version x buffer.max_staleness "
            f"{buffer.max_staleness}; the least that works is {least}",
        )
    # A batch that is no multiple of the group leaves up to batch - 1 rows that wait for the rest of theirs.
    waiting = batch - 1 if batch % group else 0
    if buffer.limit and buffer.limit * batch - waiting < group:
        yield (
            ("buffer.limit", "buffer.sample_batch_size", "rollout.num_generations", "rollout.algorithm"),
            f"leaves no room for a group of {group}: {counted(buffer.limit, 'batch', 'batches')} of "
            f"{counted(batch, 'row')}; the least that works is {-(-(group + waiting) // batch)}",
        )


def _of_advantages(config: Config) -> Conflicts:
    rollout, trainer = config.rollout, config.trainer
    fitting = ("gae",) if rollout.algorithm == "ppo" else GROUP_ADVANTAGES
    if config.advantages in ADVANTAGES and config.advantages not in fitting:
        yield (
            ("rollout.advantages", "rollout.algorithm"),
            f'must be {", ".join(fitting)}, or of the form "module:function", with rollout.algorithm = '
            f'"{rollout.algorithm}", got "{config.advantages}"',
        )
    if rollout.max_refill and (rollout.algorithm == "ppo" or config.advantages not in ZERO_WITHOUT_SIGNAL):
        yield (
            ("rollout.max_refill", "rollout.advantages", "rollout.algorithm"),
            f"must be 0 unless rollout.advantages is one of {', '.join(ZERO_WITHOUT_SIGNAL)}: with others equal "
            f"rewards carry a signal, got {rollout.max_refill}",
        )
    if trainer.advantage_scale == "batch" and rollout.algorithm == "ppo":
        message = 'must be "none" with rollout.algorithm = "ppo", whose advantages trainer.whiten_advantages scales'
        yield ("trainer.advantage_scale", "rollout.algorithm"), message
    elif trainer.advantage_scale == "batch" and config.advantages in ("grpo", "reinforce_baseline"):
        yield (
            ("trainer.advantage_scale", "rollout.advantages", "rollout.algorithm"),
            'must be "none" unless rollout.advantages is dr_grpo, rloo or your own: those of '
            f'"{config.advantages}" are scaled already',
        )
    if rollout.reward_scale == "running" and config.advantages in ("grpo", "reinforce_baseline"):
        yield (
            ("rollout.reward_scale", "rollout.advantages", "rollout.algorithm"),
            'must be "none" unless rollout.advantages is gae, dr_grpo, rloo or your own: those of '
            f'"{config.advantages}" do not depend on the scale of scores',
        )
    elif rollout.reward_scale == "running" and trainer.advantage_scale == "batch":
        message = 'must be "none" with trainer.advantage_scale = "batch", which divides by the scale again'
        yield ("rollout.reward_scale", "trainer.advantage_scale"), message
    longest, penalized = config.lengths.response, rollout.overlong_buffer_tokens
    if penalized and longest is None:
        message = "needs rollout.max_new_tokens: responses have no common maximum length"
        yield ("rollout.overlong_buffer_tokens", "rollout.max_new_tokens"), message
    elif penalized and longest is not None and penalized > longest:
        message = f"must be at most the {longest} tokens of a response, got {penalized}"
        yield ("rollout.overlong_buffer_tokens", "rollout.max_new_tokens"), message
    if trainer.normalize_values and rollout.algorithm == "grpo":
        message = 'must be false with rollout.algorithm = "grpo", which has no critic'
        yield ("trainer.normalize_values", "rollout.algorithm"), message


def _of_updates(config: Config) -> Conflicts:
    trainer = config.trainer
    rows = config.sample_batch_size * trainer.world_size * trainer.gradient_accumulation_steps
    if trainer.mini_batches > rows:
        message = f"must be at most the {rows} rows of a step, got {trainer.mini_batches}"
        yield ("trainer.mini_batches", *_STEP_KEYS), message
    elif rows % trainer.mini_batches:
        message = f"must divide the {rows} rows of a step, got {trainer.mini_batches}: updates would be of unequal size"
        yield ("trainer.mini_batches", *_STEP_KEYS), message
    if trainer.kl_coef_target is not None and config.trainer_kl_coef == 0:
        message = "needs trainer.kl_coef above 0, the first value: a weight of 0 stays 0"
        yield ("trainer.kl_coef_target", "trainer.kl_coef", "rollout.algorithm"), message


def _filter(config: Config) -> str:
    """Return the key of `rollout` that leaves tokens out before one is sampled; empty if none does."""
    rollout = config.rollout
    return "top_p" if rollout.top_p < 1 else "top_k" if rollout.top_k else "min_p" if rollout.min_p else ""


def _of_log_probs(config: Config) -> Conflicts:
    rollout = config.rollout
    if rollout.log_probs == "engine" and rollout.engine == "vllm" and (filtered := _filter(config)):
        message = f'must be "worker" or "trainer" with rollout.{filtered}: the log-probs of vllm are those after it'
        yield ("rollout.log_probs", f"rollout.{filtered}", "rollout.engine"), message
    elif rollout.log_probs == "trainer" and config.trainer.kind == "external":
        message = 'must be "engine" or "worker" with trainer.kind = "external", which gets whole rows'
        yield ("rollout.log_probs", "trainer.kind"), message
    elif rollout.log_probs == "trainer" and config.rollout_kl_coef:
        yield (
            ("rollout.log_probs", "rollout.kl_coef", "rollout.algorithm"),
            'must be "engine" or "worker" with a KL in the reward (rollout.kl_coef = '
            f"{config.rollout_kl_coef:g}): the worker scores it",
        )


def _of_reference(config: Config) -> Conflicts:
    model = config.model
    if model.lora_adapter is not None and not model.lora_rank:
        message = "must be left out with model.lora_rank = 0: set it to the rank of the adapter"
        yield ("model.lora_adapter", "model.lora_rank"), message
    elif model.reference_device == "host" and config.reference_folder is None:
        yield (
            ("model.reference_device", "model.lora_rank"),
            'must be "worker" or "trainer" with model.lora_rank and without model.reference: the reference is the '
            "actor without its adapters, which takes no memory",
        )
    elif model.reference_device == "trainer" and config.trainer.kind == "external":
        message = 'must be "worker" with trainer.kind = "external", which gets whole rows'
        yield ("model.reference_device", "trainer.kind"), message
    elif model.reference_device == "trainer" and config.rollout_kl_coef:
        yield (
            ("model.reference_device", "rollout.kl_coef", "rollout.algorithm"),
            f'must be "worker" with a KL in the reward (rollout.kl_coef = {config.rollout_kl_coef:g}): the worker '
            "scores it",
        )


def _of_engine(config: Config) -> Conflicts:
    rollout = config.rollout
    if rollout.engine == "vllm" and config.model.lora_rank > _VLLM_RANKS:
        message = f'must be at most {_VLLM_RANKS} with rollout.engine = "vllm", got {config.model.lora_rank}'
        yield ("model.lora_rank", "rollout.engine"), message
    if rollout.engine != "vllm" and rollout.cache_bytes is not None:
        message = f'must be left out with rollout.engine = "{rollout.engine}": only vllm reads it'
        yield ("rollout.cache_bytes", "rollout.engine"), message
    if config.cluster.engine == "ray" and rollout.devices != "auto":
        message = "must be auto where Ray gives each worker its GPUs (cluster.worker_gpus)"
        yield ("rollout.devices", "cluster.engine"), message


def _of_tensor_parallel(config: Config) -> Conflicts:
    rollout, key = config.rollout, "rollout.tensor_parallel"
    if rollout.tensor_parallel == 1:
        return
    if rollout.engine != "vllm":
        message = f'must be 1 with rollout.engine = "{rollout.engine}": only vllm splits a model over GPUs'
        yield (key, "rollout.engine"), message
    elif config.cluster.engine == "ray":
        yield (key, "cluster.engine"), 'must be 1 with cluster.engine = "ray": an actor has one GPU at most'
    elif config.model.lora_rank:
        yield (key, "model.lora_rank"), "must be 1 with model.lora_rank: adapters are not split over GPUs"
    elif rollout.sleep:
        yield (key, "rollout.sleep"), "must be 1 with rollout.sleep: turns are taken on one GPU"
    elif rollout.devices != "auto" and len(rollout.devices) % rollout.tensor_parallel:
        message = f"must divide the {len(rollout.devices)} of rollout.devices, got {rollout.tensor_parallel}"
        yield (key, "rollout.devices"), message


def _of_quantization(config: Config) -> Conflicts:
    """Yield the settings with which an engine of quantized weights cannot run, or nothing corrects for them."""
    rollout, trainer, key = config.rollout, config.trainer, "rollout.quantization"
    if rollout.quantization == "none":
        return
    if rollout.engine != "vllm":
        message = f'must be "none" with rollout.engine = "{rollout.engine}": only vllm quantizes weights'
        yield (key, "rollout.engine"), message
        return
    if config.model.dtype == "float32":
        yield ("model.dtype", key), f'must be "bfloat16" with {key}: vllm quantizes models of 16 bits alone'
    if config.model.lora_rank:
        yield (key, "model.lora_rank"), 'must be "none" with model.lora_rank'
    if rollout.sleep:
        yield (key, "rollout.sleep"), 'must be "none" with rollout.sleep'
    if rollout.tensor_parallel > 1:
        message = f"must be 1 with {key}: nobody has tried weights of 8 bits over several GPUs"
        yield ("rollout.tensor_parallel", key), message
    if rollout.log_probs == "engine":
        message = f'must be "worker" or "trainer" with {key}: the engine\'s are not those of the policy\'s weights'
        yield ("rollout.log_probs", key), message
    if filtered := _filter(config):
        message = f'must be "none" with rollout.{filtered}: rows then lack the log-probs of vllm, and nothing corrects'
        yield (key, f"rollout.{filtered}"), message
    if trainer.kind == "builtin" and trainer.importance_correction == "none":
        message = f'must not be "none" with {key}: rows are sampled with other weights than those that are trained'
        yield ("trainer.importance_correction", key), message


def _of_sleep(config: Config) -> Conflicts:
    """Yield the settings with which trainer and engine take no turns on a card."""
    rollout, staleness = config.rollout, config.buffer.max_staleness
    if not rollout.sleep:
        return
    if staleness:
        message = f"must be 0 with rollout.sleep: rollouts and training take turns only then, got {staleness}"
        yield ("buffer.max_staleness", "rollout.sleep"), message
    if rollout.engine == "transformers":
        message = 'must be false with rollout.engine = "transformers", which computes with the worker\'s own actor'
        yield ("rollout.sleep", "rollout.engine"), message
    if config.cluster.engine == "ray":
        message = 'must be false with cluster.engine = "ray": the trainer is on another machine'
        yield ("rollout.sleep", "cluster.engine"), message


def _of_trainer(config: Config) -> Conflicts:
    trainer = config.trainer
    if config.model.dtype == "float16" and trainer.kind == "builtin":
        yield (
            ("model.dtype", "trainer.kind"),
            'must be "bfloat16" or "float32" with trainer.kind = "builtin": gradients underflow in float16, and the '
            "trainer does not scale losses",
        )
    if trainer.sharding == "hybrid" and trainer.nodes == 1:
        message = 'must be "full" with trainer.nodes = 1: hybrid copies shards between machines'
        yield ("trainer.sharding", "trainer.nodes"), message
    if trainer.keep_state_every > 1 and (trainer.kind == "external" or trainer.keep_state == "disk"):
        message = 'must be 1 unless the built-in trainer keeps its state in memory (trainer.keep_state = "memory")'
        yield ("trainer.keep_state_every", "trainer.keep_state", "trainer.kind"), message
    if trainer.record != "off" and (trainer.kind == "external" or trainer.world_size > 1):
        message = 'must be "off" unless the built-in trainer has one rank, which takes a step alone'
        yield ("trainer.record", "trainer.kind", "trainer.world_size"), message
    if trainer.max_epochs and config.prompts.sources:
        yield (
            ("trainer.max_epochs", "prompts.sources"),
            "must be 0 with prompts.sources, each of which begins its next pass on its own: set trainer.max_steps",
        )


def _of_external_trainer(config: Config) -> Conflicts:
    """Yield the settings that an external trainer cannot have, each with the reason."""
    trainer, rollout = config.trainer, config.rollout
    if trainer.kind != "external":
        return
    if config.buffer.journal_interval_s:
        message = "must be 0 with an external trainer: the rows that its checkpoints include are unknown"
        yield ("buffer.journal_interval_s", "trainer.kind"), message
    scales_once = config.advantages not in ("grpo", "reinforce_baseline") and trainer.advantage_scale != "batch"
    scales, sharding = scales_once and rollout.reward_scale == "running", trainer.sharding
    for key, is_set, must, reason in (
        ("metrics.tracker", config.metrics.tracker, "be left out", "whose steps have no line in metrics.jsonl"),
        ("rollout.reward_scale", scales, 'be "none"', "which publishes no moments"),
        ("rollout.sleep", rollout.sleep, "be false", "which does not tell when it steps"),
        ("trainer.sharding", sharding in ("full", "hybrid"), f'not be "{sharding}"', "which shards its own models"),
        ("trainer.max_epochs", trainer.max_epochs, "be 0", "which ends by itself"),
        ("trainer.normalize_values", trainer.normalize_values, "be false", "whose loss is its own"),
        ("trainer.optimizer", trainer.optimizer != "adamw", "be left out", "which has its own optimizer"),
    ):
        if is_set:
            yield (key, "trainer.kind"), f'must {must} with trainer.kind = "external", {reason}'


def _of_passes(config: Config) -> Conflicts:
    rollout, trainer, batch = config.rollout, config.trainer, config.sample_batch_size
    if trainer.micro_batch_size is not None and trainer.micro_batch_size > batch:
        message = f"must be at most the {batch} rows of buffer.sample_batch_size, got {trainer.micro_batch_size}"
        yield ("trainer.micro_batch_size", "buffer.sample_batch_size", "rollout.algorithm"), message
    if trainer.micro_batch_size is not None and trainer.micro_batch_tokens is not None:
        message = "must be left out with trainer.micro_batch_tokens, which takes its place"
        yield ("trainer.micro_batch_size", "trainer.micro_batch_tokens"), message
    if rollout.logits_forward_batch_size is not None and rollout.logits_forward_tokens is not None:
        message = "must be left out with rollout.logits_forward_tokens, which takes its place"
        yield ("rollout.logits_forward_batch_size", "rollout.logits_forward_tokens"), message


def _of_ranks(config: Config) -> Conflicts:
    trainer = config.trainer
    if trainer.devices != "auto" and len(trainer.devices) < config.ranks_here:
        message = f"names {len(trainer.devices)} for {counted(config.ranks_here, 'rank')}, each needs its own"
        yield ("trainer.devices", "trainer.world_size"), message
    if trainer.nodes == 1:
        return
    if config.cluster.engine != "ray":
        yield ("cluster.engine", "trainer.nodes"), 'must be "ray" with trainer.nodes above 1'
    if trainer.kind == "external":
        yield ("trainer.kind", "trainer.nodes"), 'must be "builtin" with trainer.nodes above 1'
    if trainer.world_size % trainer.nodes:
        message = f"must be a multiple of trainer.nodes, {trainer.nodes}, got {trainer.world_size}"
        yield ("trainer.world_size", "trainer.nodes"), message


def _of_rates(config: Config) -> Conflicts:
    trainer = config.trainer
    if trainer.warmup_ratio and not (trainer.decay.steps or trainer.max_steps):
        steps = "trainer.max_steps" if trainer.schedule == "constant" else "trainer.decay_steps or trainer.max_steps"
        message = f"needs {steps}, of which it is a share"
        yield ("trainer.warmup_ratio", "trainer.decay_steps", "trainer.max_steps", "trainer.schedule"), message
    elif trainer.schedule == "cosine" and not trainer.decay_steps:
        yield (
            ("trainer.schedule", "trainer.decay_steps"),
            'must be "constant" or "linear" with trainer.decay_steps = 0: set it to the steps of the fall, for example '
            "those of trainer.max_steps",
        )
    elif not trainer.warmup_ratio and 0 < trainer.decay.steps < trainer.warmup_steps:
        message = f"must be 0 or at least the {trainer.warmup_steps} of trainer.warmup_steps, got {trainer.decay_steps}"
        yield ("trainer.decay_steps", "trainer.warmup_steps"), message


def _of_optimizer(config: Config) -> Conflicts:
    trainer = config.trainer
    if trainer.optimizer == "adamw" or trainer.kind == "external":
        return
    if config.shards_trainer:
        yield (
            ("trainer.optimizer", "trainer.sharding", "trainer.world_size"),
            f'must be "adamw" with trainer.sharding = "{trainer.sharding}": {trainer.optimizer} needs whole matrices',
        )
    elif trainer.optimizer == "muon" and config.model.lora_rank:
        message = 'must be "adamw" or "adamw_8bit" with model.lora_rank: Muon trains whole matrices, not adapters'
        yield ("trainer.optimizer", "model.lora_rank"), message
