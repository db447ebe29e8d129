"""The trainer's side of the policy versions: weights for the workers, and the training state for a restarted trainer.

    weights     two slots, or three, read by all (`pipeline.models.weights.store`)
    training    two slots of the same format: optimizer moments, of float32 copies the bits that the weights lack
                (`pipeline.trainer.saving.lower_halves`), step, digest, random state; shard 1 of a sharded trainer has
                its own in `training-1`, and so on

A trainer publishes together with the ranks that hold shards of its models; one that holds whole models is a group of
one rank. A shard is a contiguous range of a tensor's elements, so each rank writes its own bytes of the slot, and the
layout and the fingerprint are the same for any number of ranks. The order of one publish:

    rank 0      marks the slot as being written, tells the others the slot and the version
    each rank   writes its training state, then its part of the slot, and hashes the blocks that are its own
    all ranks   gather these digests; the blocks of several ranks are hashed by one of them each, and gathered
    rank 0      writes the fingerprint and the version, and turns the page with one store

So whenever a version of the weights that has a state is the newest, its state is complete on every rank: a trainer
killed at any store instruction is resumed exactly from there. A state whose weights were never published is discarded
by the next publish.

Not every version needs a state (`trainer.keep_state_every`). The newest weights that have one, and their state, are
*kept*: no publish writes to their slots, until the next weights that have one are the newest. So weights and state of
one version are always whole, and a successor goes back to it if the newest version has no state. That takes a third
slot of weights. Where every version has a state the newest weights are the kept ones, and two slots take turns.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipeline.errors import ConfigError, UnreachableError, WeightsError
from pipeline.models.weights.held import HeldVersion
from pipeline.models.weights.shards import Group, Shard, as_shards
from pipeline.models.weights.slot_copy import combined
from pipeline.models.weights.store import WeightsMapping, WeightsPublisher, WeightsReader
from pipeline.storage.weights_header import Age, WeightsVersion, newest_version

_TRAINING_SLOTS = 2
_HEADER_ATTEMPTS = 1000

log = logging.getLogger(__name__)


class PolicyVersions:
    """Publishes and restores versions; of several ranks every one calls `publish` and `kept`, which are collectives.

    Attributes:
        training_path: File of this rank's training state.
        state_s: Seconds that the write of this rank's last training state took.
    """

    def __init__(
        self, weights_path: Path, group: Group | None = None, *, holds_pages: bool = True, weight_slots: int = 3
    ) -> None:
        """Store the arguments; the first `publish` creates the files.

        Args:
            weights_path: File of the weights in the instance's folder; the training states are beside it.
            group: The ranks that publish together; None for a rank that holds whole models.
            holds_pages: Whether written pages stay mapped, so that the next publish is faster; else they do not count
                as resident memory of a rank, which on a CPU has its shards there.
            weight_slots: Versions of the weights held at once in a file that is made here, 2 or 3; a predecessor's file
                stays as it is.
        """
        self._group = Group() if group is None else group
        self._weights_path = weights_path
        self.training_path = self._path_of(self._group.rank)
        self._holds_pages = holds_pages
        self._weight_slots = weight_slots
        self._weights: WeightsPublisher | None = None
        self._training: WeightsPublisher | None = None
        self._has_room = True
        self._wrote_state = False
        self.state_s = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the version published last and of this rank's training state with it, 0 before the first publish."""
        state = self._training.nbytes if self._training is not None and self._wrote_state else 0
        return self.weights_bytes + state

    @property
    def weights_bytes(self) -> int:
        """Bytes of one version, the same on every rank; 0 before the first publish."""
        return 0 if self._weights is None else self._weights.nbytes

    def may_lack_state(self) -> bool:
        """Return whether a version may be published without a state while an older one is kept: in three slots."""
        if self._weights is not None:
            return bool(self._weights.slots > 2)
        if not self._weights_path.exists():
            return self._weight_slots > 2
        with contextlib.closing(WeightsMapping(self._weights_path)) as weights:
            return bool(weights.slots > 2)

    def newest(self) -> WeightsVersion | None:
        """Return the version published last, by this trainer or its predecessor; None before the first."""
        return newest_version(self._weights_path, attempts=_HEADER_ATTEMPTS)

    def kept(self) -> WeightsVersion | None:
        """Return the newest version whose weights and training states of all ranks are whole, the same on every rank.

        Returns:
            None without one.
        """
        own = self.own_kept()
        # Every rank has the state of a whole version: a rank without one had no room for any.
        ages = self._group.gather([0, 0, 0] if own is None else [1, *own.age])
        return own if ages == [ages[0]] * self._group.world_size else None

    def restore(self, models: Mapping[str, Tensor | Shard], *, version: WeightsVersion | None = None) -> WeightsVersion:
        """Copy the weights of a version, the newest by default, into tensors, or this rank's ranges into its shards.

        A shard of another dtype than the published one is left as it is: the training state holds its exact values.

        Args:
            models: The tensors by published name; of names that are not published nothing is read.
            version: The version; None for the newest.

        Returns:
            The version.

        Raises:
            WeightsError: If there are no such weights, or they are another model's, or damaged; the contents of
                `models` are then undefined.
        """
        with contextlib.closing(WeightsReader(self._weights_path)) as reader:
            return reader.fetch(exact_shards(models), age=None if version is None else version.age)

    def restore_training(self, version: WeightsVersion, into: Mapping[str, Tensor]) -> bool:
        """Copy this rank's training state of a version into tensors.

        Returns:
            False if it is not held, or is another model's.

        Raises:
            WeightsError: If the stored state is corrupt; the contents of `into` are then undefined.
        """
        if not self.holds_training(version, into):
            return False
        with contextlib.closing(WeightsReader(self.training_path)) as reader:
            return reader.fetch(into, age=version.age).age == version.age

    def holds_training(self, version: WeightsVersion, into: Mapping[str, Tensor]) -> bool:
        """Return whether this rank's training state of a version is held, with these names, shapes and dtypes."""
        if not WeightsPublisher.matches(self.training_path, with_elements(into)):
            return False
        with contextlib.closing(WeightsReader(self.training_path)) as reader:
            return reader.holds(version.age)

    def publish(
        self, wanted: WeightsVersion, models: Mapping[str, Tensor | Shard], training: Mapping[str, Tensor] | None
    ) -> WeightsVersion:
        """Publish a version: its training state first, if given and if shared memory has room for it, then its weights.

        Args:
            wanted: The version; its fingerprint and history are found here. Rank 0's counts.
            models: The tensors, or this rank's shards, by published name; the same names on every rank.
            training: Tensors of this rank's training state; None, on all ranks, if it is not published.

        Returns:
            The published version, on every rank.

        Raises:
            ConfigError: If shared memory has no room for the weights.
            UnreachableError: If the daemon has ended.
            WeightsError: If the tensors are not those of the first publish, or the version is not new.
        """
        shards, slot = as_shards(models), 0
        if self._group.rank == 0:
            # Allocated before the state: if there is room for only one of the two, the weights get it.
            weights = self._weights = self._weights or self._publisher(shards)
            wanted = weights.following(wanted)
            slot = weights.begin(spared=self._spared(weights))
        slot, version, through, rollback, history, position = self._group.broadcast(
            [slot, wanted.version, wanted.trained_through, int(wanted.rollback), wanted.history, wanted.position]
        )
        wanted = WeightsVersion(version, 0, through, bool(rollback), history, wanted.probe, position)
        self.begin_part()
        self._wrote_state = training is not None and self.publish_training(wanted, training)
        published = wanted._replace(fingerprint=self._write_together(slot, shards))
        if self._group.rank == 0:
            assert self._weights is not None
            self._weights.finish(slot, published)
        if self._weights is not None and not self._holds_pages:
            self._weights.release()
        return published

    def publish_training(self, version: WeightsVersion, training: Mapping[str, Tensor]) -> bool:
        """Write this rank's training state of a version; return whether shared memory has room for it.

        Args:
            version: The version whose weights are published next, or that is the newest and has no state.
            training: Tensors of the training state.
        """
        state, started_s = with_elements(training), time.monotonic()
        if (slot := self.begin_state(state)) is None:
            return False
        self.finish_state(slot, version, self.write_state(slot, state))
        self.state_s = time.monotonic() - started_s
        return True

    # The parts of a publish that are one rank's alone: on another machine its gateway takes them.

    def begin_part(self) -> int:
        """Map the weights' file and discard states without weights; return the bytes of one version."""
        weights = self._weights = self._weights or WeightsPublisher(self._weights_path)
        self._discard_unpublished()
        return weights.nbytes

    def write_part(self, slot: int, shards: Mapping[str, Shard]) -> list[int]:
        """Write ranges of tensors into a slot; return the digest of each block, 0 for one not written whole."""
        assert self._weights is not None
        return self._weights.slot(slot).write(shards)

    def digests_of(self, slot: int, blocks: Sequence[int]) -> list[int]:
        """Return the digests of these blocks of a slot, which all ranks have written."""
        assert self._weights is not None
        return self._weights.slot(slot).digests(blocks)

    def begin_state(self, state: Mapping[str, Tensor]) -> int | None:
        """Begin a training state of these names, shapes and dtypes.

        Returns:
            Its slot; None if it is empty, or there is no room for it.

        Raises:
            WeightsError: If its names are others than those of the first one.
        """
        if not state:
            return None
        if self._training is None and self._has_room:
            self._training = self._training_publisher(state)
        if self._training is None:
            return None
        if others := self._training.names ^ state.keys():
            shown = ", ".join(sorted(others)[:3])
            raise WeightsError(f"the training state has other names than the one published first: {shown}")
        return self._training.begin(spared=self._kept_age())

    def write_state(self, slot: int, state: Mapping[str, Tensor | Shard]) -> list[int]:
        """Write tensors of a training state, or ranges of them; return the digests as `write_part`."""
        assert self._training is not None
        return self._training.slot(slot).write(state)

    def finish_state(self, slot: int, version: WeightsVersion, digests: Sequence[int]) -> None:
        """Make a training state, all of which is written, that of a version; digests of 0 are made here."""
        assert self._training is not None
        left = [block for block, digest in enumerate(digests) if not digest]
        made = dict(zip(left, self._training.slot(slot).digests(left), strict=True))
        whole = [made.get(block, digest) for block, digest in enumerate(digests)]
        self._training.finish(slot, version._replace(fingerprint=combined(whole), probe=None))
        if not self._holds_pages:
            self._training.release()

    def held(self, state: Mapping[str, Tensor | Shard]) -> HeldVersion | None:
        """Return this trainer's newest version in place, with the training states of all ranks; called on rank 0.

        Args:
            state: This rank's training state: names, and which of them are split over the ranks.

        Returns:
            None if shared memory does not hold the training state of every rank.
        """
        weights, training = self._weights, self._training
        slot = None if weights is None else weights.newest_slot()
        if weights is None or training is None or slot is None:
            return None
        age = weights.version(slot).age
        own = training.slot_of(age)
        others = [self._state_of(rank, age) for rank in range(1, self._group.world_size)]
        if own is None or None in others:
            return None
        states = [training.slot(own).views, *(other for other in others if other is not None)]

        def is_next() -> bool:
            return weights.next_slot(self._spared(weights)) == slot or training.next_slot(self._kept_age()) == own

        return HeldVersion(weights.slot(slot).views, _Joined(states, as_shards(state)), is_next)

    def close(self) -> None:
        """Unmap the files; they stay, for the workers and for the next trainer."""
        for publisher in (self._weights, self._training):
            if publisher is not None:
                publisher.close()

    def _path_of(self, rank: int) -> Path:
        return self._weights_path.with_name(f"training-{rank}" if rank else "training")

    def own_kept(self) -> WeightsVersion | None:
        """Return the newest version whose weights and training state of this rank are whole; None without one."""
        newest = self.newest()
        if newest is None or not self.training_path.exists():
            return None
        with (
            contextlib.closing(WeightsMapping(self._weights_path)) as weights,
            contextlib.closing(WeightsMapping(self.training_path)) as training,
        ):
            states = {state.age for state in training.whole()}
            # Whole weights whose page was never turned come after the newest: they were not published.
            pairs = [
                found for found in weights.whole() if found.age in states and _order(found.age) <= _order(newest.age)
            ]
        return max(pairs, key=lambda found: _order(found.age), default=None)

    def _kept_age(self) -> Age | None:
        return None if (kept := self.own_kept()) is None else kept.age

    def _spared(self, weights: WeightsPublisher) -> Age | None:
        """Return the version whose weights the next publish spares beside the newest; two slots leave none for it."""
        return self._kept_age() if weights.slots > 2 else None

    def _discard_unpublished(self) -> None:
        """Discard states whose weights were never published: their number's next weights may come without a state."""
        if not self.training_path.exists():
            return
        newest = self.newest()
        with contextlib.closing(WeightsMapping(self.training_path)) as training:
            for state in training.whole():
                if newest is None or _order(state.age) > _order(newest.age):
                    training.discard(state.age)

    def _publisher(self, shards: Mapping[str, Shard]) -> WeightsPublisher:
        if not self._weights_path.parent.exists():
            raise UnreachableError(f"the daemon has ended: {self._weights_path.parent} is gone")
        tensors = {name: shard.whole_on_meta() for name, shard in shards.items()}
        return WeightsPublisher(self._weights_path, tensors, slots=self._weight_slots)

    def _training_publisher(self, state: Mapping[str, Tensor]) -> WeightsPublisher | None:
        try:
            return WeightsPublisher(self.training_path, state, slots=_TRAINING_SLOTS)
        except ConfigError as error:
            self._has_room = False
            log.warning("no training state in shared memory, a killed trainer resumes from a checkpoint: %s", error)
            return None

    def _write_together(self, slot: int, shards: Mapping[str, Shard]) -> int:
        """Write this rank's part of a slot; return the fingerprint of all of it, once every rank has written."""
        rank, world_size = self._group.rank, self._group.world_size
        # A tensor that every rank holds whole is rank 0's to write.
        own = {name: shard if shard.split or not rank else shard.without_elements() for name, shard in shards.items()}
        by_rank = self._group.gather(self.write_part(slot, own))
        digests = [max(found) for found in zip(*by_rank, strict=True)]
        left = [block for block, digest in enumerate(digests) if not digest]
        mine = self.digests_of(slot, left[rank::world_size])
        most = -(-len(left) // world_size)
        for other, found in enumerate(self._group.gather([*mine, *[0] * (most - len(mine))])):
            for block, digest in zip(left[other::world_size], found, strict=False):
                digests[block] = digest
        return combined(digests)

    def _state_of(self, rank: int, age: Age) -> Mapping[str, Tensor] | None:
        """Return another rank's training state of a version, in place; None if it is not held."""
        if not (path := self._path_of(rank)).exists():
            return None
        mapping = WeightsMapping(path)
        slot = mapping.slot_of(age)
        # Unmapped with the last of these tensors.
        return None if slot is None else mapping.slot(slot).views


class _Joined(Mapping[str, Tensor]):
    """The training states of all ranks as one: a tensor that is split is joined when it is read."""

    def __init__(self, states: Sequence[Mapping[str, Tensor]], expected: Mapping[str, Shard]) -> None:
        self._states = states
        self._expected = expected

    def __getitem__(self, name: str) -> Tensor:
        # A rank without a row of a tensor has none of it.
        parts = [state[name] for state in self._states if name in state]
        if not parts:
            return self._expected[name].local
        return torch.cat(parts) if self._expected[name].split else parts[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._expected)

    def __len__(self) -> int:
        return len(self._expected)


def exact_shards(models: Mapping[str, Tensor | Shard]) -> dict[str, Shard]:
    """Return shards as a restore fills them: none of another dtype than the published one."""
    return {
        name: shard if shard.local.dtype == shard.dtype else shard.without_elements()
        for name, shard in as_shards(models).items()
    }


def with_elements(training: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that have elements on this rank: a vector shorter than the ranks are many has none on some."""
    return {name: tensor for name, tensor in training.items() if tensor.numel()}


def _order(age: Age) -> Age:
    """Return a key that rises with each publish: a rollback lowers the number, and raises the history."""
    version, history = age
    return history, version
