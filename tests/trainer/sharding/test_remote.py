"""Shards of a rank on another machine: the files of the daemon's machine are those of ranks that are all there.

Rank 1 of a crew of two calls its `ShardService` as over a wire: all that arrives is a copy, its arrays read-only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline.errors import CheckpointError, WeightsError
from pipeline.models.weights.shards import Shard
from pipeline.models.weights.versions import PolicyVersions
from pipeline.storage.weights_header import WeightsVersion, newest_version
from pipeline.trainer.sharding import remote
from pipeline.trainer.sharding.remote import Parts, RemoteShards, ShardService
from pipeline.trainer.sharding.tensor_files import HERE
from tests.models.weights.test_shards import Crew, Rank, Ranks, assert_holds, shards, training
from tests.models.weights.test_versions import Killed
from tests.trainer.sharding.wire import Wire

SMALL_PARTS = 1 << 19
"""A row of the largest tensor, of which rank 1 has two."""


class FarCrew(Crew):
    """Two ranks over one file, of which the second is on another machine."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.wire = Wire(ShardService(path, 1, weight_slots=3))
        self.far = RemoteShards(self.wire.ask, self.wire.count)
        self.versions[1] = self.far.versions(self.groups[1])

    def close(self) -> None:
        super().close()
        self.wire.service.close()


@pytest.fixture
def far(tmp_path: Path) -> Any:
    (tmp_path / "far").mkdir()
    crew = FarCrew(tmp_path / "far" / "weights")
    yield crew
    crew.close()


@pytest.fixture(params=[False, True], ids=["whole", "in parts"])
def in_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        monkeypatch.setattr(remote, "_PART_BYTES", SMALL_PARTS)
    return bool(request.param)


def shard_bytes(rank: int) -> int:
    """Return the bytes of a rank's shards in the published dtypes; a tensor that all ranks hold is the first one's."""
    return sum(shard.local.numel() * shard.dtype.itemsize for shard in shards(rank, 0.0).values() if shard.split)


def test_the_files_are_those_of_ranks_on_one_machine_and_each_byte_travels_once(
    tmp_path: Path, far: FarCrew, in_parts: bool
) -> None:
    near = Crew(tmp_path / "weights")
    for crew in (near, far):
        for version in range(4):
            crew.publish(version, float(version), has_state=version % 2 == 0)

    for name in ("weights", "training", "training-1"):
        assert (tmp_path / "far" / name).read_bytes() == (tmp_path / name).read_bytes(), name
    moments = training(1, 0)["moments"].nbytes
    assert far.wire.counted == {"shards_sent": 4 * shard_bytes(1) + 2 * moments}
    assert (far.wire.calls.count("write_part") > 4) is in_parts
    assert [found.version for found in far.kept()] == [2, 2]
    near.close()


