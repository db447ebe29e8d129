"""Streams of tickets: the interface of a scheduling worker to its models, with several rollouts in hand.

`EngineStream` has an engine of `pipeline.rollout.generation` sample the prompts of several tickets at a time.
`pipeline.rollout.ray` puts one on another machine behind the same interface.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from typing import Protocol, cast

from pipeline.config.schema import Config
from pipeline.errors import FieldError, ShapeError, WeightsMismatchError
from pipeline.models.device import free_cached
from pipeline.models.weights.store import WeightsReader
from pipeline.rollout.environment.turns import Turns
from pipeline.rollout.generation.interface import (
    Completed,
    EngineCounts,
    EngineLoad,
    Request,
    Response,
    Sleeper,
)
from pipeline.rollout.generation.weights import WeightsSource
from pipeline.rollout.prompt_batch import PromptBatch, tokens_of
from pipeline.rollout.roller import Begun, LocalRoller, Rolled
from pipeline.rollout.worker_progress import WorkerTelemetry
from pipeline.storage.weights_header import WeightsVersion
from pipeline.telemetry.metrics import OTHER

_UNBOUNDED_TICKETS_AHEAD = 8
_MOST_TICKETS_AHEAD = 1024
_ENVIRONMENT_WAIT_S = 0.25


class TicketStream(Protocol):
    """The interface of a worker to its models: tickets in, rollouts out in the order in which they end.

    Attributes:
        tickets_ahead: Tickets that the worker holds at a time.
        updates_in_flight: Whether weights may change while tickets are in hand.
    """

    tickets_ahead: int
    updates_in_flight: bool

    @property
    def has_room(self) -> bool:
        """Whether another ticket can make progress."""
        ...

    def begin(self, ticket: int, position: int, prompts: int, *, evaluation: int = -1) -> None:
        """Take the prompts of a ticket over; `evaluation`: the number of their held-out file.

        Raises:
            ConfigError: As `pipeline.rollout.roller.LocalRoller.roll`.
        """
        ...

    def step(self) -> list[int]:
        """Advance the tickets; return those whose responses have ended, in the order in which they began."""
        ...

    def finish(self, ticket: int) -> Rolled:
        """Return the rollout of an ended ticket, which then is forgotten; errors of its prompts are raised here."""
        ...

    def cancel(self, tickets: Sequence[int]) -> None:
        """Drop tickets."""
        ...

    def fetch(self, source: WeightsReader) -> WeightsVersion:
        """Replace the weights by the newest version; return that version."""
        ...

    def close(self) -> None:
        """Release models and prompts."""
        ...


def new_stream(roller: LocalRoller, config: Config, metrics: WorkerTelemetry) -> EngineStream:
    """Return the stream of a roller's engine, with the tickets in hand that the configuration wants."""
    rows = config.prompts_per_ticket * config.group_size
    return EngineStream(
        roller,
        metrics,
        config.rollout.tickets_ahead or tickets_ahead(roller.engine.load, rows),
        updates_in_flight=config.rollout.weight_updates == "in_flight",
    )


def tickets_ahead(load: EngineLoad, ticket_rows: int) -> int:
    """Return the number of tickets that keep an engine full: those that fill its room, and one more.

    Args:
        load: The engine's load while it is idle.
        ticket_rows: Rows of a ticket.
    """
    if load.room_rows is None:
        return _UNBOUNDED_TICKETS_AHEAD
    return min(math.ceil(load.room_rows / ticket_rows) + 1, _MOST_TICKETS_AHEAD)


@dataclasses.dataclass
class _Rollout:
    """A ticket in the engine.

    Attributes:
        roller: Renders its prompts and scores its responses.
        begun: Prompts of the ticket.
        batch: The prompts with their sampling parameters; None if there are none, or with an error.
        since_s: Monotonic time of submission.
        keys: Keys of the ticket's requests, in order.
        completed: Requests that have ended, by key.
        error: Ends the ticket.
        turns: Rows of the ticket in their environments; None: each has one response.
    """

    roller: LocalRoller
    begun: Begun
    batch: PromptBatch | None
    since_s: float
    keys: list[int] = dataclasses.field(default_factory=list)
    completed: dict[int, Completed] = dataclasses.field(default_factory=dict)
    error: FieldError | ShapeError | None = None
    turns: Turns | None = None

    @property
    def has_ended(self) -> bool:
        if self.error is not None or self.turns is None:
            return self.error is not None or len(self.completed) == len(self.keys)
        return self.turns.has_ended

    @property
    def awaits_engine(self) -> bool:
        """Whether the engine has to have requests of the ticket in hand."""
        return not self.has_ended and (self.turns is None or self.turns.is_sampling)

    @property
    def rows(self) -> int:
        return 0 if self.batch is None else len(self.batch.answers)

    @property
    def rows_done(self) -> int:
        return len(self.completed) * self.rows // max(1, len(self.keys)) if self.turns is None else self.turns.rows_done


