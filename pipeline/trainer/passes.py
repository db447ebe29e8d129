"""Forward passes of a micro-batch, packed or padded."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pipeline.models.critic import Critic
from pipeline.models.inputs import inside
from pipeline.models.log_probs import action_log_probs_and_entropies, action_values
from pipeline.models.packing import log_probs_of_rows, values_of_rows
from pipeline.models.vision_inputs import vision_backbone
from pipeline.trainer.batch import TrainingBatch


def policy_log_probs(
    actor: nn.Module,
    part: TrainingBatch,
    *,
    packing: bool,
    temperature: float,
    with_entropy: bool,
    width_multiple: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Return a policy's log-probs of a micro-batch and, if wanted, the entropies, each ``(N,)``.

    The call must be inside the model (`inside`). Padded rows are as wide as a multiple of tokens.
    """
    settings: Any = {"temperature": temperature, "with_entropy": with_entropy, "vision": part.vision}
    if _packs(actor, part, packing=packing):
        return log_probs_of_rows(actor, part.flat, shared=part.tokens_once is not None, **settings)
    padded = part.flat.padded(width_multiple)
    log_probs, entropies = action_log_probs_and_entropies(
        actor, padded.sequences, padded.attention_mask, padded.num_actions, **settings
    )
    return padded.flat(log_probs), padded.flat(entropies) if with_entropy else None


def critic_values(critic: nn.Module, part: TrainingBatch, *, packing: bool, width_multiple: int = 1) -> Tensor:
    """Return the critic's values of a micro-batch, ``(N,)``."""
    if _packs(critic, part, packing=packing):
        # `prepare_packing` and `prepare_shared_prefix` refuse any other.
        assert isinstance(critic, Critic)
        shared = part.tokens_once is not None
        return inside(critic, lambda: values_of_rows(critic, part.flat, shared=shared, vision=part.vision))
    padded = part.flat.padded(width_multiple)
    values = action_values(critic, padded.sequences, padded.attention_mask, padded.num_actions, vision=part.vision)
    return padded.flat(values)


def _packs(model: nn.Module, part: TrainingBatch, *, packing: bool) -> bool:
    """Return whether a micro-batch is packed; one without an action, which keeps ranks in step, is padded.

    So is one with images for a model of text alone: the padded pass refuses it.
    """
    if part.vision is not None and part.vision.tensors_exist and vision_backbone(model) is None:
        return False
    return (packing or part.tokens_once is not None) and len(part.advantages) > 0
