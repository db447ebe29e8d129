"""The optimizer of one model on one rank: of the whole model, or of the rank's shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.errors import DeviceMemoryError
from pipeline.trainer.optimizer import ModelOptimizer
from pipeline.trainer.sharding.models import is_sharded, replica_of, shards_of


def new_optimizer(model: nn.Module, **settings: Any) -> ModelOptimizer:
    """Return the optimizer of a model, of AdamW if it is sharded; arguments: those of `ModelOptimizer`."""
    return (ShardOptimizer if is_sharded(model) else ModelOptimizer)(model, **settings)


def refuse_retry(model: nn.Module) -> None:
    """Refuse to repeat a step that ran out of memory on one rank of a sharded model: the others cannot know of it.

    Raises:
        DeviceMemoryError: If the model is sharded.
    """
    if is_sharded(model):
        raise DeviceMemoryError(
            "the device has no memory for a micro-batch, and a rank of a sharded model cannot repeat a pass alone: "
            "set a lower trainer.micro_batch_tokens or trainer.micro_batch_size"
        )


class ShardOptimizer(ModelOptimizer):
    """AdamW over one rank's shards, which are float32; FSDP has summed their gradients over the ranks already."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        """Take over the rank's shards; arguments: those of `ModelOptimizer`."""
        super().__init__(model, **settings)
        shards = shards_of(model)
        self._counts = replica_of(model).is_published
        self._is_copied = [shards[name].dtype != torch.float32 for name in self._names]

    def _taken_over(self, trained: dict[str, nn.Parameter]) -> list[Tensor]:
        self._parameters = list(trained.values())
        return [parameter.detach().to_local() for parameter in self._parameters]  # type: ignore[attr-defined]

    def collect(self) -> None:
        """Do nothing: FSDP adds up the gradients of the shards, in float32."""

    def reduce(self) -> float:
        """Return the norm of the gradients before clipping, of all shards of a replica."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            gradient: Any = parameter.grad
            master.grad = torch.zeros_like(master) if gradient is None else gradient.to_local()
        self._to_units()
        # Each shard counts once. All ranks get the same bits of the norm, so that replicas stay equal.
        gradients = [master.grad for master in self._masters if master.grad is not None] if self._counts else []
        squares = sum_of_squares(gradients, self._masters[0].device)
        dist.all_reduce(squares, group=self._group)
        self._norm = squares.sqrt().float()
        return float(self._norm)

    def clear(self) -> None:
        """Clear the gradients."""
        super().clear()
        for parameter in self._parameters:
            parameter.grad = None


def sum_of_squares(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements, ``()`` float64, by a few operations for all tensors.

    Each tensor is summed in float64 without a copy in float64, then the tensors in their order, on a CPU to the same
    bits each time.

    Args:
        tensors: Tensors of a device; some may have no elements.
        device: The device.
    """
    if not (held := [tensor for tensor in tensors if tensor.numel()]):
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(held, 2, torch.float64))
    # A sum over all at once would have another order.
    return norms.square().cumsum(0)[-1]
