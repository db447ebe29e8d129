"""Versions of a sharded model: two ranks, of which one dies at any collective or at any store of the page."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import WeightsError
from pipeline.models.weights import slot_copy
from pipeline.models.weights import versions as versions_module
from pipeline.models.weights.shards import Shard
from pipeline.models.weights.store import WeightsReader
from pipeline.models.weights.versions import PolicyVersions
from pipeline.storage.weights_header import WeightsVersion, newest_version
from tests.models.weights.test_versions import ENDLESS, Dying, DyingMapping, DyingPublisher, Killed

ROWS, WIDTH = 5, 220_000
"""A tensor of more than one block of 1 MiB, whose rows two ranks cannot halve."""
SHAPES = {"weight": (ROWS, WIDTH), "head": (1, 3), "scale": ()}
COLLECTIVES = 3


class Ranks:
    """Collectives of two threads; a rank dies before one of them, and the other with it."""

    def __init__(self, world_size: int = 2) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=30)
        self.values: list[list[int]] = [[] for _ in range(world_size)]
        self.dies: tuple[int, int] | None = None


class Rank:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.rank, self.world_size = rank, ranks.world_size
        self._ranks = ranks
        self.met = 0

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        if self._ranks.dies == (self.rank, self.met):
            raise Killed
        self.met += 1
        self._ranks.values[self.rank] = list(values)
        self._ranks.barrier.wait()
        found = [list(one) for one in self._ranks.values]
        self._ranks.barrier.wait()
        return found

    def broadcast(self, values: Sequence[int]) -> list[int]:
        return self.gather(values)[0]

    def agree(self, ready: bool) -> bool:
        return all(found for (found,) in self.gather([int(ready)]))


def together(ranks: Ranks, call: Callable[[int], Any]) -> list[Any]:
    """Call a function on each rank; return the results, or the errors."""
    results: list[Any] = [None] * ranks.world_size

    def run(rank: int) -> None:
        try:
            results[rank] = call(rank)
        except (Killed, threading.BrokenBarrierError) as error:
            results[rank] = error.with_traceback(None)
            ranks.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def shards(rank: int, value: float, world_size: int = 2) -> dict[str, Shard]:
    """Return a rank's shards of float32, published as bfloat16 but for the head; each element has its own value."""
    found = {}
    for name, shape in SHAPES.items():
        whole = value + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) % 7
        dtype = torch.float32 if name == "head" else torch.bfloat16
        if not shape:
            found[f"actor.{name}"] = Shard(whole, shape, 0, dtype, split=False)
            continue
        chunk = -(-shape[0] // world_size)
        first = min(rank * chunk, shape[0])
        own = whole[first : first + chunk].clone()
        found[f"actor.{name}"] = Shard(own, shape, first * (torch.Size(shape).numel() // shape[0]), dtype)
    return found


def training(rank: int, value: float) -> dict[str, torch.Tensor]:
    return {"moments": torch.full((3,), 10.0 * value + rank), "none": torch.empty(0)}


class Crew:
    """Two ranks over one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ranks = Ranks()
        self.groups = [Rank(self.ranks, rank) for rank in range(2)]
        self.versions = [PolicyVersions(path, group) for group in self.groups]

    def publish(self, version: int, value: float, *, has_state: bool = True, **options: Any) -> list[Any]:
        def publish(rank: int) -> WeightsVersion:
            state = training(rank, value) if has_state else None
            wanted = WeightsVersion(version, trained_through=version, **options)
            return self.versions[rank].publish(wanted, shards(rank, value), state)

        return together(self.ranks, publish)

    def kept(self) -> list[Any]:
        """Return the version that each rank finds after a death."""
        return together(self.ranks, lambda rank: self.versions[rank].kept())

    def close(self) -> None:
        for versions in self.versions:
            versions.close()


def fetched(path: Path) -> tuple[WeightsVersion, dict[str, torch.Tensor]]:
    into = {f"actor.{name}": torch.empty(shape) for name, shape in SHAPES.items()}
    reader = WeightsReader(path)
    try:
        return reader.fetch(into), into
    finally:
        reader.close()


def assert_holds(path: Path, version: int, value: float) -> None:
    """Check that readers and both successors find a version whole, weights and training state."""
    newest, into = fetched(path)
    assert newest.version == version
    for name, shape in SHAPES.items():
        expected = value + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) % 7
        assert torch.equal(into[f"actor.{name}"], expected), name
    for rank in range(2):
        versions = PolicyVersions(path, Rank(Ranks(), rank))
        state = training(rank, -1)
        found = shards(rank, -5)
        assert versions.holds_training(newest, state) and versions.restore_training(newest, state)
        versions.restore(found, version=newest)
        assert torch.equal(state["moments"], training(rank, value)["moments"])
        assert torch.equal(found["actor.head"].local, shards(rank, value)["actor.head"].local)
        # float32 shards of what is published in bfloat16 come from the training state.
        assert torch.equal(found["actor.weight"].local, shards(rank, -5)["actor.weight"].local)
        versions.close()


def test_readers_and_successors_find_what_all_ranks_published(tmp_path: Path) -> None:
    crew = Crew(tmp_path / "weights")

    results = [crew.publish(version, float(version)) for version in range(5)]
    crew.close()

    assert all(one == other for one, other in results)
    assert [one.version for one, _ in results] == list(range(5))
    assert_holds(tmp_path / "weights", 4, 4.0)


def test_a_rollback_is_a_lower_version_of_a_new_history(tmp_path: Path) -> None:
    crew = Crew(tmp_path / "weights")
    crew.publish(3, 1.0)

    one, other = crew.publish(2, 2.0, rollback=True, position=8)
    crew.close()

    assert one == other and one.age == (2, 1) and (one.rollback, one.position) == (True, 8)
    assert_holds(tmp_path / "weights", 2, 2.0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("collective", range(COLLECTIVES))
def test_a_rank_that_dies_at_a_collective_leaves_the_version_before(tmp_path: Path, rank: int, collective: int) -> None:
    path = tmp_path / "weights"
    crew = Crew(path)
    crew.publish(0, 0.0)
    crew.publish(1, 1.0)
    crew.ranks.dies = (rank, 2 * COLLECTIVES + collective)

    results = crew.publish(2, 2.0)

    assert any(isinstance(result, Killed) for result in results)
    assert_holds(path, 1, 1.0)
    for version in (2, 3, 4):
        successor = Crew(path)
        assert successor.publish(version, 10.0 + version)[0].version == version
        assert_holds(path, version, 10.0 + version)
        successor.close()
    crew.close()


def test_rank_0_killed_at_any_store_of_the_page_leaves_the_version_before_or_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions_module, "WeightsMapping", DyingMapping)
    monkeypatch.setattr(versions_module, "WeightsPublisher", DyingPublisher)
    monkeypatch.setattr(DyingPublisher, "slot_type", slot_copy.Slot)
    seen = set()
    # A publish has 30 stores: 1 and 9 of the page, and 10 of each training state.
    for stores in range(31):
        path = tmp_path / str(stores) / "weights"
        path.parent.mkdir()
        crew = Crew(path)
        crew.publish(0, 0.0)
        Dying.budget[0] = stores
        results = crew.publish(1, 1.0)
        Dying.budget[0] = ENDLESS
        is_dead = any(isinstance(result, Killed) for result in results)
        newest = newest_version(path)
        assert newest is not None and (newest.version == 0 if is_dead else newest.version == 1)
        assert_holds(path, newest.version, float(newest.version))
        seen.add(is_dead)
        crew.close()
    assert seen == {True, False}


def test_the_newest_version_that_has_a_state_on_every_rank_is_spared_and_found(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    crew = Crew(path)
    assert crew.kept() == [None, None]
    for version in range(6):
        crew.publish(version, float(version), has_state=version % 3 == 0)
        kept = crew.kept()
        assert [found.version for found in kept] == [version // 3 * 3] * 2
    # Rank 1 dies once rank 0 has written its state of version 6, which is never published.
    crew.ranks.dies = (1, crew.groups[1].met + 1)
    assert any(isinstance(result, Killed) for result in crew.publish(6, 6.0))
    crew.close()

    successor = Crew(path)
    newest = newest_version(path)
    assert newest is not None and newest.version == 5
    (found, other) = successor.kept()
    assert found == other and found.version == 3
    state, own = training(1, -1), shards(1, -5)
    assert successor.versions[1].restore_training(found, state)
    successor.versions[1].restore(own, version=found)
    assert torch.equal(state["moments"], training(1, 3.0)["moments"])
    assert torch.equal(own["actor.head"].local, shards(1, 3.0)["actor.head"].local)

    successor.publish(3, 3.5, rollback=True, position=8)
    for version in (4, 5, 6):
        successor.publish(version, 10.0 + version, has_state=False)
        assert [found.age for found in successor.kept()] == [(3, 1)] * 2
    successor.close()


def test_a_successor_spares_what_it_goes_on_from_and_discards_a_state_without_weights(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    crew = Crew(path)
    for version in range(4):
        crew.publish(version, float(version), has_state=version % 3 == 0)
    crew.ranks.dies = (1, crew.groups[1].met + 1)
    assert any(isinstance(result, Killed) for result in crew.publish(4, 4.0))
    crew.close()

    successor = Crew(path)
    for version in (4, 5, 6):
        successor.publish(version, 10.0 + version, has_state=False)
        assert [found.version for found in successor.kept()] == [3, 3]
    successor.close()


def test_a_state_that_one_rank_lacks_is_none(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    crew = Crew(path)
    crew.publish(0, 0.0)
    path.with_name("training-1").unlink()

    assert crew.kept() == [None, None]

    crew.close()


def test_a_rank_without_a_training_state_says_so(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    crew = Crew(path)
    together(
        crew.ranks,
        lambda rank: crew.versions[rank].publish(
            WeightsVersion(0), shards(rank, 0), training(rank, 0) if rank == 0 else None
        ),
    )
    newest = newest_version(path)
    assert newest is not None

    found = [versions.holds_training(newest, training(rank, -1)) for rank, versions in enumerate(crew.versions)]
    crew.close()

    assert found == [True, False]


def test_damaged_weights_are_not_restored(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    crew = Crew(path)
    crew.publish(0, 0.0)
    crew.close()
    content = bytearray(path.read_bytes())
    content[3 * 4096] ^= 1
    path.write_bytes(content)
    found = shards(0, -5)
    newest = newest_version(path)
    assert newest is not None
    versions = PolicyVersions(path, Rank(Ranks(), 0))

    with pytest.raises(WeightsError, match="no whole copy"):
        versions.restore(found, version=newest)


def test_weights_of_another_model_are_not_restored(tmp_path: Path) -> None:
    crew = Crew(tmp_path / "weights")
    crew.publish(0, 0.0)
    crew.close()
    newest = newest_version(tmp_path / "weights")
    assert newest is not None
    found = shards(0, -5)
    found["actor.head"] = found["actor.head"]._replace(shape=(3, 1))
    versions = PolicyVersions(tmp_path / "weights", Rank(Ranks(), 0))

    with pytest.raises(WeightsError, match=r"^actor\.head: \(3, 1\), published as \(1, 3\)$"):
        versions.restore(found, version=newest)

    assert torch.equal(found["actor.head"].local, shards(0, -5)["actor.head"].local)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_ranks_publishes_the_bytes_and_the_fingerprint_of_whole_tensors(
    tmp_path: Path, world_size: int
) -> None:
    """The expected one is of plain tensors in the published dtypes."""
    ranks = Ranks(world_size)
    versions = [PolicyVersions(tmp_path / "weights", Rank(ranks, rank)) for rank in range(world_size)]
    whole = {name: shard.local.to(shard.dtype) for name, shard in shards(0, 2.0, 1).items()}
    expected = PolicyVersions(tmp_path / "whole").publish(WeightsVersion(1), whole, None)

    found = together(ranks, lambda rank: versions[rank].publish(WeightsVersion(1), shards(rank, 2.0, world_size), None))

    assert found == [expected] * world_size
    assert (tmp_path / "weights").read_bytes() == (tmp_path / "whole").read_bytes()


def test_each_block_is_hashed_by_one_rank_and_those_of_one_rank_beside_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[tuple[int, int]] = []
    crew = Crew(tmp_path / "weights")
    crew.publish(0, 0.0)
    for rank, versions in enumerate(crew.versions):
        assert versions._weights is not None
        for slot in map(versions._weights.slot, range(3)):
            digest = slot._digest
            monkeypatch.setattr(
                slot, "_digest", lambda index, rank=rank, digest=digest: hashed.append((rank, index)) or digest(index)
            )

    crew.publish(1, 1.0)

    # The three blocks: rows 0 to 2 of 440,000 B are rank 0's, the others rank 1's, then head and scale of rank 0.
    assert sorted(hashed) == [(0, 0), (0, 1), (1, 2)]
    crew.close()
