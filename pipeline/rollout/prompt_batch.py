"""A batch of prompts between a maker and an engine: sampling parameters, requests, and the rows of the responses."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.errors import FieldError, ShapeError, counted
from pipeline.experience.vision_rows import VisionRows
from pipeline.rollout.environment.turn_rows import TurnColumns
from pipeline.rollout.generation.interface import Completed, Engine, Request, Sampling
from pipeline.rollout.generation.stop_strings import StopStrings
from pipeline.rollout.generation.stops import parse_stop_token_ids
from pipeline.rollout.rows import Rows, check_lengths


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """Prompts with the sampling parameters of their responses.

    Attributes:
        prompts: The tokens of each prompt, ``(p,)`` int64 on the CPU, without padding.
        prompt_columns: Columns of prompt, P, at least the longest prompt's tokens.
        group_size: Responses of each prompt (G).
        answers: Ground truth of each row, ``prompts * G`` elements.
        vision: Images and videos of the prompts; None for a model of text alone.
        sampling: The sampling parameters.
        columns: Further columns of each row's prompt; None if no prompt has any.
    """

    prompts: Sequence[Tensor]
    prompt_columns: int
    group_size: int
    answers: list[Any]
    vision: VisionRows | None
    sampling: Sampling
    columns: list[Any] | None = None

    @property
    def num_actions(self) -> int:
        """The room of a response, A."""
        return self.sampling.max_length - self.prompt_columns

    def requests(self, new_key: Callable[[], int]) -> list[Request]:
        """Return one request a prompt, in order; `new_key` returns a key that was not used before."""
        has_images = self.vision is not None and self.vision.tensors_exist
        return [
            Request(
                new_key(),
                ids,
                self.group_size,
                self.num_actions,
                self.sampling,
                first_row=index * self.group_size,
                vision=self.vision.rows([index]) if self.vision is not None and has_images else None,
            )
            for index, ids in enumerate(self.prompts)
        ]

    def joined(self, completed: Sequence[Completed]) -> Rows:
        """Return the prompts with the responses of all requests.

        Args:
            completed: One element a request, in the order of `requests`.

        Raises:
            ShapeError: If a request has another number of responses than G, or a response more tokens than A.
            FieldError: If token ids are not integers.
        """
        responses = [response for request in completed for response in request.responses]
        if [len(request.responses) for request in completed] != [self.group_size] * len(self.prompts):
            returned = counted(len(responses), "response")
            raise ShapeError(
                f"the engine returned {returned} for {counted(len(self.prompts), 'prompt')}, "
                f"{self.group_size} of each were requested"
            )
        # An engine of the user's may give tensors of any device and dtype.
        tokens, turns = [response.token_ids for response in responses], TurnColumns.of(responses)
        lengths = np.array(list(map(len, tokens)), np.int64)
        check_lengths(lengths, self.num_actions)
        for row, ids in enumerate(tokens):
            if ids.is_floating_point() or ids.dtype == torch.bool:
                raise FieldError(f"row {row}: the tokens of its response are {ids.dtype}; token ids are integers")
        if turns is not None and bool((ends := turns.observed[lengths.cumsum() - 1]).any()):
            raise ShapeError(f"row {int(ends.nonzero()[0])}: its last response has no token")
        prompts = [prompt for prompt in self.prompts for _ in range(self.group_size)]
        halves = (half.cpu() for row in zip(prompts, tokens, strict=True) for half in row)
        return Rows(
            tokens=torch.cat(list(halves)).long(),
            prompts=np.array([len(ids) for ids in prompts], np.int64),
            lengths=lengths,
            prompt_columns=self.prompt_columns,
            num_actions=self.num_actions,
            pad_token_id=self.sampling.pad_token_id,
            cut=torch.tensor([response.finish_reason == "length" for response in responses]),
            sampled_log_probs=_joined([response.log_probs for response in responses], lengths.tolist()),
            vision=None if self.vision is None else self.vision.repeated(self.group_size),
            turns=turns,
        )


def _joined(log_probs: Sequence[Tensor | None], lengths: Sequence[int]) -> Tensor | None:
    """Return the log-probs of all responses, ``(N,)`` float32 on the CPU; None unless each response has them.

    Raises:
        ShapeError: If a response has another number of them than tokens.
    """
    found = [values for values in log_probs if values is not None]
    if len(found) != len(lengths):
        return None
    for row, (values, length) in enumerate(zip(found, lengths, strict=True)):
        if values.shape != (length,):
            raise ShapeError(f"row {row}: log-probs of shape {tuple(values.shape)} for {length} tokens of its response")
    return torch.cat([values.detach().to("cpu", torch.float32) for values in found])


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
    # None is the default, as for transformers.
    for name in ("temperature", "top_p", "top_k", "min_p", "do_sample"):
        if keywords.get(name, 0) is None:
            del keywords[name]
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
