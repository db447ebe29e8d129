"""The end of a response: the first stop sequence, else the first eos, else the last token before the padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import FieldError, ShapeError
from pipeline.rollout.generation.stop_strings import StopStrings


def parse_stop_token_ids(
    stop_token_ids: int | Sequence[int] | Sequence[Sequence[int]] | None,
) -> tuple[tuple[int, ...], ...]:
    """Convert the accepted forms of `stop_token_ids`.

    Args:
        stop_token_ids: An int is one stop token; a list of ints is ONE stop sequence; a list of lists holds
            alternatives; None or an empty list means that only eos ends a response.

    Returns:
        The stop sequences.

    Raises:
        FieldError: If it has another form, or an alternative is empty.
    """
    if stop_token_ids is None:
        return ()
    if isinstance(stop_token_ids, int):
        return ((stop_token_ids,),)
    given: Sequence[Any] = stop_token_ids if isinstance(stop_token_ids, list | tuple) else [None]
    if all(isinstance(element, int) for element in given):
        return (tuple(given),) if given else ()
    if not all(_is_sequence_of_ints(element) for element in given):
        raise FieldError(
            f"stop_token_ids is {stop_token_ids!r}: an int, a list of ints (one stop sequence), or a list of "
            "such lists, none of them empty (alternatives)"
        )
    return tuple(tuple(element) for element in given)


def _is_sequence_of_ints(element: object) -> bool:
    return isinstance(element, list | tuple) and bool(element) and all(isinstance(token, int) for token in element)


def response_lengths(
    responses: Tensor,
    stop_sequences: Sequence[Sequence[int]],
    eos_token_ids: Sequence[int],
    pad_token_id: int,
) -> Tensor:
    """Return the length of each response, found from its ids alone.

    The first stop sequence ends a response; without one the first eos; without either the padding at its end is
    stripped, and a response cut off at the length limit keeps all its tokens. The stop belongs to the response. Of pad
    tokens alone the first one was sampled: it is the response.

    Args:
        responses: ``(B, A)`` int64, without the prompts.
        stop_sequences: The stop sequences.
        eos_token_ids: Tokens that end a response on their own.
        pad_token_id: The token after the end; may be one of the eos tokens.

    Returns:
        ``(B,)`` int64, from 1 to A.

    Raises:
        ShapeError: If there are no columns.
    """
    num_actions = responses.shape[1]
    if not num_actions:
        raise ShapeError("no response token in 0 columns")
    columns = torch.arange(1, num_actions + 1, device=responses.device)
    last = torch.where(responses != pad_token_id, columns, 0).amax(dim=1).clamp(min=1)
    eos = torch.isin(responses, torch.tensor(list(eos_token_ids), dtype=responses.dtype, device=responses.device))
    ends = _first_end(eos, columns, last)
    stop_ends = torch.full_like(ends, num_actions + 1)
    for stop in stop_sequences:
        found = _ends_of(responses, stop)
        stop_ends = torch.minimum(stop_ends, _first_end(found, columns, stop_ends))
    # The padding behind an eos was not sampled, whatever stop it looks like.
    is_padding = eos.gather(1, last.unsqueeze(1) - 1).squeeze(1) & (stop_ends > last)
    return torch.where((stop_ends <= num_actions) & ~is_padding, stop_ends, ends)


def _ends_of(responses: Tensor, stop: Sequence[int]) -> Tensor:
    """Return ``(B, A)`` bool: the stop sequence ends in this column and began inside the response."""
    found = torch.zeros_like(responses, dtype=torch.bool)
    if len(stop) <= responses.shape[1]:
        windows = responses.unfold(1, len(stop), 1)  # (B, A - len + 1, len)
        found[:, len(stop) - 1 :] = (windows == torch.tensor(stop, device=responses.device)).all(dim=-1)
    return found


def _first_end(found: Tensor, columns: Tensor, otherwise: Tensor) -> Tensor:
    beyond = len(columns) + 1
    first = torch.where(found, columns, beyond).amin(dim=1)
    return torch.where(first == beyond, otherwise, first)


def ends_with_stop(
    responses: Tensor,
    stop_sequences: Sequence[Sequence[int]],
    eos_token_ids: Sequence[int],
    stop_strings: StopStrings | None = None,
) -> Tensor:
    """Return which responses without padding end with a stop sequence, an eos token, or a stop string.

    Args:
        responses: ``(B, A)`` int64, without the prompts.
        stop_sequences: The stop sequences.
        eos_token_ids: Tokens that end a response on their own.
        stop_strings: The stop strings.

    Returns:
        ``(B,)`` bool.
    """
    eos = torch.tensor(list(eos_token_ids), dtype=responses.dtype, device=responses.device)
    ended = torch.isin(responses[:, -1], eos)
    for stop in stop_sequences:
        ended |= _ends_of(responses, stop)[:, -1]
    return ended if stop_strings is None else ended | stop_strings.end_rows(responses, ~ended)
