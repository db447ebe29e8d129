"""Defaults of a run with a model of its own; those of the schema belong to the embedded run.

trainer.learning_rate          1e-6, constant: `trainer.decay_steps` and `trainer.warmup_steps` are 0; adapters 1e-5
trainer.critic_learning_rate   1e-5
model.dtype                    bfloat16 where GPUs are
rollout.max_length             the model's positions, at most 1,024
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pipeline.config.types import BUILTIN_PREFIX

MOST_TOKENS: Final = 1024
LENGTH_KEYS: Final = ("rollout.max_length", "rollout.max_prompt_length", "rollout.max_new_tokens")
_POSITIONS: Final = ("max_position_embeddings", "n_positions")


class Default(NamedTuple):
    """A default and its reason."""

    value: Any
    reason: str


def defaults(values: Mapping[str, Any], base: Path, *, on_cards: bool) -> dict[str, Default]:
    """Return the defaults of keys that are not set, by ``section.key``; none for the embedded model.

    Args:
        values: The keys that are set; they may be wrong.
        base: Folder of relative paths.
        on_cards: Whether the run has GPUs.
    """
    actor = values.get("model.actor")
    if not isinstance(actor, str) or actor.startswith(BUILTIN_PREFIX):
        return {}
    trains_adapters = values.get("model.lora_rank", 0) != 0
    kind = "adapters" if trains_adapters else "a model of its own"
    found = {
        "trainer.learning_rate": Default(1e-5 if trains_adapters else 1e-6, f"for {kind}"),
        "trainer.critic_learning_rate": Default(1e-5, "for a model of its own"),
        "trainer.warmup_steps": Default(0, "constant, for a model of its own"),
        "trainer.decay_steps": Default(0, "constant, for a model of its own"),
    }
    if on_cards:
        found["model.dtype"] = Default("bfloat16", "for a model of its own on a GPU")
    positions = _positions(base / actor)
    if positions is not None and not any(key in values for key in LENGTH_KEYS):
        reason = f"the model has {positions:,} positions"
        found["rollout.max_length"] = Default(
            min(positions, MOST_TOKENS), f"{reason}, {MOST_TOKENS:,} are taken" if positions > MOST_TOKENS else reason
        )
    return {key: default for key, default in found.items() if key not in values}


def _positions(folder: Path) -> int | None:
    """Return the positions of a model; None if its config.json does not tell."""
    try:
        described = json.loads((folder / "config.json").read_bytes())
        text = described.get("text_config") or described
        given = next((text[name] for name in _POSITIONS if name in text), None)
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return given if isinstance(given, int) and given >= 2 else None
