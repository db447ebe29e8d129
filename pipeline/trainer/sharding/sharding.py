"""Everything of one rank of a sharded trainer that differs from a whole one: load, publish, restore, save."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config.schema import Config
from pipeline.models.lora import adapter_of
from pipeline.models.weights.held import HeldVersion
from pipeline.models.weights.shards import Shard, ShardedVersions
from pipeline.storage.weights_header import Probe, WeightsVersion
from pipeline.trainer.connection import Connection
from pipeline.trainer.sharding.checkpoints import HeldCheckpoint, Write, load_shards, save_together, state_shards
from pipeline.trainer.sharding.models import load_actor_shards, load_critic_shards, shards_of
from pipeline.trainer.sharding.ranks import TIMEOUT, RankGroup

_M_MMAP_THRESHOLD = -3
_MAPPED_FROM_BYTES = 1 << 20


def sharded_models(config: Config, device: torch.device) -> dict[str, nn.Module]:
    """Return a rank's shards of the run's models, ``actor`` and, with PPO, ``critic``; a collective.

    Raises:
        ConfigError: If a model does not load, or cannot be sharded.
    """
    if device.type == "cpu":
        _return_freed_memory()
    model, world_size = config.model, config.trainer.world_size
    models = {
        "actor": load_actor_shards(
            model.actor, dtype=model.dtype, device=device, world_size=world_size, lora=model, seed=config.daemon.seed
        )
    }
    if config.rollout.algorithm == "ppo":
        path, field = (model.actor, "model.actor") if model.critic is None else (model.critic, "model.critic")
        models["critic"] = load_critic_shards(
            path, dtype=model.dtype, device=device, world_size=world_size, field=field
        )
    return models


def sharded_reference(config: Config, path: str, device: torch.device) -> nn.Module:
    """Return a rank's shards of the reference in a folder; a collective. Errors: `sharded_models`."""
    return load_actor_shards(
        path,
        dtype=config.model.dtype,
        device=device,
        world_size=config.trainer.world_size,
        lora=None,
        field="model.reference",
    )


def _return_freed_memory() -> None:
    """Let glibc map every tensor of 1 MiB or more by itself, so that its memory returns to the kernel when it is freed.

    By default glibc takes tensors of up to 32 MiB from its heap, once it has freed one, and the gathered layers and
    gradients that come and go in each pass leave holes there as large as all shards.
    """
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)


