"""A published version read in place: views of its slots, valid until a publish writes to one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from pipeline.models.weights.store import WeightsPublisher, tensor_identity


class HeldSlot(NamedTuple):
    """The newest version of one file.

    Attributes:
        publisher: The file's publisher.
        slot: Number of the slot.
        tensors: The version's tensors, by published name; not to be written to.
    """

    publisher: WeightsPublisher
    slot: int
    tensors: Mapping[str, torch.Tensor]

    @property
    def is_next(self) -> bool:
        """Whether the next publish writes to this slot."""
        return self.publisher.next_slot == self.slot


class HeldVersion(NamedTuple):
    """A version whose weights and training state are in shared memory.

    Attributes:
        weights: The weights.
        training: The training state of the same version.
    """

    weights: HeldSlot
    training: HeldSlot

    @property
    def is_next(self) -> bool:
        """Whether the next publish writes over the weights or the training state."""
        return self.weights.is_next or self.training.is_next


def hold(weights: WeightsPublisher | None, training: WeightsPublisher | None) -> HeldVersion | None:
    """Return the newest version in place; None if its training state is not in shared memory.

    Args:
        weights: Publisher of the weights; None before the first publish.
        training: Publisher of the training state; None if it is not published.
    """
    if weights is None or training is None:
        return None
    found, state = weights.newest_slot(), training.newest_slot()
    if found is None or state is None or weights.version(found).age != training.version(state).age:
        return None
    return HeldVersion(
        HeldSlot(weights, found, weights.tensors(found)), HeldSlot(training, state, training.tensors(state))
    )


def state_dicts(
    tensors: Mapping[str, torch.Tensor], **models: Mapping[str, torch.Tensor] | None
) -> dict[str, dict[str, torch.Tensor]]:
    """Return state dicts with the tensors of a slot: the inverse of `flatten`.

    Args:
        tensors: Tensors by published name, as ``actor.lm_head.weight``.
        models: The state dicts that were published, for their names. Tied weights share one tensor of the slot; a
            tensor without elements is the model's own.

    Returns:
        The state dict of each model that is not None.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    held: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = {}
    for prefix, state in models.items():
        for name, tensor in (state or {}).items():
            if tensor.numel():
                own = tensors.get(f"{prefix}.{name}")
                chosen = held.setdefault(tensor_identity(tensor), tensor if own is None else own)
            else:
                chosen = tensor
            found.setdefault(prefix, {})[name] = chosen
    return found
