"""Attention of rows whose prompts are computed once: each response attends to its prompt and to itself, causally.

The tokens of a pass are laid end to end, all prompts first, then the responses, prompt by prompt::

    prompt 0 | prompt 1 | ... | response 0 of prompt 0 | response 1 of prompt 0 | response 0 of prompt 1 | ...

A prompt is a row of its own. The responses of prompts of equal length are one call of torch's fused attention: their
queries, padded at the end to the longest, against the keys of prompt and response. Under the causal mask no query that
counts sees a key of the padding, which comes after it; so one mask serves all rows of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.models.flat_rows import on_device


@dataclass(frozen=True, slots=True)
class ResponseRun:
    """Responses, neighbours in the pass, whose prompts have the same length.

    Attributes:
        prompt_tokens: ``(first, end)`` of the prompts' tokens in the pass; they are neighbours too.
        prompts: Number of prompts.
        prompt_of_row: ``(rows,)`` int64, the prompt of each response, counted from the run's first.
        response_tokens: ``(first, end)`` of the responses' tokens in the pass.
        rows: Number of responses.
        longest: Tokens of the longest response.
        indices: ``(tokens,)`` int64, the index of each response token among rows x longest; None if all are as long.
        mask: ``(longest, prompt length + longest)`` bool, True where a query attends to a key.
    """

    prompt_tokens: tuple[int, int]
    prompts: int
    prompt_of_row: Tensor
    response_tokens: tuple[int, int]
    rows: int
    longest: int
    indices: Tensor | None
    mask: Tensor


@dataclass(frozen=True, slots=True)
class PrefixLayout:
    """The layout of prompts and responses in a pass.

    Attributes:
        prompt_lengths: Tokens of each prompt; prompts of equal length are neighbours.
        prompt_starts: ``(prompts + 1,)`` int32, the first token of each prompt, and the first of the responses.
        runs: The responses of one or more tokens.
    """

    prompt_lengths: list[int]
    prompt_starts: Tensor
    runs: list[ResponseRun]

    @classmethod
    def of(cls, prompt_lengths: list[int], response_lengths: Sequence[Sequence[int]], device: torch.device) -> Self:
        """Return the layout of prompts, equal lengths side by side, and of the tokens of each one's responses."""
        runs: list[ResponseRun] = []
        prompt_end, response_end = 0, sum(prompt_lengths)
        by_length = groupby(zip(prompt_lengths, response_lengths, strict=True), key=lambda pair: pair[0])
        for prompt_length, pairs in by_length:
            responses = [list(of_prompt) for _, of_prompt in pairs]
            prompt_start, prompt_end = prompt_end, prompt_end + prompt_length * len(responses)
            lengths = [length for of_prompt in responses for length in of_prompt]
            response_start, response_end = response_end, response_end + sum(lengths)
            longest = max(lengths)
            if not longest:
                continue
            prompt_of_row = [prompt for prompt, of_prompt in enumerate(responses) for _ in of_prompt]
            real = np.arange(longest) < np.array(lengths)[:, None]
            columns, keys = (torch.arange(end, device=device) for end in (longest, prompt_length + longest))
            runs.append(
                ResponseRun(
                    prompt_tokens=(prompt_start, prompt_end),
                    prompts=len(responses),
                    prompt_of_row=on_device(np.array(prompt_of_row), device),
                    response_tokens=(response_start, response_end),
                    rows=len(lengths),
                    longest=longest,
                    indices=None if min(lengths) == longest else on_device(np.flatnonzero(real), device),
                    mask=keys <= prompt_length + columns.unsqueeze(1),
                )
            )
        starts = np.cumsum([0, *prompt_lengths]).astype(np.int32)
        return cls(prompt_lengths, on_device(starts, device), runs)


def response_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PrefixLayout, scaling: float | None
) -> list[Tensor]:
    """Return the attention of the responses, ``(tokens, heads, size)`` for each run of the layout.

    Args:
        query: ``(1, heads, T, size)``.
        key: ``(1, KV heads, T, size)``.
        value: As `key`.
        layout: The layout of prompts and responses in the T tokens.
        scaling: Factor of the scores; None for 1 / sqrt(size).
    """
    shared = query.shape[1] // key.shape[1]
    outputs: list[Tensor] = []
    for run in layout.runs:
        start, end = run.response_tokens
        queries = _spread(query[0, :, start:end], run)
        # The query heads of a KV head are more queries to it: no key is repeated, and every kernel takes them.
        folded = queries.unflatten(1, (key.shape[1], shared)).flatten(2, 3)
        output = functional.scaled_dot_product_attention(
            folded, _keys(key[0], run), _keys(value[0], run), run.mask.repeat(shared, 1), scale=scaling
        )
        by_row = output.view(*queries.shape[:3], -1)  # values may have another size than keys
        by_token = by_row.transpose(1, 2).flatten(0, 1)  # (rows x longest, heads, size)
        outputs.append(by_token if run.indices is None else by_token.index_select(0, run.indices))
    return outputs


def _keys(key: Tensor, run: ResponseRun) -> Tensor:
    """Return the keys of prompt and response of each row, ``(rows, heads, prompt length + longest, size)``."""
    prompts = key[:, slice(*run.prompt_tokens)].unflatten(1, (run.prompts, -1)).transpose(0, 1)
    if run.prompts == 1:
        of_rows = prompts.expand(run.rows, -1, -1, -1)
    else:
        of_rows = prompts.index_select(0, run.prompt_of_row)
    return torch.cat([of_rows, _spread(key[:, slice(*run.response_tokens)], run)], dim=2)


def _spread(tokens: Tensor, run: ResponseRun) -> Tensor:
    """Return the tokens of the responses, ``(heads, T, size)``, as ``(rows, heads, longest, size)``, 0 in padding."""
    if run.indices is not None:
        shape = (tokens.shape[0], run.rows * run.longest, tokens.shape[2])
        tokens = tokens.new_zeros(shape).index_copy(1, run.indices, tokens)
    return tokens.view(len(tokens), run.rows, run.longest, -1).transpose(0, 1)
