"""The built-in trainer: takes leased batches, steps the optimizer, acknowledges, publishes the weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from pipeline.config.schema import Config
from pipeline.errors import CheckpointError
from pipeline.experience.types import Experience
from pipeline.models.lora import published
from pipeline.storage.weights_header import Probe, WeightsVersion
from pipeline.trainer.connection import Batch, Connection
from pipeline.trainer.metrics import TrainerMetrics
from pipeline.trainer.resume import Start
from pipeline.trainer.state import Progress, digest_after, tensors_of
from pipeline.trainer.step_stats import StepStats

_IDLE_STEPS = 20

log = logging.getLogger(__name__)


class Learns(Protocol):
    """What the trainer needs of a learner (`pipeline.trainer.learner.Learner`)."""

    def update(self, experiences: list[Experience]) -> StepStats:
        """Take one optimizer step."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a step changes beside the weights, live."""


class CheckpointWriter(Protocol):
    """Writes what there is to go on from (`pipeline.trainer.checkpoints`)."""

    def __call__(self, progress: Progress, version: WeightsVersion, *, complete: bool) -> Path:
        """Write and return where.

        Raises:
            CheckpointError: If it cannot be written.
        """


class Trainer:
    """One rank's decisions: when a step is due, what it publishes, when it has ended.

    Attributes:
        progress: Steps taken, and the digest of every batch in training order; the digest is equal only for runs that
            trained on the same experience.
    """

    def __init__(
        self,
        config: Config,
        learner: Learns,
        connection: Connection,
        models: Mapping[str, torch.nn.Module],
        metrics: TrainerMetrics,
        *,
        device: torch.device,
        agree: Callable[[bool], bool] = lambda ready: ready,
        save: CheckpointWriter | None = None,
        start: Start = Start(),  # noqa: B008 - immutable
        probe: Callable[[], Probe] | None = None,
    ) -> None:
        """Publish the first weights, unless they are there.

        Args:
            config: The run's.
            learner: Owns the optimizer.
            connection: To the daemon; closed by `close`.
            models: ``actor`` and, with PPO, ``critic``: the very modules that the learner trains.
            metrics: Where the work is counted.
            device: Where batches go.
            agree: Called by all ranks before each step: True if every rank said so. Ranks that drain say False, so
                that none waits in a collective for one that has ended.
            save: Writes a checkpoint; None on every rank but the first.
            start: Where it begins.
            probe: Asks the actor what workers are to compare with; None where nothing is asked.
        """
        self.progress = start.progress
        self.save_every = config.trainer.save_every
        self._config = config.trainer
        self._learner = learner
        self._connection = connection
        self._models = models
        self._metrics = metrics
        self._device = device
        self._agree = agree
        self._agreed_to_stop = False
        self._save = save
        self._probe = probe
        self._batches: list[Batch] = []
        self._published_step, self._saved_step = start.progress.step, start.saved_step
        self._tried_step = start.saved_step
        self._idle_steps = 0
        # Other ranks publish nothing; what they hold is what the first publishes.
        self._version = WeightsVersion(start.version or 0, 0)
        if start.version is None:
            found = connection.newest()
            assert found is not None
            self._version = found
        else:
            self._publish(start.version, rollback=start.rollback, position=start.position)
        if start.version is not None and not start.rollback:
            metrics.resumed(self.step)
        metrics.began(self._version.version)

    @property
    def fingerprint(self) -> int:
        """Of the weights published last."""
        return self._version.fingerprint

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.progress.step

    @property
    def finished(self) -> bool:
        """Whether the last step was taken, or the daemon drains, or another rank does."""
        return self._connection.draining or self._agreed_to_stop or self.complete

    @property
    def complete(self) -> bool:
        """Whether `trainer.max_steps` were taken."""
        return 0 < self._config.max_steps <= self.step

    def stop(self) -> None:
        """Take no further step."""
        self._connection.draining = True

    def poll(self) -> bool:
        """Work on one batch if it is here; return whether it was."""
        with self._metrics.fetching():
            batch = self._connection.poll(device=self._device)
        if batch is None:
            return False
        self._use(batch)
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait for the buffer to say something."""
        with self._metrics.waiting():
            self._connection.receive(timeout_s)

    def close(self) -> bool:
        """Let the other ranks go, write the last checkpoint and hand back what is leased.

        Returns:
            Whether the last checkpoint holds all that was trained; True on every rank but the first.
        """
        if not (self.complete or self._agreed_to_stop):
            self._agree(False)
        self._connection.hand_back(len(self._batches))
        if self.step > self._published_step:
            # What is in the last checkpoint counts as trained.
            self._publish()
        if self.step > self._saved_step:
            self._checkpoint()
        self._connection.close()
        log.info(
            "training ended: steps=%d weights=%016x experiences=%016x",
            self.step,
            self._version.fingerprint,
            self.progress.digest,
        )
        return self._save is None or self._saved_step == self.step

    def _use(self, batch: Batch) -> None:
        self._metrics.work_on(batch.lease)
        self._batches.append(batch)
        if len(self._batches) < self._config.gradient_accumulation_steps:
            return
        if not self._agree(True):
            self._agreed_to_stop = True
            return
        experiences = [batch.experience for batch in self._batches]
        with self._metrics.training():
            stats = self._learner.update(experiences)
        self.progress = Progress(
            self.step + 1,
            digest_after(self.progress.digest, experiences),
            # The newest word of it, also where it is lower: prompts may have been taken back since. On several ranks
            # the first's is the lowest: at worst what the others had of one step is asked again, nothing is left out.
            batch.position,
        )
        self._batches = []
        if self.step % self._config.publish_every == 0 or self.complete:
            self._publish()
        self._metrics.stepped(stats, experiences, batch.for_version)
        self._warn_if_idle(stats)
        every = self.save_every
        # A full disk is tried again when the next one is due, not at each step.
        if every and self.step // every > self._tried_step // every and self.step == self._published_step:
            self._checkpoint()

    def _warn_if_idle(self, stats: StepStats) -> None:
        """Say once that steps go by without anything to learn from: GRPO where all rewards of a group are equal."""
        self._idle_steps = 0 if stats.tokens_trained else self._idle_steps + 1
        if self._idle_steps == _IDLE_STEPS:
            log.warning("nothing to learn from, in every group all rewards are equal: steps_in_a_row=%d", _IDLE_STEPS)

    def _publish(self, version: int | None = None, *, rollback: bool = False, position: int = -1) -> None:
        """Publish, which acknowledges: a trainer that dies before it gets every batch since the last version again."""
        self._published_step = self.step
        if self._connection.rank != 0:
            self._connection.settle()
            return
        started_s = time.monotonic()
        in_memory = self._config.keep_state == "memory"
        with self._metrics.publishing():
            critic = self._models.get("critic")
            self._version = self._connection.publish(
                actor=published(self._models["actor"]),
                critic=None if critic is None else critic.state_dict(),
                probe=self._answer(first=version is not None),
                training=tensors_of(self._learner, self.progress, self._device) if in_memory else None,
                version=version,
                rollback=rollback,
                position=position,
            )
        self._metrics.published(self._version.version, self._connection.weights_bytes, time.monotonic() - started_s)

    def _answer(self, *, first: bool) -> Probe | None:
        """Return what goes with the version that comes, if it is one to be checked."""
        every = self._config.probe_every
        due = every and (first or (self._version.version + 1) % every == 0)
        return self._probe() if self._probe is not None and due else None

    def _checkpoint(self) -> None:
        """Write one if this rank does; if that fails, the run goes on."""
        self._tried_step = self.step
        if self._save is None:
            self._saved_step = self.step
            return
        started_s = time.monotonic()
        try:
            path = self._save(self.progress, self._version, complete=self.complete)
        except CheckpointError as error:
            self._metrics.not_saved()
            log.error("%s", error)
            return
        self._saved_step = self.step
        self._metrics.saved(time.monotonic() - started_s)
        log.info("checkpoint written: step=%d path=%s", self.step, path)
