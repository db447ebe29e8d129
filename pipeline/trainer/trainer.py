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
from pipeline.models.lora import published
from pipeline.storage.weights_header import Probe, WeightsVersion
from pipeline.trainer.connection import Batch, Connection
from pipeline.trainer.metrics import TrainerMetrics
from pipeline.trainer.resume import Start
from pipeline.trainer.state import LearnerProtocol, Progress, RankProgress, after_step, digest_after, tensors_of
from pipeline.trainer.step_stats import StepStats

_IDLE_STEPS = 20

log = logging.getLogger(__name__)


class CheckpointWriter(Protocol):
    """Writes a checkpoint (`pipeline.trainer.checkpoints`)."""

    def __call__(self, progress: Progress, version: WeightsVersion, *, complete: bool) -> Path:
        """Write the checkpoint and return its folder.

        Raises:
            CheckpointError: If the checkpoint cannot be written.
        """


class Trainer:
    """One rank's decisions: when a step is due, when weights are published, when training has ended.

    Attributes:
        progress: Steps taken, and the digest of every batch of all ranks in training order; the digest is equal only
            for runs whose ranks trained on the same experience.
    """

    def __init__(
        self,
        config: Config,
        learner: LearnerProtocol,
        connection: Connection,
        models: Mapping[str, torch.nn.Module],
        metrics: TrainerMetrics,
        *,
        device: torch.device,
        agree: Callable[[bool], bool] = lambda ready: ready,
        leave: Callable[[], None] = lambda: None,
        gather: Callable[[RankProgress], list[RankProgress]] = lambda own: [own],
        save: CheckpointWriter | None = None,
        start: Start = Start(),  # noqa: B008 - immutable
        probe: Callable[[], Probe] | None = None,
    ) -> None:
        """Publish the first weights, unless they are published already.

        Args:
            config: The run's configuration.
            learner: Owns the optimizer.
            connection: The connection to the daemon; closed by `close`.
            models: ``actor`` and, with PPO, ``critic``: the same module objects that the learner trains.
            metrics: The rank's metrics.
            device: Device of the batches.
            agree: A collective that all ranks call before each step; returns True if every rank passed True. A rank
                that drains passes False, so that no rank waits in a collective for a rank that has ended.
            leave: Leaves the group of the ranks; called once, after all agreed to end, before the last checkpoint.
            gather: A collective that all ranks call after each step; returns every rank's progress, in order of ranks.
            save: Writes a checkpoint; None on every rank but the first.
            start: The point from which training starts.
            probe: Returns the actor's answer to the probe, which workers compare with; None without probe tokens.
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
        self._leave = leave
        self._agreed_to_stop = False
        self._gather = gather
        self._save = save
        self._probe = probe
        self._batches: list[Batch] = []
        self._published_step, self._saved_step = start.progress.step, start.saved_step
        self._tried_step = start.saved_step
        self._idle_steps = 0
        # Other ranks publish nothing; they hold the same weights as the first rank.
        self._version = WeightsVersion(start.version or 0, 0)
        if start.version is None:
            found = connection.newest()
            assert found is not None
            self._version = found
        else:
            self._publish(start.version, rollback=start.rollback, position=start.position)
        is_resumed = start.version is not None and not start.rollback
        metrics.began(self._version.version, steps_before=self.step if is_resumed else 0)

    @property
    def fingerprint(self) -> int:
        """Fingerprint of the newest published weights."""
        return self._version.fingerprint

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.progress.step

    @property
    def finished(self) -> bool:
        """Whether the last step was taken, or the daemon or another rank drains."""
        return self._connection.draining or self._agreed_to_stop or self.complete

    @property
    def complete(self) -> bool:
        """Whether `trainer.max_steps` were taken."""
        return 0 < self._config.max_steps <= self.step

    def stop(self) -> None:
        """Take no further step."""
        self._connection.draining = True

    def poll(self) -> bool:
        """Work on one batch if one is leased; return whether there was one."""
        with self._metrics.fetching():
            batch = self._connection.poll(device=self._device)
        if batch is None:
            return False
        self._use(batch)
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait for messages from the buffer."""
        with self._metrics.waiting():
            self._connection.receive(timeout_s)

    def close(self) -> bool:
        """Release the other ranks, write the last checkpoint and hand back the leases.

        Returns:
            Whether the last checkpoint includes every step; True on every rank but the first.
        """
        if not (self.complete or self._agreed_to_stop):
            self._agree(False)
        # From here on no rank waits for another one: the last checkpoint may take minutes.
        self._leave()
        self._connection.hand_back(len(self._batches))
        if self.step > self._published_step:
            # The batches in the last checkpoint count as trained.
            self._publish()
        if self.step > self._saved_step:
            self._checkpoint()
        self._connection.close()
        log.info(
            "training ended: steps=%d weights=%s experiences=%016x",
            self.step,
            # The first rank alone publishes.
            "-" if self._connection.rank else f"{self._version.fingerprint:016x}",
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
        # The newest batch's position, even if it is lower: a rollback may have re-issued prompts.
        own = RankProgress(digest_after(self.progress.digest, experiences), batch.position)
        self.progress = after_step(self.step + 1, self._gather(own))
        self._batches = []
        if self.step % self._config.publish_every == 0 or self.complete:
            self._publish()
        self._metrics.stepped(stats, experiences, batch.for_version)
        self._warn_if_idle(stats)
        every = self.save_every
        # On a full disk the next attempt is at the next due checkpoint, not at each step.
        if every and self.step // every > self._tried_step // every and self.step == self._published_step:
            self._checkpoint()

    def _warn_if_idle(self, stats: StepStats) -> None:
        """Log once that several steps in a row trained no token: in GRPO, if all rewards of each group are equal."""
        self._idle_steps = 0 if stats.tokens_trained else self._idle_steps + 1
        if self._idle_steps == _IDLE_STEPS:
            log.warning("nothing to learn from, in every group all rewards are equal: steps_in_a_row=%d", _IDLE_STEPS)

    def _publish(self, version: int | None = None, *, rollback: bool = False, position: int = -1) -> None:
        """Publish the weights, which acknowledges the batches in hand.

        If a trainer dies before the publish, every batch since the last version is delivered again.
        """
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
                probe=self._probe_answer(first=version is not None),
                training=tensors_of(self._learner, self.progress, self._device) if in_memory else None,
                version=version,
                rollback=rollback,
                position=position,
            )
        self._metrics.published(self._version.version, self._connection.weights_bytes, time.monotonic() - started_s)

    def _probe_answer(self, *, first: bool) -> Probe | None:
        """Return the probe answer of the next version; None if that version carries no probe."""
        every = self._config.probe_every
        due = every and (first or (self._version.version + 1) % every == 0)
        return self._probe() if self._probe is not None and due else None

    def _checkpoint(self) -> None:
        """Write a checkpoint if this rank writes them; if the write fails, the run goes on."""
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
