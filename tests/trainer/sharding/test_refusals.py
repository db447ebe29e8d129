"""Models that cannot be sharded, and a sharded step that runs out of memory: one clear line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from pipeline.config.schema import ModelConfig
from pipeline.errors import ConfigError, DeviceMemoryError
from pipeline.trainer.sharding import optimizer
from pipeline.trainer.sharding.models import load_actor_shards
from tests.support import tiny, tiny_vision
from tests.trainer.test_learner import experience_for, new_learner
from tests.trainer.test_out_of_memory import Device

CPU = torch.device("cpu")
NOWHERE: Any = None
"""A model is refused before it is sharded."""


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        load_actor_shards(folder, dtype="float32", device=CPU, replica=NOWHERE, lora=ModelConfig(), seed=0)
    message = str(raised.value)
    assert message.startswith("model.actor: ") and "\n" not in message
    return message


def test_a_model_that_does_not_name_its_layers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.llama().save_pretrained(tmp_path)
    made = LlamaForCausalLM._from_config.__func__  # type: ignore[attr-defined]

    def without_names(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        model = made(cls, *arguments, **keywords)
        model._no_split_modules = {"Block"}
        return model

    monkeypatch.setattr(LlamaForCausalLM, "_from_config", classmethod(without_names))

    message = refused(tmp_path)

    assert "LlamaForCausalLM does not name its layers (_no_split_modules: Block)" in message
    assert 'trainer.sharding = "none"' in message


def test_a_vision_language_model_is_refused(tmp_path: Path) -> None:
    assert "vision-language models are not sharded" in refused(tiny_vision.save(tmp_path))


def test_a_sharded_step_that_runs_out_of_memory_ends_with_the_key_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = new_learner("grpo")
    experience = experience_for(learner, "grpo")
    Device(learner._actor, most_tokens=30)
    monkeypatch.setattr(optimizer, "is_sharded", lambda model: True)

    with pytest.raises(
        DeviceMemoryError, match=r"cannot repeat a pass alone: set a lower trainer\.micro_batch_tokens or"
    ):
        learner.update([experience])
