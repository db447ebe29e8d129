"""A blocking engine behind the interface of a stream: one `generate` call a ticket."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.pass_size import RowBound
from pipeline.progress import Telemetry
from pipeline.rollout.generation.interface import (
    Completed,
    EngineLoad,
    FinishReason,
    Request,
    Response,
    ResponseGenerator,
    Responses,
    Sampling,
    Sleeper,
    Span,
    row_seed,
)
from pipeline.rollout.generation.stops import ends_with_stop
from pipeline.rollout.rows import check_lengths

# The last number is the row of a request that is computed alone.
_Ticket = tuple[Sampling, int, bool, int]


class BlockingEngine:
    """An `Engine` over a `ResponseGenerator`: a step runs all requests of the oldest ticket in one call.

    Requests with the same sampling parameters and group size are of one ticket, and are submitted before the step that
    runs them. The call has the rows in the order of submission, padded on the left to the longest prompt. The engine is
    full as soon as it holds a request. Requests that draw alone are run together only by a generator with an attribute
    `draws_by_row` that is true: its `generate` takes `row_seeds`, the seed of each row, and `row_limits`, its most
    tokens.

    Args:
        generator: Any blocking engine.
        most_rows: Most rows that run at a time; None for all. Halved if the device runs out of memory.
        telemetry: Counts each time that the bound is halved.
        bound: The bound as it was halved by engines before; None for none.

    Attributes:
        deterministic: True: a ticket gets the same tokens alone and beside others. Its requests are never split.
    """

    deterministic = True

    def __init__(
        self,
        generator: ResponseGenerator,
        *,
        most_rows: int | None = None,
        telemetry: Telemetry = Telemetry.none(),
        bound: RowBound | None = None,
    ) -> None:
        self._generator = generator
        self._most_rows = most_rows
        self._bound = RowBound(telemetry) if bound is None else bound
        self._tickets: dict[_Ticket, list[Request]] = {}
        self._keys: dict[int, _Ticket] = {}
        self._version = -1

    @property
    def load(self) -> EngineLoad:
        """The work in hand: the oldest ticket runs with the next step. The engine is full as soon as it has one."""
        rows = [sum(request.group_size for request in ticket) for ticket in self._tickets.values()]
        return EngineLoad(sum(rows[:1]), sum(rows[1:]), room_rows=max(1, sum(rows)))

    def submit(self, request: Request) -> None:
        """Take a request over; see `pipeline.rollout.generation.interface.Engine`."""
        if request.key in self._keys:
            raise FieldError(f"request {request.key} is in hand already")
        # Not read, and different for tickets of other prompts.
        apart = request.draws_alone and not getattr(self._generator, "draws_by_row", False)
        sampling = dataclasses.replace(request.sampling, max_length=0)
        ticket = sampling, request.group_size, request.draws_alone, request.first_row if apart else -1
        self._tickets.setdefault(ticket, []).append(request)
        self._keys[request.key] = ticket

    def step(self) -> list[Completed]:
        """Run the oldest ticket; return its requests. A ticket whose call raises an error is not in hand any more."""
        if not self._tickets:
            return []
        requests = self._tickets.pop(next(iter(self._tickets)))
        # A cancelled request is computed with the others of its ticket: their tokens depend on all rows of the call.
        wanted = {request.key for request in requests if self._keys.pop(request.key, None) is not None}
        return [done for done in self._run(requests) if done.key in wanted]

    def cancel(self, keys: Sequence[int]) -> None:
        """Drop requests; see `pipeline.rollout.generation.interface.Engine`."""
        for ticket in {self._keys.pop(key) for key in keys if key in self._keys}:
            if not any(request.key in self._keys for request in self._tickets[ticket]):
                del self._tickets[ticket]

    def update_weights(self, actor: Mapping[str, Tensor], version: int) -> None:
        """Compute with these weights from the next step on."""
        self._generator.update_weights(actor)
        self._version = version

    def pause(self) -> None:
        """Pause the generator."""
        self._generator.pause()

    def resume(self) -> None:
        """Resume the generator."""
        self._generator.resume()

    def sleep(self) -> None:
        """Have the generator sleep, which must be able to."""
        cast("Sleeper", self._generator).sleep()

    def wake(self) -> None:
        """Wake the generator."""
        cast("Sleeper", self._generator).wake()

    def close(self) -> None:
        """Drop all requests."""
        self.cancel(list(self._keys))

    def _run(self, requests: list[Request]) -> list[Completed]:
        first = requests[0]
        group_size, prompts = first.group_size, [request.prompt_ids.long() for request in requests]
        width = max(map(len, prompts))
        room = max(request.max_new_tokens for request in requests)
        pad = functools.partial(pad_sequence, batch_first=True, padding_side="left")
        input_ids = pad(prompts, padding_value=first.sampling.pad_token_id)
        mask = pad([torch.ones_like(ids) for ids in prompts])
        sampling = dataclasses.replace(first.sampling, max_length=width + room)
        # Passed only if there are images: an engine for text alone need not take the argument.
        vision = [request.vision or VisionRows.none(1) for request in requests]
        extra: dict[str, Any] = {}
        if any(rows.tensors_exist for rows in vision):
            extra["vision"] = VisionRows.joined(vision)
        if first.draws_alone:
            rows = [request.first_row + member for request in requests for member in range(group_size)]
            seeds = [row_seed(sampling.seed, row) for row in rows]
            if getattr(self._generator, "draws_by_row", False):
                extra["row_seeds"] = seeds
                # Prompts of later turns differ by whole turns: the room of one row is more than another one has.
                extra["row_limits"] = [request.max_new_tokens for request in requests for _ in range(group_size)]
            else:
                sampling = dataclasses.replace(sampling, seed=seeds[0])
        responses = self._bound.run(
            len(prompts) * group_size,
            self._most_rows,
            lambda rows: self._generator.generate(
                input_ids, mask, sampling, group_size=group_size, batch_rows=rows, **extra
            ),
        )
        _check_responses(responses, len(prompts) * group_size, width, sampling.max_length)
        return [
            Completed(
                request.key,
                tuple(
                    self._response(responses, prompt * group_size + member, width, request)
                    for member in range(group_size)
                ),
            )
            for prompt, request in enumerate(requests)
        ]

    def _response(self, responses: Responses, row: int, width: int, request: Request) -> Response:
        tokens, sampling = responses.sequences[row, width:], request.sampling
        length = int(responses.lengths[row])
        if bool((tokens[length:] != sampling.pad_token_id).any()):
            raise FieldError(f"row {row}: the generator returned a token after the {length} of its response")
        # A ticket whose requests have different room runs with the largest one.
        ids = tokens[: min(length, request.max_new_tokens)]
        if sampling.stop_strings is not None:
            # A generator of the user's need not know of them: its tokens up to there are the same.
            ids = ids[: sampling.stop_strings.end_of(ids.tolist())]
        log_probs = None if responses.log_probs is None else responses.log_probs[row, : len(ids)]
        return Response(ids, _finish_reason(ids, request), (Span(self._version, 0, len(ids)),), log_probs)


def _finish_reason(ids: Tensor, request: Request) -> FinishReason:
    if len(ids) < request.max_new_tokens:
        return "stop"
    stops = request.sampling
    has_stopped = ends_with_stop(ids[None], stops.stop_sequences, stops.eos_token_ids, stops.stop_strings)
    return "stop" if bool(has_stopped) else "length"


def _check_responses(responses: Responses, rows: int, prompt_width: int, max_length: int) -> None:
    """Refuse the result of a blocking engine in another shape than requested, or with an impossible length.

    Args:
        responses: The result.
        rows: B, as requested.
        prompt_width: P, columns of the prompts.
        max_length: As requested.

    Raises:
        ShapeError: If there is another number of rows or columns, log-probs are of another number of rows, or a
            response does not have from 1 to `max_length` - P tokens.
    """
    shape, lengths = tuple(responses.sequences.shape), responses.lengths
    if shape != (rows, max_length) or lengths.shape != (rows,):
        raise ShapeError(
            f"generator returned sequences {shape} and lengths {tuple(lengths.shape)}, "
            f"not ({rows}, {max_length}) and ({rows},)"
        )
    if responses.log_probs is not None and responses.log_probs.shape[:1] != (rows,):
        raise ShapeError(f"generator returned log-probs {tuple(responses.log_probs.shape)} for {rows} responses")
    check_lengths(lengths.cpu().numpy(), max_length - prompt_width)
