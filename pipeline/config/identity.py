"""The identity of a run, its name and its folder; all follow from the configuration alone."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.rewards import reward_models
from pipeline.config.schema import Config
from pipeline.config.sections import ModelConfig

_DIGITS = 8
_MODEL_CHARACTERS = 40
_CACHED = "models--"
_NOT_IDENTIFYING = {"compile", "float32_logits", "reference_device", "reward", "reward_tokenizer"}
"""Keys of ``[model]`` with which a run can go on at another value; its reward model is one of all reward models."""
_MEANINGLESS = ("model", "actor", "checkpoint", "final", "latest")


def identity_of(config: Config) -> str:
    """Return a digest of the settings that identify a run: models, prompts, seed, algorithm and batches.

    It is on disk with each checkpoint. The number of trainer ranks is no part of it: a checkpoint is resumed by any
    number.
    """
    settings = json.dumps(identifying_settings(config), sort_keys=True)
    return hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()


def identifying_settings(config: Config) -> dict[str, Any]:
    """Return the settings that the identity is made of, by ``section.key``.

    A key of a section is left out at its default, so that a new key changes no identity.
    """
    values: dict[str, Any] = {
        "daemon.seed": config.daemon.seed,
        "rollout.algorithm": config.rollout.algorithm,
        "rollout.num_generations": config.rollout.num_generations,
        "rollout.max_length": config.lengths.row,
        "rollout.max_new_tokens": config.lengths.response,
        "rollout.batch_size": config.prompts_per_ticket,
        "buffer.sample_batch_size": config.sample_batch_size,
        "buffer.arena_bytes": config.buffer.arena_bytes,
    }
    for name, section, keys in (
        ("model", config.model, ModelConfig.model_fields.keys() - _NOT_IDENTIFYING),
        ("prompts", config.prompts, None),
        # The state of training, and what is published with the weights, are others with these.
        ("trainer", config.trainer, {"kind", "optimizer", "normalize_values"}),
        ("rollout", config.rollout, {"reward_scale"}),
    ):
        kept = section.model_dump(mode="json", include=keys, exclude_defaults=True)
        values |= {f"{name}.{key}": value for key, value in kept.items()}
    # Order, labels and weights of reward models are no part of it. One is that of `model.reward`, in a table too.
    models = sorted((model.path, model.tokenizer) for model in reward_models(config))
    if len(models) == 1:
        values |= zip(("model.reward", "model.reward_tokenizer"), models[0], strict=True)
    elif models:
        values["rewards"] = [list(model) for model in models]
    return values


def differing_settings(mine: Mapping[str, Any], its: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the values of two runs by the keys of `identifying_settings` in which they differ.

    A key that one of them lacks has its default there; one without a default is not compared.
    """
    defaults = {
        f"{name}.{key}": field.get_default(call_default_factory=True)
        for name, section in Config.model_fields.items()
        for key, field in getattr(type(section.default), "model_fields", {}).items()
    }
    pairs = {
        key: tuple(settings[key] if key in settings else defaults[key] for settings in (mine, its))
        for key in [*mine, *(key for key in its if key not in mine)]
        if key in defaults or (key in mine and key in its)
    }
    return {key: (here, there) for key, (here, there) in pairs.items() if here != there}


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
