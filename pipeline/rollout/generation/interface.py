"""The interface of a generation engine: prompts in, sampled responses out.

`Engine` is the interface of a worker that schedules: requests are submitted, steps return those that have ended.
`ResponseGenerator` is the blocking interface, one call a batch; an adapter puts it behind `Engine`.

An engine takes each prompt once, not once a response. It makes `group_size` responses of it, contiguous, and returns
their lengths. Its samples depend on the prompts and on `Sampling` alone, above all on the seed in it: not on the random
state of the process, which the engine leaves unchanged, and not on the number of rows that run at a time.

Weights change in place: `pause`, the new values are copied into the actor's tensors, `update_weights`, `resume`.
`engines` makes the engine named by `rollout.engine`; docs/engines.md describes how to add one.

`transformers` is the default engine of `NaiveExperienceMaker`, over `kv_cache` and, on a GPU, `cuda_graphs`.
`hf_generate` is the adapter for any object with the Hugging Face convention of ``generate``. `stops` finds the end of a
response by its tokens, `stop_strings` by its text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from torch import Tensor

from pipeline.errors import FieldError
from pipeline.experience.vision_rows import VisionRows
from pipeline.prompts.order import SPLITMIX64_STEP, splitmix64
from pipeline.rollout.generation.stop_strings import StopStrings


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters, and the conditions that end a response.

    Attributes:
        max_length: Columns of prompt and response together; a response that reaches it is cut off.
        pad_token_id: The token after the end of a response.
        eos_token_ids: Each of these tokens ends a response and belongs to it.
        stop_sequences: Each of these token sequences, inside the response, ends it and belongs to it.
        stop_strings: The token that completes one of these texts ends the response and belongs to it; None for none.
        temperature: Divisor of the logits, above 0.
        top_p: Sample from the smallest set of tokens whose probabilities reach it; 1.0 for all.
        top_k: Sample from this many most probable tokens; 0 for all.
        min_p: Sample from the tokens of at least this share of the most probable one's probability; 0.0 for all.
        seed: Seed of all random numbers of the call.
        do_sample: False takes the most probable token each time (greedy).

    Raises:
        FieldError: If the temperature is not above 0, `top_p` is not in (0, 1], `top_k` is negative, or `min_p` is
            not in [0, 1).
    """

    max_length: int
    pad_token_id: int
    eos_token_ids: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    stop_strings: StopStrings | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    do_sample: bool = True

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise FieldError(f"temperature is {self.temperature}; it must be above 0 (do_sample=False is greedy)")
        if not 0 < self.top_p <= 1:
            raise FieldError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k < 0:
            raise FieldError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more")
        if not 0 <= self.min_p < 1:
            raise FieldError(f"min_p is {self.min_p}; it must be 0 (all tokens) or more and less than 1")


@dataclasses.dataclass(frozen=True)
class Responses:
    """The responses of an engine; row i * group_size + g is response g of prompt i.

    Attributes:
        sequences: ``(B, max_length)`` int64, on any device as all of them: the prompts at full width, the responses,
            then pad tokens.
        lengths: ``(B,)`` int64, tokens of each response, its stop included.
        log_probs: ``(B, max_length - P)`` float32, of the sampled tokens at the temperature, before top_k, top_p and
            min_p; zero after the end. None if the engine does not compute them.
    """

    sequences: Tensor
    lengths: Tensor
    log_probs: Tensor | None = None