class EngineStream:
    """Tickets of a `LocalRoller` in an engine; a ticket ends with the last of its requests, whatever the others do.

    Args:
        roller: Renders prompts and scores responses; its engine samples.
        metrics: The worker's, or an actor's in front of them; shows the rows in hand and those done.
        tickets_ahead: Tickets that the worker holds at a time.
        updates_in_flight: Whether weights may change while tickets are in hand.
    """

    def __init__(
        self,
        roller: LocalRoller,
        metrics: WorkerTelemetry,
        tickets_ahead: int,
        *,
        updates_in_flight: bool = False,
    ) -> None:
        self.tickets_ahead = tickets_ahead
        self.updates_in_flight = updates_in_flight
        self._roller = roller
        self._engine = roller.engine
        self._metrics = metrics
        self._rollouts: dict[int, _Rollout] = {}
        self._ticket_of: dict[int, int] = {}
        self._new_key = itertools.count().__next__
        # Key of the probe's request and the version in question.
        self._asked: tuple[int, int] | None = None
        # The error of a step with both the probe and tickets; either may be the cause.
        self._doubtful: FieldError | ShapeError | None = None
        # Token counts for an engine that does not count.
        self._tokens_in = self._tokens_out = 0

    @property
    def has_room(self) -> bool:
        """Whether the engine could run another response."""
        load = self._engine.load
        return load.room_rows is None or load.running + load.waiting < load.room_rows

    def begin(self, ticket: int, position: int, prompts: int, *, evaluation: int = -1) -> None:
        """Submit the prompts of a ticket; one that the maker or the engine refuses ends with the next step."""
        roller = self._roller.of(evaluation)
        begun = roller.begin(position, prompts)
        rollout = self._rollouts[ticket] = _Rollout(roller, begun, None, time.monotonic())
        if not begun.kept:
            return
        try:
            rollout.batch = roller.batch_of(begun)
            rollout.turns = roller.turns_of(begun, rollout.batch, self._new_key)
            first = rollout.batch.requests(self._new_key) if rollout.turns is None else rollout.turns.take_requests()
            self._submit(ticket, first)
        except (FieldError, ShapeError) as error:
            self._fail(rollout, error)
        # Now: a step may take as long as the whole ticket.
        self._show_load()

    def step(self) -> list[int]:
        """Advance the engine; return the tickets that have ended.

        Raises:
            RlhfdError: Any error of the engine's step while several tickets are in hand; with one, an error of its data
                ends that ticket alone.
            WeightsMismatchError: If the engine does not compute with the weights fetched last.
        """
        under_way = [rollout for rollout in self._rollouts.values() if not rollout.has_ended]
        is_asked = self._asked is not None
        clock = self._metrics.clock
        if is_asked or any(rollout.awaits_engine for rollout in under_way):
            self._enter("generate")
        try:
            completed = self._engine.step() if under_way or is_asked else []
        except (FieldError, ShapeError) as error:
            completed = []
            if is_asked:
                # An error of a ticket comes again with the next step, or its engine has dropped the ticket.
                self._give_up_asking(error)
                self._doubtful = error
            else:
                self._charge(under_way, error)
        for done in completed:
            self._tokens_out += sum(len(response.token_ids) for response in done.responses)
            if self._asked is not None and done.key == self._asked[0]:
                self._judge(done.responses[0])
                continue
            rollout = self._rollouts[self._ticket_of.pop(done.key)]
            if rollout.turns is None:
                rollout.completed[done.key] = done
            else:
                rollout.turns.responded(done)
        self._go_on_with_turns()
        left = [rollout for rollout in under_way if rollout.awaits_engine]
        if self._doubtful is not None and left and not self._engine.load.running + self._engine.load.waiting:
            self._charge(left, self._doubtful)
        if completed:
            self._metrics.sampled(tokens_of(completed))
            self._metrics.progress()
        self._show_rows()
        if clock.activity in ("generate", "environment") and all(rollout.has_ended for rollout in under_way):
            clock.enter(OTHER)
        if self._asked is not None:
            # Nothing is sealed before the engine has answered.
            return []
        return [ticket for ticket, rollout in self._rollouts.items() if rollout.has_ended]

    def finish(self, ticket: int) -> Rolled:
        """Score the responses of an ended ticket."""
        rollout = self._rollouts.pop(ticket)
        if rollout.error is not None:
            raise rollout.error
        if rollout.batch is None:
            return Rolled(None, rollout.begun.prompts, rollout.begun.refused)
        if rollout.turns is not None:
            waited_s = rollout.turns.environment_s
            self._metrics.staged("environment", waited_s)
            self._metrics.staged("generate", time.monotonic() - rollout.since_s - waited_s)
            return rollout.roller.finish(rollout.begun, rollout.batch, rollout.turns.completed())
        self._metrics.staged("generate", time.monotonic() - rollout.since_s)
        return rollout.roller.finish(rollout.begun, rollout.batch, [rollout.completed[key] for key in rollout.keys])

    def cancel(self, tickets: Sequence[int]) -> None:
        """Drop tickets and their requests."""
        for ticket in tickets:
            if (rollout := self._rollouts.pop(ticket, None)) is not None:
                self._drop(rollout)

    def fetch(self, source: WeightsSource) -> WeightsVersion:
        """Replace the roller's weights; no ticket ends before the engine was asked about these."""
        fetched = self._roller.fetch(source)
        self._ask(fetched.version)
        return fetched

    def sleep(self) -> None:
        """Have the engine give its memory of the card back; no ticket is in hand.

        A question about its weights is asked again after it has woken.
        """
        if self._asked is not None:
            self._engine.cancel([self._asked[0]])
            self._asked = None
        cast("Sleeper", self._engine).sleep()
        free_cached()

    def wake(self, held: int | None) -> None:
        """Have the engine take its memory of the card again, and the weights of the version in hand.

        Args:
            held: That version; None: a fetch follows.
        """
        cast("Sleeper", self._engine).wake()
        if held is not None:
            self._roller.weights.hand_over_again(held)

    def close(self) -> None:
        """Close the roller."""
        self._roller.close()

    def _submit(self, ticket: int, requests: Sequence[Request]) -> None:
        for request in requests:
            self._engine.submit(request)
            self._tokens_in += len(request.prompt_ids)
            self._rollouts[ticket].keys.append(request.key)
            self._ticket_of[request.key] = ticket

    def _go_on_with_turns(self) -> None:
        """Take the answers of the environments; with nothing else to do wait for them a moment."""
        if self._roller.turns is None:
            return
        pool, load = self._roller.turns.pool, self._engine.load
        if pool.is_busy and load.running + load.waiting:
            pool.step(0.0)
        elif pool.is_busy:
            self._enter("environment")
            pool.step(_ENVIRONMENT_WAIT_S)
        for ticket, rollout in self._rollouts.items():
            if rollout.turns is None or rollout.error is not None:
                continue
            try:
                self._submit(ticket, rollout.turns.take_requests())
            except (FieldError, ShapeError) as error:
                self._fail(rollout, error)

    def _enter(self, activity: str) -> None:
        # Not once a step: a change of the activity is a heartbeat, and a step without progress is none.
        if self._metrics.clock.activity != activity:
            self._metrics.clock.enter(activity)

    def _ask(self, version: int) -> None:
        probe = self._roller.weights.probe
        if probe is None:
            return
        if self._asked is not None:
            self._engine.cancel([self._asked[0]])
        self._asked = self._new_key(), version
        try:
            self._engine.submit(probe.request(self._asked[0]))
        except (FieldError, ShapeError) as error:
            self._give_up_asking(error)

    def _give_up_asking(self, error: FieldError | ShapeError) -> None:
        assert self._asked is not None
        key, version = self._asked
        self._asked = None
        self._engine.cancel([key])
        probe = self._roller.weights.probe
        assert probe is not None
        probe.refused(version, error)

    def _judge(self, response: Response) -> None:
        assert self._asked is not None
        weights, (_, version) = self._roller.weights, self._asked
        assert weights.probe is not None
        self._asked = None
        try:
            if not weights.probe.judge(response, version):
                return
        except WeightsMismatchError:
            self._metrics.count("weights_synced", "mismatch")
            raise
        weights.hand_over_again(version)
        self._ask(version)

    def _charge(self, rollouts: Sequence[_Rollout], error: FieldError | ShapeError) -> None:
        if len(rollouts) > 1:
            raise error
        self._fail(rollouts[0], error)

    def _fail(self, rollout: _Rollout, error: FieldError | ShapeError) -> None:
        # Without its frames, which hold the tensors of the call.
        rollout.error = error.with_traceback(None)
        self._drop(rollout)

    def _drop(self, rollout: _Rollout) -> None:
        self._engine.cancel(rollout.keys)
        if rollout.turns is not None:
            rollout.turns.drop()
        for key in rollout.keys:
            self._ticket_of.pop(key, None)

    def _show_rows(self) -> None:
        rollouts = self._rollouts.values()
        done = sum(rollout.rows_done for rollout in rollouts)
        self._metrics.show_rows(done, sum(rollout.rows for rollout in rollouts))
        self._show_load()

    def _show_load(self) -> None:
        load = self._engine.load
        if load.counts is None:
            load = dataclasses.replace(load, counts=EngineCounts(self._tokens_in, self._tokens_out))
        self._metrics.engine(load)
