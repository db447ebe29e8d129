"""The trainer's side: a connection to a running daemon that yields batches of experience and publishes weights.

    with pipeline.connect("run/rlhfd", rank=0, world_size=1) as daemon:
        for experience in daemon.experiences(device="cuda:0"):
            loss = ...
            daemon.publish(actor=model.state_dict())

A batch is leased, not given: it counts as trained when the next one is asked for, or when weights that include it are
published, which is one store in shared memory. One that was neither when its trainer died is delivered again.
"""

from __future__ import annotations

import collections
import fcntl
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

import msgspec
import torch

from pipeline.errors import ConfigError, DeadlineError, UnreachableError
from pipeline.experience.types import Experience
from pipeline.models.lora import without_peft_names
from pipeline.models.weights.pinned import PinnedMemory, pin_arena
from pipeline.models.weights.versions import PolicyVersions
from pipeline.runtime.lock import find
from pipeline.runtime.messages import Ack, Credit, Damaged, Drain, Hello, Lease, Message, Published, Release, Welcome
from pipeline.runtime.transport import BUFFER, Mailbox, Outbox, Sender, Traffic, trainer_name
from pipeline.storage.arena import Arena
from pipeline.storage.weights_header import Probe, WeightsVersion
from pipeline.trainer.prefetch import Staging

_CONNECT_TIMEOUT_S = 30.0
_HELLO_AGAIN_S = 1.0
_ACKS_KEPT = 256

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Where a role's messages come from: a mailbox, or a queue when all roles share one process."""

    def receive(self, timeout_s: float) -> list[Message]:
        """Return what has come, waiting up to `timeout_s` for the first message."""


class Batch(NamedTuple):
    """A leased batch: its rows, its lease, the policy version that is trained on it, and `Lease.position`."""

    experience: Experience
    lease: int
    for_version: int
    position: int = 0


