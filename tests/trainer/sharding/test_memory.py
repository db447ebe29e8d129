"""The memory of trainer ranks, whole and sharded, is that of `rlhfd plan`: two ranks of a model of 374 M parameters."""

from __future__ import annotations

import os

import pytest

from benches.sharding import LARGE, Compared, compared, write_model

NEEDED_BYTES = 22 * 10**9


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compared]:
    """Measure and plan both ways of training, once."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory < NEEDED_BYTES:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            f"it takes {NEEDED_BYTES:,} B of memory, {memory:,} are there"
        )
    folder = tmp_path_factory.mktemp("memory")
    write_model(folder / "model", LARGE)
    return {sharding: compared(LARGE, sharding, folder) for sharding in ("none", "full")}


@pytest.mark.variant
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_a_rank_and_shared_memory_take_what_the_plan_says(found: dict[str, Compared], sharding: str) -> None:
    one = found[sharding]

    assert one.rank_bytes == pytest.approx(one.planned_rank_bytes, rel=0.15)
    assert one.shared_bytes == pytest.approx(one.planned_shared_bytes, rel=0.15)


@pytest.mark.variant
@pytest.mark.timeout(3600)
def test_a_rank_with_shards_takes_less_than_60_percent_of_a_whole_one(found: dict[str, Compared]) -> None:
    assert found["full"].rank_bytes < 0.60 * found["none"].rank_bytes
