"""The built-in trainer: takes leased batches, steps the optimizer, publishes the weights."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pipeline.config.schema import Config
from pipeline.experience.ragged import RaggedRows
from pipeline.storage.card_turns import TURN_S, RankTurn
from pipeline.storage.files import FULL_DISK
from pipeline.storage.weights_header import Probe, WeightsVersion
from pipeline.telemetry.evaluations import Evaluation
from pipeline.trainer.connection import Batch, Connection
from pipeline.trainer.dealing import Ranks
from pipeline.trainer.hooks import TakenStep, TrainerHook
from pipeline.trainer.metrics import TrainerMetrics
from pipeline.trainer.resume import Start
from pipeline.trainer.row_means import RowMeans
from pipeline.trainer.saving.background import BackgroundCheckpoint, CheckpointWriter, Outcome, Point
from pipeline.trainer.saving.publishing import Publishing
from pipeline.trainer.saving.rank_models import RankModels
from pipeline.trainer.state import LearnerProtocol, RankProgress, after_step, digest_after, tensors_of
from pipeline.trainer.step_stats import StepWarnings

_LONG_WAIT_S = 1.0
_TURN_S = 0.002
_LAST_MESSAGE_S = 1.0

log = logging.getLogger(__name__)


class Trainer:
    """One rank's decisions: when a step is due, when weights are published, when training has ended.

    Attributes:
        progress: Steps taken, and the digest of every batch of all ranks in training order; the digest is equal only
            for runs whose ranks trained on the same experience.
        saved_step: Step of the last checkpoint.
        tried_step: Step of the last checkpoint that was begun.
    """

    def __init__(
        self,
        config: Config,
        learner: LearnerProtocol,
        connection: Connection,
        models: RankModels,
        metrics: TrainerMetrics,
        *,
        device: torch.device,
        ranks: Ranks = Ranks(),  # noqa: B008 - immutable
        save: CheckpointWriter | None = None,
        start: Start = Start(),  # noqa: B008 - immutable
        probe: Callable[[], Probe] | None = None,
        hooks: Sequence[TrainerHook] = (),
        last_step: int | None = None,
        turn: RankTurn | None = None,
    ) -> None:
        """Publish the first weights, unless they are published already.

        Args:
            config: The run's configuration.
            learner: Owns the optimizer.
            connection: The connection to the daemon; closed by `close`.
            models: The models that the learner trains.
            metrics: The rank's metrics.
            device: Device of the batches.
            ranks: The collectives of all ranks.
            save: Writes a checkpoint; None on a rank that takes part in none.
            start: The point from which training starts.
            probe: Returns the actor's answer to the probe, which workers compare with; None without probe tokens.
            hooks: Optional behaviour, in the order of its stores.
            last_step: Steps after which training has ended, 0 for never; None: `trainer.max_steps`.
            turn: The rank's turn on a card that it shares with engines; closed at the end of training.
        """
        self.progress = start.progress
        self.save_every = config.trainer.save_every
        self._config = config.trainer
        self._last_step = config.trainer.max_steps if last_step is None else last_step
        self._learner = learner
        self._connection = connection
        self._metrics = metrics
        self._device = device
        self._ranks = ranks
        self._agreed_to_stop = self._has_agreed = False
        self._checkpoints = None if save is None else BackgroundCheckpoint(save)
        self._hooks = hooks
        self._turn = turn
        # Whether a hook removed files for the last checkpoint, which failed on a full disk.
        self._made_room = False
        self._models = models
        self._batches: list[Batch] = []
        self._published_step = start.progress.step
        self._uncounted: list[Callable[[], None]] = []
        self.saved_step = self.tried_step = start.saved_step
        self._warnings = StepWarnings(skips_cut=config.trainer.mask_cut_responses)
        self._row_means = RowMeans.of(config)
        self._publishing = Publishing(config, learner, connection, models, metrics, device=device, probe=probe)
        if start.version is None:
            found = start.published or connection.newest()
            assert found is not None
            self._publishing.version = found
        else:
            # Other ranks publish nothing; they hold the same weights as the first rank.
            first = WeightsVersion(start.version, rollback=start.rollback, position=start.progress.position)
            self._publishing.version = WeightsVersion(start.version)
            self._publish(first=first)
        is_resumed = start.version is not None and not start.rollback
        metrics.began(self.version.version, step=self.step, steps_before=self.step if is_resumed else 0)
        self._hooks = [hook.began(self) for hook in hooks]

    @property
    def version(self) -> WeightsVersion:
        """The newest version that is published."""
        return self._publishing.version

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.progress.step

    @property
    def finished(self) -> bool:
        """Whether the last step was taken and its version evaluated if due, or the daemon or another rank drains."""
        if self._connection.session.draining or self._agreed_to_stop:
            return True
        # Until a version that is being published is the newest, no hook is asked of it.
        is_published = not self._publishing.is_pending
        return self.complete and is_published and not any(hook.awaits(self.version) for hook in self._hooks)

    @property
    def complete(self) -> bool:
        """Whether all steps of `trainer.max_steps` or `trainer.max_epochs` were taken."""
        return self._took_last_step or self._connection.session.is_exhausted(
            self._batches[-1].lease if self._has_batches else None
        )

    @property
    def _took_last_step(self) -> bool:
        return 0 < self._last_step <= self.step

    def stop(self) -> None:
        """Take no further step."""
        self._connection.session.draining = True

    def publish_in_place(self) -> None:
        """Let no thread publish: all turns of one process are taken in order."""
        self._publishing.is_beside = False

    def poll(self) -> bool:
        """Work on one batch if one is leased; return whether there was one."""
        self._publishing.poll()
        if self.complete:
            self._publish_rest()
            return False
        batch = None
        if not self._has_batches:
            with self._metrics.fetching():
                batch = self._connection.poll(device=self._device, ragged=True)
            if batch is not None:
                self._metrics.work_on(batch.lease)
                self._batches.append(batch)
        self._collect_checkpoint()
        if not self._has_batches or self._agreed_to_stop:
            return batch is not None
        if is_due := self._may_step():
            self._step()
        return is_due or not self.is_waiting_for_card

    def wait(self, timeout_s: float) -> None:
        """Wait for messages from the buffer, or for the version that is being published."""
        if self._publishing.is_pending:
            self._publishing.wait(_TURN_S)
            self._connection.receive(0.0)
            return
        if self.is_waiting_for_card:
            with self._metrics.waiting_for_card():
                self._connection.receive(min(timeout_s, TURN_S))
            return
        with self._metrics.waiting():
            self._connection.receive(timeout_s)

    def beat(self) -> None:
        """Set the heartbeat, unless a version is being published: a thread that hangs must be found."""
        if not self._publishing.is_pending:
            self._metrics.progress()

    def close(self) -> bool:
        """Release the other ranks, write the last checkpoint and hand back the leases.

        Returns:
            Whether the last checkpoint includes every step; True on every rank but the first.
        """
        self._publishing.finish()
        if self._turn is not None:
            # The last publish and checkpoint follow, and may take minutes.
            self._turn.close()
        ended_early = self.complete and not self._took_last_step and self.step > 0
        if not (self._took_last_step or self._agreed_to_stop):
            self._ranks.agree(False)
        if not self._models.is_sharded:
            # From here on no rank waits for another one: the last checkpoint may take minutes.
            self._ranks.leave()
        self._connection.hand_back(len(self._batches), is_last=True)
        if self.complete:
            self._tell_stepping()
        if self.step > self._published_step:
            # The batches in the last checkpoint count as trained.
            self._publish()
            self._publishing.finish()
        self.wait_for_checkpoint()
        # A checkpoint of the last step may be there, which does not say that it is the last one.
        if self._models.due(self.step > self.saved_step or ended_early):
            self.checkpoint()
            self.wait_for_checkpoint()
            while self._made_room and self.step > self.saved_step:
                self.checkpoint()
                self.wait_for_checkpoint()
        if self.step > self.saved_step:
            self._keep_state()
        if self._models.is_sharded:
            # All ranks took part in the last checkpoint.
            self._ranks.leave()
            self._models.close()
        self._publishing.close()
        self._connection.close()
        for hook in self._hooks:
            hook.close()
        log.info(
            "training ended: steps=%d weights=%s experiences=%016x",
            self.step,
            # The first rank alone publishes.
            "-" if self._connection.rank else f"{self.version.fingerprint:016x}",
            self.progress.digest,
        )
        return self._checkpoints is None or self._connection.rank != 0 or self.saved_step == self.step

    def _keep_state(self) -> None:
        """Write the training state of the newest weights to shared memory, unless it is there: no disk has it.

        Shards are written by all ranks together, so there it stays with the versions of `trainer.keep_state_every`.
        """
        versions = self._models.versions
        if self._connection.rank or self._models.is_sharded or self.step > self._published_step:
            return
        kept = versions.kept()
        if kept is None or kept.age != self.version.age:
            self._models.keep_state(self.version, tensors_of(self._learner, self.progress))

    def abandon(self) -> None:
        """Give up a checkpoint that is being written, and let a publish end, after an error."""
        if self._checkpoints is not None:
            self._checkpoints.abandon()
        self._publishing.close()

    @property
    def is_waiting_for_card(self) -> bool:
        """Whether a step waits for engines that are awake."""
        return self._turn is not None and self._turn.is_asking

    @property
    def _has_batches(self) -> bool:
        return len(self._batches) >= self._config.gradient_accumulation_steps

    def _may_step(self) -> bool:
        """Return whether all ranks have their batches, and only then their turns: no engine is needed until the end."""
        if not self._has_agreed:
            self._has_agreed = self._all_agree()
        if self._turn is None or not self._has_agreed:
            return self._has_agreed
        # The second agreement is on the turns: a rank whose engines are awake would seem hung in a step's collectives.
        if not self._turn.take() or not self._all_agree():
            return False
        self._metrics.work_on(self._batches[-1].lease)
        return True

    def _all_agree(self) -> bool:
        self._agreed_to_stop = not self._ranks.agree(True)
        if self._agreed_to_stop and self._config.max_epochs and not self.complete:
            # The other rank may have ended because the prompts have, which the buffer tells this rank as well.
            self._connection.receive(_LAST_MESSAGE_S)
        return not self._agreed_to_stop

    def _step(self) -> None:
        self._has_agreed = False
        self._tell_stepping()
        rows = self._dealt()
        gathered, last = [batch.rows for batch in self._batches], self._batches[-1]
        with self._metrics.training():
            stats = self._learner.update(rows, before_change=self._publishing.finish)
        # The newest batch's position, even if it is lower: a rollback may have re-issued prompts.
        sums = self._row_means.sums(gathered, last.for_version)
        ranks = self._ranks.gather(RankProgress(digest_after(self.progress.digest, gathered), last.position, sums))
        self.progress = after_step(self.step + 1, ranks)
        means = self._row_means.means([rank.sums for rank in ranks])
        # Before the publish: a published step is never taken again, not even by the successor of a killed trainer.
        for hook in self._hooks:
            hook.taken(TakenStep(self.step, stats, self._batches, self.progress, means))
        self._batches = []
        every = self.save_every
        # On a full disk the next attempt is at the next due checkpoint, not at each step.
        is_due = self._models.due(bool(every) and self.step // every > self.tried_step // every)
        # Not the rows, which are large: other steps may follow before these count.
        staleness = [np.maximum(last.for_version - rows.columns["info.policy_version"], 0) for rows in gathered]
        self._uncounted.append(functools.partial(self._metrics.stepped, self.step, stats, staleness, means))
        # The buffer leases a version's batches from its publish on, also where a run was stopped between two versions.
        if self.step - self._published_step >= self._config.publish_every or self._took_last_step:
            self._publish(keeps_state=is_due or self._took_last_step)
        if self._turn is not None:
            self._turn.give_back()
        self._warnings.look(stats, means["cut_ratio"])
        if self._took_last_step:
            self._publishing.finish()
        if is_due and self.step == self._published_step:
            self.checkpoint()

    def _publish_rest(self) -> None:
        """Publish the last steps when the prompts end between two versions: they are evaluated before the end.

        Shards are published by all ranks together, and another one may still wait for this one's agreement: `close`
        publishes them.
        """
        if self.step > self._published_step and not self._models.is_sharded:
            self._publish(keeps_state=True)

    def _dealt(self) -> list[RaggedRows]:
        """Return the rows of the step that this rank trains."""
        if self._ranks.balance is None:
            return [batch.rows for batch in self._batches]
        dealt = self._ranks.balance.deal(self._batches)
        self._metrics.dealt(dealt)
        return dealt.batches

    def _tell_stepping(self) -> None:
        for hook in self._hooks:
            hook.stepping(self)

    def has_published(self, *, due: Callable[[int], bool]) -> bool:
        """Return whether the present weights are published; wait for the publish if its number is due."""
        if self.step != self._published_step:
            return False
        if self._publishing.is_pending:
            if not due(self._publishing.next_number):
                return False
            self._publishing.finish()
        return True

    def tell_evaluated(self, evaluation: Evaluation) -> None:
        """Tell all hooks of the evaluation of the present weights."""
        for hook in self._hooks:
            hook.evaluated(self.step, evaluation)

    def _publish(self, **options: Any) -> None:
        """Publish the weights, which acknowledges the batches in hand; the steps since the last version count then.

        If a trainer dies before the publish, every batch since the last version is delivered again.

        Args:
            options: See `Publishing.publish`.
        """
        self._published_step = self.step
        steps, self._uncounted = self._uncounted, []
        if not self._models.publishes:
            self._connection.session.settle()
            for counted in steps:
                counted()
            return
        if self._checkpoints is not None and (held := self._checkpoints.held) is not None and held.is_next():
            self.wait_for_checkpoint(is_slow=True)

        def ended() -> None:
            for hook in self._hooks:
                hook.published(self.step, self.version)
            for counted in steps:
                counted()

        self._publishing.publish(self.progress, then=ended, **options)

    def checkpoint(self) -> None:
        """Write a checkpoint if this rank writes them; if the write fails, the run goes on.

        From the published version, beside training; if shared memory does not hold it, from the live tensors, at once,
        which ranks of a sharded trainer do together.
        """
        self.tried_step = self.step
        if self._checkpoints is None:
            self.saved_step = self.step
            return
        self._publishing.finish()
        self.wait_for_checkpoint(is_slow=True)
        for hook in self._hooks:
            hook.flush()
        is_held, held = self._models.held(tensors_of(self._learner, self.progress))
        if is_held and held is None:
            # The first rank writes it alone.
            self.saved_step = self.step
            return
        point = Point(self.progress, self.version, self.complete)
        if held is not None:
            self._checkpoints.begin(point, held)
            return
        self._ended(self._checkpoints.write_at_once(point, self._metrics))

    def wait_for_checkpoint(self, *, is_slow: bool = False) -> None:
        """Wait for the checkpoint that is being written, if there is one.

        Args:
            is_slow: Whether training could go on if the checkpoint were written faster.
        """
        if self._checkpoints is None or self._checkpoints.held is None:
            return
        started_s = time.monotonic()
        self._checkpoints.wait(self._metrics)
        waited_s = time.monotonic() - started_s
        if is_slow:
            self._metrics.waited_for_checkpoint(waited_s)
            if waited_s > _LONG_WAIT_S:
                log.warning("training waited %.1f s for a checkpoint that takes longer than its next steps, "
                            "raise trainer.save_every or write to a faster disk", waited_s)  # fmt: skip
        self._collect_checkpoint()

    def _collect_checkpoint(self) -> None:
        if self._checkpoints is not None and (outcome := self._checkpoints.collect()) is not None:
            self._ended(outcome)

    def _ended(self, outcome: Outcome) -> None:
        is_first = self._connection.rank == 0
        self._made_room = False
        if outcome.error:
            if is_first:
                self._metrics.not_saved()
                log.error("%s", outcome.error)
                if any(os.strerror(number) in outcome.error for number in FULL_DISK):
                    for hook in self._hooks:
                        self._made_room |= hook.give_way()
            return
        self.saved_step = outcome.step
        if is_first:
            self._metrics.saved(outcome.duration_s)
            log.info("checkpoint written: step=%d path=%s", outcome.step, outcome.path)
        for hook in self._hooks:
            hook.saved(outcome.step)
