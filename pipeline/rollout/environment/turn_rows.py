"""A row of several turns as one response: its tokens, those of the environment marked, and the reward of each turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.rollout.generation.interface import Response, TurnColumns


@dataclasses.dataclass(frozen=True)
class TurnsResponse(Response):
    """The responses of a row and the observations between them.

    `token_ids` are all of them, `spans` and `finish_reason` are those of the responses: "length" if the row was cut.

    Attributes:
        observed: ``(n,)`` bool, True for the tokens of the environment.
        rewards: ``(n,)`` float64, the reward of each turn at its last token; NaN in a row without an answer.
        turns: Number of responses.
    """

    observed: Tensor = dataclasses.field(kw_only=True)
    rewards: Tensor = dataclasses.field(kw_only=True)
    turns: int = dataclasses.field(kw_only=True)


def turn_columns(responses: Sequence[Response], room: int) -> TurnColumns | None:
    """Return the columns of rows of several turns, padded to the room; None for those of one response."""
    rows = [response for response in responses if isinstance(response, TurnsResponse)]
    if not rows:
        return None
    observed = torch.zeros((len(rows), room), dtype=torch.bool)
    rewards = torch.zeros((len(rows), room), dtype=torch.float64)
    for place, row in enumerate(rows):
        observed[place, : len(row.observed)] = row.observed
        rewards[place, : len(row.rewards)] = row.rewards
    cut = torch.tensor([row.finish_reason == "length" for row in rows])
    return TurnColumns(observed, rewards, cut, torch.tensor([row.turns for row in rows]))


def actions_of(response: Response) -> int:
    """Return the number of tokens that the actor sampled."""
    observed = int(response.observed.sum()) if isinstance(response, TurnsResponse) else 0
    return len(response.token_ids) - observed
