"""Passes over rows end to end, for padded batches: the rows go in, and their results come back into the columns."""

from typing import Any

import numpy as np
from torch import Tensor, nn

from pipeline.models.critic import Critic
from pipeline.models.flat_rows import FlatRows, on_device
from pipeline.models.packing import log_probs_of_rows, values_of_rows


def log_probs_by_packing(
    model: nn.Module, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies, ``(B, A)``, 0 outside the mask."""
    rows = flat_rows_of(sequences, attention_mask, action_mask)
    log_probs, entropies = log_probs_of_rows(model, rows, **settings)
    return spread(log_probs, action_mask), None if entropies is None else spread(entropies, action_mask)


def values_by_packing(
    critic: Critic, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor, **settings: Any
) -> Tensor:
    """Values, ``(B, A)``, 0 outside the mask."""
    rows = flat_rows_of(sequences, attention_mask, action_mask)
    return spread(values_of_rows(critic, rows, **settings), action_mask)


def flat_rows_of(sequences: Tensor, attention_mask: Tensor, action_mask: Tensor) -> FlatRows:
    """The rows of a padded batch, ``(B, S)`` with actions ``(B, A)``, each up to its last action."""
    is_action = np.zeros(tuple(sequences.shape), np.bool_)
    is_action[:, sequences.shape[1] - action_mask.shape[1] :] = action_mask.cpu().numpy()
    behind = np.cumsum(is_action[:, ::-1], axis=1)[:, ::-1]
    real = (attention_mask.cpu().numpy() != 0) & (behind > 0)
    assert is_action.any(axis=1).all() and not (is_action & ~real).any(), "each row has an action, all are its tokens"
    tokens = sequences[on_device(real, sequences.device)]
    return FlatRows.of(tokens, real.sum(axis=1), np.flatnonzero(is_action[real]), np.nonzero(is_action)[0])


def spread(values: Tensor, action_mask: Tensor) -> Tensor:
    return values.new_zeros(action_mask.shape).masked_scatter(action_mask, values)
