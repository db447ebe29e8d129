"""The memory of a rank's card, against the plan by which its passes are sized."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from pipeline.config.plan import models_of
from pipeline.config.schema import Config
from pipeline.supervisor.capacity.budgets import budgets_of
from pipeline.supervisor.capacity.machine import Machine
from pipeline.trainer.card_memory import CardMemory, planned_bytes
from tests.config.test_plan import QWEN_05B, described
from tests.trainer.test_step_log import taken


def test_the_first_step_tells_the_memory_and_one_warning_says_that_a_later_one_had_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    reserved = iter([900, 1000, 1001, 2000])
    memory = CardMemory(1000, lambda: {"allocated": 1, "reserved": next(reserved)})

    for step in (7, 8, 9, 10):
        memory.taken(taken(step))

    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("INFO", "memory of the card after a step: step=7 reserved_bytes=900 planned_bytes=1000"),
        (
            "WARNING",
            "more memory of the card than planned: step=9 reserved_bytes=1001 planned_bytes=1000 "
            "key=trainer.micro_batch_tokens",
        ),
    ]


def test_a_first_step_with_more_than_planned_is_the_warning_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    memory = CardMemory(1000, lambda: {"reserved": 1001})

    for step in (1, 2):
        memory.taken(taken(step))

    assert [one.levelname for one in caplog.records] == ["WARNING"]


def test_the_planned_memory_is_that_of_rlhfd_plan(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**QWEN_05B))
    described(tmp_path, {name: list(weight.shape) for name, weight in model.named_parameters()})
    config = Config.model_validate({"model": {"actor": str(tmp_path), "dtype": "bfloat16"}})

    machine = Machine(gpus=2, gpu_bytes=80 * 10**9, ram_bytes=10**12, shm_bytes=10**12)
    card, *_ = (budget for budget in budgets_of(config, models_of(config), machine) if budget.holds_ranks)

    own = [count for term, count in card.terms.items() if term.startswith("trainer 0: ")]
    assert planned_bytes(config) == sum(own) > 10**9
