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
from pipeline.trainer.sharding import ranks
from pipeline.trainer.sharding.sharding import Sharding


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
        get_rank=lambda: 1,
        get_world_size=lambda: 2,
        all_reduce=all_reduce,
        ReduceOp=operations,
        new_group=lambda **_: None,
    )
    monkeypatch.setattr(ranks, "dist", group)
    monkeypatch.setattr("pipeline.trainer.sharding.sharding.dist", group)
    connection = cast(Any, SimpleNamespace(weights_path=tmp_path / "weights"))
    sharding = Sharding(Config(), {}, connection, torch.device("cpu"), waiting)

    sharding.meet()

    assert seen == [True] and not is_waiting
