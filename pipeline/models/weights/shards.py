"""Publishes and restores versions of a model whose tensors are sharded over the ranks; no rank holds a whole model.

A shard is a contiguous range of a tensor's elements, so each rank writes its own bytes of the slot, in the same layout
and with the same fingerprint as a publish by one rank: readers see no difference. The order of one publish:

    rank 0      marks the slot as being written, tells the others the slot and the version
    each rank   writes its training state to a file of its own (`training`, `training-1`), then its part of the slot
    all ranks   meet; each hashes every n-th block of the slot, and all gather the digests
    rank 0      writes the fingerprint and the version, and turns the page with one store

Whenever a version of the weights that has a training state is the newest, its state is therefore whole on every rank,
and a rank killed at any store of a publish leaves the version before it. As with one rank not every version needs a
state (`trainer.keep_state_every`): the slot of the newest weights that have one is spared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipeline.errors import WeightsError
from pipeline.models.weights.held import HeldSlot, HeldVersion
from pipeline.models.weights.slot_copy import combined
from pipeline.models.weights.store import WeightsMapping, WeightsPublisher, joined
from pipeline.models.weights.versions import PolicyVersions, publisher_of
from pipeline.storage.weights_header import Probe, WeightsVersion


class Shard(NamedTuple):
    """One rank's range of a tensor.

    Attributes:
        local: The rank's elements, live; their dtype may differ from the published one.
        shape: Shape of the whole tensor.
        start: First element of the range in the whole tensor.
        dtype: Dtype in which the tensor is published and saved.
        split: Whether it is split over the ranks; a tensor that is not is held whole by each.
    """

    local: Tensor
    shape: tuple[int, ...]
    start: int
    dtype: torch.dtype
    split: bool = True

    @property
    def elements(self) -> slice:
        """The range, in elements of the whole tensor."""
        return slice(self.start, self.start + self.local.numel())

    def whole_on_meta(self) -> Tensor:
        """Return a tensor of the whole shape and the published dtype, without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class Group(Protocol):
    """The collectives of all ranks that a publish needs.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
    """

    rank: int
    world_size: int

    def broadcast(self, values: Sequence[int]) -> list[int]:
        """Return rank 0's values, each in 63 bits; every rank passes as many."""

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's values, unsigned 64-bit, in order of ranks; every rank passes as many."""

    def barrier(self) -> None:
        """Wait for all ranks."""


