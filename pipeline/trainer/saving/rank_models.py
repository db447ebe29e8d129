"""The models of one rank as they are published, restored and saved with the training state, whole or as shards.

A rank that holds whole models is a group of one rank, in which one shard is a whole tensor. So the ranks of a sharded
trainer and a rank with whole models take one path; only the files of a checkpoint are written and read in two ways:
those of whole models by transformers, those of shards by slices (`pipeline.trainer.sharding.checkpoints`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from pipeline.config.schema import Config
from pipeline.models.lora import Saved, adapter_of, published
from pipeline.models.weights.held import HeldVersion, state_dicts
from pipeline.models.weights.shards import Group, Shard, as_shards
from pipeline.models.weights.store import flatten, joined
from pipeline.models.weights.versions import PolicyVersions
from pipeline.storage.weights_header import WeightsVersion
from pipeline.trainer.checkpoints import STATE_FILE, load_whole
from pipeline.trainer.connection import Connection
from pipeline.trainer.saving.lower_halves import JoinedState, LowerHalves
from pipeline.trainer.sharding.checkpoints import Write, held_checkpoint, load_shards, save_together, state_shards
from pipeline.trainer.sharding.models import is_sharded, replica_of, shards_of
from pipeline.trainer.sharding.ranks import RankGroup
from pipeline.trainer.sharding.tensor_files import HERE

Waiting = Callable[[], contextlib.AbstractContextManager[None]]
"""Encloses a collective, in which a rank makes no progress of its own."""


class RankModels:
    """The models of one rank. What the ranks of a replica do together is a collective if the models are sharded.

    Attributes:
        is_sharded: Whether the ranks of the first replica publish and save together; else the first rank alone.
        publishes: Whether this rank takes part in publishes and checkpoints.
        versions: The published versions.
    """

    def __init__(
        self,
        config: Config,
        models: Mapping[str, nn.Module],
        connection: Connection,
        device: torch.device,
        waiting: Waiting = contextlib.nullcontext,
        *,
        beside: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Take over the models; with shards a collective.

        Args:
            config: The run's configuration.
            models: ``actor`` and, with PPO, ``critic``, whole or sharded.
            connection: This rank's connection to the daemon.
            device: Device of the models.
            waiting: Encloses each collective.
            beside: Small tensors that are published beside the models, by published name, live and the same on each
                rank; they are part of the training state.
        """
        self._config = config
        self._models = models
        self._beside = as_shards(beside)
        self._held: Callable[[Write], Path] | None = None
        self._files = connection.remote or HERE
        self.is_sharded = is_sharded(models["actor"])
        self._group = self._all = Group()
        if not self.is_sharded:
            self.publishes = connection.rank == 0
            self.versions = connection.versions
            return
        replica = replica_of(models["actor"])
        self.publishes = replica.is_published
        self._group, self._all = RankGroup(device, waiting, replica.group), RankGroup(device, waiting)
        # A group of its own, on the CPU: a thread publishes beside the collectives of training.
        publishing = RankGroup(torch.device("cpu"), _in_training(waiting), replica.gloo_group())
        if connection.remote is not None:
            self.versions = connection.remote.versions(publishing)
            return
        self.versions = PolicyVersions(
            connection.weights_path,
            publishing,
            holds_pages=device.type != "cpu",
            weight_slots=config.trainer.weight_slots,
        )

    def writing(self, wanted: WeightsVersion, training: Mapping[str, Tensor] | None) -> Callable[[], WeightsVersion]:
        """Return the publish of a version, which a thread of every rank may call while training goes on.

        The tensors are read live: the caller waits for the end before they change. Training's thread meets the other
        ranks here, so that none waits for a late one in a pass or in the publish. Arguments and errors of the publish:
        `PolicyVersions.publish`.
        """
        models = self._published()
        self.meet()
        return functools.partial(self._write, wanted, models, training)

    def keep_state(self, version: WeightsVersion, state: Mapping[str, Tensor]) -> None:
        """Write the training state of the newest version, whose weights are the live ones, to shared memory."""
        self.versions.publish_training(version, LowerHalves(self._published(), state).stored())

    def restore(self, version: WeightsVersion, state: Mapping[str, Tensor]) -> bool:
        """Set the models and the training state to a version.

        Returns:
            False if a rank has no training state of that version: then no rank has changed anything.

        Raises:
            WeightsError: If weights or state are damaged, or the weights are another model's.
        """
        halves = LowerHalves(self._published(), state)
        into = halves.targets()
        if not self._all.agree(self.versions.holds_training(version, into)):
            return False
        self.versions.restore_training(version, into)
        rounded = halves.rounded()
        self.versions.restore(rounded, version=version)
        halves.join(into, rounded)
        return True

    def load(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Set the models and the training state to a checkpoint's.

        Raises:
            CheckpointError: If a file cannot be read, or is of other models.
        """
        if self.is_sharded:
            load_shards(folder, STATE_FILE, self._models, state, self._files)
        else:
            load_whole(folder, self._config, self._models, state)

    def meet(self) -> None:
        """Wait for the ranks of the replica; a collective in which a rank may be for any time."""
        self.agree(True)

    def agree(self, ready: bool) -> bool:
        """Return whether every rank of the replica passed True; a collective of them."""
        return self._group.agree(ready)

    def due(self, is_due: bool) -> bool:
        """Return the first rank's answer on every rank: only that rank knows the checkpoints that it has written."""
        return bool(self._group.broadcast([int(is_due)])[0])

    def held(self, state: Mapping[str, Tensor]) -> tuple[bool, HeldVersion | None]:
        """Return whether shared memory holds the newest version and the states of all ranks.

        Args:
            state: This rank's training state.

        Returns:
            The answer, on every rank, and on the first one the version, which `save` writes. Shards with adapters are
            never held: no rank has their whole base model.
        """
        found = None
        if self._group.rank == 0 and not (self.is_sharded and adapter_of(self._models["actor"])):
            shards = state_shards(state, self._models) if self.is_sharded else as_shards(state)
            halves = LowerHalves(self._published(), state)
            found = self.versions.held(halves.shards(shards))
            if found is not None and halves:
                found = found._replace(training=halves.whole(found.training, found.weights, shards))
            if found is not None and self.is_sharded:
                self._held = held_checkpoint(self._models, state, found)
        return self.due(found is not None), found

    def save(self, write: Write, state: Mapping[str, Tensor] | None, held: HeldVersion | None) -> Path | None:
        """Write a checkpoint.

        Args:
            write: Writes it from models and state, on the first rank.
            state: This rank's training state, to save the live tensors, which all ranks do together; None for `held`.
            held: The version to save, from `held`; the first rank alone saves it, in any thread.

        Returns:
            The checkpoint's folder; None on another rank than the first.

        Raises:
            CheckpointError: On every rank that takes part, if the checkpoint cannot be written.
        """
        if isinstance(self._group, RankGroup) and state is not None:
            return save_together(self._group, self._models, state, self._config.model, write)
        if self._held is not None:
            from_shards, self._held = self._held, None
            return from_shards(write)
        live = {name: published(model) for name, model in self._models.items()}
        states = live if held is None else state_dicts(held.weights, **live)
        tensors = state if held is None else held.training
        assert tensors is not None
        saved = {name: Saved(self._models[name], self._config.model, of_model) for name, of_model in states.items()}
        return write(
            actor=saved["actor"],
            critic=saved.get("critic"),
            state=tensors.write if isinstance(tensors, JoinedState) else tensors,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the models by name, live, those that no step changes among them."""
        return flatten(**{name: dict(module.state_dict()) for name, module in self._models.items()})

    def close(self) -> None:
        """Unmap the published versions; they stay."""
        self.versions.close()

    def _write(
        self, wanted: WeightsVersion, models: Mapping[str, Shard], training: Mapping[str, Tensor] | None
    ) -> WeightsVersion:
        stored = None if training is None else LowerHalves(models, training).stored()
        return self.versions.publish(wanted, models, stored)

    def _published(self) -> dict[str, Shard]:
        if self.is_sharded:
            of_models = joined({model: shards_of(module, published=True) for model, module in self._models.items()})
        else:
            of_models = as_shards(flatten(**{model: published(module) for model, module in self._models.items()}))
        return of_models | self._beside


def _in_training(waiting: Waiting) -> Waiting:
    """Return the context of a collective for training's thread; in another one the rank does not wait."""
    training = threading.current_thread()
    return lambda: waiting() if threading.current_thread() is training else contextlib.nullcontext()
