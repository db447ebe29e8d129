"""A batch of prompts between a maker and an engine: sampling parameters, requests, and the rows of the responses."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.pass_size import RowBound
from pipeline.rollout.environment.turn_rows import turn_columns
from pipeline.rollout.generation.interface import Completed, Engine, Request, ResponseGenerator, Responses, Sampling
from pipeline.rollout.generation.stop_strings import StopStrings
from pipeline.rollout.generation.stops import parse_stop_token_ids
from pipeline.rollout.rows import Rows


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """Prompts with the sampling parameters of their responses; P columns of prompt, A = max_length - P of response.

    Attributes:
        input_ids: ``(prompts, P)`` int64 on the CPU, padded on the left.
        attention_mask: ``(prompts, P)``, 1 where the token is real.
        group_size: Responses of each prompt (G).
        answers: Ground truth of each row, ``prompts * G`` elements.
        vision: Images and videos of the prompts; None for a model of text alone.
        sampling: The sampling parameters.
        columns: Further columns of each row's prompt; None if no prompt has any.
    """

    input_ids: Tensor
    attention_mask: Tensor
    group_size: int
    answers: list[Any]
    vision: VisionRows | None
    sampling: Sampling
    columns: list[Any] | None = None

    def with_group_size(self, group_size: int) -> PromptBatch:
        """Return these prompts with another number of responses each."""
        first, count = range(0, len(self.answers), self.group_size), range(group_size)
        return dataclasses.replace(
            self,
            group_size=group_size,
            answers=[self.answers[row] for row in first for _ in count],
            columns=None if self.columns is None else [self.columns[row] for row in first for _ in count],
        )

    def generate(self, engine: ResponseGenerator, bound: RowBound, most_rows: int | None) -> Responses:
        """Return the responses of a blocking engine, ``prompts * G`` rows; `most_rows` run at a time, None for all."""
        # Passed only if there are images: an engine for text alone need not take the argument.
        images = {"vision": self.vision} if self.vision is not None and self.vision.tensors_exist else {}
        return bound.run(
            len(self.input_ids) * self.group_size,
            most_rows,
            lambda rows: engine.generate(
                self.input_ids,
                self.attention_mask,
                self.sampling,
                group_size=self.group_size,
                batch_rows=rows,
                **images,
            ),
        )

    def requests(self, new_key: Callable[[], int]) -> list[Request]:
        """Return one request a prompt, in order; `new_key` returns a key that was not used before."""
        has_images = self.vision is not None and self.vision.tensors_exist
        return [
            Request(
                new_key(),
                ids[mask != 0],
                self.group_size,
                self.sampling.max_length - self.input_ids.shape[1],
                self.sampling,
                first_row=index * self.group_size,
                vision=self.vision.rows([index]) if self.vision is not None and has_images else None,
            )
            for index, (ids, mask) in enumerate(zip(self.input_ids, self.attention_mask, strict=True))
        ]

    def joined(self, completed: Sequence[Completed]) -> Responses:
        """Return the responses of all requests as one batch.

        Args:
            completed: One element a request, in the order of `requests`.

        Returns:
            ``prompts * G`` rows; log-probs only if every response has them.

        Raises:
            ShapeError: If a request has another number of responses than G, or a response more tokens than A.
        """
        responses = [response for request in completed for response in request.responses]
        if [len(request.responses) for request in completed] != [self.group_size] * len(self.input_ids):
            raise ShapeError(
                f"the engine returned {len(responses)} responses for {len(self.input_ids)} prompts, "
                f"{self.group_size} of each were requested"
            )
        room = self.sampling.max_length - self.input_ids.shape[1]
        lengths = torch.tensor([len(response.token_ids) for response in responses])
        if bool((lengths > room).any()):
            row = int((lengths > room).nonzero()[0])
            raise ShapeError(f"row {row}: a response of {int(lengths[row])} tokens, not from 1 to {room}")
        tokens = torch.full((len(responses), room), self.sampling.pad_token_id)
        log_probs = torch.zeros((len(responses), room))
        has_log_probs = True
        for row, response in enumerate(responses):
            tokens[row, : len(response.token_ids)] = response.token_ids
            if response.log_probs is None:
                has_log_probs = False
            else:
                log_probs[row, : len(response.token_ids)] = response.log_probs
        prompts = self.input_ids.repeat_interleave(self.group_size, dim=0)
        return Responses(
            torch.cat([prompts, tokens], dim=1),
            lengths,
            log_probs if has_log_probs else None,
            turn_columns(responses, room),
        )

    def rows(self, responses: Responses) -> Rows:
        """Return the rows of these responses; see `Rows.of`."""
        return Rows.of(
            self.attention_mask.repeat_interleave(self.group_size, dim=0),
            responses,
            self.sampling,
            vision=None if self.vision is None else self.vision.repeated(self.group_size),
        )


def sample_all(engine: Engine, requests: Sequence[Request]) -> list[Completed]:
    """Have an engine without other requests run these to their end; return them in the order of `requests`.

    After an error none of them is in hand.
    """
    ended: dict[int, Completed] = {}
    with contextlib.ExitStack() as undone:
        # The next call may give the same keys.
        undone.callback(lambda: engine.cancel([request.key for request in requests]))
        for request in requests:
            engine.submit(request)
        # Without a deadline of its own: the engine's heartbeat, or its lack, decides on a hang.
        while len(ended) < len(requests):
            ended |= {completed.key: completed for completed in engine.step()}
        undone.pop_all()
    return [ended[request.key] for request in requests]


def tokens_of(completed: Iterable[Completed]) -> int:
    """Return the number of response tokens of ended requests."""
    return sum(len(response.token_ids) for request in completed for response in request.responses)


def _stop_strings(given: StopStrings | str | Sequence[str] | None, tokenizer: Any) -> StopStrings | None:
    if isinstance(given, StopStrings):
        return given
    if not given:
        return None
    strings = [given] if isinstance(given, str) else list(given)
    if not all(isinstance(string, str) and string for string in strings):
        raise FieldError(f"stop_strings is {given!r}: a text, or a list of texts, none of them empty")
    return StopStrings(strings, tokenizer)


def read_sampling(
    generate_kwargs: dict[str, Any], prompt_width: int, tokenizer: Any, *, temperature: float, seeds: torch.Generator
) -> tuple[Sampling, dict[str, Any]]:
    """Return the sampling parameters among keywords, and the keywords that only the actor takes.

    Args:
        generate_kwargs: As for `pipeline.rollout.maker.NaiveExperienceMaker.make_experience`, without pixels.
        prompt_width: Columns of the prompts, P.
        tokenizer: The tokenizer whose pad and eos token ids are the defaults.
        temperature: The default.
        seeds: Gives a seed if there is none among the keywords.

    Raises:
        FieldError: If `max_length` is missing, or a value is invalid.
        ShapeError: If `max_length` leaves no room for a response.
    """
    keywords = dict(generate_kwargs)
    max_length = keywords.pop("max_length", None)
    if max_length is None:
        raise FieldError("max_length is missing: columns of prompt and response together")
    if prompt_width >= max_length:
        raise ShapeError(f"prompts are {prompt_width} columns wide; max_length {max_length} leaves no response")
    eos = keywords.pop("eos_token_id", tokenizer.eos_token_id)
    eos_token_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    pad = keywords.pop("pad_token_id", tokenizer.pad_token_id)
    if pad is None:
        pad = eos_token_ids[0] if eos_token_ids else 0
    seed = keywords.pop("seed", None)
    if seed is None:
        seed = int(torch.randint(2**62, (), generator=seeds))
    sampling = Sampling(
        max_length=max_length,
        pad_token_id=pad,
        eos_token_ids=eos_token_ids,
        stop_sequences=parse_stop_token_ids(keywords.pop("stop_token_ids", None)),
        stop_strings=_stop_strings(keywords.pop("stop_strings", None), tokenizer),
        temperature=keywords.pop("temperature", temperature),
        top_p=keywords.pop("top_p", 1.0),
        top_k=keywords.pop("top_k", 0),
        min_p=keywords.pop("min_p", 0.0),
        do_sample=keywords.pop("do_sample", True),
        seed=seed,
    )
    return sampling, keywords
