"""Notes on a configuration that can run and probably does not do what its author means: a line each, no refusal."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pipeline.config.evaluation import EvaluationConfig, held_out
from pipeline.config.load import LoadedConfig
from pipeline.config.losses import LossSection, lacks_ratio_for_staleness, log_probs_by
from pipeline.config.model_files import json_object, model_sizes, processors_of, text_settings
from pipeline.config.positions import positions_of
from pipeline.config.rewards import reward_functions
from pipeline.config.schema import Config
from pipeline.config.types import BUILTIN_PREFIX
from pipeline.errors import ConfigError
from pipeline.prompts.check import file_rows, left_out
from pipeline.prompts.types import Message

_PROMPTS_READ: Final = 1000
_MOST_RATE: Final = 1e-2
_PPO_ONLY: Final = (
    "model.critic", "rollout.gamma", "rollout.lam", "trainer.critic_learning_rate", "trainer.value_clip_range",
    "trainer.critic_warmup_steps", "trainer.whiten_advantages",
)  # fmt: skip
_LORA: Final = tuple(f"model.lora_{key}" for key in ("alpha", "targets", "kind"))
_CLIPS: Final = ("trainer.clip_range", "trainer.clip_low", "trainer.clip_high")
_ALL_CLIPS: Final = (*_CLIPS, "trainer.dual_clip")
_FALL: Final = ("trainer.decay_steps", "trainer.final_learning_rate_ratio")
_OF_ENVIRONMENTS: Final = ("rollout.max_turns", "rollout.environment_timeout_s", "rollout.environment_processes")
_OF_EVALUATIONS: Final = tuple(f"evaluation.{key}" for key in EvaluationConfig.model_fields if key != "files")
_CORRECTION: Final = ("trainer.importance_correction", "trainer.importance_cap")
_OPTIMIZATION: Final = (
    "trainer.learning_rate", "trainer.weight_decay", "trainer.warmup_steps", "trainer.decay_steps", "trainer.max_steps",
    "trainer.schedule", "trainer.warmup_ratio",
    "trainer.micro_batch_size", "trainer.micro_batch_tokens", "trainer.save_every", "trainer.clip_range",
    "trainer.activation_checkpointing", "trainer.packing",
    *(f"trainer.{key}" for key in LossSection.model_fields if key != "mask_cut_responses"),
)  # fmt: skip


def notes(loaded: LoadedConfig) -> list[str]:
    """Return the notes on a configuration without errors, each with the location of its key."""
    return [
        f"{loaded.where(key)}: {text}"
        for key, text in itertools.chain(
            _without_effect(loaded),
            _of_loss(loaded.config),
            _of_batch(loaded.config),
            _of_schedule(loaded),
            _of_model(loaded.config),
            _of_processors(loaded.config),
        )
    ] + [*_of_prompts(loaded), *_of_evaluation(loaded)]


def _of_evaluation(loaded: LoadedConfig) -> Iterator[str]:
    """Yield a note on each file of held-out prompts of which some are prompts of training, with their number."""
    for file in loaded.config.evaluation.files:
        try:
            texts = [_text(prompt) for _, prompt, _ in file_rows(held_out(loaded.config, file))]
            wanted = set(texts)
            trained = {text for _, prompt, _ in file_rows(loaded.config.prompts) if (text := _text(prompt)) in wanted}
        except ConfigError:
            continue
        if overlap := sum(text in trained for text in texts):
            yield (
                f"{loaded.where('evaluation.files')}: {overlap:,} of the {len(texts):,} prompts of {file} are in "
                f"the prompts of training too: an evaluation on them shows what was learned by heart"
            )


def _text(prompt: str | list[Message]) -> str:
    """Return a prompt as a text in which spaces at its ends and between words do not count."""
    return " ".join((prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)).split())


def _without_effect(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys that were set and that no process reads under the values of other keys."""
    config, trainer, rollout = loaded.config, loaded.config.trainer, loaded.config.rollout
    loss, aggregation, correction = trainer.policy_loss, trainer.loss_aggregation, trainer.importance_correction
    has_one_update = trainer.epochs * trainer.mini_batches == 1
    rewards = "reward models alone" if config.rewards else "rewards = []"
    for is_unused, keys, by in (
        (rollout.algorithm == "grpo", _PPO_ONLY, 'rollout.algorithm = "grpo"'),
        (rollout.algorithm == "ppo", ("rollout.num_generations",), 'rollout.algorithm = "ppo"'),
        (trainer.kind == "external", _OPTIMIZATION, 'trainer.kind = "external"'),
        (loss in ("cispo", "reinforce"), ("trainer.dual_clip",), f'trainer.policy_loss = "{loss}"'),
        (loss == "reinforce", _CLIPS, 'trainer.policy_loss = "reinforce"'),
        (aggregation != "dr_grpo", ("trainer.dr_grpo_tokens",), f'trainer.loss_aggregation = "{aggregation}"'),
        (config.trainer_kl_coef == 0, ("trainer.kl_estimator",), "trainer.kl_coef = 0"),
        (has_one_update, ("trainer.target_kl",), "trainer.epochs = 1 and trainer.mini_batches = 1"),
        (correction == "none", ("trainer.importance_cap",), 'trainer.importance_correction = "none"'),
        (log_probs_by(config) == "engine", _CORRECTION, 'rollout.log_probs = "engine"'),
        # The ratio that they bound is 1 in the first update of a step.
        (log_probs_by(config) == "trainer" and has_one_update, _ALL_CLIPS, 'rollout.log_probs = "trainer"'),
        (trainer.schedule == "constant", _FALL, 'trainer.schedule = "constant"'),
        (not config.model.lora_rank, _LORA, "model.lora_rank = 0"),
        (config.cluster.engine == "local", ("cluster.address", "cluster.worker_gpus"), 'cluster.engine = "local"'),
        (not reward_functions(config), ("rollout.reward_timeout_s", "rollout.reward_processes"), rewards),
        (rollout.environment is None, _OF_ENVIRONMENTS, "no rollout.environment"),
        (not config.evaluation.files, _OF_EVALUATIONS, "evaluation.files = []"),
        (config.reference_on is None, ("model.reference_device",), "trainer.kl_coef = 0 and rollout.kl_coef = 0"),
        (not config.metrics.enabled, ("metrics.port",), "metrics.enabled = false"),
    ):
        yield from ((key, f"has no effect with {by}") for key in keys if is_unused and key in loaded.origins)


