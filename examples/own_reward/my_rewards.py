"""Two reward functions: each is called once per response, in a separate process, and returns one finite number."""

from __future__ import annotations

import itertools
from typing import Any

import torch


def descending(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    response_start: int,
    response_end: int,
    tokenizer: Any,
    **_: Any,
) -> float:
    """Return the share of adjacent characters of the response that descend, from 0 to 1."""
    text = tokenizer.decode(input_ids[response_start:response_end], skip_special_tokens=True)
    pairs = list(itertools.pairwise(text))
    return sum(left >= right for left, right in pairs) / len(pairs) if pairs else 0.0


def short(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, *, response_start: int, response_end: int, **_: Any
) -> float:
    """Return a small penalty for each token beyond the fifth."""
    return -0.05 * max(0, response_end - response_start - 5)
