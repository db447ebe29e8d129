"""A published version read in place: views of its slots, valid until a publish writes to one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from pipeline.models.weights.store import tensor_identity


class HeldVersion(NamedTuple):
    """A version whose weights and training state are in shared memory; their tensors are not to be written to.

    Attributes:
        weights: The weights, by published name.
        training: The training state of the same version, of all ranks.
        is_next: Returns whether the next publish writes over the weights or the training state.
    """

    weights: Mapping[str, torch.Tensor]
    training: Mapping[str, torch.Tensor]
    is_next: Callable[[], bool]


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
            own = tensors.get(f"{prefix}.{name}", tensor)
            found.setdefault(prefix, {})[name] = held.setdefault(tensor_identity(tensor), own)
    return found