class ResponseGenerator(Protocol):
    """The interface of an engine: samples responses; the worker replaces its weights between two calls."""

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        sampling: Sampling,
        *,
        group_size: int = 1,
        batch_rows: int | None = None,
        vision: VisionRows | None = None,
    ) -> Responses:
        """Sample `group_size` responses of each prompt.

        Args:
            input_ids: ``(prompts, P)`` int64, padded on the left.
            attention_mask: ``(prompts, P)``, 1 where the token is real.
            sampling: The sampling parameters; P is below `max_length`.
            group_size: Responses of each prompt (G), contiguous in the result.
            batch_rows: Rows that run at a time, at most; None for all. It bounds memory and changes no token, save
                of `hf_generate`.
            vision: Images and videos of the prompts; not passed if no prompt has any.

        Returns:
            ``prompts * group_size`` responses, on the device of `input_ids`.
        """
        ...

    def update_weights(self, actor: Mapping[str, Tensor]) -> None:
        """Compute with the weights that the actor's tensors hold now, from the next `generate` on.

        Args:
            actor: The actor's state dict under Hugging Face's names, with LoRA the adapters' alone: the same tensors
                each time, with new values. An engine that computes with these tensors does nothing.
        """
        ...

    def pause(self) -> None:
        """Return once no weight is being read, and release memory that only generation needs."""
        ...

    def resume(self) -> None:
        """Prepare for the next `generate`."""
        ...


