"""The trainer's side of the policy versions: weights for the workers, and the training state for a restarted trainer.

    weights     three slots, read by all (`pipeline.models.weights.store`)
    training    two slots of the same format: optimizer moments, float32 copies, step, digest, random state

`publish` writes the training state of a version first, its weights last. So whenever a version of the weights that has
a state is the newest, its state is complete: a trainer killed at any store instruction is resumed exactly from there. A
state whose weights were never published is discarded by the successor before it publishes. It makes the state of the
version that it resumes (`kept`) the newest state again, so that the next write uses the other slot: two are enough.

Not every version needs a state (`trainer.keep_state_every`). The slot of the newest weights that have one is spared
until the next weights that have one are the newest; the versions between use the other two slots in turns. So weights
and state of one version are always whole, and a successor goes back to it if the newest version has no state.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from pipeline.errors import ConfigError, UnreachableError
from pipeline.models.weights.held import HeldSlot, HeldVersion, hold
from pipeline.models.weights.store import WeightsMapping, WeightsPublisher, WeightsReader, flatten, joined
from pipeline.storage.weights_header import Age, Probe, WeightsVersion, newest_version

_TRAINING_SLOTS = 2
_HEADER_ATTEMPTS = 1000

log = logging.getLogger(__name__)


def publisher_of(weights_path: Path, tensors: Mapping[str, torch.Tensor]) -> WeightsPublisher:
    """Return the publisher of an instance's weights.

    Raises:
        ConfigError: If shared memory has no room for the weights.
        UnreachableError: If the daemon has ended.
    """
    if not weights_path.parent.exists():
        raise UnreachableError(f"the daemon has ended: {weights_path.parent} is gone")
    return WeightsPublisher(weights_path, tensors)


class PolicyVersions:
    """Publishes and restores versions; among the ranks only the first one publishes.

    Attributes:
        state_s: Seconds that the write of the last training state took.
    """

    def __init__(self, weights_path: Path, *, training_name: str = "training") -> None:
        """Store the paths; the first `publish` creates the files.

        Args:
            weights_path: File of the weights in the instance's folder; the training state's file is beside it.
            training_name: Name of the training state's file.
        """
        self._weights_path = weights_path
        self._training_path = weights_path.with_name(training_name)
        self._weights: WeightsPublisher | None = None
        self._training: WeightsPublisher | None = None
        self._has_room = True
        self._wrote_state = False
        self.state_s = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that the last publish of this trainer wrote, 0 before the first."""
        written = (self._weights, self._training if self._wrote_state else None)
        return sum(publisher.nbytes for publisher in written if publisher is not None)

    def newest(self) -> WeightsVersion | None:
        """Return the version published last, by this trainer or its predecessor; None before the first."""
        return newest_version(self._weights_path, attempts=_HEADER_ATTEMPTS)

    def kept(self) -> WeightsVersion | None:
        """Return the newest version whose weights and training state are both whole; None without one."""
        newest = self.newest()
        if newest is None or not self._training_path.exists():
            return None
        with (
            contextlib.closing(WeightsMapping(self._weights_path)) as weights,
            contextlib.closing(WeightsMapping(self._training_path)) as training,
        ):
            states = {state.age for state in training.whole()}
            # Whole weights whose page was never turned come after the newest: they were not published.
            pairs = [
                found for found in weights.whole() if found.age in states and _order(found.age) <= _order(newest.age)
            ]
        return max(pairs, key=lambda found: _order(found.age), default=None)

    def restore(
        self, models: Mapping[str, Mapping[str, torch.Tensor]], *, version: WeightsVersion | None = None
    ) -> WeightsVersion:
        """Copy the weights of a version, the newest by default, into state dicts.

        Raises:
            WeightsError: If there are no such weights, or they are another model's.
        """
        with contextlib.closing(WeightsReader(self._weights_path)) as reader:
            return reader.fetch(joined(models), age=None if version is None else version.age)

    def restore_training(self, version: WeightsVersion, into: Mapping[str, torch.Tensor]) -> bool:
        """Copy the training state of a version into tensors; return False if it is not held or is another model's.

        Raises:
            WeightsError: If the stored state is corrupt; the contents of `into` are then undefined.
        """
        if not self.holds_training(version, into):
            return False
        with contextlib.closing(WeightsReader(self._training_path)) as reader:
            return reader.fetch(into, age=version.age).age == version.age

    def holds_training(self, version: WeightsVersion, into: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the training state of a version is held, with these names, shapes and dtypes."""
        if not WeightsPublisher.matches(self._training_path, into):
            return False
        with contextlib.closing(WeightsReader(self._training_path)) as reader:
            return reader.holds(version.age)

    def publish(
        self,
        version: int,
        weights: Mapping[str, Mapping[str, torch.Tensor] | None],
        training: Mapping[str, torch.Tensor] | None,
        *,
        trained_through: int,
        rollback: bool = False,
        position: int | None = None,
        probe: Probe | None = None,
    ) -> WeightsVersion:
        """Publish a version: its training state first, if given and if shared memory has room for it, then its weights.

        Args:
            version: Version number, above the newest unless `rollback`.
            weights: State dicts of the models, by model.
            training: Tensors of the training state; None if it is not published.
            trained_through: First lease that these weights do not include.
            rollback: Whether this version undoes the newest one.
            position: For a rollback, the first prompt that may be missing from these weights; None if unknown.
            probe: The probe of a model with these weights.

        Returns:
            The published version of the weights.

        Raises:
            ConfigError: If shared memory has no room for the weights.
            UnreachableError: If the daemon has ended.
            WeightsError: If the tensors are not those of the first publish, or the version is not new.
        """
        tensors = flatten(**weights)
        if self._weights is None:
            # Allocated first: if there is room for only one of the two, the weights get it.
            self._weights = publisher_of(self._weights_path, tensors)
            if (kept := self.kept()) is not None:
                self._weights.spare(kept.age)
            self.discard_unpublished()
        self.publish_no_training()
        if training is not None:
            before = self.newest()
            # The weights' count, not one of its own: it distinguishes versions of the same number.
            history = rollback + (0 if before is None else before.history)
            self.publish_training(
                version, training, trained_through=trained_through, rollback=rollback, history=history
            )
        published = self._weights.publish(
            version, tensors, trained_through=trained_through, rollback=rollback, position=position, probe=probe
        )
        if self._wrote_state:
            self._weights.spare(published.age)
        return published

    def publish_training(
        self,
        version: int,
        training: Mapping[str, torch.Tensor],
        *,
        trained_through: int,
        rollback: bool,
        history: int,
    ) -> None:
        """Write the training state of a version if shared memory has room for it; its weights are published next.

        Args:
            version: Version number of the weights.
            training: Tensors of the training state.
            trained_through: First lease that these weights do not include.
            rollback: Whether this version undoes the newest one.
            history: Rollbacks up to this version, of the weights' file.
        """
        if self._training is None and self._has_room:
            self._training = self._keep(training)
        if self._training is not None:
            started_s = time.monotonic()
            self._training.publish(
                version, training, trained_through=trained_through, rollback=rollback, history=history
            )
            self.state_s = time.monotonic() - started_s
            self._wrote_state = True

    def publish_no_training(self) -> None:
        """Note that the weights published next have no training state, unless `publish_training` follows."""
        self._wrote_state = False

    @property
    def wrote_training(self) -> bool:
        """Whether the version published last has a training state, for which shared memory had room."""
        return self._wrote_state

    def held_training(self, version: WeightsVersion) -> HeldSlot | None:
        """Return the training state of this publisher's newest version in place; None if it is not held."""
        slot = None if self._training is None else self._training.newest_slot()
        if self._training is None or slot is None or self._training.version(slot).age != version.age:
            return None
        return HeldSlot(self._training, slot, self._training.tensors(slot))

    def release_training(self) -> None:
        """Take the training states out of the resident memory of this process; they stay in the file."""
        if self._training is not None:
            self._training.release()

    def held(self) -> HeldVersion | None:
        """Return the newest version of this publisher in place; None if its training state is not held."""
        return hold(self._weights, self._training)

    def close(self) -> None:
        """Unmap the files; they stay, for the workers and for the next trainer."""
        for publisher in (self._weights, self._training):
            if publisher is not None:
                publisher.close()

    def discard_unpublished(self) -> None:
        """Discard states whose weights were never published: their number's next weights may come without a state.

        Called before the first publish of a trainer.
        """
        if not self._training_path.exists():
            return
        newest = self.newest()
        with contextlib.closing(WeightsMapping(self._training_path)) as training:
            for state in training.whole():
                if newest is None or _order(state.age) > _order(newest.age):
                    training.discard(state.age)

    def _keep(self, training: Mapping[str, torch.Tensor]) -> WeightsPublisher | None:
        try:
            publisher = WeightsPublisher(self._training_path, training, slots=_TRAINING_SLOTS)
        except ConfigError as error:
            self._has_room = False
            log.warning("no training state in shared memory, a killed trainer resumes from a checkpoint: %s", error)
            return None
        if (kept := self.kept()) is not None:
            publisher.rewind(kept.age)
        return publisher


def _order(age: Age) -> Age:
    """Return a key that rises with each publish: a rollback lowers the number, and raises the history."""
    version, history = age
    return history, version
