"""The interface of a generation engine: prompts in, sampled responses out.

An engine takes each prompt once, not once a response. It makes `group_size` responses of it, contiguous, and returns
their lengths. Its samples depend on the prompts and on `Sampling` alone, above all on the seed in it: not on the random
state of the process, which the engine leaves unchanged, and not on the number of rows that run at a time.

Weights change in place: `pause`, the new values are copied into the actor's tensors, `update_weights`, `resume`.
`engines` makes the engine named by `rollout.engine`; docs/engines.md describes how to add one.

`transformers` is the default engine of `NaiveExperienceMaker`, over `kv_cache` and, on a GPU, `cuda_graphs`.
`hf_generate` is the adapter for any object with the Hugging Face convention of ``generate``. `stops` finds the end of a
response.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from pipeline.errors import FieldError
from pipeline.experience.vision_rows import VisionRows


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters, and the conditions that end a response.

    Attributes:
        max_length: Columns of prompt and response together; a response that reaches it is cut off.
        pad_token_id: The token after the end of a response.
        eos_token_ids: Each of these tokens ends a response and belongs to it.
        stop_sequences: Each of these token sequences, inside the response, ends it and belongs to it.
        temperature: Divisor of the logits, above 0.
        top_p: Sample from the smallest set of tokens whose probabilities reach it; 1.0 for all.
        top_k: Sample from this many most probable tokens; 0 for all.
        seed: Seed of all random numbers of the call.
        do_sample: False takes the most probable token each time (greedy).

    Raises:
        FieldError: If the temperature is not above 0, `top_p` is not in (0, 1], or `top_k` is negative.
    """

    max_length: int
    pad_token_id: int
    eos_token_ids: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    do_sample: bool = True

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise FieldError(f"temperature is {self.temperature}; it must be above 0 (do_sample=False is greedy)")
        if not 0 < self.top_p <= 1:
            raise FieldError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k < 0:
            raise FieldError(f"top_k is {self.top_k}; it must be 0 (all tokens) or more")


@dataclasses.dataclass(frozen=True)
class Responses:
    """The responses of an engine; row i * group_size + g is response g of prompt i.

    Attributes:
        sequences: ``(B, max_length)`` int64, the prompts at full width, the responses, then pad tokens.
        lengths: ``(B,)`` int64, tokens of each response, its stop included.
        log_probs: ``(B, max_length - P)`` float32, of the sampled tokens at the temperature, before top_k and top_p;
            zero after the end. None if the engine does not compute them.
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
            batch_rows: Rows that run at a time, at most; None for all. It bounds memory and changes no token.
            vision: Images and videos of the prompts; not passed if no prompt has any.

        Returns:
            ``prompts * group_size`` responses, on the device of `input_ids`.
        """
        ...

    def update_weights(self, actor: Mapping[str, Tensor]) -> None:
        """Compute with the weights that the actor's tensors hold now, from the next `generate` on.

        Args:
            actor: The actor's state dict under Hugging Face's names: the same tensors each time, with new values. An
                engine that computes with these tensors does nothing.
        """
        ...

    def pause(self) -> None:
        """Return once no weight is being read, and release memory that only generation needs."""
        ...

    def resume(self) -> None:
        """Prepare for the next `generate`."""
        ...