def _in_training(
    waiting: Callable[[], contextlib.AbstractContextManager[None]],
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return the context of a collective for training's thread; in another one the rank does not wait."""
    training = threading.current_thread()
    return lambda: waiting() if threading.current_thread() is training else contextlib.nullcontext()


class Sharding:
    """The sharded models of one rank, their published versions and their checkpoints."""

    def __init__(
        self,
        config: Config,
        models: Mapping[str, nn.Module],
        connection: Connection,
        device: torch.device,
        waiting: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Store the arguments.

        Args:
            config: The run's configuration.
            models: From `sharded_models`.
            connection: This rank's connection to the daemon.
            device: Device of the models.
            waiting: Encloses each collective.
        """
        self._lora = config.model
        self._models = models
        self._held: HeldCheckpoint | None = None
        self._connection = connection
        self._group = RankGroup(device, waiting)
        # A group of its own, on the CPU: a thread publishes beside the collectives of training.
        beside = dist.new_group(backend="gloo", timeout=TIMEOUT)
        publishing = RankGroup(torch.device("cpu"), _in_training(waiting), beside)
        self._versions = ShardedVersions(connection.weights_path, publishing, holds_pages=device.type != "cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of one version and of this rank's training state."""
        return self._versions.nbytes

    @property
    def weights_bytes(self) -> int:
        """Bytes of one version, the same on every rank; 0 before the first publish."""
        return self._versions.weights_bytes

    @property
    def state_s(self) -> float:
        """Seconds that the write of this rank's last training state took."""
        return self._versions.state_s

    def publish(
        self,
        training: Mapping[str, Tensor] | None,
        *,
        version: int | None = None,
        rollback: bool = False,
        position: int | None = None,
        probe: Probe | None = None,
    ) -> WeightsVersion:
        """Publish this rank's shards; a collective. Arguments and errors: `Connection.publish`."""
        shards = self._shards()

        def together(number: int, trained_through: int) -> WeightsVersion:
            return self._versions.publish(
                number,
                shards,
                training,
                trained_through=trained_through,
                rollback=rollback,
                position=position,
                probe=probe,
            )

        return self._connection.publish_with(together, version=version, rollback=rollback)

    def writing(
        self, version: int, training: Mapping[str, Tensor] | None, *, trained_through: int, probe: Probe | None
    ) -> Callable[[], WeightsVersion]:
        """Return the publish of this rank's shards, called by a thread of every rank while training goes on.

        The shards are read live: the caller waits for the end before they change. Training's thread meets the other
        ranks here, so that none waits for a late one in a pass or in the publish.
        """
        shards = self._shards()
        self.meet()
        return functools.partial(
            self._versions.publish, version, shards, training, trained_through=trained_through, probe=probe
        )

    def _shards(self) -> dict[str, dict[str, Shard]]:
        return {model: shards_of(module, published=True) for model, module in self._models.items()}

    def kept(self) -> WeightsVersion | None:
        """Return the newest version that has a training state on every rank; a collective. See `ShardedVersions`."""
        return self._versions.kept()

    def restore(self, version: WeightsVersion, state: Mapping[str, Tensor]) -> bool:
        """Set this rank's shards and training state to a version; a collective.

        Returns:
            False if a rank has no training state of that version: then no rank has changed anything.

        Raises:
            WeightsError: If weights or state are damaged, or the weights are another model's.
        """
        if not self._group.agree(self._versions.holds_training(version, state)):
            return False
        self._versions.restore_training(version, state)
        self._versions.restore(version, self._shards())
        return True

    def load(self, folder: Path, state_file: str, state: Mapping[str, Tensor]) -> None:
        """Set this rank's shards and training state to a checkpoint's; errors: `load_shards`."""
        load_shards(folder, state_file, self._models, state)

    def meet(self) -> None:
        """Wait for all ranks; a collective in which a rank may be for any time."""
        self._group.barrier()

    def due(self, is_due: bool) -> bool:
        """Return rank 0's answer on every rank; a collective: only rank 0 knows the checkpoints that it has written."""
        return bool(self._group.broadcast([int(is_due)])[0])

    def held(self, version: WeightsVersion, state: Mapping[str, Tensor]) -> tuple[bool, HeldVersion | None]:
        """Return whether shared memory holds the newest version and the states of all ranks; a collective.

        Args:
            version: The newest version.
            state: This rank's training state.

        Returns:
            The answer, on every rank, and on rank 0 the version, which `save_held` writes; never with adapters.
        """
        found = None
        if self._group.rank == 0 and not adapter_of(self._models["actor"]):
            split = {name for name, shard in state_shards(state, self._models).items() if shard.split}
            if (found := self._versions.held(version, split)) is not None:
                self._held = HeldCheckpoint(self._models, state, found)
        return self.due(found is not None), found

    def save_held(self, write: Write) -> Path:
        """Write a checkpoint of the version of `held`, on rank 0 alone, in any thread; errors: those of `write`."""
        held, self._held = self._held, None
        assert held is not None
        return held.write(write)

    def save(self, state: Mapping[str, Tensor], write: Write) -> Path | None:
        """Write a checkpoint through rank 0; a collective. Arguments, result and errors: `save_together`."""
        return save_together(self._group, self._models, state, self._lora, write)

    def close(self) -> None:
        """Unmap the published versions; they stay."""
        self._versions.close()
