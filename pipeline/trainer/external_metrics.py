"""The metrics of an external trainer's rank, written by its connection into the slot of that rank.

A rank's lock (`pipeline.trainer.connect`) belongs to one process, so each slot has one writer. The connection begins
its slot itself; the supervisor folds it once the lock is free again (`pipeline.supervisor.external`).
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from pipeline.experience.ragged import RaggedRows
from pipeline.experience.types import Experience
from pipeline.storage.weights_header import WeightsVersion
from pipeline.telemetry.activity import ActivityClock
from pipeline.telemetry.slab import MetricsSlab

_ROLE = "trainer"


class ExternalMetrics:
    """Writes the slot of one rank; the connection calls it at each batch and publish.

    A step is a publish that includes at least one batch. Its reward is the mean raw score of the rows that this rank
    has taken since the step before.

    Args:
        path: File of the metrics slab.
        rank: The rank.
        reward_source: Label of the rewards, as in `pipeline.runtime.role.reward_source`.
    """

    def __init__(self, path: Path, *, rank: int, reward_source: str) -> None:
        self._slab = MetricsSlab.attach(path)
        self._rank = rank
        self._source = reward_source
        self._scores: list[torch.Tensor] = []
        self._begin()

    def took(self, batch: RaggedRows | Experience, lease: int, for_version: int) -> None:
        """Count a batch in hand; the time from here on is spent on training.

        Args:
            batch: The rows of the batch.
            lease: Number of its lease.
            for_version: Version that is trained on it.
        """
        self._begin_again()
        if isinstance(batch, RaggedRows):
            info = {name: batch.tensor(f"info.{name}") for name in ("score", "policy_version")}
            actions = sum(batch.actions_of_rows()) if "action_mask" in batch.named else 0
        else:
            info = batch.info or {}
            actions = 0 if batch.action_mask is None else int(batch.action_mask.sum())
        scores, versions = info["score"], info["policy_version"]
        assert scores is not None and versions is not None
        if self._rank == 0:
            # Ranks that publish nothing would keep them without end. A copy: a view would keep the whole block of rows.
            self._scores.append(scores.detach().to("cpu", torch.float32, copy=True))
        self._experiences.inc(len(scores))
        self._tokens.inc(actions)
        staleness = (for_version - versions).clamp(min=0)
        for versions_late, rows in collections.Counter(staleness.tolist()).items():
            self._staleness.observe(versions_late, rows)
        self._writer.work_on(lease)
        self._clock.enter("train")

    def handed_back(self, batches: int) -> None:
        """Remove the last batches, which no step has used, from the next step's reward."""
        del self._scores[len(self._scores) - batches :]

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as a wait for a batch."""
        self._begin_again()
        self._writer.work_on()
        with self._clock.during("wait_data"):
            yield

    @contextlib.contextmanager
    def publishing(self) -> Iterator[None]:
        """Count the block as a publish."""
        self._begin_again()
        with self._clock.during("publish"):
            yield

    def published(self, version: WeightsVersion, nbytes: int, duration_s: float) -> None:
        """Count a publish, and a step if it includes a batch.

        Args:
            version: The published version.
            nbytes: Bytes of a version.
            duration_s: Duration of the publish.
        """
        self._version.set(version.version)
        self._publish_s.observe(duration_s)
        self._published_bytes.inc(nbytes)
        self._syncs.inc()
        self._sync_time.set(time.time())
        scores, self._scores = self._scores, []
        if scores and not version.rollback:
            rows = torch.cat(scores)
            self._reward_mean.set(float(rows.mean()))
            self._reward_stddev.set(float(rows.std(correction=0)))
            # Last: a reader that sees the step finds its reward.
            self._steps.inc()
        self._writer.beat()

    def close(self) -> None:
        """Detach; the supervisor reads the last values, and folds the slot once the rank's lock is free."""
        self._begin_again()
        self._writer.work_on()
        self._clock.enter("other")
        self._slab.close()

    def _begin_again(self) -> None:
        """Begin the slot anew if a supervisor that took over a killed one's run has folded it."""
        if not self._slab.is_live(_ROLE, self._rank):
            self._begin()

    def _begin(self) -> None:
        self._slab.begin(_ROLE, self._rank)
        self._writer = writer = self._slab.writer(_ROLE, self._rank)
        self._clock = ActivityClock(writer, ["train", "publish", "wait_data"])
        self._tokens = writer.counter("rlhfd_tokens_total", kind="trained")
        self._experiences = writer.counter("rlhfd_train_experiences_total")
        self._staleness = writer.histogram("rlhfd_policy_staleness_versions", point="train")
        self._version = writer.gauge("rlhfd_policy_version")
        self._publish_s = writer.histogram("rlhfd_weight_sync_duration_seconds", phase="publish")
        self._published_bytes = writer.counter("rlhfd_weight_sync_bytes_total", transport="shm")
        self._syncs = writer.counter("rlhfd_weight_syncs_total", result="ok")
        self._sync_time = writer.gauge("rlhfd_weight_sync_last_success_timestamp_seconds")
        if self._rank == 0:
            self._steps = writer.counter("rlhfd_train_steps_total")
            self._reward_mean = writer.gauge("rlhfd_reward_mean", source=self._source)
            self._reward_stddev = writer.gauge("rlhfd_reward_stddev", source=self._source)
        writer.beat()
