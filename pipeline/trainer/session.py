"""A trainer rank's session with the buffer: the leases it holds, its messages, and their repeats to a new buffer.

The buffer may be restarted at any time, and messages of both sides may be lost with it. On the `Welcome` of a new
buffer the session changes its incarnation, so that messages of the dead buffer are void, and repeats every message that
the dead buffer may not have handled: acknowledgements, the newest version, and a report of damage.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Protocol

import msgspec

from pipeline.errors import counted
from pipeline.runtime.messages import (
    Ack,
    Credit,
    Damaged,
    Drain,
    Exhausted,
    Hello,
    Lease,
    Message,
    Published,
    Release,
    Welcome,
)
from pipeline.runtime.peer import Peer
from pipeline.runtime.transport import Sender, trainer_name
from pipeline.storage.weights_header import WeightsVersion

_HELLO_AGAIN_S = 1.0
_ACKS_KEPT = 256

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """The source of a role's messages: a mailbox, or a queue if all roles share one process."""

    def receive(self, timeout_s: float) -> list[Message]:
        """Return the messages that have arrived, waiting up to `timeout_s` for the first one."""


class BufferSession:
    """The leases and messages of one trainer rank. Not thread-safe but for `tell`.

    Attributes:
        draining: Whether the run drains: no further lease is taken.
    """

    def __init__(
        self,
        receiver: Receiver,
        sender: Sender,
        *,
        rank: int,
        world_size: int,
        prefetch: int,
        newest: WeightsVersion | None,
    ) -> None:
        """Announce the newest version and send the first hello.

        Args:
            receiver: The rank's messages from the buffer.
            sender: Sends to the buffer.
            rank: This rank.
            world_size: Number of ranks.
            prefetch: Batches leased ahead, including the batch in hand.
            newest: The newest published version, on rank 0; None if there is none, and on the other ranks.
        """
        self.draining = False
        self._receiver = receiver
        self._sender = sender
        self._sending = threading.Lock()
        self._name = trainer_name(rank)
        self._world_size = world_size
        self._prefetch = prefetch
        self._peer = Peer()
        self._leases: collections.deque[Lease] = collections.deque()
        self._newest_lease = -1
        # As things stand no lease from this number on follows; None: others may follow.
        self._exhausted: int | None = None
        self._in_hand: list[int] = []
        # Batches in the version that is being published, while the next ones are taken in hand.
        self._in_version: list[int] = []
        self._acks: collections.deque[int] = collections.deque(maxlen=_ACKS_KEPT)
        self._published: Published | None = None
        # The life of the buffer that was told of the version that is being published.
        self._told: int | None = None
        self._damaged: Damaged | None = None
        self._trained_through = 0
        if newest is not None:
            # Before the first hello: the versions of a dead trainer include leases that it never acknowledged.
            self.announce(newest)
        self._send(self._hello())

    # Messages from the buffer.

    def await_buffer(self, timeout_s: float) -> bool:
        """Repeat the hello until the buffer's welcome arrives; return whether it arrived in time.

        Messages are addressed to a rank, not to a connection: a welcome sent while an earlier connection of this rank
        closes is lost with that connection's socket. The buffer answers an incarnation once, so each hello has a new
        incarnation.
        """
        deadline_s = time.monotonic() + timeout_s
        while self._peer.server is None and (left_s := deadline_s - time.monotonic()) > 0:
            self.receive(min(left_s, _HELLO_AGAIN_S))
            if self._peer.server is None:
                self._peer.renew()
                self._send(self._hello())
        return self._peer.server is not None

    def receive(self, timeout_s: float) -> None:
        """Handle the buffer's messages, waiting up to `timeout_s` for the first one."""
        for message in self._receiver.receive(timeout_s):
            self._handle(message)

    def _handle(self, message: Message) -> None:
        match message:
            case Welcome() if self._peer.meets(message):
                self._welcomed()
            case Lease(to=self._peer.incarnation, lease=lease) if lease > self._newest_lease:
                # Leases arrive in order; a lower number is a repeat by a buffer that could not know of the first send.
                self._newest_lease = lease
                self._exhausted = None
                self._damaged = None
                self._forget_rollback()
                self._leases.append(message)
            case Exhausted(to=self._peer.incarnation, through=through):
                self._exhausted = through
            case Drain():
                self.draining = True

    def _welcomed(self) -> None:
        # Unread leases of a dead buffer are void: the new one may lease them to other ranks, or lease other rows under
        # their numbers.
        if self._peer.has_met_another:
            log.debug("the buffer was restarted, repeating the messages that it may have missed")
            for lease in self._acks:
                self._send(Ack(self._name, lease))
            if self._published is not None:
                self._send(self._published)
            if self._damaged is not None:
                self._damaged = msgspec.structs.replace(self._damaged, incarnation=self._peer.incarnation)
                self._send(self._damaged)
        self._greet()

    def _greet(self) -> None:
        self._exhausted = None
        self._send(self._hello())
        self._send(Credit(self._name, self._peer.incarnation, self._prefetch))

    # Leases.

    @property
    def next_lease(self) -> Lease | None:
        """The lease that `take` returns next; None without one, and once the run drains."""
        return self._leases[0] if self._leases and not self.draining else None

    def is_exhausted(self, lease: int | None) -> bool:
        """Return whether no further step can be taken, because leases for it do not follow (`trainer.max_epochs`).

        Args:
            lease: The last lease of the step, None while this rank lacks it. A step takes whole rounds of leases.
        """
        if self._exhausted is None:
            return False
        if lease is None:
            return not self._leases
        return (lease // self._world_size + 1) * self._world_size > self._exhausted

    def take(self) -> Lease:
        """Remove and return `next_lease`; its batch is in hand once `hold` is called, or is refused."""
        return self._leases.popleft()

    def hold(self, lease: Lease) -> None:
        """Take the batch of a lease in hand."""
        self._in_hand.append(lease.lease)

    def acknowledge(self) -> None:
        """Count the batches in hand as trained."""
        for lease in self._in_hand:
            self._acks.append(lease)
            self._send(Ack(self._name, lease))
        self._in_hand.clear()

    def settle(self) -> None:
        """Leave the batches in hand to the version that rank 0 publishes next; it counts them as trained."""
        self._in_hand.clear()

    def begin_version(self) -> int:
        """Leave the batches in hand to a version whose publish begins; return its `trained_through`.

        They are held until `end_version`: a new buffer must not deliver them again meanwhile.
        """
        through = self.trained_through()
        self._in_version, self._in_hand = self._in_hand, []
        return through

    def end_version(self) -> None:
        """Count the batches of `begin_version` as trained: the version's page is turned."""
        self._in_version.clear()

    def hand_back(self, batches: int, *, is_last: bool = False) -> None:
        """Hand back the last batches taken in hand, and unless the rank ends, the leases that are not taken yet.

        The buffer leases their numbers again, with any rows, before later ones: leases on their way to the incarnation
        so far are void, and numbers are accepted from the lowest one on.

        Raises:
            ValueError: If fewer batches are in hand; none is handed back then.
        """
        if not 0 <= batches <= len(self._in_hand):
            wanted = counted(batches, "batch", "batches")
            raise ValueError(f"{wanted} cannot be handed back, {len(self._in_hand)} in hand")
        for _ in range(batches):
            lowest = self._in_hand.pop()
            self._send(Release(self._name, lowest, self._peer.incarnation))
        if batches and not is_last:
            self._leases.clear()
            self._peer.renew()
            self._newest_lease = lowest - 1
            self._greet()

    def refuse(self, lease: Lease, damaged: Mapping[int, str]) -> None:
        """Report the damaged tickets of a lease, each with its reason, and give up all later leases."""
        reason = next(iter(damaged.values()))
        log.error("damaged batch handed back: lease=%d tickets=%s: %s", lease.lease, [*damaged], reason)
        # The later leases are delivered again under the same numbers, with other rows: leases sent to the incarnation
        # so far are void, and numbers are accepted from the damaged lease on.
        self._leases.clear()
        self._exhausted = None
        self._peer.renew()
        self._newest_lease = lease.lease - 1
        self._damaged = Damaged(self._name, lease.lease, [*damaged], reason, self._peer.incarnation)
        self._send(self._damaged)

    # Versions.

    def trained_through(self) -> int:
        """Return the lease number below which every lease is in the next version."""
        taken = [*self._acks, *self._in_hand]
        # Ranks step together: if rank 0 has its lease of a round, every other rank has its lease of that round.
        through = (taken[-1] // self._world_size + 1) * self._world_size if taken else 0
        # A version without a batch of its own has those of the versions before it.
        return max(through, self._trained_through)

    def tell(self, version: WeightsVersion) -> None:
        """Report a version from the thread that publishes it; `announce` follows in the session's own thread.

        Workers begin with the version while the rank computes its next step, and hears of nothing.
        """
        buffer = self._peer.server
        self._send(_published(version))
        self._told = buffer

    def announce(self, version: WeightsVersion) -> None:
        """Report a published version, unless `tell` has reported it to this buffer, and again to each new buffer."""
        self._trained_through = max(self._trained_through, version.trained_through)
        self._published = _published(version)
        told, self._told = self._told, None
        if told is None or told != self._peer.server:
            self._send(self._published)

    def _forget_rollback(self) -> None:
        """Repeat a rollback as a version from now on: leases of after it have come, so it is in the buffer's ledger.

        Later versions may be in there as well, which the first rank alone reports: they must not be undone.
        """
        if self._published is not None and self._published.rollback:
            self._published = msgspec.structs.replace(self._published, rollback=False, position=-1)

    def start_over(self, published: WeightsVersion) -> None:
        """Void every lease of this rank after a rollback.

        Every rank announces the rollback before its hello: one rank's hello may overtake another rank's rollback.
        """
        self._peer.renew()
        self._leases.clear()
        self._in_hand.clear()
        self._in_version.clear()
        self._acks.clear()
        self._newest_lease = -1
        self.announce(published)
        self._greet()

    def close(self) -> None:
        """Hand back every lease that is not trained."""
        # The credit first: otherwise the buffer would lease the rows to this rank again.
        self._send(Credit(self._name, self._peer.incarnation, 0))
        for lease in self._held():
            self._send(Release(self._name, lease, self._peer.incarnation))

    def _hello(self) -> Hello:
        return Hello(self._name, self._peer.incarnation, self._held(), self._newest_lease < 0, os.getpid())

    def _held(self) -> list[int]:
        return [*self._in_version, *self._in_hand, *(lease.lease for lease in self._leases)]

    def _send(self, message: Message) -> None:
        with self._sending:
            self._sender.send(message)


def _published(version: WeightsVersion) -> Published:
    return Published(version.version, version.fingerprint, version.trained_through, version.rollback, version.position)
