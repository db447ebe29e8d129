"""Collectives of the ranks, as the watchdog sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.trainer.saving.rank_models import RankModels
from pipeline.trainer.sharding import ranks


def test_a_rank_that_meets_the_others_is_known_to_wait_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    is_waiting, seen = False, list[bool]()

    @contextlib.contextmanager
    def waiting() -> Iterator[None]:
        nonlocal is_waiting
        is_waiting = True
        yield
        is_waiting = False

    def all_reduce(flag: torch.Tensor, operation: Any, group: Any = None) -> None:
        seen.append(is_waiting)

    operations = SimpleNamespace(MIN="min")
    group = SimpleNamespace(
        get_rank=lambda group: 1,
        get_world_size=lambda group: 2,
        all_reduce=all_reduce,
        ReduceOp=operations,
    )
    monkeypatch.setattr(ranks, "dist", group)
    replica = SimpleNamespace(is_published=True, group=None, gloo_group=lambda: None)
    monkeypatch.setattr("pipeline.trainer.saving.rank_models.replica_of", lambda model: replica)
    monkeypatch.setattr("pipeline.trainer.saving.rank_models.is_sharded", lambda model: True)
    connection = cast(Any, SimpleNamespace(rank=1, weights_path=tmp_path / "weights", remote=None))
    models = RankModels(Config(), {"actor": torch.nn.Identity()}, connection, torch.device("cpu"), waiting)

    models.meet()

    assert seen == [True] and not is_waiting
