"""Conflicts between keys of a configuration whose values are each valid alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeline.config.evaluation import conflict_of_evaluation
from pipeline.config.lengths import conflict_of_lengths
from pipeline.config.losses import ADVANTAGES, GROUP_ADVANTAGES, ZERO_WITHOUT_SIGNAL
from pipeline.config.prompts import conflict_of_prompts
from pipeline.config.rewards import conflict_of_environment, conflict_of_rewards

if TYPE_CHECKING:
    from pipeline.config.schema import Config


class Conflict(NamedTuple):
    """Values that are each valid alone and invalid together: the keys that take part, the one to change first."""

    keys: tuple[str, ...]
    message: str


_VERSION_KEYS = (
    "buffer.sample_batch_size",
    "rollout.num_generations",
    "buffer.max_staleness",
    "rollout.algorithm",
    "trainer.world_size",
    "trainer.gradient_accumulation_steps",
    "trainer.publish_every",
)
_VLLM_RANKS = 512
_LENGTH_KEYS = ("rollout.max_length", "rollout.max_prompt_length", "rollout.max_new_tokens")


def conflicts(config: Config) -> list[Conflict]:
    """Return the conflicts between keys of a configuration; empty if it can run."""
    rollout, trainer = config.rollout, config.trainer
    keys: tuple[str, ...]
    found: list[Conflict] = []
    if rollout.algorithm == "grpo" and rollout.num_generations < 2:
        keys = ("rollout.num_generations", "rollout.algorithm")
        found.append(Conflict(keys, f"must be at least 2 with GRPO, got {rollout.num_generations}"))
    if not config.rewards and config.model.reward is None and rollout.environment is None:
        keys = ("rewards", "model.reward", "rollout.environment")
        found.append(Conflict(keys, "is empty and model.reward is not set: nothing would score a response"))
    if config.model.reward_tokenizer == "own" and config.model.reward is None:
        found.append(Conflict(("model.reward_tokenizer",), "needs model.reward"))
    if environment := conflict_of_environment(config):
        found.append(Conflict(*environment))
    if rewards := conflict_of_rewards(config):
        found.append(Conflict(*rewards))
    names = config.metrics.tracker
    if len(set(names)) < len(names):
        found.append(Conflict(("metrics.tracker",), "must name each tracker once"))
    if names and trainer.kind == "external":
        message = 'must be left out with trainer.kind = "external", whose steps have no line in metrics.jsonl'
        found.append(Conflict(("metrics.tracker", "trainer.kind"), message))
    if evaluation := conflict_of_evaluation(config):
        found.append(Conflict(*evaluation))
    if prompts := conflict_of_prompts(config):
        found.append(Conflict(*prompts))
    if lengths := conflict_of_lengths(rollout):
        first, message = lengths
        found.append(Conflict(tuple(dict.fromkeys((first, *_LENGTH_KEYS))), message))
    found += _flow_conflicts(config)
    found += _conflicts_of_advantages(config)
    found += _conflicts_of_updates(config)
    found += _conflicts_of_log_probs(config)
    found += _conflicts_of_reference(config)
    if (config.metrics.tls_cert is None) != (config.metrics.tls_key is None):
        keys = ("metrics.tls_cert", "metrics.tls_key")
        found.append(Conflict(keys, "must be set together with metrics.tls_key"))
    # The agreed interface names engines that are not built yet: a refusal is better than silence.
    # An engine is available as soon as its module exists; nothing else is added for it.
    module = Path(__file__).parents[1] / "rollout" / "generation" / rollout.engine
    if ":" not in rollout.engine and not (module.is_dir() or module.with_suffix(".py").is_file()):
        found.append(Conflict(("rollout.engine",), f'"{rollout.engine}" is not available in this version'))
    if rollout.tensor_parallel > 1:
        found += _conflicts_of_tensor_parallel(config)
    if rollout.quantization != "none":
        found += _conflicts_of_quantization(config)
    if rollout.engine == "vllm":
        found += _vllm_conflicts(config)
    elif rollout.cache_bytes is not None:
        keys = ("rollout.cache_bytes", "rollout.engine")
        found.append(Conflict(keys, f'must be left out with rollout.engine = "{rollout.engine}": only vllm reads it'))
    found += _sleep_conflicts(config)
    if config.cluster.engine == "ray" and rollout.devices != "auto":
        keys = ("rollout.devices", "cluster.engine")
        found.append(Conflict(keys, "must be auto where Ray gives each worker its GPUs (cluster.worker_gpus)"))
    if config.buffer.journal_interval_s and trainer.kind == "external":
        keys = ("buffer.journal_interval_s", "trainer.kind")
        found.append(
            Conflict(keys, "must be 0 with an external trainer: the rows that its checkpoints include are unknown")
        )
    if config.model.dtype == "float16" and trainer.kind == "builtin":
        keys = ("model.dtype", "trainer.kind")
        message = 'must be "bfloat16" or "float32" with trainer.kind = "builtin"'
        found.append(
            Conflict(keys, f"{message}: gradients underflow in float16, and the trainer does not scale losses")
        )
    if trainer.sharding in ("full", "hybrid") and trainer.kind == "external":
        keys = ("trainer.sharding", "trainer.kind")
        message = f'must not be "{trainer.sharding}" with trainer.kind = "external", which shards its own models'
        found.append(Conflict(keys, message))
    if trainer.sharding == "hybrid" and trainer.nodes == 1:
        keys = ("trainer.sharding", "trainer.nodes")
        found.append(Conflict(keys, 'must be "full" with trainer.nodes = 1: hybrid copies shards between machines'))
    if trainer.keep_state_every > 1 and (trainer.kind == "external" or trainer.keep_state == "disk"):
        keys = ("trainer.keep_state_every", "trainer.keep_state", "trainer.kind")
        message = 'must be 1 unless the built-in trainer keeps its state in memory (trainer.keep_state = "memory")'
        found.append(Conflict(keys, message))
    if trainer.record != "off" and (trainer.kind == "external" or trainer.world_size > 1):
        keys = ("trainer.record", "trainer.kind", "trainer.world_size")
        found.append(Conflict(keys, 'must be "off" unless the built-in trainer has one rank, which takes a step alone'))
    if trainer.micro_batch_size is not None and trainer.micro_batch_size > config.sample_batch_size:
        keys = ("trainer.micro_batch_size", "buffer.sample_batch_size", "rollout.algorithm")
        message = f"must be at most the {config.sample_batch_size} rows of buffer.sample_batch_size"
        found.append(Conflict(keys, f"{message}, got {trainer.micro_batch_size}"))
    if trainer.micro_batch_size is not None and trainer.micro_batch_tokens is not None:
        keys = ("trainer.micro_batch_size", "trainer.micro_batch_tokens")
        found.append(Conflict(keys, "must be left out with trainer.micro_batch_tokens, which takes its place"))
    if rollout.logits_forward_batch_size is not None and rollout.logits_forward_tokens is not None:
        keys = ("rollout.logits_forward_batch_size", "rollout.logits_forward_tokens")
        found.append(Conflict(keys, "must be left out with rollout.logits_forward_tokens, which takes its place"))
    if trainer.devices != "auto" and len(trainer.devices) < config.ranks_here:
        keys = ("trainer.devices", "trainer.world_size")
        found.append(Conflict(keys, f"names {len(trainer.devices)} for {config.ranks_here} ranks, each needs its own"))
    found += _conflicts_of_nodes(config)
    if trainer.max_epochs and config.prompts.sources:
        keys = ("trainer.max_epochs", "prompts.sources")
        message = "must be 0 with prompts.sources, each of which begins its next pass on its own: set trainer.max_steps"
        found.append(Conflict(keys, message))
    if trainer.max_epochs and trainer.kind == "external":
        keys = ("trainer.max_epochs", "trainer.kind")
        found.append(Conflict(keys, 'must be 0 with trainer.kind = "external", which ends by itself'))
    if trainer.normalize_values and rollout.algorithm == "grpo":
        keys = ("trainer.normalize_values", "rollout.algorithm")
        found.append(Conflict(keys, 'must be false with rollout.algorithm = "grpo", which has no critic'))
    if trainer.normalize_values and trainer.kind == "external":
        keys = ("trainer.normalize_values", "trainer.kind")
        found.append(Conflict(keys, 'must be false with trainer.kind = "external", whose loss is its own'))
    return found + _conflicts_of_rates(config) + _conflicts_of_optimizer(config)


def _conflicts_of_nodes(config: Config) -> list[Conflict]:
    trainer = config.trainer
    if trainer.nodes == 1:
        return []
    found = []
    for key, is_wrong, message in (
        (
            "cluster.engine",
            config.cluster.engine != "ray",
            'must be "ray" with trainer.nodes above 1',
        ),
        ("trainer.kind", trainer.kind == "external", 'must be "builtin" with trainer.nodes above 1'),
        (
            "trainer.world_size",
            trainer.world_size % trainer.nodes > 0,
            f"must be a multiple of trainer.nodes, {trainer.nodes}, got {trainer.world_size}",
        ),
    ):
        if is_wrong:
            found.append(Conflict((key, "trainer.nodes"), message))
    return found


def _conflicts_of_optimizer(config: Config) -> list[Conflict]:
    trainer, keys = config.trainer, ("trainer.optimizer",)
    if trainer.optimizer == "adamw":
        return []
    if trainer.kind == "external":
        message = 'must be left out with trainer.kind = "external", which has its own optimizer'
        return [Conflict((*keys, "trainer.kind"), message)]
    if config.shards_trainer:
        message = (
            f'must be "adamw" with trainer.sharding = "{trainer.sharding}": {trainer.optimizer} needs whole matrices'
        )
        return [Conflict((*keys, "trainer.sharding", "trainer.world_size"), message)]
    if trainer.optimizer == "muon" and config.model.lora_rank:
        message = 'must be "adamw" or "adamw_8bit" with model.lora_rank: Muon trains whole matrices, not adapters'
        return [Conflict((*keys, "model.lora_rank"), message)]
    return []


def _conflicts_of_rates(config: Config) -> list[Conflict]:
    trainer = config.trainer
    if trainer.warmup_ratio and not (trainer.decay.steps or trainer.max_steps):
        keys: tuple[str, ...] = ("trainer.warmup_ratio", "trainer.decay_steps", "trainer.max_steps", "trainer.schedule")
        return [Conflict(keys, "needs trainer.decay_steps or trainer.max_steps, of which it is a share")]
    if trainer.schedule == "cosine" and not trainer.decay_steps:
        keys = ("trainer.schedule", "trainer.decay_steps")
        message = 'must be "constant" or "linear" with trainer.decay_steps = 0: set it to the steps of the fall'
        return [Conflict(keys, f"{message}, for example those of trainer.max_steps")]
    if not trainer.warmup_ratio and 0 < trainer.decay.steps < trainer.warmup_steps:
        keys = ("trainer.decay_steps", "trainer.warmup_steps")
        message = f"must be 0 or at least the {trainer.warmup_steps} of trainer.warmup_steps, got {trainer.decay_steps}"
        return [Conflict(keys, message)]
    return []


def _conflicts_of_advantages(config: Config) -> list[Conflict]:
    rollout, found = config.rollout, []
    fitting = ("gae",) if rollout.algorithm == "ppo" else GROUP_ADVANTAGES
    if config.advantages in ADVANTAGES and config.advantages not in fitting:
        message = f'must be {", ".join(fitting)}, or of the form "module:function"'
        found.append(
            Conflict(
                ("rollout.advantages", "rollout.algorithm"),
                f'{message}, with rollout.algorithm = "{rollout.algorithm}", got "{config.advantages}"',
            )
        )
    if rollout.max_refill and (rollout.algorithm == "ppo" or config.advantages not in ZERO_WITHOUT_SIGNAL):
        known = ", ".join(ZERO_WITHOUT_SIGNAL)
        found.append(
            Conflict(
                ("rollout.max_refill", "rollout.advantages", "rollout.algorithm"),
                f"must be 0 unless rollout.advantages is one of {known}: with others equal rewards carry a signal, "
                f"got {rollout.max_refill}",
            )
        )
    if config.trainer.advantage_scale == "batch" and config.advantages in ("gae", "grpo", "reinforce_baseline"):
        keys: tuple[str, ...] = ("trainer.advantage_scale", "rollout.advantages", "rollout.algorithm")
        message = 'must be "none" unless rollout.advantages is dr_grpo, rloo or your own'
        found.append(Conflict(keys, f'{message}: those of "{config.advantages}" are scaled already'))
    elif config.trainer.advantage_scale == "batch" and rollout.algorithm == "ppo" and config.trainer.whiten_advantages:
        keys = ("trainer.advantage_scale", "trainer.whiten_advantages", "rollout.algorithm")
        message = 'must be "none" with ppo and trainer.whiten_advantages, which scales them already'
        found.append(Conflict(keys, message))
    if rollout.reward_scale == "running":
        found += _conflicts_of_reward_scale(config)
    if rollout.overlong_buffer_tokens:
        longest = config.lengths.response
        keys = ("rollout.overlong_buffer_tokens", "rollout.max_new_tokens")
        if longest is None:
            found.append(Conflict(keys, "needs rollout.max_new_tokens: responses have no common maximum length"))
        elif rollout.overlong_buffer_tokens > longest:
            message = f"must be at most the {longest} tokens of a response, got {rollout.overlong_buffer_tokens}"
            found.append(Conflict(keys, message))
    return found


def _conflicts_of_reward_scale(config: Config) -> list[Conflict]:
    if config.advantages in ("grpo", "reinforce_baseline"):
        keys: tuple[str, ...] = ("rollout.reward_scale", "rollout.advantages", "rollout.algorithm")
        message = 'must be "none" unless rollout.advantages is gae, dr_grpo, rloo or your own'
        return [Conflict(keys, f'{message}: those of "{config.advantages}" do not depend on the scale of scores')]
    if config.trainer.advantage_scale == "batch":
        keys = ("rollout.reward_scale", "trainer.advantage_scale")
        return [
            Conflict(keys, 'must be "none" with trainer.advantage_scale = "batch", which divides by the scale again')
        ]
    if config.trainer.kind == "external":
        keys = ("rollout.reward_scale", "trainer.kind")
        return [Conflict(keys, 'must be "none" with trainer.kind = "external", which publishes no moments')]
    return []


def _conflicts_of_updates(config: Config) -> list[Conflict]:
    trainer, found = config.trainer, []
    rows = config.sample_batch_size * trainer.world_size * trainer.gradient_accumulation_steps
    of_rows = ("buffer.sample_batch_size", "trainer.world_size", "trainer.gradient_accumulation_steps")
    if trainer.mini_batches > rows:
        message = f"must be at most the {rows} rows of a step, got {trainer.mini_batches}"
        found.append(Conflict(("trainer.mini_batches", *of_rows), message))
    elif rows % trainer.mini_batches:
        message = f"must divide the {rows} rows of a step, got {trainer.mini_batches}: updates would be of unequal size"
        found.append(Conflict(("trainer.mini_batches", *of_rows), message))
    if trainer.kl_coef_target is not None and config.trainer_kl_coef == 0:
        keys = ("trainer.kl_coef_target", "trainer.kl_coef", "rollout.algorithm")
        found.append(Conflict(keys, "needs trainer.kl_coef above 0, the first value: a weight of 0 stays 0"))
    return found


def _conflicts_of_log_probs(config: Config) -> list[Conflict]:
    rollout = config.rollout
    keys: tuple[str, ...]
    filtered = "top_p" if rollout.top_p < 1 else "top_k" if rollout.top_k else "min_p" if rollout.min_p else ""
    if rollout.log_probs == "engine" and rollout.engine == "vllm" and filtered:
        keys = ("rollout.log_probs", f"rollout.{filtered}", "rollout.engine")
        message = f'must be "worker" or "trainer" with rollout.{filtered}: the log-probs of vllm are those after it'
        return [Conflict(keys, message)]
    if rollout.log_probs == "trainer" and config.trainer.kind == "external":
        keys = ("rollout.log_probs", "trainer.kind")
        message = 'must be "engine" or "worker" with trainer.kind = "external", which gets whole rows'
        return [Conflict(keys, message)]
    if rollout.log_probs == "trainer" and config.rollout_kl_coef:
        keys = ("rollout.log_probs", "rollout.kl_coef", "rollout.algorithm")
        message = f'must be "engine" or "worker" with a KL in the reward (rollout.kl_coef = {config.rollout_kl_coef:g})'
        return [Conflict(keys, f"{message}: the worker scores it")]
    return []


def _conflicts_of_reference(config: Config) -> list[Conflict]:
    keys: tuple[str, ...]
    if config.model.lora_adapter is not None and not config.model.lora_rank:
        keys = ("model.lora_adapter", "model.lora_rank")
        return [Conflict(keys, "must be left out with model.lora_rank = 0: set it to the rank of the adapter")]
    if config.model.reference_device == "worker":
        return []
    if config.model.reference_device == "host":
        if config.reference_folder is not None:
            return []
        keys = ("model.reference_device", "model.lora_rank")
        message = 'must be "worker" or "trainer" with model.lora_rank and without model.reference'
        return [Conflict(keys, f"{message}: the reference is the actor without its adapters, which takes no memory")]
    if config.trainer.kind == "external":
        keys = ("model.reference_device", "trainer.kind")
        return [Conflict(keys, 'must be "worker" with trainer.kind = "external", which gets whole rows')]
    if config.rollout_kl_coef:
        keys = ("model.reference_device", "rollout.kl_coef", "rollout.algorithm")
        message = f'must be "worker" with a KL in the reward (rollout.kl_coef = {config.rollout_kl_coef:g})'
        return [Conflict(keys, f"{message}: the worker scores it")]
    return []


def _vllm_conflicts(config: Config) -> list[Conflict]:
    """Return the options that the vLLM engine lacks."""
    found = []
    if config.model.lora_rank > _VLLM_RANKS:
        message = f'must be at most {_VLLM_RANKS} with rollout.engine = "vllm", got {config.model.lora_rank}'
        found.append(Conflict(("model.lora_rank", "rollout.engine"), message))
    return found


def _conflicts_of_tensor_parallel(config: Config) -> list[Conflict]:
    rollout, key = config.rollout, "rollout.tensor_parallel"
    if rollout.engine != "vllm":
        message = f'must be 1 with rollout.engine = "{rollout.engine}": only vllm splits a model over GPUs'
        return [Conflict((key, "rollout.engine"), message)]
    if config.cluster.engine == "ray":
        return [
            Conflict((key, "cluster.engine"), 'must be 1 with cluster.engine = "ray": an actor has one GPU at most')
        ]
    if config.model.lora_rank:
        return [Conflict((key, "model.lora_rank"), "must be 1 with model.lora_rank: adapters are not split over GPUs")]
    if rollout.sleep:
        return [Conflict((key, "rollout.sleep"), "must be 1 with rollout.sleep: turns are taken on one GPU")]
    if rollout.devices != "auto" and len(rollout.devices) % rollout.tensor_parallel:
        message = f"must divide the {len(rollout.devices)} of rollout.devices, got {rollout.tensor_parallel}"
        return [Conflict((key, "rollout.devices"), message)]
    return []


def _conflicts_of_quantization(config: Config) -> list[Conflict]:
    """Return the settings with which an engine of quantized weights cannot run, or nothing corrects for them."""
    rollout, trainer, key = config.rollout, config.trainer, "rollout.quantization"
    if rollout.engine != "vllm":
        message = f'must be "none" with rollout.engine = "{rollout.engine}": only vllm quantizes weights'
        return [Conflict((key, "rollout.engine"), message)]
    found = []
    if config.model.dtype == "float32":
        message = f'must be "bfloat16" with {key}: vllm quantizes models of 16 bits alone'
        found.append(Conflict(("model.dtype", key), message))
    if config.model.lora_rank:
        found.append(Conflict((key, "model.lora_rank"), 'must be "none" with model.lora_rank'))
    if rollout.sleep:
        found.append(Conflict((key, "rollout.sleep"), 'must be "none" with rollout.sleep'))
    if rollout.tensor_parallel > 1:
        message = f"must be 1 with {key}: nobody has tried weights of 8 bits over several GPUs"
        found.append(Conflict(("rollout.tensor_parallel", key), message))
    if rollout.log_probs == "engine":
        message = f'must be "worker" or "trainer" with {key}: the engine\'s are not those of the policy\'s weights'
        found.append(Conflict(("rollout.log_probs", key), message))
    filtered = "top_p" if rollout.top_p < 1 else "top_k" if rollout.top_k else "min_p" if rollout.min_p else ""
    if filtered:
        message = f'must be "none" with rollout.{filtered}: rows then lack the log-probs of vllm, and nothing corrects'
        found.append(Conflict((key, f"rollout.{filtered}"), message))
    if trainer.kind == "builtin" and trainer.importance_correction == "none":
        message = f'must not be "none" with {key}: rows are sampled with other weights than those that are trained'
        found.append(Conflict(("trainer.importance_correction", key), message))
    return found


def _sleep_conflicts(config: Config) -> list[Conflict]:
    """Return the settings with which trainer and engine take no turns on a card."""
    rollout, found = config.rollout, []
    if not rollout.sleep:
        return []
    if config.buffer.max_staleness:
        message = "must be 0 with rollout.sleep: rollouts and training take turns only then"
        found.append(
            Conflict(("buffer.max_staleness", "rollout.sleep"), f"{message}, got {config.buffer.max_staleness}")
        )
    if rollout.engine == "transformers":
        message = 'must be false with rollout.engine = "transformers", which computes with the worker\'s own actor'
        found.append(Conflict(("rollout.sleep", "rollout.engine"), message))
    if config.cluster.engine == "ray":
        message = 'must be false with cluster.engine = "ray": the trainer is on another machine'
        found.append(Conflict(("rollout.sleep", "cluster.engine"), message))
    if config.trainer.kind == "external":
        message = 'must be false with trainer.kind = "external", which does not tell when it steps'
        found.append(Conflict(("rollout.sleep", "trainer.kind"), message))
    return found


def _flow_conflicts(config: Config) -> list[Conflict]:
    """Return sizes with which `pipeline.buffer.admission` could stop for ever: a ticket holds whole groups only."""
    group, rows, buffer = config.group_size, config.rows_per_version, config.buffer
    found = []
    if buffer.max_staleness == 0 and rows % group:
        message = f"must be a multiple of the group of {group} with buffer.max_staleness = 0, got {rows} rows a version"
        found.append(Conflict(_VERSION_KEYS, message))
    if buffer.max_staleness and group > rows * buffer.max_staleness:
        least = -(-group * config.sample_batch_size // (rows * buffer.max_staleness))
        message = (
            f"is too small for a group of {group}: {rows} rows a version x buffer.max_staleness "
            f"{buffer.max_staleness}; the least that works is {least}"
        )
        found.append(Conflict(_VERSION_KEYS, message))
    if buffer.limit:
        batch = config.sample_batch_size
        # A batch that is no multiple of the group leaves up to batch - 1 rows that wait for the rest of theirs.
        room = buffer.limit * batch - (batch - 1 if batch % group else 0)
        if room < group:
            least = -(-(group + (batch - 1 if batch % group else 0)) // batch)
            keys = ("buffer.limit", "buffer.sample_batch_size", "rollout.num_generations", "rollout.algorithm")
            message = (
                f"leaves no room for a group of {group}: {buffer.limit} batches of {batch} rows each; the least that "
                f"works is {least}"
            )
            found.append(Conflict(keys, message))
    return found
