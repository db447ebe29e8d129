"""Two ranks deal the rows of their leases to each other, over a real arena: every row once, and the same step."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config.schema import Config
from pipeline.errors import DecodeError
from pipeline.experience import codec
from pipeline.experience.ragged import RaggedRows
from pipeline.experience.types import Experience
from pipeline.runtime.messages import ExtentRows
from pipeline.serial import Queue
from pipeline.storage.arena import Arena
from pipeline.storage.layout import LedgerLayout
from pipeline.trainer.connection import Batch, Connection
from pipeline.trainer.dealing import Dealt, RankBalance, RankRows
from pipeline.trainer.process import deals_rows
from tests.support.experiences import made_up_vl
from tests.trainer.test_learner import (
    ROWS,
    applied_gradients,
    assert_same,
    assert_same_stats,
    experience_for,
    new_learner,
    rows_of,
)

CPU = torch.device("cpu")
LAYOUT = LedgerLayout(extents=16, rows_per_extent=4)
EXTENT_BYTES = 1 << 16


class Ranks:
    """Ranks with a connection each, in threads, over extents that hold the rows of a step."""

    def __init__(self, folder: Path, world_size: int = 2) -> None:
        Arena.create(folder / "arena", payload_bytes=1 << 20, ledger_bytes=LAYOUT.nbytes, layout=LAYOUT.identity)
        self.arena = Arena(folder / "arena")
        post = collections.defaultdict(Queue)
        self.connections = [
            Connection(
                self.arena, folder / "weights", post[f"trainer-{rank}"], post["buffer"],
                rank=rank, world_size=world_size,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        self._barrier = threading.Barrier(world_size)
        self._sent: dict[int, RankRows] = {}
        self._extents = 0

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.arena.close()

    def seal(self, experience: Experience) -> ExtentRows:
        """Write an extent; return all of its rows."""
        offset = EXTENT_BYTES * self._extents
        self._extents += 1
        encoded = codec.encode(experience, self.arena.extent(offset, EXTENT_BYTES))
        rows = list(range(len(experience.sequences)))
        return ExtentRows(offset, encoded.nbytes, encoded.checksum, self._extents, self._extents, rows)

    def batch(self, rank: int, parts: list[ExtentRows], **changes: Any) -> Batch:
        """Return a leased batch of a rank."""
        rows = self.connections[rank].gather(parts, CPU)
        return Batch(rows, lease=rank, for_version=1, parts=parts)._replace(**changes)

    def deal(self, batches: list[list[Batch]]) -> list[Dealt]:
        """Deal in all ranks at the same time, ``batches[rank]``."""

        def exchange(rank: int, own: RankRows) -> list[RankRows]:
            self._sent[rank] = own
            self._barrier.wait(60)
            return [self._sent[each] for each in sorted(self._sent)]

        def dealt(rank: int) -> Dealt:
            balance = RankBalance(self.connections[rank], CPU, functools.partial(exchange, rank))
            return balance.deal(batches[rank])

        with ThreadPoolExecutor(len(batches)) as threads:
            return list(threads.map(dealt, range(len(batches))))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


def by_length(experience: Experience) -> Experience:
    """Return the rows with the longest first: in order, the first rank has the most work."""
    assert experience.attention_mask is not None
    return rows_of(experience, experience.attention_mask.sum(dim=1).argsort(descending=True, stable=True))


def leased(ranks: Ranks, experience: Experience) -> list[list[Batch]]:
    """Return two batches for each rank: of two rows each, and one extent is shared by two ranks."""
    first, second = ranks.seal(rows_of(experience, slice(3))), ranks.seal(rows_of(experience, slice(3, ROWS)))

    def of(part: ExtentRows, *rows: int) -> ExtentRows:
        return ExtentRows(part.offset, part.nbytes, part.checksum, part.policy_version, part.ticket, list(rows))

    parts = [[[of(first, 0, 1)], [of(first, 2), of(second, 0)]], [[of(second, 1, 2)], [of(second, 3, 4)]]]
    return [[ranks.batch(rank, each) for each in own] for rank, own in enumerate(parts)]


def values(batches: list[RaggedRows]) -> list[tuple[Any, ...]]:
    """Return each row: its tokens, its reward and its version."""
    rows = []
    for one in batches:
        starts = one.starts("S")
        for row in range(len(one)):
            tokens = tuple(one.columns["sequences"][starts[row] : starts[row + 1]].tolist())
            rows.append((tokens, float(one.columns["reward"][row]), int(one.columns["info.policy_version"][row])))
    return rows


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_rows_dealt_are_those_leased_and_take_the_same_step(ranks: Ranks, algorithm: Any) -> None:
    learner, of_dealt = new_learner(algorithm), new_learner(algorithm)
    batches = leased(ranks, by_length(experience_for(learner, algorithm)))
    own = [batch.rows for of_rank in batches for batch in of_rank]

    dealt = ranks.deal(batches)

    for_ranks = [each.batches for each in dealt]
    assert [[len(one) for one in each] for each in for_ranks] == [[2, 2], [2, 2]]
    assert sorted(values(for_ranks[0] + for_ranks[1])) == sorted(values(own))
    assert values(for_ranks[0]) != values(own[:2])
    assert dealt[0].leased == dealt[1].leased > 1.3
    assert dealt[0].trained == dealt[1].trained < 1.1
    stats, expected = of_dealt.update(for_ranks[0] + for_ranks[1]), learner.update(own)
    assert_same(applied_gradients(of_dealt), applied_gradients(learner), tolerance=1e-6)
    assert_same_stats(stats, expected)


def test_the_same_rows_are_dealt_alike_wherever_they_are(ranks: Ranks) -> None:
    experience = by_length(experience_for(new_learner("grpo"), "grpo"))

    first, again = ranks.deal(leased(ranks, experience)), ranks.deal(leased(ranks, experience))

    for rank in range(2):
        for one, other in zip(first[rank].batches, again[rank].batches, strict=True):
            assert one.columns.keys() == other.columns.keys()
            # The versions are those of the extents.
            for name in one.columns.keys() - {"info.policy_version"}:
                assert np.array_equal(one.columns[name], other.columns[name]), name


@pytest.mark.parametrize("why", ["equal lengths", "a death", "other fields"])
def test_ranks_keep_the_batches_that_they_hold(ranks: Ranks, why: str) -> None:
    experience = by_length(experience_for(new_learner("grpo"), "grpo"))
    if why == "equal lengths":
        experience = rows_of(experience, torch.zeros(ROWS, dtype=torch.int64))
    batches = leased(ranks, experience)
    if why == "a death":
        batches[1][0] = batches[1][0]._replace(deaths=1)
    if why == "other fields":
        batches[1][1] = batches[1][1]._replace(content=batches[1][1].rows.without("kl"))

    dealt = ranks.deal(batches)

    for rank, each in enumerate(dealt):
        assert all(one is batch.rows for one, batch in zip(each.batches, batches[rank], strict=True))
        assert each.trained == each.leased


def test_images_go_with_their_rows(ranks: Ranks) -> None:
    experiences = [made_up_vl(4, seed=seed, prompt=prompt, actions=6) for seed, prompt in ((1, 40), (2, 3))]
    batches = [[ranks.batch(rank, [ranks.seal(one)])] for rank, one in enumerate(experiences)]
    images = sum(int(batch.rows.columns["info.image_num"].sum()) for (batch,) in batches)

    dealt = ranks.deal(batches)

    mixed = [one for each in dealt for one in each.batches]
    assert dealt[0].trained < dealt[0].leased
    assert sorted(values(mixed)) == sorted(values([batch.rows for (batch,) in batches]))
    grids = [each for one in mixed if one.vision is not None for each in one.vision.image_grid_thws]
    assert sum(len(each) for each in grids if each is not None) == images > 0


def test_damage_that_the_lessee_did_not_find_ends_the_rank(ranks: Ranks) -> None:
    batches = leased(ranks, by_length(experience_for(new_learner("grpo"), "grpo")))
    ranks.arena.extent(0, EXTENT_BYTES)[200:260] = bytes(60)

    with pytest.raises(DecodeError, match=r"by ticket: \{1: "):
        ranks.deal(batches)


@pytest.mark.parametrize(("ranks", "mini_batches", "dealt"), [(1, 1, False), (2, 1, True), (2, 2, False)])
def test_rows_are_dealt_to_several_ranks_that_take_one_update_an_epoch(
    ranks: int, mini_batches: int, dealt: bool
) -> None:
    trainer = {"world_size": ranks, "mini_batches": mini_batches}

    assert deals_rows(Config.model_validate({"trainer": trainer})) is dealt