FinishReason = Literal["stop", "length"]
"""The reason for a response's end: a stop token, sequence or string, or the end of its room."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and its group of responses.

    Attributes:
        key: The caller's name of the request, unique among those in hand.
        prompt_ids: ``(P,)`` int64 on the CPU, without padding.
        group_size: Responses to sample (G).
        max_new_tokens: Room for each response, its stop included.
        sampling: The sampling parameters. `max_length` is not read. `seed` is that of the ticket.
        first_row: Number of the request's first row within its ticket. Response g has the draws that
            `sampling.seed` and ``first_row + g`` determine. Requests with the same seed are of one ticket.
        vision: Images and videos of the prompt; None without.
        draws_alone: Whether its draws must not depend on the other requests of the ticket either: of a later turn,
            which not all rows of the ticket have.
        prompt_log_probs: Whether the first response has those of the prompt, computed anew; of vLLM alone.
    """

    key: int
    prompt_ids: Tensor
    group_size: int
    max_new_tokens: int
    sampling: Sampling
    first_row: int = 0
    vision: VisionRows | None = None
    draws_alone: bool = False
    prompt_log_probs: bool = False


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive tokens of a response that were sampled with the weights of one version: ``start ... end - 1``.

    The version is that of `Engine.update_weights`; -1 before the first call.
    """

    version: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Response:
    """One ended response.

    Attributes:
        token_ids: ``(n,)`` int64 on the CPU, its stop included.
        finish_reason: Why it ended.
        spans: The versions of its tokens, in order and without gaps.
        log_probs: ``(n,)`` float32, of the sampled tokens at the temperature, before top_k, top_p and min_p. None if
            the engine does not compute these.
        prompt_log_probs: ``(P - 1,)`` float32, of the prompt's tokens but the first, without temperature. None if the
            request did not ask for these.
    """

    token_ids: Tensor
    finish_reason: FinishReason
    spans: tuple[Span, ...]
    log_probs: Tensor | None = None
    prompt_log_probs: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Completed:
    """An ended request.

    Attributes:
        key: The request's.
        responses: The request's `group_size` responses, in order.
    """

    key: int
    responses: tuple[Response, ...]


@dataclasses.dataclass(frozen=True)
class EngineCounts:
    """The work of an engine since its start.

    Attributes:
        tokens_in: Prompt tokens, once for each response that an engine computes by itself.
        tokens_out: Tokens sampled, also those of responses that have not ended.
        preemptions: Responses that lost their place in the key-value cache to others, and were computed again.
        prefix_tokens: Prompt tokens that were looked up in the prefix cache.
        prefix_hits: The part of these tokens that the cache held.
    """

    tokens_in: int = 0
    tokens_out: int = 0
    preemptions: int = 0
    prefix_tokens: int = 0
    prefix_hits: int = 0


@dataclasses.dataclass(frozen=True)
class EngineLoad:
    """The work in hand of an engine.

    Attributes:
        running: Responses that advance with each step.
        waiting: Responses that have been submitted and do not advance yet.
        free_cache: Share of the key-value cache that is free, 0 to 1; 1.0 for an engine without one of fixed size.
        room_rows: Responses that could run at a time, at most; None if the engine sets no limit.
        counts: The work since its start; None if the engine does not count.
    """

    running: int
    waiting: int
    free_cache: float = 1.0
    room_rows: int | None = None
    counts: EngineCounts | None = None


class Sleeper(Protocol):
    """The further methods of an engine, blocking or not, that shares its card with a trainer (`rollout.sleep`)."""

    def sleep(self) -> None:
        """Give its memory of the card back, weights included; there is no request in hand."""
        ...

    def wake(self) -> None:
        """Take memory of the card again; `pause`, `update_weights` or `fetch_weights`, and `resume` follow."""
        ...


class Engine(Protocol):
    """The interface of an engine to a worker that schedules.

    A response depends on its request and on the weights: not on other requests, if the engine is `deterministic`, and
    never on the random state of the process. An engine may compute the requests of one ticket together: it is
    submitted whole, and its requests may depend on each other.

    Attributes:
        deterministic: Whether a ticket gets the same tokens alone and beside others.
    """

    deterministic: bool

    @property
    def load(self) -> EngineLoad:
        """The work in hand."""
        ...

    def submit(self, request: Request) -> None:
        """Take a request over; it begins with one of the next steps.

        Args:
            request: A request whose key is not in hand.

        Raises:
            FieldError: If the engine lacks an option of the request, or the request can never fit into its cache.
        """
        ...

    def step(self) -> list[Completed]:
        """Advance the running requests; return those that have ended. Without requests it returns at once."""
        ...

    def cancel(self, keys: Sequence[int]) -> None:
        """Drop requests, running or waiting; unknown keys are ignored. Dropped requests never come out of `step`."""
        ...

    def update_weights(self, actor: Mapping[str, Tensor], version: int) -> None:
        """Compute with these weights from the next step on; key-value caches that are shared by requests are dropped.

        Requests in hand go on: their next tokens are of the new version. A caller that wants none waits for them first.

        Args:
            actor: The actor's state dict under Hugging Face's names, with LoRA the adapters' alone.
            version: Version of these weights.

        Raises:
            WeightsMismatchError: If a parameter of the engine was not given, or does not fit.
        """
        ...

    def pause(self) -> None:
        """Return once no weight is being read; release memory that only generation needs."""
        ...

    def resume(self) -> None:
        """Prepare for the next `step`."""
        ...

    def close(self) -> None:
        """End its processes and release its memory."""
        ...


def row_seed(ticket_seed: int, row: int) -> int:
    """Return the seed of one response: SplitMix64 of the ticket's seed and the row (Steele et al., OOPSLA 2014).

    Rows of a ticket never share a seed nor its lowest 32 bits, the ones that torch's generator of a CPU reads: they are
    a permutation of the row. Rows of two tickets share a seed with a probability of 2**-63, and these bits with 2**-32.
    """
    # The states of a generator with this seed: before its number `row`, and two before its first one.
    whole = splitmix64(ticket_seed + row * SPLITMIX64_STEP) >> 32
    keys = splitmix64(ticket_seed - 2 * SPLITMIX64_STEP)
    lowest = _permuted32(_permuted32(row ^ (keys >> 32)) ^ (keys & _LOWEST_32))
    return (whole >> 1) << 32 | lowest


_LOWEST_32 = (1 << 32) - 1


def _permuted32(value: int) -> int:
    """Return the finalizer of MurmurHash3 (Appleby, 2011), which maps 32 bits one to one."""
    z = value & _LOWEST_32
    z = ((z ^ (z >> 16)) * 0x85EBCA6B) & _LOWEST_32
    z = ((z ^ (z >> 13)) * 0xC2B2AE35) & _LOWEST_32
    return z ^ (z >> 16)
