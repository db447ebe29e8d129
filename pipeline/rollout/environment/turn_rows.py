"""A row of several turns as one response: its tokens, those of the environment marked, and the reward of each turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from pipeline.rollout.generation.interface import Response


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


@dataclasses.dataclass(frozen=True)
class TurnColumns:
    """The columns that rows of several turns have beside their tokens; N tokens of responses in B rows.

    Attributes:
        observed: ``(N,)`` bool, True for the tokens of the environment, which the actor did not sample.
        rewards: ``(N,)`` float64, the reward of each turn at its last token, else 0; NaN in a row without an answer.
        counts: ``(B,)`` int64, turns of each row.
    """

    observed: Tensor
    rewards: Tensor
    counts: Tensor

    @classmethod
    def of(cls, responses: Sequence[Response]) -> Self | None:
        """Return the columns of rows of several turns; None for those of one response."""
        rows = [response for response in responses if isinstance(response, TurnsResponse)]
        if not rows:
            return None
        return cls(
            torch.cat([row.observed for row in rows]),
            torch.cat([row.rewards for row in rows]),
            torch.tensor([row.turns for row in rows]),
        )

    def rows(self, index: Tensor, actions: Tensor) -> Self:
        """Return those of the rows at an index, whose tokens are `actions` among all."""
        return type(self)(self.observed[actions], self.rewards[actions], self.counts[index])


def actions_of(response: Response) -> int:
    """Return the number of tokens that the actor sampled."""
    observed = int(response.observed.sum()) if isinstance(response, TurnsResponse) else 0
    return len(response.token_ids) - observed