@pytest.mark.parametrize("rows", [1, 64])
def test_a_state_of_views_travels_in_parts_of_rows(
    tmp_path: Path, far: FarCrew, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """The halves of float32 copies are every second element of them (`pipeline.trainer.saving.lower_halves`)."""
    monkeypatch.setattr(remote, "_PART_BYTES", rows * 6)
    far.publish(0, 0.0, has_state=False)
    copies = torch.arange(21.0).reshape(7, 3)
    state = {
        "lower": copies.view(torch.int16)[..., ::2],
        "upper": copies.to(torch.bfloat16),
        "step": torch.tensor(3.0),
        "none": torch.empty(0, 3),
    }
    near = PolicyVersions(tmp_path / "weights")

    assert near.publish_training(WeightsVersion(1), state)
    assert far.versions[1].publish_training(WeightsVersion(1), state)

    assert (tmp_path / "far" / "training-1").read_bytes() == (tmp_path / "training").read_bytes()
    assert far.wire.counted["shards_sent"] == shard_bytes(1) + 21 * 2 + 21 * 2 + 4


def test_a_successor_far_away_gets_its_shards_and_no_others(far: FarCrew, in_parts: bool) -> None:
    for version in range(3):
        far.publish(version, float(version))
    newest = newest_version(far.path)
    assert newest is not None
    far.wire.counted.clear()
    successor = far.far.versions(Rank(Ranks(), 1))
    state, own = training(1, -1), shards(1, -5)

    assert successor.newest() == newest
    assert successor.holds_training(newest, state) and successor.restore_training(newest, state)
    assert successor.restore(own, version=newest) == newest

    assert torch.equal(state["moments"], training(1, 2.0)["moments"])
    assert torch.equal(own["actor.scale"].local, shards(1, -5)["actor.scale"].local)
    # float32 shards of what is published in bfloat16 come from the training state.
    assert torch.equal(own["actor.weight"].local, shards(1, -5)["actor.weight"].local)
    assert far.wire.counted == {"shards_received": state["moments"].nbytes}
    exact = {name: shard._replace(local=shard.local.to(shard.dtype)) for name, shard in shards(1, -5).items()}
    successor.restore(exact, version=newest)
    assert torch.equal(exact["actor.weight"].local, shards(1, 2.0)["actor.weight"].local.to(torch.bfloat16))
    everywhere = exact["actor.scale"].local.nbytes
    assert far.wire.counted["shards_received"] == state["moments"].nbytes + shard_bytes(1) + everywhere


@pytest.mark.parametrize("call", range(6))
def test_a_rank_or_gateway_that_dies_at_any_call_leaves_the_version_before(far: FarCrew, call: int) -> None:
    far.publish(0, 0.0)
    far.publish(1, 1.0)
    assert len(far.wire.calls) == 12, far.wire.calls
    far.wire.dies = 12 + call

    results = far.publish(2, 2.0)

    assert any(isinstance(result, Killed) for result in results)
    assert_holds(far.path, 1, 1.0)
    successor = FarCrew(far.path)
    for version in (2, 3, 4):
        assert successor.publish(version, 10.0 + version)[1].version == version
        assert_holds(far.path, version, 10.0 + version)
    successor.close()


def damaged(value: Any) -> Any:
    """Change a bit of the parts in arguments or a result."""
    for parts in (value,) if isinstance(value, Parts) else value if isinstance(value, tuple) else ():
        if isinstance(parts, Parts):
            content = bytearray(parts.parts[0].data)
            content[-1] ^= 1
            changed = parts.parts[0]._replace(data=torch.frombuffer(content, dtype=torch.uint8).numpy())
            whole = parts._replace(parts=[changed, *parts.parts[1:]])
            return whole if parts is value else tuple(whole if one is parts else one for one in value)
    return value


def test_bytes_that_change_on_the_way_are_found_in_both_directions(far: FarCrew) -> None:
    far.publish(0, 0.0)
    newest = newest_version(far.path)
    assert newest is not None
    versions = far.far.versions(Rank(Ranks(), 1))
    far.wire.changes = damaged

    with pytest.raises(WeightsError, match="changed on their way"):
        versions.restore_training(newest, training(1, -1))
    with pytest.raises(WeightsError, match="changed on their way"):
        versions.write_part(1, shards(1, 1.0))
    assert_holds(far.path, 0, 0.0)


def test_weights_of_another_model_are_neither_written_nor_restored(far: FarCrew) -> None:
    far.publish(0, 0.0)
    versions = far.far.versions(Rank(Ranks(), 1))
    other = shards(1, 1.0)
    other["actor.head"] = other["actor.head"]._replace(shape=(3, 1))

    for call in (lambda: versions.restore(other), lambda: versions.write_part(1, other)):
        with pytest.raises(WeightsError, match=r"^actor\.head: \(3, 1\), (published as|expected) \(1, 3\)$"):
            call()


def test_a_rank_without_room_for_its_state_publishes_without_it(far: FarCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far.wire.service._versions, "_training_publisher", lambda state: None)

    one, other = far.publish(0, 0.0)

    assert one == other
    assert far.kept() == [None, None]
    assert not far.versions[1].holds_training(one, training(1, -1))


def files_in(folder: Path) -> dict[str, Tensor]:
    found = {"a": torch.arange(30.0).reshape(10, 3), "b": torch.arange(5, dtype=torch.int64), "c": torch.tensor(7.5)}
    save_file(found, folder / "model.safetensors")
    return found


def targets() -> dict[str, Shard]:
    return {
        "a": Shard(torch.zeros(4, 3), (10, 3), 12, torch.float32),
        "b": Shard(torch.zeros(0, dtype=torch.int64), (5,), 5, torch.int64),
        "c": Shard.whole(torch.tensor(0.0)),
    }


@pytest.mark.parametrize("nbytes", [1, 1 << 28])
def test_a_rank_far_away_reads_its_rows_of_a_checkpoint_and_no_others(
    tmp_path: Path, far: FarCrew, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr(remote, "_PART_BYTES", nbytes)
    content, here, there = files_in(tmp_path), targets(), targets()
    with HERE.tensors(tmp_path, str(tmp_path)) as files:
        files.fill(here)

    with (
        far.far.tensors(tmp_path, str(tmp_path)) as files,
        far.far.tensors([tmp_path / "model.safetensors"], "twice") as again,
    ):
        assert files.names() == again.names() == set("abc")
        files.fill(there)

    for name, shard in there.items():
        assert torch.equal(shard.local, here[name].local), name
    assert torch.equal(there["a"].local, content["a"][4:8])
    assert far.wire.counted == {"shards_received": 4 * 3 * 4 + 4}
    assert far.far.has(tmp_path / "model.safetensors") and not far.far.has(tmp_path / "value_head.safetensors")


def test_files_that_are_missing_or_of_another_model_are_told_far_away_as_here(tmp_path: Path, far: FarCrew) -> None:
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        far.far.tensors(tmp_path, str(tmp_path))
    files_in(tmp_path)
    with far.far.tensors(tmp_path, str(tmp_path)) as files:
        with pytest.raises(CheckpointError, match="d is missing"):
            files.fill({"d": targets()["c"]})
        with pytest.raises(CheckpointError, match=r"a is \(10, 3\), expected \(3, 10\)"):
            files.fill({"a": targets()["a"]._replace(shape=(3, 10))})