class Connection:
    """One trainer rank's link to the daemon. Not thread-safe; close it, or use it as a context manager."""

    def __init__(
        self,
        arena: Arena,
        weights_path: Path,
        receiver: Receiver,
        sender: Sender,
        *,
        rank: int,
        world_size: int,
        prefetch: int = 2,
        verify_checksum: bool = True,
        copy_ahead: bool | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Introduce this rank to the buffer; `connect` is the usual way here.

        Args:
            arena: Mapped with its payload.
            weights_path: File of the published weights, made by the first `publish`.
            receiver: This rank's mail.
            sender: To the buffer.
            rank: This rank.
            world_size: Ranks in all, as in the daemon's configuration.
            prefetch: Batches leased ahead, the one in hand included.
            verify_checksum: Whether each extent's checksum is looked at before its rows are used.
            copy_ahead: Whether the next batch is copied while one is trained; None for on a card.
            on_close: Called once by `close`.
        """
        self.rank = rank
        self.world_size = world_size
        self.draining = False
        self.deliveries_repeated = 0
        self._arena = arena
        self._versions = PolicyVersions(weights_path)
        self._receiver = receiver
        self._sender = sender
        self._prefetch = prefetch
        self._staging = Staging(arena, verify_checksum=verify_checksum, ahead=copy_ahead)
        self._on_close = on_close
        self._incarnation = random.getrandbits(62)
        self._buffer_incarnation: int | None = None
        self._leases: collections.deque[Lease] = collections.deque()
        self._newest_lease = -1
        self._in_hand: list[int] = []
        self._acks: collections.deque[int] = collections.deque(maxlen=_ACKS_KEPT)
        self._published: Published | None = None
        self._damaged: Damaged | None = None
        self._trained_through = 0
        self._closed = False
        self._pinned: PinnedMemory | None = None
        if rank == 0 and (newest := self.newest()) is not None:
            # Before the first hello: what a dead trainer published includes leases it never acknowledged.
            self._trained_through = newest.trained_through
            self._announce(newest)
        self._send(self._hello())

    def meet_buffer(self, timeout_s: float) -> bool:
        """Wait for the buffer's welcome, asking for it again and again; return whether it came in time.

        Mail goes to a rank, not to a connection: a welcome on its way while another connection of this rank closes is
        lost with that one's socket. The buffer answers a name once, so each hello has a name of its own.
        """
        deadline_s = time.monotonic() + timeout_s
        while self._buffer_incarnation is None and (left_s := deadline_s - time.monotonic()) > 0:
            self.receive(min(left_s, _HELLO_AGAIN_S))
            if self._buffer_incarnation is None:
                self._incarnation = random.getrandbits(62)
                self._send(self._hello())
        return self._buffer_incarnation is not None

    # Batches.

    def experiences(
        self, *, device: str | torch.device = "cpu", timeout_s: float | None = None
    ) -> Iterator[Experience]:
        """Yield batches of `sample_batch_size` rows until the daemon drains.

        Each batch counts as trained when the next is asked for, or at `publish`.

        Args:
            device: Where the tensors go; a CUDA device is fed from page-locked memory.
            timeout_s: Longest wait for one batch, None for no end.

        Raises:
            DeadlineError: If no batch came in time.
        """
        while (batch := self.take(timeout_s=timeout_s, device=device)) is not None:
            yield batch.experience
            self.acknowledge()

    def take(self, *, timeout_s: float | None, device: str | torch.device = "cpu") -> Batch | None:
        """Return the next batch, None once the daemon drains.

        Raises:
            DeadlineError: If `timeout_s` passed without one.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.acknowledge()
        while not self.draining:
            if (batch := self.poll(device=device)) is not None:
                return batch
            left_s = 1.0 if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(f"no batch for trainer rank {self.rank} within {timeout_s:g} s")
            self.receive(min(left_s, 1.0))
        return None

    def poll(self, *, device: str | torch.device = "cpu") -> Batch | None:
        """Return the next batch if it is here."""
        if self.draining or not self._leases:
            return None
        lease, device = self._leases.popleft(), torch.device(device)
        staged = self._staging.take(lease, device)
        if staged.experience is None:
            self._refuse(lease, staged.damaged)
            return None
        self._in_hand.append(lease.lease)
        if self._staging.wants_next(device):
            # What came meanwhile: the next batch is on its way while this one is trained.
            self.receive(0.0)
            if self._leases and not self.draining:
                self._staging.begin(self._leases[0], device)
        return Batch(staged.experience, lease.lease, lease.for_version, lease.position)

    def acknowledge(self) -> None:
        """Count the batches in hand as trained; without one, do nothing."""
        for lease in self._in_hand:
            self._acks.append(lease)
            self._send(Ack(trainer_name(self.rank), lease))
        self._in_hand.clear()

    def settle(self) -> None:
        """Leave the batches in hand to the version that rank 0 publishes next; that version counts them as trained."""
        self._in_hand.clear()

    def hand_back(self, batches: int) -> None:
        """Hand back the last batches taken, which no step was made with; their rows are ready again."""
        for _ in range(batches):
            self._send(Release(trainer_name(self.rank), self._in_hand.pop(), self._incarnation))

    def receive(self, timeout_s: float) -> None:
        """Take note of what the buffer says, waiting up to `timeout_s` for it."""
        for message in self._receiver.receive(timeout_s):
            self._handle(message)

    # Weights.

    @property
    def weights_bytes(self) -> int:
        """Bytes of one published version, 0 before the first publish of this trainer."""
        return self._versions.nbytes

    def newest(self) -> WeightsVersion | None:
        """Return the version published last, by this trainer or the one before it; None before the first."""
        return self._versions.newest()

    def restore(self, **models: Mapping[str, torch.Tensor]) -> WeightsVersion:
        """Copy the newest published weights into state dicts, as a trainer does that takes a dead one's place.

        Raises:
            WeightsError: If there are none, or they are another model's.
        """
        return self._versions.restore(models)

    def restore_training(self, version: WeightsVersion, into: Mapping[str, torch.Tensor]) -> bool:
        """Copy the `training` tensors that were published with a version; return whether they were there."""
        return self._versions.restore_training(version, into)

    def publish(
        self,
        *,
        actor: Mapping[str, torch.Tensor],
        critic: Mapping[str, torch.Tensor] | None = None,
        training: Mapping[str, torch.Tensor] | None = None,
        version: int | None = None,
        rollback: bool = False,
        position: int = -1,
        probe: Probe | None = None,
    ) -> WeightsVersion:
        """Publish weights as the next policy version; they include the batches in hand, which count as trained by it.

        Args:
            actor: The policy's state dict, on any device, under Hugging Face's names. With `model.lora_rank`, of the
                adapters alone, under those names or peft's (`get_peft_model_state_dict`).
            critic: The critic's, with PPO.
            training: Optimizer moments and whatever else training goes on from, for `restore_training`; dropped with
                a warning where shared memory has no room for it.
            version: The version's number, None for one more than the newest.
            rollback: Whether these weights are older than the newest. All batches leased before are void then; on
                several ranks each calls `start_over` next.
            position: Of a rollback, the first prompt that may be missing from these weights: from there on prompts
                are issued again, unless their experience is still held. With -1 only those whose experience is
                dropped are.
            probe: What a model with these weights answers to the probe (`pipeline.models.weights.probe`).

        Raises:
            ConfigError: If shared memory has no room for the weights.
            UnreachableError: If the daemon has ended.
            WeightsError: If the tensors are not those of the first publish, or the version is not new.
        """
        if version is None:
            newest = self.newest()
            version = 1 if newest is None else newest.version + 1
        if taken := [*self._acks, *self._in_hand]:
            # Ranks step together: what rank 0 has of a round, each other rank has too.
            self._trained_through = (taken[-1] // self.world_size + 1) * self.world_size
        published = self._versions.publish(
            version,
            {"actor": without_peft_names(actor), "critic": critic},
            training,
            trained_through=self._trained_through,
            rollback=rollback,
            position=position,
            probe=probe,
        )
        self._in_hand.clear()
        if rollback:
            self.start_over(published)
        else:
            self._announce(published)
        return published

    def start_over(self, published: WeightsVersion) -> None:
        """Begin anew from a rollback: whatever was leased to this rank is void, and none of it is accepted any more.

        The rollback is said before the hello, by every rank, for one rank's hello may overtake another's rollback.
        """
        self._incarnation = random.getrandbits(62)
        self._forget_leases()
        self._in_hand.clear()
        self._acks.clear()
        self._newest_lease = -1
        self._announce(published)
        self._send(self._hello())
        self._send(Credit(trainer_name(self.rank), self._incarnation, self._prefetch))

    def pin(self, device: torch.device) -> int:
        """Page-lock the arena for copies to a card; return how many bytes of it are, 0 where there is no card."""
        if self._pinned is None:
            self._pinned = pin_arena(self._arena, device)
        return 0 if self._pinned is None else self._pinned.nbytes

    # The end.

    def close(self) -> None:
        """Hand back what is leased and not trained, then disconnect."""
        if self._closed:
            return
        self._closed = True
        self._staging.close()
        # First: what is handed back must not come again.
        self._send(Credit(trainer_name(self.rank), self._incarnation, 0))
        for lease in [*self._in_hand, *(lease.lease for lease in self._leases)]:
            self._send(Release(trainer_name(self.rank), lease, self._incarnation))
        self._versions.close()
        if self._pinned is not None:
            self._pinned.close()
        self._on_close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A batch that was in hand when its step failed is not trained: `close` hands it back.
        self.close()

    # Messages.

    def _send(self, message: Message) -> None:
        self._sender.send(message)

    def _announce(self, version: WeightsVersion) -> None:
        self._published = Published(
            version.version, version.fingerprint, version.trained_through, version.rollback, version.position
        )
        self._send(self._published)

    def _hello(self) -> Hello:
        held = [*self._in_hand, *(lease.lease for lease in self._leases)]
        return Hello(trainer_name(self.rank), self._incarnation, held, self._newest_lease < 0, os.getpid())

    def _handle(self, message: Message) -> None:
        match message:
            case Welcome(incarnation=incarnation) if incarnation != self._buffer_incarnation:
                self._meet(incarnation)
            case Lease(to=self._incarnation, lease=lease) if lease > self._newest_lease:
                # Leases come in order; one that came before was sent again by a buffer that could not know.
                self._newest_lease = lease
                self.deliveries_repeated += message.deliveries > 1
                self._damaged = None
                self._leases.append(message)
            case Drain():
                self.draining = True

    def _meet(self, incarnation: int) -> None:
        if self._buffer_incarnation is not None:
            log.debug("the buffer was restarted, telling it what it may have missed")
            # What the dead one sent and is still unread, this one may give to others, or other rows under that number.
            self._incarnation = random.getrandbits(62)
            for lease in self._acks:
                self._send(Ack(trainer_name(self.rank), lease))
            if self._published is not None:
                self._send(self._published)
            if self._damaged is not None:
                self._damaged = msgspec.structs.replace(self._damaged, incarnation=self._incarnation)
                self._send(self._damaged)
        self._buffer_incarnation = incarnation
        self._send(self._hello())
        self._send(Credit(trainer_name(self.rank), self._incarnation, self._prefetch))

    def _refuse(self, lease: Lease, damaged: dict[int, str]) -> None:
        """Tell the buffer which parts of a batch are damaged."""
        reason = next(iter(damaged.values()))
        log.error("damaged batch handed back: lease=%d tickets=%s: %s", lease.lease, [*damaged], reason)
        # What was leased behind it comes again under the same numbers, with other rows: mail to the name that this
        # rank had until now is void, and numbers are taken from the damaged one on.
        self._forget_leases()
        self._incarnation = random.getrandbits(62)
        self._newest_lease = lease.lease - 1
        self._damaged = Damaged(trainer_name(self.rank), lease.lease, [*damaged], reason, self._incarnation)
        self._send(self._damaged)

    def _forget_leases(self) -> None:
        self._staging.forget()
        self._leases.clear()


def connect(
    runtime_dir: str | os.PathLike[str] = "run/rlhfd", *, rank: int = 0, world_size: int = 1, prefetch: int = 2
) -> Connection:
    """Connect a trainer rank to the daemon that serves `runtime_dir`.

    Args:
        runtime_dir: As configured under ``daemon.runtime_dir``.
        rank: This process's rank; each rank connects once.
        world_size: Ranks in all, as configured under ``trainer.world_size``.
        prefetch: Batches leased ahead.

    Returns:
        The rank's link to the daemon: batches of experience come from it, new weights go to it. Close it.

    Raises:
        NotRunningError: If no daemon serves it.
        UnreachableError: If the daemon's buffer does not answer.
        ConfigError: If the rank is taken, or the daemon was configured for another world size.
    """
    record = find(Path(runtime_dir))
    if record.world_size != world_size or not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} of {world_size}: trainer.world_size of the daemon is {record.world_size}")
    folder = Path(record.shm_dir)
    connection = open_connection(folder, rank=rank, world_size=world_size, prefetch=prefetch)
    if not connection.meet_buffer(_CONNECT_TIMEOUT_S):
        connection.close()
        raise UnreachableError(f"the buffer of {runtime_dir} did not answer within {_CONNECT_TIMEOUT_S:g} s")
    return connection


def open_connection(
    folder: Path,
    *,
    rank: int,
    world_size: int,
    prefetch: int = 2,
    verify_checksum: bool = True,
    traffic: Traffic | None = None,
) -> Connection:
    """Connect over ZeroMQ to the buffer whose sockets and arena lie in `folder`; `traffic` counts what is said."""
    lock = _lock_rank(folder, rank)
    arena = Arena(folder / "arena")
    arena.populate()
    mailbox = Mailbox(folder, trainer_name(rank), traffic)
    outbox = Outbox(folder, BUFFER, traffic)

    def on_close() -> None:
        outbox.close(linger_s=1.0)
        mailbox.close()
        arena.close()
        os.close(lock)

    return Connection(
        arena, folder / "weights", mailbox, outbox,
        rank=rank, world_size=world_size, prefetch=prefetch, verify_checksum=verify_checksum, on_close=on_close,
    )  # fmt: skip


def _lock_rank(folder: Path, rank: int) -> int:
    descriptor = os.open(folder / f"{trainer_name(rank)}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"trainer rank {rank} is connected already") from None
    return descriptor