def _of_loss(config: Config) -> Iterator[tuple[str, str]]:
    trainer = config.trainer
    if trainer.policy_loss == "gspo" and trainer.clip_low is None and trainer.clip_high is None:
        yield (
            "trainer.policy_loss",
            f"gspo clips the ratio of a whole sequence, which trainer.clip_range = {trainer.clip_range:g} hardly ever "
            "does: the paper has trainer.clip_low = 3e-4 and trainer.clip_high = 4e-4",
        )
    if trainer.policy_loss == "reinforce" and trainer.epochs * trainer.mini_batches > 1:
        yield (
            "trainer.policy_loss",
            "reinforce has no ratio: every update of a step but the first is biased, with trainer.epochs = "
            f"{trainer.epochs} and trainer.mini_batches = {trainer.mini_batches}",
        )
    is_corrected = log_probs_by(config) == "trainer" and trainer.importance_correction != "none"
    if trainer.kind == "builtin" and lacks_ratio_for_staleness(config) and not is_corrected:
        yield (
            "trainer.policy_loss",
            "reinforce corrects for no staleness, with buffer.max_staleness = "
            f'{config.buffer.max_staleness}: set it to 0, or rollout.log_probs = "trainer" without a KL in the reward '
            "and a trainer.importance_correction",
        )
    if trainer.kl_estimator == "k1" and config.trainer_kl_coef:
        text = "the gradient of k1 in the loss is 0 on average: k2 and k3 hold the policy near the reference"
        yield "trainer.kl_estimator", text


def _of_batch(config: Config) -> Iterator[tuple[str, str]]:
    batch, rows, group = config.sample_batch_size, config.rows_per_version, config.group_size
    if rows % group:
        least = group // math.gcd(group, rows // batch)
        nearest = f"{batch - batch % least} and {batch - batch % least + least}" if batch > least else str(least)
        yield (
            "buffer.sample_batch_size",
            f"{rows} rows{' a version' if rows > batch else ''} are no multiple of the {group} responses to a prompt "
            f"(rollout.num_generations): groups are divided between batches; multiples are {nearest}",
        )


