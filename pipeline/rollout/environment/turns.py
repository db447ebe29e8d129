"""The turns of a ticket: responses of the engine and answers of the environments, until each row has ended.

All rows of a ticket take a turn together: the next one begins when the last row has its observation. So an engine that
computes the rows of a call together always gets the same ones. The responses of turn t draw by a seed of the ticket's
seed and t, and by the row's number.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from pipeline.prompts.types import Prompt
from pipeline.rollout.environment.pool import EnvironmentPool, row_json
from pipeline.rollout.environment.turn_rows import TurnsResponse
from pipeline.rollout.environment.wire import Answer
from pipeline.rollout.generation.interface import Completed, Engine, Request, Response, Span
from pipeline.rollout.prompt_batch import PromptBatch, sample_all, tokens_of
from pipeline.rollout.response_text import ResponseText

_WAIT_S = 1.0


@dataclasses.dataclass
class _Row:
    """A row in its turns.

    Attributes:
        place: Number of the row in the ticket.
        number: Number of the row in the pool.
        row_json: Prompt, answer and columns.
        prompt_ids: ``(P,)``.
        room: Tokens that are left for responses and observations.
        parts: Tokens of each response and observation, in order.
        observed: Whether each part is an observation.
        log_probs: Log-probs of each part; None where the engine has none.
        texts: The responses.
        rewards: Reward of each turn; NaN for a turn without an answer.
        ends: The tokens up to the end of each turn.
        spans: Spans of the responses.
    """

    place: int
    number: int
    row_json: str
    prompt_ids: Tensor
    room: int
    parts: list[Tensor] = dataclasses.field(default_factory=list)
    observed: list[bool] = dataclasses.field(default_factory=list)
    log_probs: list[Tensor | None] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)
    rewards: list[float] = dataclasses.field(default_factory=list)
    ends: list[int] = dataclasses.field(default_factory=list)
    spans: list[Span] = dataclasses.field(default_factory=list)
    has_ended: bool = False
    is_cut: bool = False

    @property
    def tokens(self) -> int:
        return sum(map(len, self.parts))

    def respond(self, response: Response, text: str) -> None:
        start = self.tokens
        self.spans += [Span(span.version, start + span.start, start + span.end) for span in response.spans]
        self.texts.append(text)
        self._append(response.token_ids, response.log_probs, observed=False)
        self.ends.append(self.tokens)

    def observe(self, ids: Tensor) -> None:
        self._append(ids, torch.zeros(len(ids)), observed=True)

    def _append(self, ids: Tensor, log_probs: Tensor | None, *, observed: bool) -> None:
        self.parts.append(ids)
        self.observed.append(observed)
        self.log_probs.append(log_probs)
        self.room -= len(ids)

    def joined(self) -> TurnsResponse:
        rewards = torch.zeros(self.tokens, dtype=torch.float64)
        rewards[torch.tensor(self.ends) - 1] = torch.tensor(self.rewards, dtype=torch.float64)
        observed = [torch.full((len(ids),), flag) for ids, flag in zip(self.parts, self.observed, strict=True)]
        log_probs = [values for values in self.log_probs if values is not None]
        return TurnsResponse(
            torch.cat(self.parts),
            "length" if self.is_cut else "stop",
            tuple(self.spans),
            torch.cat(log_probs) if len(log_probs) == len(self.parts) else None,
            observed=torch.cat(observed),
            rewards=rewards,
            turns=len(self.texts),
        )


class Turns:
    """The rows of one ticket. The caller has `take_requests` sampled, and reports each with `responded`.

    Args:
        settings: The environments and the limits.
        batch: The prompts with their sampling parameters.
        prompts: The same prompts, as the environments get them.
        tokenizer: Decodes responses, encodes observations.
        new_key: Returns a key for a request that was not used before.

    Attributes:
        environment_s: Time in which the ticket waited for its environments alone.
    """

    def __init__(
        self,
        settings: TurnSettings,
        batch: PromptBatch,
        prompts: Sequence[Prompt],
        tokenizer: Any,
        new_key: Callable[[], int],
    ) -> None:
        self.environment_s = 0.0
        self._settings = settings
        self._pool = settings.pool
        self._batch = batch
        self._tokenizer = tokenizer
        self._text = settings.text or ResponseText.of(tokenizer)
        self._new_key = new_key
        self._turn = 0
        self._unanswered = 0
        self._since_s = 0.0
        requests = batch.requests(new_key)
        room, size = batch.num_actions, batch.group_size
        self._rows = [
            _Row(
                place * size + member,
                self._pool.new_row(),
                row_json(prompt.prompt, prompt.answer, prompt.columns),
                request.prompt_ids,
                room,
            )
            for place, (request, prompt) in enumerate(zip(requests, prompts, strict=True))
            for member in range(size)
        ]
        self._requests = [
            dataclasses.replace(request, max_new_tokens=self._room(self._rows[place * size]))
            for place, request in enumerate(requests)
        ]
        self._sampling = {
            request.key: self._rows[place * size : (place + 1) * size] for place, request in enumerate(requests)
        }

    @property
    def has_ended(self) -> bool:
        """Whether all rows have ended."""
        return not self._sampling and not self._unanswered and all(row.has_ended for row in self._rows)

    @property
    def is_sampling(self) -> bool:
        """Whether responses are awaited."""
        return bool(self._sampling)

    @property
    def rows_done(self) -> int:
        """The number of rows that have ended."""
        return sum(row.has_ended for row in self._rows)

    def clear_problem(self) -> None:
        """Forget the problem of former rows; for a ticket that has the environments for itself."""
        self._pool.problem = None

    def take_requests(self) -> list[Request]:
        """Return the requests that are due, each once."""
        requests, self._requests = self._requests, []
        return requests

    def responded(self, done: Completed) -> None:
        """Take the responses of a request; after the last one of the turn the environments are asked."""
        rows = self._sampling.pop(done.key)
        for row, response in zip(rows, done.responses, strict=True):
            row.respond(response, self._text(response.token_ids.tolist()))
        if self._sampling:
            return
        self._since_s = time.monotonic()
        living = [row for row in self._rows if not row.has_ended]
        self._unanswered = len(living)
        for row in living:
            is_last = self._turn + 1 == self._settings.max_turns or row.room < 1
            callback = functools.partial(self._answered, row, is_last=is_last)
            self._pool.submit(row.number, row.row_json, row.texts, callback, is_last=is_last)

    def wait(self, timeout_s: float) -> None:
        """Wait for answers, if the ticket waits for any."""
        if self._unanswered:
            self._pool.step(timeout_s)

    def completed(self) -> list[Completed]:
        """Return the rows of each prompt as its responses."""
        size = self._batch.group_size
        rows = [row.joined() for row in self._rows]
        return [Completed(at // size, tuple(rows[at : at + size])) for at in range(0, len(rows), size)]

    def drop(self) -> None:
        """Forget the rows in the environments."""
        self._pool.forget([row.number for row in self._rows if not row.has_ended])

    def _answered(self, row: _Row, answer: Answer, *, is_last: bool) -> None:
        self._unanswered -= 1
        row.rewards.append(float("nan") if answer.problem else answer.reward)
        row.has_ended = bool(answer.problem) or answer.done
        if not row.has_ended:
            ids = self._tokenizer(answer.observation, add_special_tokens=False)["input_ids"]
            # A row ends with a response: an observation that leaves no room for one is dropped.
            row.is_cut = row.has_ended = is_last or len(ids) >= row.room
            if not row.has_ended:
                row.observe(torch.tensor(ids, dtype=torch.int64))
            elif not is_last:
                self._pool.forget([row.number])
        if not self._unanswered:
            self._begin_turn()

    def _begin_turn(self) -> None:
        self.environment_s += time.monotonic() - self._since_s
        self._turn += 1
        seed = self._batch.sampling.seed
        sampling = dataclasses.replace(self._batch.sampling, seed=turn_seed(seed, self._turn))
        for row in self._rows:
            if row.has_ended:
                continue
            request = Request(
                self._new_key(),
                torch.cat([row.prompt_ids, *row.parts]),
                1,
                self._room(row),
                sampling,
                first_row=row.place,
                draws_alone=True,
            )
            self._requests.append(request)
            self._sampling[request.key] = [row]

    def _room(self, row: _Row) -> int:
        return min(row.room, self._settings.turn_tokens or row.room)


@dataclasses.dataclass(frozen=True)
class TurnSettings:
    """The environments of a roller, and the limits of its rows.

    Attributes:
        pool: The environments.
        max_turns: Most responses of a row.
        turn_tokens: Most tokens of a response; None: the room that is left.
        text: Decodes responses; None: with the tokenizer's special tokens, but pad and eos.
    """

    pool: EnvironmentPool
    max_turns: int
    turn_tokens: int | None = None
    text: ResponseText | None = None


def turn_seed(ticket_seed: int, turn: int) -> int:
    """Return the sampling seed of a later turn of a ticket."""
    return xxhash.xxh3_64_intdigest(f"{ticket_seed}:turn:{turn}".encode()) >> 1


def sample_turns(engine: Engine, turns: Turns, on_sampled: Callable[[int], None]) -> list[Completed]:
    """Have an engine without other requests run a ticket to its end; return its rows."""
    try:
        while not turns.has_ended:
            for done in sample_all(engine, turns.take_requests()):
                on_sampled(tokens_of([done]))
                turns.responded(done)
            turns.wait(_WAIT_S)
    except BaseException:
        turns.drop()
        raise
    return turns.completed()
