"""Two ranks on two machines find one start: each has folders of its own, and the first one's hold the run."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.identity import identity_of
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.models.weights.versions import PolicyVersions
from pipeline.runtime.checkpoint_note import CheckpointNote
from pipeline.runtime.latest_checkpoint import checkpoints_dir
from pipeline.storage.weights_header import WeightsVersion
from pipeline.trainer.checkpoints import save_checkpoint
from pipeline.trainer.learner import Learner
from pipeline.trainer.resume import Resumption, Start
from pipeline.trainer.saving.rank_models import RankModels
from pipeline.trainer.sharding.models import load_actor_shards, shards_of
from pipeline.trainer.sharding.replicas import Replica
from pipeline.trainer.spreading import of_first, spread
from pipeline.trainer.state import Progress, tensors_of
from tests.support import forked_ranks, tiny
from tests.trainer.sharding.wire import far_shards
from tests.trainer.test_checkpoints import Tokenizer

CPU = torch.device("cpu")
PROGRESS = Progress(5, 7, 50)


@pytest.mark.ranks
def test_two_ranks_on_two_machines_find_one_start_with_shards_and_with_whole_models(tmp_path: Path) -> None:
    tiny.llama(1).save_pretrained(tmp_path / "model")

    forked_ranks.run(2, f"{__name__}:rank_main", tmp_path, timeout_s=120)

    assert [(tmp_path / f"passed-{rank}").exists() for rank in range(2)] == [True, True]


def rank_main(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    folder = Path(directory)
    (folder / str(rank)).mkdir()
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    shards_are_found(rank, folder)
    whole_models_are_sent(rank, folder)
    with pytest.raises(ConfigError, match="the first rank reads"):
        of_first(functools.partial(refuse, rank))
    (folder / f"passed-{rank}").touch()
    dist.barrier()
    dist.destroy_process_group()
    # As each role ends (`child_entry.leave`): threads of torch that still run at the interpreter's end abort it.
    os._exit(0)


def refuse(rank: int) -> None:
    assert rank == 0, "another rank has called"
    raise ConfigError("the first rank reads")


def config_of(rank: int, folder: Path, sharding: str) -> Config:
    return Config.model_validate(
        {
            "model": {"actor": str(folder / "model")},
            "rollout": {"algorithm": "grpo"},
            "trainer": {"world_size": 2, "nodes": 2, "sharding": sharding},
            "cluster": {"engine": "ray"},
            "daemon": {"state_dir": str(folder / str(rank) / "state")},
        }
    )


def disturb(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Fill tensors with random numbers, those without a dimension with the same on each rank; return copies."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) if tensor.dim() else torch.tensor(seed // 10))
    return {name: tensor.clone() for name, tensor in tensors.items()}


def holds(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in tensors)


def shards_are_found(rank: int, folder: Path) -> None:
    """Publish, save a checkpoint, die, and find both again; the second rank's machine has neither."""
    config, path = config_of(rank, folder, "full"), folder / "0" / "weights"
    actor = load_actor_shards(folder / "model", dtype="float32", device=CPU, replica=Replica.of(CPU), lora=config.model)
    learner = Learner(config.trainer, "grpo", actor, process_group=dist.group.WORLD)
    far = far_shards(path, rank) if rank else None
    versions = PolicyVersions(path) if far is None else far.versions()
    connection: Any = SimpleNamespace(rank=rank, weights_path=path, remote=far, newest=versions.newest)
    models = RankModels(config, {"actor": actor}, connection, CPU)
    resumption = Resumption(config, connection, learner, models, agree=all_agree, of_first=of_first)
    tensors = {name: shard.local for name, shard in shards_of(actor).items()} | learner.tensors()
    assert resumption.find() == Start(), "nothing is there yet"
    before = disturb(tensors, 10 + rank)
    state = tensors_of(learner, PROGRESS)
    version = models.writing(WeightsVersion(5), state)()
    _, held = models.held(state)
    if held is not None:
        described, fingerprint = config.model_dump(mode="json"), f"{version.fingerprint:016x}"
        note = CheckpointNote(identity_of(config), 5, 5, 50, False, f"{7:016x}", fingerprint, described)
        write = functools.partial(save_checkpoint, checkpoints_dir(config), note, tokenizer=Tokenizer())
        models.save(write, None, held)
    dist.barrier()

    disturb(tensors, 20 + rank)
    assert resumption.find() == Start(PROGRESS, None, saved_step=5)
    assert holds(tensors, before), "from shared memory"

    dist.barrier()
    if rank == 0:
        for name in ("weights", "training", "training-1"):
            path.with_name(name).unlink()
    dist.barrier()
    disturb(tensors, 30 + rank)
    start = resumption.find()
    assert (start.progress, start.version, start.rollback, start.saved_step) == (PROGRESS, 5, False, 5)
    assert holds(tensors, before), "from the checkpoint"
    assert not (folder / "1" / "state").exists()


def all_agree(ready: bool) -> bool:
    flag = torch.tensor(int(ready))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def whole_models_are_sent(rank: int, folder: Path) -> None:
    """Send the first rank's models and training state to a rank whose machine has other ones."""
    config, path = config_of(rank, folder, "none"), folder / str(rank) / "whole"
    actor = tiny.llama(rank)
    learner = Learner(config.trainer, "grpo", actor, process_group=dist.group.WORLD)
    connection: Any = SimpleNamespace(rank=rank, weights_path=path, remote=None, versions=PolicyVersions(path))
    connection.newest = connection.versions.newest
    models = RankModels(config, {"actor": actor}, connection, CPU)
    tensors = models.tensors() | learner.tensors()
    before = disturb(tensors, 40 + rank)
    found: list[Any] = [before]
    dist.broadcast_object_list(found, src=0)

    start = spread(Start(PROGRESS, 5) if rank == 0 else Start(), learner, models, connection, CPU)

    assert (start.progress, start.version, learner.step) == (PROGRESS, 5, 5)
    assert holds(tensors, found[0])
