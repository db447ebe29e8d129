"""Forward passes of a micro-batch, packed or padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.models.critic import Critic
from pipeline.models.log_probs import action_log_probs, action_values
from pipeline.models.packing import log_probs_by_packing, values_by_packing
from pipeline.trainer.batch import TrainingBatch
from pipeline.trainer.sharding.models import inside
from pipeline.trainer.sharding.optimizer import refuse_retry
from pipeline.trainer.sharding.ranks import in_step


def policy_log_probs(
    actor: nn.Module, part: TrainingBatch, *, packing: bool, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return a policy's log-probs of a micro-batch and, if wanted, the entropies, each ``(B, A)``.

    Values outside the mask are undefined. The call must be inside the model (`inside`).
    """
    entropy: Any = with_entropy
    if _packs(part, packing=packing):
        rows = part.sequences, part.attention_mask, part.action_mask
        settings: Any = {"with_entropy": entropy, "shared": part.tokens_once is not None}
        return log_probs_by_packing(actor, *rows, temperature=temperature, **settings)
    found: Any = action_log_probs(
        actor,
        part.sequences,
        part.attention_mask,
        part.action_mask.shape[1],
        temperature=temperature,
        with_entropy=entropy,
        vision=part.vision,
    )
    return found if with_entropy else (found, None)


def log_probs_of_batch(
    model: nn.Module,
    batch: TrainingBatch,
    parts: Iterator[TrainingBatch],
    log_probs_of: Callable[[TrainingBatch], Tensor],
) -> Tensor | None:
    """Return a model's log-probs of all actions, ``(B, A)`` float32, 0 outside the mask; on shards a collective.

    Args:
        model: The model.
        batch: Result of `TrainingBatch.to_score`.
        parts: Micro-batches of the batch.
        log_probs_of: Returns the model's log-probs of a micro-batch.

    Returns:
        None if a pass ran out of the device's memory.
    """
    found = torch.zeros(batch.action_mask.shape, device=batch.action_mask.device)
    try:
        for part, _ in in_step(parts, batch, [], model):
            mask = part.action_mask
            found.view(-1)[part.log_probs[mask].long()] = log_probs_of(part)[mask].float()
    except torch.OutOfMemoryError:
        refuse_retry(model)
        return None
    return found


def critic_values(critic: nn.Module, part: TrainingBatch, *, packing: bool) -> Tensor:
    """Return the critic's values of a micro-batch, ``(B, A)``; those outside the mask are undefined."""
    if _packs(part, packing=packing):
        # `prepare_packing` and `prepare_shared_prefix` refuse any other.
        assert isinstance(critic, Critic)
        rows = part.sequences, part.attention_mask, part.action_mask
        return inside(critic, lambda: values_by_packing(critic, *rows, shared=part.tokens_once is not None))
    columns = part.action_mask.shape[1]
    return action_values(critic, part.sequences, part.attention_mask, columns, vision=part.vision)


def _packs(part: TrainingBatch, *, packing: bool) -> bool:
    """Return whether a micro-batch is packed; one without an action, which keeps ranks in step, is padded.

    So is one with images, which no model that packs takes: the padded pass says so.
    """
    if part.vision is not None and part.vision.tensors_exist:
        return False
    return (packing or part.tokens_once is not None) and bool(part.action_mask.any())
