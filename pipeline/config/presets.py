"""Presets of `rollout.algorithm`: the defaults that a published algorithm has in place of the schema's.

A preset is grpo with other defaults; a key that is set wins over it. docs/losses.md has the table with the sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pipeline.config.own_model import Default

ALGORITHM: Final = "rollout.algorithm"
BASE: Final = "grpo"
_NO_KL: Final = {"trainer.kl_coef": 0.0, "rollout.kl_coef": 0.0}

PRESETS: Final[dict[str, dict[str, Any]]] = {
    "dapo": {
        "rollout.advantages": "grpo",
        "rollout.max_refill": 10,
        "trainer.policy_loss": "ppo",
        "trainer.clip_low": 0.2,
        "trainer.clip_high": 0.28,
        "trainer.loss_aggregation": "token_mean",
        **_NO_KL,
    },
    "dr_grpo": {
        "rollout.advantages": "dr_grpo",
        "trainer.policy_loss": "ppo",
        "trainer.loss_aggregation": "dr_grpo",
        **_NO_KL,
    },
    "rloo": {
        "rollout.advantages": "rloo",
        "trainer.policy_loss": "ppo",
        "trainer.loss_aggregation": "sequence_mean",
        "trainer.kl_coef": 0.0,
        "rollout.kl_coef": 0.05,
    },
    "gspo": {
        "rollout.advantages": "grpo",
        "trainer.policy_loss": "gspo",
        "trainer.clip_low": 3e-4,
        "trainer.clip_high": 4e-4,
        "trainer.loss_aggregation": "sequence_mean",
        **_NO_KL,
    },
    "cispo": {
        "rollout.advantages": "grpo",
        "trainer.policy_loss": "cispo",
        "trainer.clip_low": 1.0,
        "trainer.clip_high": 4.0,
        "trainer.loss_aggregation": "token_mean",
        **_NO_KL,
    },
    "reinforce++": {
        "rollout.advantages": "reinforce_baseline",
        "trainer.policy_loss": "ppo",
        "trainer.loss_aggregation": "token_mean",
        "trainer.kl_estimator": "k2",
        "trainer.kl_coef": 1e-5,
        "rollout.kl_coef": 0.0,
    },
}
"""Defaults by ``section.key``, by the name of the preset."""


def preset_of(values: Mapping[str, Any]) -> str | None:
    """Return the preset that `rollout.algorithm` names; None for another value.

    Args:
        values: The keys that are set, by ``section.key``; they may be wrong.
    """
    name = values.get(ALGORITHM)
    return name if isinstance(name, str) and name in PRESETS else None


def defaults(preset: str, values: Mapping[str, Any]) -> dict[str, Default]:
    """Return the defaults of a preset for keys that are not set, by ``section.key``.

    DAPO's penalty of length needs the longest response: without `rollout.max_new_tokens` there is none.

    Args:
        preset: A name of `PRESETS`.
        values: The keys that are set, by ``section.key``; they may be wrong.
    """
    found = dict(PRESETS[preset])
    longest = values.get("rollout.max_new_tokens")
    if preset == "dapo" and isinstance(longest, int) and longest >= 5:
        found["rollout.overlong_buffer_tokens"] = longest // 5
    return {key: Default(value, f"preset {preset}") for key, value in found.items() if key not in values}
