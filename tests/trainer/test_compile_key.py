"""`model.compile`: the models whose layers each role compiles, on a card and without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.config.schema import Config
from pipeline.rollout import loader
from pipeline.trainer import process
from tests.support import tiny

CPU, CARD = torch.device("cpu"), torch.device("cuda")


def configured(value: bool | str, **trainer: Any) -> Config:
    return Config.model_validate(
        {"model": {"compile": value}, "rollout": {"kl_coef": 0.1, "log_probs": "worker"}, "trainer": trainer}
    )


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The calls of `compile_layers`: the number of models, and whether only faster code counts."""
    calls: list[tuple[int, bool]] = []

    def compile_layers(models: Mapping[nn.Module, Any], device: torch.device, *, only_if_faster: bool = False) -> int:
        calls.append((len(models), only_if_faster))
        return 0

    for module in (process, loader):
        monkeypatch.setattr(module, "compile_layers", compile_layers)
    return calls


@pytest.mark.parametrize(
    ("config", "device", "calls"),
    [
        (configured("auto"), CARD, [(1, True)]),
        (configured("auto"), CPU, []),
        (configured("auto", world_size=2, sharding="full"), CARD, []),
        (configured(True), CARD, [(1, False)]),
        (configured(True), CPU, [(1, False)]),
        (configured(False), CARD, []),
    ],
    ids=["auto", "auto, CPU", "auto, shards", "true", "true, CPU", "false"],
)
def test_the_trainer_compiles_by_auto_on_a_card_alone_and_only_what_is_faster(
    compiled: list[tuple[int, bool]], config: Config, device: torch.device, calls: list[tuple[int, bool]]
) -> None:
    process.compile_passes(config, {"actor": tiny.llama(0)}, None, device, packed=True, tokens=64)

    assert compiled == calls


@pytest.mark.parametrize(("value", "calls"), [("auto", []), (True, [(2, False)]), (False, [])])
def test_a_worker_compiles_only_if_it_is_told_to(
    compiled: list[tuple[int, bool]], value: bool | str, calls: list[tuple[int, bool]]
) -> None:
    loader.compile_passes(configured(value), tiny.llama(0), tiny.llama(1), None, CPU)

    assert compiled == calls


def test_it_is_auto_by_default() -> None:
    assert Config().model.compile == "auto"
