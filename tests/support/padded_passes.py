"""Passes over rows end to end, for padded batches: the rows go in, and their results come back into the columns."""

from typing import Any

from torch import Tensor, nn

from pipeline.models.critic import Critic
from pipeline.models.flat_rows import FlatRows
from pipeline.models.packing import log_probs_of_rows, values_of_rows


def log_probs_by_packing(
    model: nn.Module, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies, ``(B, A)``, 0 outside the mask."""
    rows = FlatRows.of_padded(sequences, attention_mask, action_mask)
    log_probs, entropies = log_probs_of_rows(model, rows, **settings)
    return spread(log_probs, action_mask), None if entropies is None else spread(entropies, action_mask)


def values_by_packing(
    critic: Critic, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor, *, shared: bool = False
) -> Tensor:
    """Values, ``(B, A)``, 0 outside the mask."""
    rows = FlatRows.of_padded(sequences, attention_mask, action_mask)
    return spread(values_of_rows(critic, rows, shared=shared), action_mask)


def spread(values: Tensor, action_mask: Tensor) -> Tensor:
    return values.new_zeros(action_mask.shape).masked_scatter(action_mask, values)
