"""The trainer's connection to a running daemon: it yields batches of experience and publishes weights.

    with pipeline.connect("run/rlhfd", rank=0, world_size=1) as daemon:
        for experience in daemon.experiences(device="cuda:0"):
            loss = ...
            daemon.publish(actor=model.state_dict())

A batch is leased: it counts as trained when every rank has requested its next batch, or when weights that include it
are published, which is one store in shared memory. If its trainer dies before both, the batch is delivered again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import torch

from pipeline.errors import DeadlineError, UnreachableError, WeightsError
from pipeline.experience.ragged import RaggedRows, ragged_rows
from pipeline.experience.types import Experience
from pipeline.models.expected import kind_fault
from pipeline.models.lora import without_peft_names
from pipeline.models.weights.store import flatten, joined
from pipeline.models.weights.versions import PolicyVersions
from pipeline.runtime.messages import ExtentRows
from pipeline.runtime.transport import Sender
from pipeline.storage.arena import Arena
from pipeline.storage.weights_header import Probe, WeightsVersion
from pipeline.trainer.external_metrics import ExternalMetrics
from pipeline.trainer.prefetch import Gathering, Prefetcher, RowSource
from pipeline.trainer.session import BufferSession, Receiver

if TYPE_CHECKING:
    from pipeline.trainer.sharding.remote import RemoteShards

Check = Callable[[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor] | None], None]
"""Raises if a publish of actor and critic must be refused."""


class Batch(NamedTuple):
    """A leased batch.

    Attributes:
        content: The rows: without padding if they were asked for with `ragged`, else as `experience`.
        lease: The lease's number.
        for_version: The policy version that is trained on the batch.
        position: Every prompt before this position is trained, dropped, or in a lease up to this one.
        parts: The extents and rows that the batch was gathered from, in order.
        deaths: The largest number of trainers that died at a row.
    """

    content: RaggedRows | Experience
    lease: int
    for_version: int
    position: int = 0
    parts: Sequence[ExtentRows] = ()
    deaths: int = 0

    @property
    def rows(self) -> RaggedRows:
        """The rows without padding."""
        return ragged_rows(self.content)

    @property
    def experience(self) -> Experience:
        """The rows, padded on the left; ``info["policy_version"]`` is ``(B,)`` int64."""
        return self.content.padded() if isinstance(self.content, RaggedRows) else self.content


class Connection:
    """One trainer rank's connection to the daemon. Not thread-safe; close it, or use it as a context manager.

    Attributes:
        versions: The published versions in shared memory.
        session: The rank's leases and messages.
    """

    def __init__(
        self,
        rows: Arena | RowSource,
        weights_path: Path,
        receiver: Receiver,
        sender: Sender,
        *,
        rank: int,
        world_size: int,
        prefetch: int = 2,
        gathering: Gathering = Gathering(),  # noqa: B008 - immutable
        on_close: Callable[[], None] = lambda: None,
        check: Check = lambda actor, critic: None,
        metrics: ExternalMetrics | None = None,
        weight_slots: int = 3,
        remote: RemoteShards | None = None,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        """Send this rank's hello to the buffer; users call `connect`.

        Args:
            rows: The place of the rows of leases; an arena is mapped with its payload.
            weights_path: File of the published weights, made by the first `publish`.
            receiver: This rank's messages from the buffer.
            sender: Sends to the buffer.
            rank: This rank.
            world_size: Number of ranks, as in the daemon's configuration.
            prefetch: Batches leased ahead, including the batch in hand.
            gathering: The way in which the rows of leases are gathered.
            on_close: Called once by `close`.
            check: Called with the state dicts of each publish; raises if they must not be published.
            metrics: The rank's metrics, if it is an external trainer's.
            weight_slots: Versions of the weights held at once.
            remote: The way to versions and checkpoints, of a rank on another machine than the daemon's.
            has_ended: Returns whether the daemon of this connection has ended for good.
        """
        self.rank = rank
        self.world_size = world_size
        self.weights_path = weights_path
        self.remote = remote
        self.versions = PolicyVersions(weights_path, weight_slots=weight_slots) if remote is None else remote.versions()
        self._prefetcher = Prefetcher(rows, gathering)
        self._on_close = on_close
        self._check = check
        self._metrics = metrics
        self._has_ended = has_ended
        self._closed, self._pid = False, os.getpid()
        self.session = BufferSession(
            receiver, sender, rank=rank, world_size=world_size, prefetch=prefetch,
            newest=self.newest() if rank == 0 else None,
        )  # fmt: skip

    # Batches.

    @overload
    def experiences(
        self, *, device: str | torch.device = ..., timeout_s: float | None = ..., ragged: Literal[False] = ...
    ) -> Iterator[Experience]: ...

    @overload
    def experiences(
        self, *, device: str | torch.device = ..., timeout_s: float | None = ..., ragged: Literal[True]
    ) -> Iterator[RaggedRows]: ...

    @overload
    def experiences(
        self, *, device: str | torch.device = ..., timeout_s: float | None = ..., ragged: bool
    ) -> Iterator[Experience] | Iterator[RaggedRows]: ...

    def experiences(
        self, *, device: str | torch.device = "cpu", timeout_s: float | None = None, ragged: bool = False
    ) -> Iterator[Experience] | Iterator[RaggedRows]:
        """Iterate over batches of `sample_batch_size` rows until the daemon drains.

        Each batch counts as trained when the next one is requested, or at `publish`.

        Args:
            device: Device of the tensors; a CUDA device is fed from page-locked memory.
            timeout_s: Longest wait for one batch, in seconds; None for no limit.
            ragged: Whether a batch is `RaggedRows`, rows end to end as they lie in the arena, in place of an
                `Experience`, which is padded on the left.

        Raises:
            DeadlineError: If no batch arrives in time.
            UnreachableError: If the daemon has ended without a drain.
        """
        batches = self._batches(device, timeout_s, ragged)
        return (batch.rows for batch in batches) if ragged else (batch.experience for batch in batches)

    def _batches(self, device: str | torch.device, timeout_s: float | None, ragged: bool) -> Iterator[Batch]:
        while (batch := self.take(timeout_s=timeout_s, device=device, ragged=ragged)) is not None:
            yield batch
            self.acknowledge()

    def take(
        self, *, timeout_s: float | None, device: str | torch.device = "cpu", ragged: bool = False
    ) -> Batch | None:
        """Acknowledge the batches in hand and wait for the next batch.

        Args:
            timeout_s: Longest wait, in seconds; None for no limit.
            device: Device of the tensors; a CUDA device is fed from page-locked memory.
            ragged: Whether the batch comes without padding.

        Returns:
            The batch; None once the daemon drains.

        Raises:
            DeadlineError: If no batch arrives within `timeout_s`.
            UnreachableError: If the daemon has ended without a drain.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        has_heard = False
        self.acknowledge()
        while not self.session.draining:
            if (batch := self.poll(device=device, ragged=ragged)) is not None:
                return batch
            left_s = 1.0 if deadline is None else deadline - time.monotonic()
            # Within no time at all, too, a batch is taken that is there.
            if left_s <= 0 and has_heard:
                raise DeadlineError(f"no batch for trainer rank {self.rank} within {timeout_s:g} s")
            with contextlib.nullcontext() if self._metrics is None else self._metrics.waiting():
                self.receive(max(0.0, min(left_s, 1.0)))
            has_heard = True
            if self.session.next_lease is None and not self.session.draining and self._has_ended():
                raise UnreachableError(
                    "no batch comes any more: the daemon of this connection has ended; connect again"
                )
        return None

    def poll(self, *, device: str | torch.device = "cpu", ragged: bool = False) -> Batch | None:
        """Take the next batch without waiting; a damaged batch is handed back.

        Args:
            device: Device of the tensors; a CUDA device is fed from page-locked memory.
            ragged: Whether the batch comes without padding.

        Returns:
            The batch; None if no batch is leased, the leased one is damaged, or the daemon drains.
        """
        if (lease := self.session.next_lease) is None:
            return None
        device = torch.device(device)
        fetched = self._prefetcher.take(lease, device, padded=not ragged)
        # Not before: a device that has no room for the batch may have it at the next call.
        self.session.take()
        if fetched.content is None:
            self._prefetcher.discard()
            self.session.refuse(lease, fetched.damaged)
            return None
        self.session.hold(lease)
        batch = Batch(fetched.content, lease.lease, lease.for_version, lease.position, lease.parts, lease.deaths)
        if self._metrics is not None:
            self._metrics.took(fetched.content, lease.lease, lease.for_version)
        if self._prefetcher.wants_next(device):
            # Leases that arrived meanwhile: the next batch is copied while this one is trained.
            self.receive(0.0)
            if (following := self.session.next_lease) is not None:
                self._prefetcher.begin(following, device, padded=not ragged)
        return batch

    def gather(self, parts: Sequence[ExtentRows], device: torch.device) -> RaggedRows:
        """Return rows of leases of any rank as one batch; that rank must hold its lease meanwhile.

        Args:
            parts: The extents and rows, in batch order.
            device: Device of the tensors.

        Returns:
            The rows, as in a leased batch.

        Raises:
            DecodeError: If an extent is damaged.
        """
        return self._prefetcher.gather(parts, device)

    def acknowledge(self) -> None:
        """Count the batches in hand as trained; without a batch in hand, do nothing."""
        self.session.acknowledge()

    def hand_back(self, batches: int, *, is_last: bool = False) -> None:
        """Hand back the last batches taken, which no step has used; their rows are ready again.

        Args:
            batches: Number of batches.
            is_last: Whether no batch is polled for any more.

        Raises:
            ValueError: If fewer batches are in hand, as after a publish; none is handed back then.
        """
        self._prefetcher.discard()
        self.session.hand_back(batches, is_last=is_last)
        if self._metrics is not None:
            self._metrics.handed_back(batches)

    def receive(self, timeout_s: float) -> None:
        """Handle the buffer's messages.

        Args:
            timeout_s: Longest wait for the first message, in seconds.
        """
        self.session.receive(timeout_s)

    # Weights.

    @property
    def weights_bytes(self) -> int:
        """Bytes that the last publish of this trainer wrote, 0 before the first."""
        return self.versions.nbytes

    def newest(self) -> WeightsVersion | None:
        """Return the newest published version, of this trainer or its predecessor; None before the first publish."""
        return self.versions.newest()

    def restore(self, **models: Mapping[str, torch.Tensor]) -> WeightsVersion:
        """Copy the newest published weights into state dicts, as the successor of a dead trainer does.

        Args:
            models: The state dict of each model to fill, ``actor`` and ``critic`` by name, on any device.

        Returns:
            The version of the weights.

        Raises:
            WeightsError: If no weights are published, or they are of another model.
        """
        _refuse_models("restored", **models)
        # Adapters by peft's names, as `publish` takes them.
        return self.versions.restore(joined({name: without_peft_names(state) for name, state in models.items()}))

    def restore_training(self, version: WeightsVersion, into: Mapping[str, torch.Tensor]) -> bool:
        """Copy the `training` tensors that were published with a version.

        Args:
            version: The version, from `newest`.
            into: Tensors to fill, by name, on any device.

        Returns:
            Whether the version has training tensors of these names, shapes and dtypes.

        Raises:
            WeightsError: If the tensors are damaged; the contents of `into` are then undefined.
        """
        return self.versions.restore_training(version, into)

    def publish(
        self,
        *,
        actor: Mapping[str, torch.Tensor],
        critic: Mapping[str, torch.Tensor] | None = None,
        training: Mapping[str, torch.Tensor] | None = None,
        version: int | None = None,
        rollback: bool = False,
        position: int | None = None,
        probe: Probe | None = None,
    ) -> WeightsVersion:
        """Publish weights as the next policy version; it includes the batches in hand and counts them as trained.

        Args:
            actor: The policy's state dict, on any device, under Hugging Face's names. With `model.lora_rank`, of the
                adapters alone, under those names or peft's (`get_peft_model_state_dict`).
            critic: The critic's state dict, with PPO.
            training: Tensors by name for `restore_training`, such as the optimizer's moments; dropped with a warning
                if shared memory has no room for them.
            version: The version's number; None for the newest version's number plus 1.
            rollback: Whether these weights are older than the newest. All earlier leases are then void; on several
                ranks each other rank calls `start_over` next.
            position: With `rollback`, the first prompt that may be missing from these weights: prompts from there on
                are issued again, unless their experience is still held. With None only prompts whose experience is
                dropped are issued again.
            probe: The answer of a model with these weights to the probe (`pipeline.models.weights.probe`).

        Returns:
            The published version.

        Raises:
            ConfigError: If shared memory has no room for the weights.
            UnreachableError: If the daemon has ended, or was started anew after this connection was made.
            WeightsError: If the tensors are not those of the run's models in name, shape and dtype, or the version is
                not new. Nothing is published then, and the next publish is not affected.
        """
        _refuse_models("published", actor=actor, critic=critic)
        _refuse_training({} if training is None else training)
        actor = without_peft_names(actor)
        self._check(actor, critic)
        if version is None:
            newest = self.newest()
            version = 1 if newest is None else newest.version + 1
        started_s = time.monotonic()
        with contextlib.nullcontext() if self._metrics is None else self._metrics.publishing():
            first = -1 if position is None else position
            wanted = WeightsVersion(version, 0, self.session.trained_through(), rollback, 0, probe, first)
            published = self.versions.publish(wanted, flatten(actor=actor, critic=critic), training)
        if self._metrics is not None:
            self._metrics.published(published, self.weights_bytes, time.monotonic() - started_s)
        self.session.settle()
        self._report(published)
        return published

    def begin_version(self) -> int:
        """Leave the batches in hand to a version that is begun; return its `trained_through`."""
        return self.session.begin_version()

    def tell(self, published: WeightsVersion) -> None:
        """Report a version of `begin_version` from the thread that has published it; `end_version` follows.

        Args:
            published: The version.
        """
        if self.rank == 0:
            self.session.tell(published)

    def end_version(self, published: WeightsVersion) -> None:
        """End `begin_version`: the version counts its batches as trained; of several ranks the first one reports it.

        Args:
            published: The version.
        """
        self.session.end_version()
        if self.rank == 0:
            self._report(published)

    def _report(self, published: WeightsVersion) -> None:
        if published.rollback:
            self.start_over(published)
        else:
            self.session.announce(published)

    def start_over(self, published: WeightsVersion) -> None:
        """Void every lease of this rank after a rollback; `publish` with `rollback` includes it on its own rank.

        Args:
            published: The version of the rollback, from `newest`.
        """
        self._prefetcher.discard()
        self.session.start_over(published)

    # The end.

    def close(self) -> None:
        """Hand back the leases that are not trained, then disconnect. No effect in a fork of the process."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._prefetcher.close()
        self.session.close()
        self.versions.close()
        if self._metrics is not None:
            self._metrics.close()
        self._on_close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        # If a step fails, its batch in hand is not trained: `close` hands it back.
        self.close()


def _refuse_models(done: str, **given: object) -> None:
    for name, value in given.items():
        if value is not None and not isinstance(value, Mapping):
            kind = type(value).__name__
            raise WeightsError(f"nothing is {done}: {name} is a {kind}, pass its state dict: {name}.state_dict()")


def _refuse_training(training: object) -> None:
    if not isinstance(training, Mapping):
        raise WeightsError(f"nothing is published: training has tensors by name, and is a {type(training).__name__}")
    for name, value in training.items():
        if not (isinstance(name, str) and isinstance(value, torch.Tensor)):
            kind = type(value).__name__
            raise WeightsError(f"nothing is published: training has tensors by name, and {name!r} is a {kind}")
        if fault := kind_fault(name, value):
            raise WeightsError(f"nothing is published: training: {fault}")
