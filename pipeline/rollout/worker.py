"""The rollout worker: takes a ticket, rolls its prompts out with the newest weights, seals the experience."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import (
    ArenaFullError,
    FieldError,
    RewardError,
    ShapeError,
    TokenError,
    WeightsMismatchError,
)
from pipeline.experience import codec
from pipeline.experience.types import Experience
from pipeline.models.weights.store import WeightsReader
from pipeline.rollout.insert_gate import Fault
from pipeline.rollout.metrics import RolloutMetrics
from pipeline.rollout.roller import Rolled, Roller
from pipeline.rollout.sample_recorder import RolloutSamples
from pipeline.runtime.messages import (
    Drain,
    Failed,
    FaultReason,
    Faulty,
    Hello,
    Message,
    Sealed,
    Settled,
    Ticket,
    Wait,
    WantTickets,
    Welcome,
)
from pipeline.runtime.transport import Sender, worker_name
from pipeline.storage.arena import Arena
from pipeline.storage.weights_header import WeightsVersion

TICKETS_AHEAD = 2

_DEADLINE_PASSED = "deadline passed: raise rollout.ticket_timeout_s, or lower rollout.batch_size or rollout.max_length"

Outcome = Sealed | Faulty | Failed

log = logging.getLogger(__name__)


class RolloutWorker:
    """The worker's decisions: the next ticket, the weights for it, the message to the buffer."""

    def __init__(
        self,
        roller: Roller,
        arena: Arena,
        weights_path: Path,
        sender: Sender,
        metrics: RolloutMetrics,
        *,
        index: int,
        clock: Callable[[], float],
        group_size: int = 1,
        checksum: bool = True,
        initial_version: int = -1,
        log_texts: bool = False,
        samples: RolloutSamples | None = None,
    ) -> None:
        """Introduce this worker to the buffer.

        Args:
            roller: Makes experience of prompts, with the weights that it fetched last.
            arena: Mapped with its payload.
            weights_path: File of the published weights; the first publish creates it.
            sender: To the buffer.
            metrics: This worker's.
            index: This worker's number.
            clock: Monotonic seconds.
            group_size: Responses of a prompt (G).
            checksum: Whether sealed extents carry a checksum.
            initial_version: The version of the weights as loaded; -1 if only published weights have a version.
            log_texts: Whether reasons may quote prompts, responses and answers.
            samples: Records some rollouts for people to read.
        """
        self.draining = False
        self.held = WeightsVersion(initial_version, 0)
        self._roller = roller
        self._arena = arena
        self._weights_path = weights_path
        self._sender = sender
        self._metrics = metrics
        self._name = worker_name(index)
        self._clock = clock
        self._group_size = group_size
        self._checksum = checksum
        self._log_texts = log_texts
        self._samples = samples
        self._reader: WeightsReader | None = None
        self._incarnation = random.getrandbits(62)
        self._buffer_incarnation: int | None = None
        self._tickets: list[Ticket] = []
        self._unsettled: dict[int, Outcome] = {}
        sender.send(self._hello())

    @property
    def idle(self) -> bool:
        """Whether there is no ticket to work on."""
        return not self._tickets

    @property
    def finished(self) -> bool:
        """Whether a drain is complete: no ticket in hand, no outcome that the buffer has not settled."""
        return self.draining and not self._tickets and not self._unsettled

    def handle(self, message: Message) -> None:
        """Handle a message of the buffer."""
        match message:
            case Welcome(incarnation=incarnation) if incarnation != self._buffer_incarnation:
                self._connect(incarnation)
            case Ticket(to=self._incarnation):
                if message.ticket not in self._unsettled and all(t.ticket != message.ticket for t in self._tickets):
                    self._tickets.append(message)
            case Settled(to=self._incarnation, ticket=ticket):
                self._unsettled.pop(ticket, None)
            case Wait(to=self._incarnation, reason=reason):
                self._metrics.wait_for(reason)
            case Drain():
                self.draining = True

    def step(self) -> None:
        """Work on the oldest ticket in hand."""
        ticket = self._tickets[0]
        self._metrics.in_flight(len(self._tickets))
        self._metrics.work_on(ticket.ticket, ticket.deadline_s)
        outcome = self._work(ticket)
        self._metrics.work_on()
        self._tickets.pop(0)
        self._unsettled[ticket.ticket] = outcome
        self._sender.send(outcome)
        self._metrics.in_flight(len(self._tickets))

    def close(self) -> None:
        """Unmap the weights, and close roller and samples."""
        self._roller.close()
        if self._reader is not None:
            self._reader.close()
        if self._samples is not None:
            self._samples.close()

    def _hello(self) -> Hello:
        held = [*self._unsettled.values(), *self._tickets]
        return Hello(
            self._name, self._incarnation, [message.ticket for message in held],
            pid=os.getpid(), attempts=[message.attempt for message in held],
        )  # fmt: skip

    def _connect(self, incarnation: int) -> None:
        if self._buffer_incarnation is not None:
            # Unread tickets of the dead buffer are void: the new buffer learns the tickets in hand from this Hello, and
            # issues the others, with their room, to any worker.
            self._incarnation = random.getrandbits(62)
        self._buffer_incarnation = incarnation
        self._sender.send(self._hello())
        for message in self._unsettled.values():
            self._sender.send(message)
        self._sender.send(WantTickets(self._name, self._incarnation, TICKETS_AHEAD))

    def _work(self, ticket: Ticket) -> Outcome:
        if self._must_fetch(ticket):
            self._fetch()
        if self._samples is not None:
            self._samples.begin()
        try:
            rolled = self._roller.roll(ticket.position, ticket.prompts)
            if rolled.experience is None:
                return self._failed(ticket, "all its prompts were set aside", retry=False)
            if self._clock() > ticket.deadline_s:
                return self._failed(ticket, _DEADLINE_PASSED, retry=True)
            if rolled.fault is not None:
                return self._faulty(ticket, rolled.fault, rolled.experience)
            return self._seal(ticket, rolled)
        except (FieldError, ShapeError) as error:
            return self._faulty(ticket, Fault(_reason_of(error), error.told(texts=self._log_texts)), None)
        except (RewardError, ArenaFullError) as error:
            # Not retried: the same prompts would give the same rollout.
            # As text: the frames of the error refer to the arena, and a log record may be kept.
            reason = error.told(texts=self._log_texts)
            log.error("rollout failed: ticket=%d position=%d reason=%s", ticket.ticket, ticket.position, reason)
            return self._failed(ticket, reason, retry=False)

    def _seal(self, ticket: Ticket, rolled: Rolled) -> Sealed:
        experience = rolled.experience
        assert experience is not None
        with self._metrics.activity("seal"):
            encoded = self._encode(ticket, experience)
        assert rolled.stopped is not None
        self._metrics.rolled(
            experience,
            prompts=ticket.prompts,
            prompts_failed=rolled.prompts_failed,
            group_size=self._group_size,
            stopped=rolled.stopped,
        )
        if self._samples is not None:
            self._samples.keep(
                experience, rolled.stopped, rolled.answers,
                ticket=ticket.ticket, position=ticket.position, version=self.held.version,
            )  # fmt: skip
        return Sealed(
            self._name, ticket.ticket, len(experience.sequences), encoded.nbytes, encoded.checksum,
            self.held.version, self.held.fingerprint, rolled.prompts_failed, ticket.attempt,
        )  # fmt: skip

    def _faulty(self, ticket: Ticket, fault: Fault, experience: Experience | None) -> Faulty:
        """Return the message of a refused rollout; its rows, if any, are written to the extent, for the quarantine."""
        log.error("rollout refused: ticket=%d position=%d reason=%s detail=%s",
                  ticket.ticket, ticket.position, fault.reason, fault.detail)  # fmt: skip
        self._metrics.failed(prompts=ticket.prompts, group_size=self._group_size, retried=False)
        rows, encoded = 0, codec.Encoded(0, 0)
        # Fields whose lengths disagree cannot be encoded.
        if experience is not None and fault.reason != "lengths":
            try:
                encoded, rows = self._encode(ticket, experience), len(experience.sequences)
            except (FieldError, ShapeError, ArenaFullError) as error:
                log.warning("rollout refused without a copy: ticket=%d reason=%s", ticket.ticket, str(error))
        return Faulty(
            self._name, ticket.ticket, fault.reason, fault.detail, rows, encoded.nbytes, encoded.checksum,
            self.held.version, self.held.fingerprint, ticket.attempt,
        )  # fmt: skip

    def _encode(self, ticket: Ticket, experience: Experience) -> codec.Encoded:
        return codec.encode(experience, self._arena.extent(ticket.offset, ticket.nbytes), checksum=self._checksum)

    def _failed(self, ticket: Ticket, reason: str, *, retry: bool) -> Failed:
        self._metrics.failed(prompts=ticket.prompts, group_size=self._group_size, retried=retry)
        return Failed(self._name, ticket.ticket, reason, retry, ticket.attempt)

    def _must_fetch(self, ticket: Ticket) -> bool:
        """Return whether the weights in hand are not those of the ticket, or were rolled back."""
        if self._reader is None and self._weights_path.exists():
            self._reader = WeightsReader(self._weights_path)
        newest = None if self._reader is None else self._reader.newest()
        if newest is None or newest == self.held:
            return False
        return ticket.policy_version != self.held.version or newest.history != self.held.history

    def _fetch(self) -> None:
        assert self._reader is not None
        with self._metrics.activity("fetch_weights"):
            started_s = self._clock()
            try:
                self.held = self._roller.fetch(self._reader)
            except WeightsMismatchError:
                self._metrics.weights_mismatch()
                raise
            self._metrics.fetched(self.held.version, self._reader.nbytes, self._clock() - started_s)


def _reason_of(error: FieldError | ShapeError) -> FaultReason:
    """Return the fault reason of a rollout that its maker refused; it has no rows to keep."""
    if isinstance(error, TokenError):
        return "vocabulary"
    return "lengths" if isinstance(error, ShapeError) else "malformed"
