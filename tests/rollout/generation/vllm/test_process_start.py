"""The start of an engine's process; vLLM itself is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.schema import Config
from pipeline.rollout.generation.vllm import engine as engines

CARD: Any = SimpleNamespace(type="cuda")


@pytest.mark.parametrize(
    ("rollout", "buffer", "directories"),
    [
        ({"engine": "vllm"}, {}, ["model"]),
        ({"engine": "transformers"}, {}, []),
        # Begun before the turn on the card, it would not hold it.
        ({"engine": "vllm", "sleep": True, "cache_bytes": 1 << 20}, {"max_staleness": 0}, []),
    ],
)
def test_it_begins_before_the_models_unless_it_must_inherit_the_turn_on_the_card(
    rollout: dict[str, Any], buffer: dict[str, int], directories: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(engines, "refuse_unsuitable", lambda: None)
    monkeypatch.setattr(engines, "EngineProcess", lambda settings, threads: started.append(settings.directory))

    config = Config.model_validate({"model": {"actor": "model"}, "rollout": rollout, "buffer": buffer})
    engines.begin(config, CARD)

    assert started == directories
