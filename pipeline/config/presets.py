"""Presets of `rollout.algorithm`: the defaults that a published algorithm has in place of the schema's.

A preset is grpo with other defaults; a key that is set wins over it. docs/losses.md has the table with the sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pipeline.config.own_model import Default

ALGORITHM: Final = "rollout.algorithm"
BASE: Final = "grpo"
_LOSS: Final = "trainer.policy_loss"
_OVERLONG_SHARE: Final = 5
_NO_KL: Final = {"trainer.kl_coef": 0.0, "rollout.kl_coef": 0.0}

PRESETS: Final[dict[str, dict[str, Any]]] = {
    "dapo": {
        "rollout.advantages": "grpo",
        "rollout.max_refill": 9,
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
        "trainer.loss_aggregation": "dr_grpo",
        # A KL in the reward is a signal where the scores of a group are equal, too.
        "trainer.loss_rows": "all",
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

    DAPO's penalty of length needs the longest response: without one there is none. The bounds of one policy loss are
    not those of another, nor of a `trainer.clip_range` that is set. Refill needs advantages that are 0 without a
    signal.

    Args:
        preset: A name of `PRESETS`.
        values: The keys that are set, by ``section.key``; they may be wrong.
    """
    found = dict(PRESETS[preset])
    longest = _longest_response(values)
    if preset == "dapo" and longest >= _OVERLONG_SHARE:
        found["rollout.overlong_buffer_tokens"] = longest // _OVERLONG_SHARE
    other_loss = values.get(_LOSS, found[_LOSS]) != found[_LOSS]
    if other_loss or "trainer.clip_range" in values:
        found = {key: value for key, value in found.items() if key not in ("trainer.clip_low", "trainer.clip_high")}
    if values.get("rollout.advantages", found["rollout.advantages"]) != found["rollout.advantages"]:
        found.pop("rollout.max_refill", None)
    return {key: Default(value, f"preset {preset}") for key, value in found.items() if key not in values}


def _longest_response(values: Mapping[str, Any]) -> int:
    """Return the tokens of the longest response; 0 where responses have no common maximum."""
    row, prompt, response = (
        value if isinstance(value := values.get(f"rollout.{key}"), int) else 0
        for key in ("max_length", "max_prompt_length", "max_new_tokens")
    )
    return response or (row - prompt if row and prompt else 0)
