"""The built-in trainer: takes leased batches, steps the optimizer, acknowledges, publishes the weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
import xxhash

from pipeline.config import Config
from pipeline.experience import Experience
from pipeline.learner import StepStats
from pipeline.stream import Batch, Connection
from pipeline.trainer_metrics import TrainerMetrics

log = logging.getLogger(__name__)


class Learns(Protocol):
    """What the trainer needs of a learner (`pipeline.learner.Learner`)."""

    def update(self, experiences: list[Experience]) -> StepStats:
        """Take one optimizer step."""


class CheckpointWriter(Protocol):
    """Writes the models of one step (`pipeline.checkpoints`)."""

    def __call__(self, step: int) -> Path:
        """Write and return where."""


class Trainer:
    """One rank's decisions: when a step is due, what it publishes, when it has ended.

    Attributes:
        step: Optimizer steps taken.
        digest: xxh3-64 over every batch in training order; equal only for runs that trained on the same experience.
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
        step: int = 0,
    ) -> None:
        """Publish the first weights if there are none yet.

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
            step: Steps taken before, when a dead trainer's place is taken.
        """
        self.step = step
        self.digest = xxhash.xxh3_64()
        self.fingerprint = 0
        self._config = config.trainer
        self._learner = learner
        self._connection = connection
        self._models = models
        self._metrics = metrics
        self._device = device
        self._agree = agree
        self._agreed_to_stop = False
        self._save = save
        self._batches: list[Experience] = []
        newest = connection.newest()
        if newest is None:
            self._publish(version=0)
        else:
            self.fingerprint = newest.fingerprint
        metrics.began(0 if newest is None else newest.version)

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

    def close(self) -> None:
        """Let the other ranks go, write the last checkpoint and hand back what is leased."""
        if not (self.complete or self._agreed_to_stop):
            self._agree(False)
        if self._save is not None and self.step:
            self._checkpoint()
        self._connection.close()
        log.info(
            "training ended: steps=%d weights=%016x experiences=%016x",
            self.step,
            self.fingerprint,
            self.digest.intdigest(),
        )

    def _use(self, batch: Batch) -> None:
        self._metrics.work_on(batch.lease)
        self._digest(batch.experience)
        self._batches.append(batch.experience)
        if len(self._batches) < self._config.gradient_accumulation_steps:
            return
        if not self._agree(True):
            self._agreed_to_stop = True
            return
        with self._metrics.training():
            stats = self._learner.update(self._batches)
        self.step += 1
        if self.step % self._config.publish_every == 0 or self.complete:
            self._publish()
        self._metrics.stepped(stats, self._batches, batch.for_version)
        self._batches = []
        if self._save is not None and self._config.save_every and self.step % self._config.save_every == 0:
            self._checkpoint()

    def _publish(self, version: int | None = None) -> None:
        """Publish, which acknowledges: a trainer that dies before it gets every batch since the last version again."""
        if self._connection.rank != 0:
            self._connection.settle()
            return
        started_s = time.monotonic()
        with self._metrics.publishing():
            critic = self._models.get("critic")
            published = self._connection.publish(
                actor=self._models["actor"].state_dict(),
                critic=None if critic is None else critic.state_dict(),
                version=version,
            )
        self.fingerprint = published.fingerprint
        self._metrics.published(published.version, self._connection.weights_bytes, time.monotonic() - started_s)

    def _checkpoint(self) -> None:
        assert self._save is not None
        started_s = time.monotonic()
        path = self._save(self.step)
        self._metrics.saved(time.monotonic() - started_s)
        log.info("checkpoint written: step=%d path=%s", self.step, path)

    def _digest(self, experience: Experience) -> None:
        for tensor in (experience.sequences, experience.action_log_probs, experience.advantages, experience.reward):
            assert tensor is not None
            self.digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