def _of_schedule(loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    trainer = loaded.config.trainer
    if trainer.kind == "builtin" and not loaded.config.model.actor.startswith(BUILTIN_PREFIX):
        rates = {"learning_rate": trainer.learning_rate}
        if loaded.config.rollout.algorithm == "ppo":
            rates["critic_learning_rate"] = trainer.critic_learning_rate
        for name, rate in rates.items():
            if rate > _MOST_RATE:
                yield (
                    f"trainer.{name}",
                    f"{rate:g} is far above that of any model of its own: 1e-6 to 1e-5 for all weights, to 1e-3 for "
                    "adapters",
                )
    if trainer.kind != "builtin" or not trainer.max_steps:
        return
    if loaded.config.rollout.algorithm == "ppo" and trainer.critic_warmup_steps >= trainer.max_steps:
        yield (
            "trainer.max_steps",
            f"{trainer.max_steps} steps, of which the first {trainer.critic_warmup_steps} "
            "(trainer.critic_warmup_steps) train the critic alone: the actor is never trained",
        )
    decay, has_ratio = trainer.decay, trainer.warmup_ratio > 0
    if decay.warmup_steps >= trainer.max_steps and not has_ratio and "trainer.warmup_steps" in loaded.origins:
        yield (
            "trainer.warmup_steps",
            f"{trainer.warmup_steps} steps of {trainer.max_steps} (trainer.max_steps): the learning rate rises until "
            "the end and is never in force",
        )
    elif 0 < decay.steps < trainer.max_steps and "trainer.decay_steps" not in loaded.origins:
        share = trainer.final_learning_rate_ratio
        yield (
            "trainer.max_steps",
            f"{trainer.max_steps} steps, of which those after {trainer.decay_steps} have {share:g} of the learning "
            f"rate: set trainer.decay_steps, for example to {trainer.max_steps}, or to 0 for no decay",
        )


def _of_model(config: Config) -> Iterator[tuple[str, str]]:
    described = text_settings(Path(config.model.actor))
    positions, row = positions_of(described), config.lengths.row
    if positions is not None and row > positions[1]:
        yield (
            "model.actor",
            f"the model was made for {positions[1]:,} tokens ({positions[0]}), rows have up to {row:,} "
            "(rollout.max_length)",
        )
    if config.model.lora_rank:
        yield from _of_adapters(config)


def _of_adapters(config: Config) -> Iterator[tuple[str, str]]:
    """Yield a note if experts are among the layers that would get adapters and get none."""
    try:
        sizes = model_sizes(Path(config.model.actor), "model.actor")
    except ConfigError:
        return
    if experts := sizes.expert_parameters(config.model.lora_targets):
        yield (
            "model.lora_targets" if config.model.lora_targets != "all-linear" else "model.lora_rank",
            f"the experts of the mixture, {experts / sizes.parameters:.0%} of its parameters, get no adapters and stay "
            "as they are: they are no linear layers in the model, as with peft's target_modules",
        )


def _of_processors(config: Config) -> Iterator[tuple[str, str]]:
    if not config.model.actor.startswith(BUILTIN_PREFIX) and (found := processors_of(Path(config.model.actor))):
        text = f"its generation settings are off, so that log-probs are those of the samples: {', '.join(found)}"
        yield "model.actor", text


def _of_prompts(loaded: LoadedConfig) -> Iterator[str]:
    """Yield notes on the first prompts, each with its line, and on columns that are not read."""
    prompts = loaded.config.prompts
    try:
        first = list(itertools.islice(file_rows(prompts), _PROMPTS_READ))
        unread = left_out(prompts)
    except ConfigError:
        return
    if not first:
        return
    key = "prompts.sources" if prompts.sources else "prompts.path"
    yield from (f"{loaded.where(key)}: the column {column} has bytes and is not read" for column in unread)
    without = [location for location, _, answer in first if answer is None]
    if 0 < len(without) < len(first):
        yield (
            f"{without[0]}: no answer here and in {len(without) - 1} more of the first {len(first)} rows, which others "
            "have: gt_answer of reward functions is then None; prompts.answer_column refuses such rows"
        )
    for location, _, answer in first:
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            shown = json.dumps(answer)
            yield (
                f"{location}: answer is the number {shown}, not a text: gt_answer of reward functions is then "
                f'{type(answer).__name__} {shown}, unequal to the text of any response; for a text write "{shown}"'
            )
            break
    model = Path(loaded.config.model.actor)
    in_settings = json_object(model / "tokenizer_config.json").get("chat_template")
    has_template = in_settings or (model / "chat_template.jinja").is_file()
    is_bare = prompts.template == "auto" and not prompts.needs_template
    if is_bare and has_template and all(isinstance(prompt, str) for _, prompt, _ in first):
        yield (
            f"{loaded.where('prompts.template')}: the prompts are texts, and the model's chat template is not applied "
            'to them: "chat" applies it, "none" states that none is wanted'
        )
