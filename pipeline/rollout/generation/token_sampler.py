"""The next token of each row, and the rows that it ends: tensors in, tensors out, so that a graph can hold it.

The random numbers are arguments: drawn before the first step (`pipeline.rollout.generation.transformers`), they are
functions of seed, row and column, and a token is the same inside a graph and outside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from pipeline.models.vision_inputs import plain_tokens
from pipeline.rollout.generation.interface import Sampling

NO_TOKEN = -1
"""In the place of a token that a response does not have."""

_MOST_NOISE = 1 - 2.0**-52
"""The product of any float64 with it is rounded to a smaller number."""

_SAMPLE_ELEMENTS = 2**24
"""Most probabilities in float64 at a time while a token is sampled: 128 MiB."""


@dataclasses.dataclass(frozen=True)
class BegunRows:
    """Rows of which some tokens have been sampled.

    Attributes:
        tokens: ``(rows, t)`` int64, the tokens so far; `NO_TOKEN` after the end of a row.
        noise: ``(rows, more)`` float64 in [0, 1), the draws of the tokens that may follow.
        alive: ``(rows,)`` bool, whether the row goes on.
    """

    tokens: Tensor
    noise: Tensor
    alive: Tensor


class TokenSampler:
    """Samples by the settings of one call.

    Args:
        sampling: The settings.
        device: The device of the logits.
        vision_backbone: The part of a vision-language model that replaces image tokens; None for any other model.
    """

    def __init__(self, sampling: Sampling, device: torch.device, vision_backbone: Any = None) -> None:
        self.sampling = sampling
        self._vision_backbone = vision_backbone
        # Made once: a copy from the host can be in no graph.
        self._stops = [torch.tensor(stop, device=device) for stop in sampling.stop_sequences]
        self._no_token = torch.tensor(NO_TOKEN, device=device)

    @property
    def draws(self) -> bool:
        """Whether a token needs a random number."""
        return self.sampling.do_sample

    @property
    def can_be_captured(self) -> bool:
        """Whether it works on the device alone: texts that end a response are looked for on the host."""
        return self.sampling.stop_strings is None

    @property
    def key(self) -> Hashable:
        """The settings that are constants of a graph."""
        return dataclasses.replace(self.sampling, seed=0, max_length=0, pad_token_id=0)

    def next(self, logits: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return a token of each row and its log-prob, ``(rows,)`` int64 and float32.

        Args:
            logits: ``(rows, V)`` float32.
            noise: ``(rows,)`` float64 in [0, 1); None without draws.
        """
        sampling = self.sampling
        scaled = logits if sampling.temperature == 1 else logits / sampling.temperature
        if noise is None:
            tokens = scaled.argmax(dim=-1)
        else:
            tokens = sample_tokens(scaled, noise, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
        return tokens, scaled.log_softmax(dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def go_on(self, alive: Tensor, tokens: Tensor, last: Callable[[int], Tensor | None]) -> Tensor:
        """Return ``(rows,)`` bool: the row was alive, and its token ends it neither alone nor as a sequence's last.

        Args:
            alive: ``(rows,)`` bool.
            tokens: ``(rows,)`` int64, the newest.
            last: Returns so many of the last tokens, ``(rows, count)``, the newest included; None if there are fewer.
        """
        for eos in self.sampling.eos_token_ids:
            alive = alive & (tokens != eos)
        for stop in self._stops:
            if (recent := last(len(stop))) is not None:
                alive = alive & (recent != stop).any(dim=1)
        return alive

    def kept(self, alive: Tensor, tokens: Tensor) -> Tensor:
        """Return the tokens of rows that are alive, `NO_TOKEN` of the others."""
        return torch.where(alive, tokens, self._no_token)

    def fed(self, tokens: Tensor) -> Tensor:
        """Return the tokens as the model reads them."""
        return tokens if self._vision_backbone is None else plain_tokens(self._vision_backbone, tokens)


def sample_tokens(
    scaled_logits: Tensor, noise: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Invert each row's cumulative distribution at a uniform number.

    In float64: a float32 sum over 100,000 tokens is off by more than the probability of the rare ones.

    Args:
        scaled_logits: ``(B, V)`` float32, divided by the temperature.
        noise: ``(B,)`` float64 in [0, 1).
        top_k: As in `Sampling`.
        top_p: As in `Sampling`, of the distribution that `top_k` leaves.
        min_p: As in `Sampling`; a filter of the same distribution, so that its order with `top_p` is of no matter.

    Returns:
        ``(B,)`` int64; never a token of probability zero. A row with NaN logits gives an arbitrary token, whose
        log-prob is NaN too.
    """
    rows = max(1, _SAMPLE_ELEMENTS // scaled_logits.shape[1])
    if len(noise) > rows:
        parts = zip(scaled_logits.split(rows), noise.split(rows), strict=True)
        return torch.cat([sample_tokens(part, draws, top_k=top_k, top_p=top_p, min_p=min_p) for part, draws in parts])
    if 0 < top_k < scaled_logits.shape[1]:
        threshold = scaled_logits.topk(top_k, dim=-1).values[:, -1:]
        scaled_logits = scaled_logits.masked_fill(scaled_logits < threshold, -torch.inf)
    probs = scaled_logits.double().softmax(dim=-1)
    if top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        # No token is before the most probable one, which therefore always stays.
        probs = torch.zeros_like(probs).scatter_(-1, order, ordered.masked_fill(before >= top_p, 0.0))
    if min_p > 0:
        probs = probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    cumulative = probs.cumsum(dim=-1)
    # Below the total even after rounding: the token found beyond it would have probability zero.
    target = noise.clamp(max=_MOST_NOISE) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    # Only NaN logits give an id beyond the vocabulary; on a GPU it would fail later, and hide the cause.
    return tokens.clamp_(max=probs.shape[1] - 1)
