"""Defaults of a run with a model of its own, in place of those of the schema, which belong to the embedded run.

`SHOWN` lists them. They differ by adapters, the model's positions and whether GPUs are there.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pipeline.config.lengths import LENGTH_KEYS
from pipeline.config.model_files import text_settings
from pipeline.config.positions import positions_of, row_limit
from pipeline.config.types import BUILTIN_PREFIX

MOST_TOKENS: Final = 1024
SAVED_STEPS: Final = 50
NEEDED: Final = {
    "rewards": ("model.reward", "rollout.environment"),
    "prompts.path": ("prompts.sources",),
}
"""The keys without a default for a model of its own, each with the keys that may be set in its place."""

SHOWN: Final = {
    "model.dtype": '`"bfloat16"` on GPUs',
    "prompts.path": "none: this or `prompts.sources` must be set",
    "rewards": "none: this, `model.reward` or `rollout.environment` must be set",
    "rollout.engine": '`"auto"`',
    "rollout.max_length": f"the model's positions, at most {MOST_TOKENS:,}",
    "trainer.learning_rate": "`1e-6`, adapters `1e-5`",
    "trainer.critic_learning_rate": "`1e-5`",
    "trainer.betas": "`[0.9, 0.999]`",
    "trainer.warmup_steps": "`0`",
    "trainer.decay_steps": "`0`",
    "trainer.save_every": "`50`",
}
"""The keys with another default for a model of its own, and that default, for docs/configuration.md."""


class Default(NamedTuple):
    """A default and its reason.

    Attributes:
        value: The value in force; None: none, or one that a start finds.
        reason: The reason, such as the key that it follows from.
    """

    value: Any
    reason: str


def is_own(values: Mapping[str, Any]) -> bool:
    """Return whether `model.actor` names a model of its own; values are as in `defaults`."""
    actor = values.get("model.actor")
    return isinstance(actor, str) and not actor.startswith(BUILTIN_PREFIX)


def defaults(values: Mapping[str, Any], *, on_cards: bool) -> dict[str, Default]:
    """Return the defaults of keys that are not set, by ``section.key``; none for the embedded model.

    Args:
        values: The keys that are set; they may be wrong.
        on_cards: Whether the run has GPUs.
    """
    if not is_own(values):
        return {}
    trains_adapters = values.get("model.lora_rank", 0) != 0
    kind = "adapters" if trains_adapters else "a model of its own"
    found = {
        "trainer.learning_rate": Default(1e-5 if trains_adapters else 1e-6, f"for {kind}"),
        "trainer.betas": Default((0.9, 0.999), "for a model of its own"),
        "trainer.critic_learning_rate": Default(1e-5, "for a model of its own"),
        "trainer.warmup_steps": Default(0, "constant, for a model of its own"),
        "trainer.decay_steps": Default(0, "constant, for a model of its own"),
        "trainer.save_every": Default(SAVED_STEPS, "for a model of its own: a lost machine costs these steps at most"),
    }
    if "model.reward" in values or "rollout.environment" in values:
        found["rewards"] = Default([], "the embedded task's reward is for that task alone")
    if on_cards:
        found["model.dtype"] = Default("bfloat16", "for a model of its own on a GPU")
    positions = _positions(Path(values["model.actor"]))
    if positions is not None and not any(key in values for key in LENGTH_KEYS):
        reason = f"the model has {positions:,} positions"
        found["rollout.max_length"] = Default(
            min(positions, MOST_TOKENS), f"{reason}, {MOST_TOKENS:,} are taken" if positions > MOST_TOKENS else reason
        )
    return {key: default for key, default in found.items() if key not in values}


def missing(actor: str, given: Container[str]) -> dict[str, str]:
    """Return the keys of `NEEDED` that have no value, each with the message; none for the embedded model.

    Args:
        actor: `model.actor`.
        given: The keys that are set.
    """
    if actor.startswith(BUILTIN_PREFIX):
        return {}
    return {
        key: f"must be set with a model of its own, or {' or '.join(others)}"
        for key, others in NEEDED.items()
        if not any(one in given for one in (key, *others))
    }


def _positions(folder: Path) -> int | None:
    """Return the positions of a model; None if its config.json does not tell."""
    text = text_settings(folder)
    try:
        limit, given = row_limit(text), positions_of(text)
    except (ValueError, TypeError, AttributeError):
        return None
    found = [tokens for tokens in (limit and limit.tokens, given and given[1]) if tokens is not None and tokens >= 2]
    return min(found, default=None)
