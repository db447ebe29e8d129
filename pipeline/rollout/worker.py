"""The rollout worker: has tickets rolled out with the newest weights, and seals the experience of each as it ends."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
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
from pipeline.experience.ragged import RaggedRows
from pipeline.models.weights.store import WeightsReader
from pipeline.rollout.insert_gate import Fault
from pipeline.rollout.metrics import RolloutMetrics
from pipeline.rollout.reward.numbers import pack
from pipeline.rollout.roller import Rolled
from pipeline.rollout.ticket_stream import TicketStream
from pipeline.runtime.messages import (
    Drain,
    Evaluated,
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
    is_evaluation,
)
from pipeline.runtime.peer import Peer
from pipeline.runtime.transport import Sender, worker_name
from pipeline.storage.arena import Arena
from pipeline.storage.weights_header import WeightsVersion
from pipeline.telemetry.number_names import NumberNames

_DEADLINE_PASSED = "deadline passed: raise rollout.ticket_timeout_s, or lower rollout.batch_size or rollout.max_length"

Outcome = Sealed | Faulty | Failed | Evaluated

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _InHand:
    """A ticket in hand.

    Attributes:
        ticket: The ticket.
        allowance_s: Time from its arrival to its deadline, which it gets from its begin on.
        deadline_s: Monotonic time; 0 before it has begun.
        weights: Weights with which it can have been sampled, oldest first.
    """

    ticket: Ticket
    allowance_s: float
    deadline_s: float = 0.0
    weights: list[WeightsVersion] = dataclasses.field(default_factory=list)


class WorkerHook:
    """Optional behaviour beside the tickets of a worker (samples, sleep), given to it at its construction."""

    def may_work(self, worker: RolloutWorker) -> bool:
        """Return whether the worker may work on its tickets now; asked again until it may."""
        return True

    def rest(self, worker: RolloutWorker, longest_s: float) -> float:
        """Use the time without work; return the time until this must be called again, at most `longest_s`."""
        return longest_s

    def sealed(self, ticket: Ticket, rolled: Rolled, version: int) -> None:
        """Use a rollout that is in the arena and not reported yet; `version` is that of its weights."""

    def closing(self) -> None:
        """Close files and turns."""


class RolloutWorker:
    """The worker's decisions: the tickets that begin, the weights for them, the messages to the buffer.

    Tickets begin in the order of their arrival, as soon as the stream has room and the weights allow it: one that needs
    newer weights waits until all tickets that have begun are sealed, unless weights are updated in flight. A ticket at
    its second attempt is rolled out alone, so that prompts that kill the worker use up no other ticket's attempts.
    After a rollback tickets that have begun are dropped from the stream, and begin again with the newest weights.

    Attributes:
        draining: Whether no further ticket comes.
        held: The version of the weights in hand.
    """

    def __init__(
        self,
        stream: TicketStream,
        arena: Arena,
        weights_path: Path,
        sender: Sender,
        metrics: RolloutMetrics,
        *,
        index: int,
        clock: Callable[[], float],
        group_size: int = 1,
        initial_version: int = -1,
        hooks: Sequence[WorkerHook] = (),
        numbers: NumberNames | None = None,
    ) -> None:
        """Introduce this worker to the buffer.

        Args:
            stream: Makes experience of prompts, with the weights that it fetched last.
            arena: Mapped with its payload.
            weights_path: File of the published weights; the first publish creates it.
            sender: To the buffer.
            metrics: This worker's.
            index: This worker's number.
            clock: Monotonic seconds.
            group_size: Responses of a prompt (G).
            initial_version: The version of the weights as loaded; -1 if only published weights have a version.
            hooks: Optional behaviour.
            numbers: Names of the further numbers of reward functions; None if no function may return them.
        """
        self.draining = False
        self.held = self._initial = WeightsVersion(initial_version, 0)
        self._stream = stream
        self._arena = arena
        self._weights_path = weights_path
        self._sender = sender
        self._metrics = metrics
        self._name = worker_name(index)
        self._clock = clock
        self._group_size = group_size
        self._hooks = hooks
        self._numbers = numbers
        self._reader: WeightsReader | None = None
        self._peer = Peer()
        # Tickets without an outcome, in the order of their arrival; those that have begun come first.
        self._tickets: dict[int, _InHand] = {}
        self._shown = -1, 0.0, 0
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
            case Welcome() if self._peer.meets(message):
                self._connect()
            case Ticket(to=self._peer.incarnation):
                if message.ticket not in self._unsettled and message.ticket not in self._tickets:
                    self._tickets[message.ticket] = _InHand(message, message.deadline_s - self._clock())
            case Settled(to=self._peer.incarnation, ticket=ticket):
                self._unsettled.pop(ticket, None)
            case Wait(to=self._peer.incarnation, reason=reason):
                self._metrics.wait_for(reason)
            case Drain():
                self.draining = True

    def may_work(self) -> bool:
        """Return whether the tickets can be worked on now; with `rollout.sleep` wake the engine if it may."""
        return all(hook.may_work(self) for hook in self._hooks)

    def rest(self, longest_s: float) -> float:
        """Use the time without work; return the time until this must be called again, at most `longest_s`."""
        return min((hook.rest(self, longest_s) for hook in self._hooks), default=longest_s)

    def step(self) -> int:
        """Begin the tickets that can begin, advance those that have begun, and report those that have ended.

        Returns:
            The number of tickets that have begun.
        """
        began = self._begin_tickets()
        self._show()
        for number in self._stream.step():
            self._end(number, self._work)
        late = [in_hand for in_hand in self._begun() if self._is_late(in_hand)]
        for in_hand in late:
            self._stream.cancel([in_hand.ticket.ticket])
            self._end(in_hand.ticket.ticket, self._late)
        return began

    def _begun(self) -> list[_InHand]:
        return [in_hand for in_hand in self._tickets.values() if in_hand.weights]

    def _begin_tickets(self) -> int:
        begun = self._begun()
        if begun and (newest := self.newest()) is not None and newest != self.held:
            if newest.history != self.held.history:
                self._stream.cancel([in_hand.ticket.ticket for in_hand in begun])
                for in_hand in begun:
                    in_hand.weights.clear()
                begun = []
            elif self._stream.updates_in_flight:
                self.fetch()
                for in_hand in begun:
                    in_hand.weights.append(self.held)
        already = len(begun)
        for in_hand in list(self._tickets.values())[already:]:
            ticket = in_hand.ticket
            if begun and (not self._stream.has_room or max(ticket.attempt, begun[0].ticket.attempt) > 1):
                break
            if self._must_fetch(ticket, exactly=not begun):
                if begun:
                    break
                self.fetch()
            in_hand.deadline_s = self._clock() + in_hand.allowance_s
            in_hand.weights.append(self.held)
            begun.append(in_hand)
            self._metrics.progress()
            held_out = {"evaluation": ticket.evaluation} if ticket.evaluation >= 0 else {}
            self._stream.begin(ticket.ticket, ticket.position, ticket.prompts, **held_out)
        return len(begun) - already

    def _end(self, number: int, outcome_of: Callable[[_InHand], Outcome]) -> None:
        self._show(number)
        outcome = outcome_of(self._tickets[number])
        del self._tickets[number]
        self._unsettled[number] = outcome
        self._show()
        self._sender.send(outcome)

    def _show(self, number: int | None = None) -> None:
        """Show the tickets in hand, and the one in work; if none is given, the oldest that has begun."""
        if number is None:
            number = next((number for number, in_hand in self._tickets.items() if in_hand.weights), -1)
        deadline_s = self._tickets[number].deadline_s if number >= 0 else 0.0
        shown = number, deadline_s, len(self._tickets)
        if shown[:2] != self._shown[:2]:
            self._metrics.work_on(number, deadline_s)
        if shown != self._shown:
            self._metrics.in_flight(len(self._tickets))
            self._shown = shown

    def _is_late(self, in_hand: _InHand) -> bool:
        return self._clock() > in_hand.deadline_s

    def _late(self, in_hand: _InHand) -> Outcome:
        return self._failed(in_hand.ticket, _DEADLINE_PASSED, retry=True)

    def close(self) -> None:
        """Unmap the weights, and close models and hooks."""
        self._stream.close()
        if self._reader is not None:
            self._reader.close()
        for hook in self._hooks:
            hook.closing()

    def _hello(self) -> Hello:
        held = [*self._unsettled.values(), *(in_hand.ticket for in_hand in self._tickets.values())]
        return Hello(
            self._name, self._peer.incarnation, [message.ticket for message in held],
            pid=os.getpid(), attempts=[message.attempt for message in held],
        )  # fmt: skip

    def _connect(self) -> None:
        # Unread tickets of a dead buffer are void: the new buffer learns the tickets in hand from this Hello, and
        # issues the others, with their room, to any worker.
        if self._peer.has_met_another:
            # The new buffer makes its evaluation anew.
            void = [number for number in self._tickets if is_evaluation(number)]
            self._stream.cancel(void)
            self._tickets = {number: held for number, held in self._tickets.items() if number not in void}
            self._unsettled = {number: held for number, held in self._unsettled.items() if not is_evaluation(number)}
        self._sender.send(self._hello())
        for message in self._unsettled.values():
            self._sender.send(message)
        self._sender.send(WantTickets(self._name, self._peer.incarnation, self._stream.tickets_ahead))

    def _work(self, in_hand: _InHand) -> Outcome:
        """Return the outcome of a ticket whose responses have ended."""
        ticket = in_hand.ticket
        try:
            rolled = self._stream.finish(ticket.ticket)
            if ticket.evaluation >= 0:
                return self._late(in_hand) if self._is_late(in_hand) else self._evaluated(in_hand, rolled)
            if rolled.rows is None:
                return self._failed(ticket, "all its prompts were set aside", retry=False)
            if self._is_late(in_hand):
                return self._late(in_hand)
            weights = self._weights_of(in_hand, rolled)
            if rolled.fault is not None:
                return self._faulty(ticket, weights, rolled.fault, rolled.rows)
            return self._seal(ticket, weights, rolled)
        except (FieldError, ShapeError) as error:
            if ticket.evaluation >= 0:
                return self._failed(ticket, error.told(texts=self._metrics.log_texts), retry=False)
            fault = Fault(_reason_of(error), error.told(texts=self._metrics.log_texts))
            return self._faulty(ticket, in_hand.weights[0], fault, None)
        except (RewardError, ArenaFullError) as error:
            # Not retried: the same prompts would give the same rollout.
            # As text: the frames of the error refer to the arena, and a log record may be kept.
            reason = error.told(texts=self._metrics.log_texts)
            log.error("rollout failed: ticket=%d position=%d reason=%s", ticket.ticket, ticket.position, reason)
            return self._failed(ticket, reason, retry=False)

    def _evaluated(self, in_hand: _InHand, rolled: Rolled) -> Outcome:
        """Return the results of held-out prompts; a ticket whose weights changed meanwhile is retried."""
        ticket, weights = in_hand.ticket, self._weights_of(in_hand, rolled)
        if len(rolled.versions) > 1:
            return self._failed(ticket, "the weights changed during its rollout", retry=True)
        return Evaluated(
            self._name, ticket.ticket, weights.version, weights.fingerprint, list(rolled.results), ticket.attempt
        )

    def _weights_of(self, in_hand: _InHand, rolled: Rolled) -> WeightsVersion:
        """Return the oldest weights that a ticket's responses were sampled with.

        Raises:
            WeightsMismatchError: If the engine sampled with weights that this worker did not hold meanwhile.
        """
        held = {weights.version: weights for weights in in_hand.weights}
        if in_hand.weights[0] == self._initial:
            # An engine without an update yet.
            held[-1] = self._initial
        foreign = [version for version in rolled.versions if version not in held]
        if foreign:
            self._metrics.count("weights_synced", "mismatch")
            raise WeightsMismatchError(
                f"the engine sampled ticket {in_hand.ticket.ticket} with weights of version {foreign[0]}; "
                f"the worker held {sorted(weights.version for weights in in_hand.weights)}"
            )
        return held[rolled.versions[0]] if rolled.versions else in_hand.weights[-1]

    def _seal(self, ticket: Ticket, weights: WeightsVersion, rolled: Rolled) -> Sealed:
        rows = rolled.rows
        assert rows is not None
        with self._metrics.activity("seal"):
            if self._numbers is not None:
                rows = pack(rows, self._numbers)
                rolled = dataclasses.replace(rolled, rows=rows)
            encoded = self._encode(ticket, rows)
        self._metrics.rolled(rolled, prompts=ticket.prompts, group_size=self._group_size)
        for hook in self._hooks:
            hook.sealed(ticket, rolled, weights.version)
        return Sealed(
            self._name, ticket.ticket, len(rows), encoded.nbytes, encoded.checksum,
            weights.version, weights.fingerprint, rolled.prompts_failed, ticket.attempt,
            flat_groups(rows, self._group_size),
        )  # fmt: skip

    def _faulty(self, ticket: Ticket, weights: WeightsVersion, fault: Fault, rows: RaggedRows | None) -> Faulty:
        """Return the message of a refused rollout; its rows, if any, are written to the extent, for the quarantine."""
        log.error("rollout refused: ticket=%d position=%d reason=%s detail=%s",
                  ticket.ticket, ticket.position, fault.reason, fault.detail)  # fmt: skip
        self._metrics.failed(prompts=ticket.prompts, group_size=self._group_size, retried=False)
        count, encoded = 0, codec.Encoded(0, 0)
        if rows is not None:
            try:
                encoded, count = self._encode(ticket, rows), len(rows)
            except (FieldError, ShapeError, ArenaFullError) as error:
                log.warning("rollout refused without a copy: ticket=%d reason=%s", ticket.ticket, str(error))
        return Faulty(
            self._name, ticket.ticket, fault.reason, fault.detail, count, encoded.nbytes, encoded.checksum,
            weights.version, weights.fingerprint, ticket.attempt,
        )  # fmt: skip

    def _encode(self, ticket: Ticket, rows: RaggedRows) -> codec.Encoded:
        return codec.encode(rows, self._arena.extent(ticket.offset, ticket.nbytes))

    def _failed(self, ticket: Ticket, reason: str, *, retry: bool) -> Failed:
        if ticket.evaluation < 0:
            self._metrics.failed(prompts=ticket.prompts, group_size=self._group_size, retried=retry)
        return Failed(self._name, ticket.ticket, reason, retry, ticket.attempt)

    def newest(self) -> WeightsVersion | None:
        """Return the newest published version; None before the first publish."""
        if self._reader is None and self._weights_path.exists():
            self._reader = WeightsReader(self._weights_path)
        return None if self._reader is None else self._reader.newest()

    def _must_fetch(self, ticket: Ticket, *, exactly: bool) -> bool:
        """Return whether the weights in hand are older than the ticket's, or were rolled back.

        With `exactly` also if they are newer, and others are newer still: a wait for rollouts is not worth it, but a
        worker without any takes the newest weights.
        """
        newest = self.newest()
        if newest is None or newest == self.held:
            return False
        if newest.history != self.held.history or ticket.policy_version > self.held.version:
            return True
        return exactly and ticket.policy_version != self.held.version

    def fetch(self) -> None:
        """Replace the weights by the newest version; there must be one."""
        assert self._reader is not None
        with self._metrics.activity("fetch_weights"):
            started_s = self._clock()
            try:
                self.held = self._stream.fetch(self._reader)
            except WeightsMismatchError:
                self._metrics.count("weights_synced", "mismatch")
                raise
            self._metrics.fetched(self.held.version, self._reader.nbytes, self._clock() - started_s)


def flat_groups(rows: RaggedRows, group_size: int) -> list[int]:
    """Return the numbers of the groups that carry no training signal, in order; none if the maker does not tell."""
    mixed = rows.columns.get("info.group_mixed")
    if mixed is None or group_size < 2 or len(mixed) % group_size:
        return []
    return [group for group, signal in enumerate(mixed[::group_size].tolist()) if not signal]


def _reason_of(error: FieldError | ShapeError) -> FaultReason:
    """Return the fault reason of a rollout that its maker refused; it has no rows to keep."""
    if isinstance(error, TokenError):
        return "vocabulary"
    return "lengths" if isinstance(error, ShapeError) else "malformed"
