"""Models that are tables: logits, values and scores are looked up by token, so that numbers can be computed by hand.

They implement the interfaces that `NaiveExperienceMaker` documents in full and are no mocks: an actor with `generate`
and `.logits`, a critic, a reward model. A token's successors depend on the token alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PAD, EOS = 0, 1


class TableActor:
    """A language model whose next token depends on the last one: row t of `logits` is for the successor of token t.

    Args:
        logits: ``(V, V)`` float32.
        responses: Responses to a prompt, by the prompt's last token, in order; its sampling is a table too.
    """

    def __init__(self, logits: Tensor, responses: dict[int, list[list[int]]] | None = None) -> None:
        self.logits = logits
        self.responses = responses or {}

    def generate(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
        said: dict[int, int] = {}
        rows = []
        for last in input_ids[:, -1].tolist():
            rows.append(self.responses[last][said.get(last, 0)])
            said[last] = said.get(last, 0) + 1
        width = max(len(row) for row in rows)
        return torch.cat([input_ids, torch.tensor([row + [PAD] * (width - len(row)) for row in rows])], dim=1)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits[input_ids])


class TableCritic:
    """The value of the state after a token is the token's entry; in the padding NaN, which must not be read."""

    def __init__(self, values: dict[int, float]) -> None:
        self.values = values

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        table = torch.tensor([self.values.get(token, torch.nan) for token in range(16)])
        return table[input_ids].masked_fill(attention_mask == 0, torch.nan)


class TableReward:
    """The score of a row is looked up by the tokens of its prompt and of its response."""

    def __init__(self, scores: dict[tuple[tuple[int, ...], tuple[int, ...]], float]) -> None:
        self.scores = scores

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_start: Tensor,
        response_end: Tensor,
        gt_answer: list[Any],
    ) -> Tensor:
        spans = zip(input_ids.tolist(), response_start.tolist(), response_end.tolist(), strict=True)
        return torch.tensor([self.scores[tuple(ids[:start]), tuple(ids[start:end])] for ids, start, end in spans])
