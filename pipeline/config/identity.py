"""The identity of a run, its name and its folder; all follow from the configuration alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.prompts import PromptsConfig, identifying_keys, identity_of_prompts
from pipeline.config.rewards import reward_models
from pipeline.config.schema import Config
from pipeline.config.sections import ModelConfig

_DIGITS = 8
_RANKS = 1
"""In the place of a number of ranks, which the identity of earlier releases had."""
_MODEL_CHARACTERS = 40
_CACHED = "models--"
_NOT_IDENTIFYING = {"compile", "float32_logits", "reference_device"}
"""Keys of ``[model]`` with which a run can go on at another value."""
_NEW = ("lora_kind", "lora_adapter", "reward_tokenizer")
_FORMER_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
_MEANINGLESS = ("model", "actor", "checkpoint", "final", "latest")


def identity_of(config: Config) -> str:
    """Return a digest of the settings that identify a run: models, prompts, seed, algorithm and batches.

    It is on disk with each checkpoint: a new key of ``[model]`` or ``[prompts]`` is left out of it at its default. The
    number of trainer ranks is no part of it: a checkpoint is resumed by any number.
    """
    model = _of_model(config).model_dump_json(exclude=_left_out(config))
    parts = (
        config.daemon.seed, model, identity_of_prompts(config.prompts),
        config.rollout.algorithm, config.rollout.num_generations, config.lengths.row, config.sample_batch_size,
        config.prompts_per_ticket,
        _RANKS, config.trainer.kind, config.buffer.arena_bytes,
        *(() if config.lengths.response is None else (config.lengths.response,)),
        *(() if len(models := _reward_models(config)) < 2 else (models,)),
        *(() if config.trainer.optimizer == "adamw" else (config.trainer.optimizer,)),
        # The state of training, and what is published with the weights, are others with these.
        *(("normalize_values",) if config.trainer.normalize_values else ()),
        *(("reward_scale",) if config.rollout.reward_scale != "none" else ()),
    )  # fmt: skip
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def identifying_settings(config: Config) -> dict[str, Any]:
    """Return the settings that the identity is made of, by ``section.key``."""
    values: dict[str, Any] = {
        "daemon.seed": config.daemon.seed,
        "rollout.algorithm": config.rollout.algorithm,
        "rollout.num_generations": config.rollout.num_generations,
        "rollout.max_length": config.lengths.row,
        "rollout.max_new_tokens": config.lengths.response,
        "rollout.batch_size": config.prompts_per_ticket,
        "buffer.sample_batch_size": config.sample_batch_size,
        "buffer.arena_bytes": config.buffer.arena_bytes,
        "trainer.kind": config.trainer.kind,
        "trainer.optimizer": config.trainer.optimizer,
        "trainer.normalize_values": config.trainer.normalize_values,
        "rollout.reward_scale": config.rollout.reward_scale,
    }
    for section, kept in (
        ("model", _of_model(config).model_dump(mode="json", exclude=_left_out(config))),
        ("prompts", identifying_keys(config.prompts)),
    ):
        values |= {f"{section}.{key}": value for key, value in kept.items()}
    if len(models := _reward_models(config)) > 1:
        values["rewards"] = [list(model) for model in models]
    return values


def differing_settings(mine: Mapping[str, Any], its: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the values of two runs by the keys of `identifying_settings` in which they differ.

    A key of ``[model]`` or ``[prompts]`` that one of them lacks has its default there; another one is not compared.
    Where one of them has several reward models, these are one setting.
    """
    if "rewards" in {*mine, *its}:
        mine, its = _with_reward_models(mine), _with_reward_models(its)
    defaults = {
        f"{section}.{key}": field.get_default(call_default_factory=True)
        for section, kind in (("model", ModelConfig), ("prompts", PromptsConfig))
        for key, field in kind.model_fields.items()
    }
    pairs = {
        key: tuple(settings[key] if key in settings else defaults[key] for settings in (mine, its))
        for key in [*mine, *(key for key in its if key not in mine)]
        if key in defaults or (key in mine and key in its)
    }
    return {key: (here, there) for key, (here, there) in pairs.items() if here != there}


def _with_reward_models(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the reward models under one key, a single one as several."""
    keys = ("model.reward", "model.reward_tokenizer", "rewards")
    one, tokenizer, models = (settings.get(key) for key in keys)
    if models is None:
        models = [] if one is None else [(one, tokenizer)]
    shown = [f"{path} (its own tokenizer)" if tokenizer == "own" else path for path, tokenizer in models]
    return {key: value for key, value in settings.items() if key not in keys} | {"the reward models": shown}


def _of_model(config: Config) -> ModelConfig:
    """Return the settings of the models; without adapters, with the layers of adapters of earlier releases.

    One reward model is that of `model.reward`, in a table too.
    """
    model = config.model
    if model.reward is None and len(models := _reward_models(config)) == 1:
        model = model.model_copy(update=dict(zip(("reward", "reward_tokenizer"), models[0], strict=True)))
    is_former = not model.lora_rank and model.lora_targets == "all-linear"
    return model.model_copy(update={"lora_targets": _FORMER_TARGETS}) if is_former else model


def _reward_models(config: Config) -> list[tuple[str, str]]:
    """Return path and tokenizer of each reward model; order, labels and weights are no part of the identity."""
    return sorted((model.path, model.tokenizer) for model in reward_models(config))


def _left_out(config: Config) -> set[str]:
    model = _of_model(config)
    fields = type(model).model_fields
    return _NOT_IDENTIFYING | {key for key in _NEW if getattr(model, key) == fields[key].default}


def run_name(config: Config) -> str:
    """Return the name of a run: `daemon.run_name`, else one like ``grpo-Qwen2.5-0.5B-3f9c1a2b``, from its identity."""
    if config.daemon.run_name is not None:
        return config.daemon.run_name
    return default_name(config.rollout.algorithm, config.model.actor, identity_of(config))


def default_name(algorithm: str, actor: str, identity: str) -> str:
    """Return the name of a run that has no `daemon.run_name`."""
    return f"{algorithm}-{_model_name(actor)}-{identity[:_DIGITS]}"


def run_dir(config: Config) -> Path:
    """Return the folder of a run: checkpoints, spool, snapshot, samples, history, quarantine."""
    return runs_dir(config.daemon.state_dir) / run_name(config)


def runs_dir(state_dir: Path) -> Path:
    """Return the folder of all runs of a state directory."""
    return Path(state_dir) / "runs"


def _model_name(actor: str) -> str:
    """Return the readable part of a model's path: a folder ``model`` is called by the folder around it."""
    path = Path(actor)
    cached = next((part for part in path.parts if part.startswith(_CACHED)), "")
    named = (part for part in reversed(path.parts) if part.lower() not in _MEANINGLESS)
    name = cached.rpartition("--")[2] or next(named, "") or "model"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:_MODEL_CHARACTERS] or "model"
