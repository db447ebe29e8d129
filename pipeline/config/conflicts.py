"""Conflicts between keys of a configuration whose values are each valid alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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


def conflicts(config: Config) -> list[Conflict]:
    """Return the conflicts between keys of a configuration; empty if it can run."""
    rollout, trainer = config.rollout, config.trainer
    keys: tuple[str, ...]
    found: list[Conflict] = []
    if rollout.algorithm == "grpo" and rollout.num_generations < 2:
        keys = ("rollout.num_generations", "rollout.algorithm")
        found.append(Conflict(keys, f"must be at least 2 with GRPO, got {rollout.num_generations}"))
    if not rollout.reward_functions and config.model.reward is None:
        keys = ("rollout.reward_functions", "model.reward")
        found.append(Conflict(keys, "is empty and model.reward is not set: nothing would score a response"))
    found += _flow_conflicts(config)
    if (config.metrics.tls_cert is None) != (config.metrics.tls_key is None):
        keys = ("metrics.tls_cert", "metrics.tls_key")
        found.append(Conflict(keys, "must be set together with metrics.tls_key"))
    # The agreed interface names engines that are not built yet: a refusal is better than silence.
    # An engine is available as soon as its module exists; nothing else is added for it.
    is_available = (
        ":" in rollout.engine
        or (Path(__file__).parents[1] / "rollout" / "generation" / f"{rollout.engine}.py").is_file()
    )
    if not is_available:
        found.append(Conflict(("rollout.engine",), f'"{rollout.engine}" is not available in this version'))
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
    if trainer.micro_batch_size is not None and trainer.micro_batch_size > config.sample_batch_size:
        keys = ("trainer.micro_batch_size", "buffer.sample_batch_size", "rollout.algorithm")
        message = f"must be at most the {config.sample_batch_size} rows of buffer.sample_batch_size"
        found.append(Conflict(keys, f"{message}, got {trainer.micro_batch_size}"))
    if trainer.devices != "auto" and len(trainer.devices) < trainer.world_size:
        keys = ("trainer.devices", "trainer.world_size")
        found.append(Conflict(keys, f"names {len(trainer.devices)} for {trainer.world_size} ranks, each needs its own"))
    if 0 < trainer.decay_steps < trainer.warmup_steps:
        keys = ("trainer.decay_steps", "trainer.warmup_steps")
        message = f"must be 0 or at least the {trainer.warmup_steps} of trainer.warmup_steps, got {trainer.decay_steps}"
        found.append(Conflict(keys, message))
    return found


def _flow_conflicts(config: Config) -> list[Conflict]:
    """Return sizes with which `pipeline.buffer.admission` could stop for ever: a ticket holds whole groups only."""
    group, rows, buffer = config.group_size, config.rows_per_version, config.buffer
    found = []
    if buffer.max_staleness == 0 and rows % group:
        message = f"must be a multiple of the group of {group} with buffer.max_staleness = 0, got {rows} rows a version"
        found.append(Conflict(_VERSION_KEYS, message))
    if buffer.max_staleness and group > rows * buffer.max_staleness:
        message = (
            f"is too small for a group of {group}: {rows} rows a version x buffer.max_staleness {buffer.max_staleness}"
        )
        found.append(Conflict(_VERSION_KEYS, message))
    if buffer.limit:
        batch = config.sample_batch_size
        # A batch that is no multiple of the group leaves up to batch - 1 rows that wait for the rest of theirs.
        room = buffer.limit * batch - (batch - 1 if batch % group else 0)
        if room < group:
            keys = ("buffer.limit", "buffer.sample_batch_size", "rollout.num_generations", "rollout.algorithm")
            message = f"leaves no room for a group of {group}: {buffer.limit} batches of {batch} rows"
            found.append(Conflict(keys, message))
    return found
