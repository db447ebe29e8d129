"""Notes on a configuration that can run and probably does not do what its author means: a line each, no refusal."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pipeline import prompts
from pipeline.config.load import LoadedConfig
from pipeline.config.schema import Config
from pipeline.config.types import BUILTIN_PREFIX
from pipeline.errors import ConfigError

_PROMPTS_READ: Final = 1000
_PPO_ONLY: Final = (
    "model.critic", "rollout.gamma", "rollout.lam", "trainer.critic_learning_rate", "trainer.value_clip_range",
    "trainer.critic_warmup_steps", "trainer.whiten_advantages",
)  # fmt: skip
_OPTIMIZATION: Final = (
    "trainer.learning_rate", "trainer.weight_decay", "trainer.warmup_steps", "trainer.decay_steps", "trainer.max_steps",
    "trainer.micro_batch_size", "trainer.save_every", "trainer.clip_range", "trainer.kl_coef",
)  # fmt: skip


def notes(loaded: LoadedConfig) -> list[str]:
    """Return the notes on a configuration without errors, each with the place of its key."""
    return [
        f"{loaded.where(key)}: {text}"
        for key, text in itertools.chain(
            _without_effect(loaded), _of_batch(loaded.config), _of_schedule(loaded), _of_model(loaded.config)
        )
    ] + list(_of_prompts(loaded))


def _without_effect(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys that were set and that no process reads under the values of other keys."""
    config = loaded.config
    unused: list[tuple[bool, tuple[str, ...], str]] = [
        (config.rollout.algorithm == "grpo", _PPO_ONLY, 'rollout.algorithm = "grpo"'),
        (config.rollout.algorithm == "ppo", ("rollout.num_generations",), 'rollout.algorithm = "ppo"'),
        (config.trainer.kind == "external", _OPTIMIZATION, 'trainer.kind = "external"'),
        (not config.model.lora_rank, ("model.lora_alpha", "model.lora_targets"), "model.lora_rank = 0"),
        (
            config.cluster.engine == "local",
            ("cluster.address", "cluster.worker_gpus"),
            'cluster.engine = "local"',
        ),
        (
            not config.rollout.reward_functions,
            ("rollout.reward_timeout_s", "rollout.reward_processes"),
            "rollout.reward_functions = []",
        ),
        (not config.metrics.enabled, ("metrics.port", "metrics.page"), "metrics.enabled = false"),
    ]
    for is_unused, keys, by in unused:
        yield from ((key, f"has no effect with {by}") for key in keys if is_unused and key in loaded.origins)


def _of_batch(config: Config) -> Iterator[tuple[str, str]]:
    batch, group = config.sample_batch_size, config.group_size
    if batch % group:
        nearest = f"{batch - batch % group} and {batch - batch % group + group}" if batch > group else str(group)
        yield (
            "buffer.sample_batch_size",
            f"{batch} rows are no multiple of the {group} responses to a prompt (rollout.num_generations): groups are "
            f"divided between batches; multiples are {nearest}",
        )


def _of_schedule(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    trainer = loaded.config.trainer
    if trainer.kind != "builtin" or not trainer.max_steps:
        return
    if trainer.warmup_steps >= trainer.max_steps and "trainer.warmup_steps" in loaded.origins:
        yield (
            "trainer.warmup_steps",
            f"{trainer.warmup_steps} steps of {trainer.max_steps} (trainer.max_steps): the learning rate rises until "
            "the end and is never in force",
        )
    elif 0 < trainer.decay_steps < trainer.max_steps and "trainer.decay_steps" not in loaded.origins:
        share = trainer.final_learning_rate_ratio
        yield (
            "trainer.max_steps",
            f"{trainer.max_steps} steps, of which those after {trainer.decay_steps} have {share:g} of the learning "
            f"rate: set trainer.decay_steps, for example to {trainer.max_steps}, or to 0 for no decay",
        )


def _of_model(config: Config) -> Iterator[tuple[str, str]]:
    described = _model_config(config)
    positions, row = described.get("max_position_embeddings"), config.lengths.row
    if isinstance(positions, int) and row > positions:
        yield (
            "model.actor",
            f"the model was made for {positions:,} tokens (max_position_embeddings), rows have up to {row:,} "
            "(rollout.max_length)",
        )


def _model_config(config: Config) -> dict[str, Any]:
    """Return config.json of the actor, its text part for a model with images; empty if it cannot be read."""
    try:
        found = json.loads((Path(config.model.actor) / "config.json").read_bytes())
        return {**found, **found.get("text_config", {})}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _of_prompts(loaded: LoadedConfig) -> Iterator[str]:
    """Yield notes on the first prompts of the file, each with its line."""
    path, template = loaded.config.prompts.path, loaded.config.prompts.template
    if path.startswith(BUILTIN_PREFIX):
        return
    try:
        first = list(itertools.islice(prompts.records(path), _PROMPTS_READ))
    except ConfigError:
        return
    for place, _, answer in first:
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            shown = json.dumps(answer)
            yield (
                f"{place}: answer is the number {shown}, not a text: gt_answer of reward functions is then "
                f'{type(answer).__name__} {shown}, unequal to the text of any response; for a text write "{shown}"'
            )
            break
    has_template = Path(loaded.config.model.actor, "chat_template.jinja").is_file()
    if template == "auto" and has_template and all(isinstance(prompt, str) for _, prompt, _ in first):
        yield (
            f"{loaded.where('prompts.template')}: the prompts are texts, and the model's chat template is not applied "
            'to them: "chat" applies it, "none" states that none is wanted'
        )