class ShardedVersions:
    """Publishes and restores versions; every call of `publish` is a collective of all ranks."""

    def __init__(self, weights_path: Path, group: Group, *, holds_pages: bool = True) -> None:
        """Store the arguments; the first `publish` creates the files.

        Args:
            weights_path: File of the weights in the instance's folder; the ranks' training states are beside it.
            group: The ranks.
            holds_pages: Whether written pages stay mapped, so that the next publish is faster; else they do not count
                as resident memory of a rank, which on a CPU has its shards there.
        """
        self._holds_pages = holds_pages
        self._path = weights_path
        self._group = group
        name = "training" if group.rank == 0 else f"training-{group.rank}"
        self._states = PolicyVersions(weights_path, training_name=name)
        self._publisher: WeightsPublisher | None = None
        self._mapping: WeightsMapping | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of one version and of this rank's training state; 0 before the first publish."""
        return self.weights_bytes + self._states.nbytes

    @property
    def weights_bytes(self) -> int:
        """Bytes of one version, the same on every rank; 0 before the first publish."""
        return 0 if self._mapping is None else int(self._mapping.slot_bytes)

    @property
    def state_s(self) -> float:
        """Seconds that the write of this rank's last training state took."""
        return self._states.state_s

    def publish(
        self,
        version: int,
        models: Mapping[str, Mapping[str, Shard]],
        training: Mapping[str, Tensor] | None,
        *,
        trained_through: int,
        rollback: bool = False,
        position: int | None = None,
        probe: Probe | None = None,
    ) -> WeightsVersion:
        """Publish a version; a collective. Rank 0's arguments count, but for `models` and `training`.

        Args:
            version: Version number, above the newest unless `rollback`.
            models: This rank's shards, by model and name; names, shapes and dtypes are the same on every rank.
            training: Tensors of this rank's training state; None, on all ranks, if it is not published.
            trained_through: First lease that these weights do not include.
            rollback: Whether this version undoes the newest one.
            position: For a rollback, the first prompt that may be missing from these weights; None if unknown.
            probe: The probe of a model with these weights.

        Returns:
            The published version, on every rank.

        Raises:
            ConfigError: If shared memory has no room for the weights.
            UnreachableError: If the daemon has ended.
            WeightsError: If the tensors are not those of the first publish, or the version is not new.
        """
        shards = joined(models)
        slot, history = 0, 0
        if self._group.rank == 0:
            slot, history = self._begin(version, shards, rollback=rollback)
        slot, history, version, rollback_word = self._group.broadcast([slot, history, version, int(rollback)])
        if self._mapping is None:
            self._mapping = WeightsMapping(self._path)
            self._states.discard_unpublished()
        self._states.publish_no_training()
        if training is not None:
            self._states.publish_training(
                version, _held(training), trained_through=trained_through, rollback=bool(rollback_word), history=history
            )
            if not self._holds_pages:
                self._states.release_training()
        memory = self._mapping.slot(slot)
        self._write(memory.views, shards)
        self._group.barrier()
        fingerprint = self._fingerprint_together(memory.blocks, memory.digests)
        first = position if rollback and position is not None else -1
        published = WeightsVersion(version, fingerprint, trained_through, bool(rollback_word), history, probe, first)
        if self._publisher is not None:
            self._publisher.finish(slot, published)
            if self._states.wrote_training:
                self._publisher.spare(published.age)
        if not self._holds_pages:
            self._mapping.release()
        return published

    def kept(self) -> WeightsVersion | None:
        """Return the newest version whose weights and training states of all ranks are whole; a collective.

        Returns:
            The same version on every rank; None without one.
        """
        own = self._states.kept()
        # Every rank has the state of a whole version: a rank without one had no room for any.
        ages = self._group.gather([0, 0, 0] if own is None else [1, *own.age])
        return own if ages == [ages[0]] * self._group.world_size else None

    def restore(self, version: WeightsVersion, models: Mapping[str, Mapping[str, Shard]]) -> None:
        """Copy this rank's ranges of a version's weights into its shards; nobody publishes meanwhile.

        A shard of another dtype than the published one is left as it is: the training state holds its exact values.

        Args:
            version: A version that is held.
            models: The shards to fill; names that are not published are left as they are.

        Raises:
            WeightsError: If the weights are damaged or another model's; the shards are then unchanged.
        """
        mapping = WeightsMapping(self._path)
        try:
            slot = mapping.slot_of(version.age)
            if slot is None:
                raise WeightsError(f"version {version.version} is no longer held")
            memory = mapping.slot(slot)
            if combined(memory.digests(range(memory.blocks))) != version.fingerprint:
                raise WeightsError(f"weights of version {version.version} are damaged in shared memory")
            shards = joined(models)
            for name, view in memory.views.items():
                if name not in shards or tuple(view.shape) != shards[name].shape:
                    raise WeightsError(f"{name}: published as {tuple(view.shape)}, not a tensor of this model")
            with torch.no_grad():
                for name, view in memory.views.items():
                    shard = shards[name]
                    if shard.local.dtype == view.dtype:
                        shard.local.copy_(view.reshape(-1)[shard.elements].view(shard.local.shape))
        finally:
            mapping.close()

    def holds_training(self, version: WeightsVersion, into: Mapping[str, Tensor]) -> bool:
        """Return whether this rank's training state of a version is held; as `PolicyVersions.holds_training`."""
        return self._states.holds_training(version, _held(into))

    def restore_training(self, version: WeightsVersion, into: Mapping[str, Tensor]) -> bool:
        """Copy this rank's training state of a version into tensors; as `PolicyVersions.restore_training`."""
        return self._states.restore_training(version, _held(into))

    def held(self, version: WeightsVersion, split: Collection[str]) -> HeldVersion | None:
        """Return the newest version in place, with the training states of all ranks; called on rank 0.

        Args:
            version: The newest version.
            split: Names of the training state that are split over the ranks; of the others rank 0's are returned.

        Returns:
            None if shared memory does not hold the training state of every rank.
        """
        own = self._states.held_training(version)
        if self._publisher is None or own is None:
            return None
        slot = self._publisher.newest_slot()
        others = [self._state_of(rank, version) for rank in range(1, self._group.world_size)]
        if slot is None or None in others:
            return None
        states = [own.tensors, *(state for state in others if state is not None)]
        return HeldVersion(
            HeldSlot(self._publisher, slot, self._publisher.tensors(slot)), own._replace(tensors=_Joined(states, split))
        )

    def _state_of(self, rank: int, version: WeightsVersion) -> Mapping[str, Tensor] | None:
        """Return another rank's training state of a version, in place; None if it is not held."""
        path = self._path.with_name(f"training-{rank}")
        if not path.exists():
            return None
        mapping = WeightsMapping(path)
        slot = mapping.slot_of(version.age)
        # Unmapped with the last of these tensors.
        return None if slot is None else mapping.slot(slot).views

    def close(self) -> None:
        """Unmap the files; they stay, for the workers and for the next trainer."""
        self._states.close()
        if self._publisher is not None:
            self._publisher.close()
        if self._mapping is not None:
            self._mapping.close()

    def _begin(self, version: int, shards: Mapping[str, Shard], *, rollback: bool) -> tuple[int, int]:
        """Mark the slot to write; return it, and the rollbacks up to this version."""
        if self._publisher is None:
            self._publisher = publisher_of(self._path, {n: shard.whole_on_meta() for n, shard in shards.items()})
            if (kept := self._states.kept()) is not None:
                self._publisher.spare(kept.age)
        slot, before = self._publisher.begin(version, rollback=rollback)
        return slot, before + rollback

    def _write(self, views: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> None:
        if views.keys() != shards.keys():
            raise WeightsError(f"{min(views.keys() ^ shards.keys())}: not a tensor of the first publish")
        for name, view in views.items():
            shard = shards[name]
            # The cast is that of the copy; a tensor that every rank holds whole is written by each, the same bytes.
            view.reshape(-1)[shard.elements].copy_(shard.local.detach().reshape(-1))

    def _fingerprint_together(self, blocks: int, digests: Callable[[Sequence[int]], list[int]]) -> int:
        """Return the fingerprint of all blocks, each hashed by one rank."""
        world_size = self._group.world_size
        own = digests(range(self._group.rank, blocks, world_size))
        most = -(-blocks // world_size)
        found = [0] * blocks
        for rank, values in enumerate(self._group.gather([*own, *[0] * (most - len(own))])):
            mine = range(rank, blocks, world_size)
            found[rank::world_size] = values[: len(mine)]
        return combined(found)


class _Joined(Mapping[str, Tensor]):
    """The training states of all ranks as one: a tensor that is split is joined when it is read."""

    def __init__(self, states: Sequence[Mapping[str, Tensor]], split: Collection[str]) -> None:
        self._states = states
        self._split = split

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._split:
            return self._states[0][name]
        # A rank without a row of a tensor has none of it.
        return torch.cat([state[name] for state in self._states if name in state])

    def __iter__(self) -> Iterator[str]:
        return iter(self._states[0])

    def __len__(self) -> int:
        return len(self._states[0])


def _held(training: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that have elements on this rank: a vector shorter than the ranks are many has none on some."""
    return {name: tensor for name, tensor in training.items() if tensor.numel()}
