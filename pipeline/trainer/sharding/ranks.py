"""Collectives of all ranks, beside those of torch's `fully_shard`; passes that all ranks take in step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.models.flat_rows import FlatRows
from pipeline.models.weights.shards import Group, Shard
from pipeline.trainer.batch import TrainingBatch
from pipeline.trainer.sharding.models import is_sharded, replica_of

_SIGN = 1 << 63


class RankGroup(Group):
    """The collectives of a step's end, of a publish and of a checkpoint.

    Args:
        device: Device of the tensors that travel: the GPU with NCCL, the CPU with gloo.
        waiting: Encloses each collective, in which a rank makes no progress of its own.
        process_group: The ranks' group; the default one if it is left out.

    Attributes:
        rank: This rank's place in the group.
        world_size: Number of ranks.
    """

    def __init__(
        self,
        device: torch.device,
        waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self._device = device
        self._waiting = waiting
        self._process_group = process_group

    def broadcast(self, values: Sequence[int]) -> list[int]:
        """Return rank 0's values, each in 63 bits; every rank passes as many."""
        sent = torch.tensor(values, dtype=torch.int64, device=self._device)
        with self._waiting():
            dist.broadcast(sent, group=self._process_group, group_src=0)
            return sent.tolist()

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's values, unsigned 64-bit, in order of ranks; every rank passes as many."""
        signed = [value - 2 * _SIGN if value >= _SIGN else value for value in values]
        sent = torch.tensor(signed, dtype=torch.int64, device=self._device)
        received = [torch.empty_like(sent) for _ in range(self.world_size)]
        with self._waiting():
            dist.all_gather(received, sent, group=self._process_group)
            return [[value % (2 * _SIGN) for value in one.tolist()] for one in received]

    def agree(self, ready: bool) -> bool:
        """Return whether every rank passed True."""
        flag = torch.tensor(int(ready), device=self._device)
        with self._waiting():
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._process_group)
            return bool(flag)

    def whole(self, shard: Shard) -> Tensor | None:
        """Return a whole tensor, in its saved dtype, on rank 0; None on the other ranks."""
        shape, own = torch.Size(shard.shape), shard.local.detach()
        if not shard.split:
            return own.to(shard.dtype) if self.rank == 0 else None
        row = shape.numel() // shape[0]
        most = -(-shape[0] // self.world_size) * row
        sent = torch.zeros(most, dtype=shard.dtype, device=self._device)
        sent[: own.numel()] = own.reshape(-1)
        received = [torch.empty_like(sent) for _ in range(self.world_size)] if self.rank == 0 else None
        with self._waiting():
            dist.gather(sent, received, group=self._process_group, group_dst=0)
        return None if received is None else torch.cat(received)[: shape.numel()].view(shape)


def in_step(
    parts: Iterator[TrainingBatch],
    batch: TrainingBatch,
    actor: nn.Module,
    trained: Sequence[Any] = (),
    *,
    is_last: bool = True,
    meeting: Callable[[], None],
) -> Iterator[TrainingBatch]:
    """Yield the micro-batches of a batch, on a sharded model as many on every rank.

    Each pass of a sharded model is a collective. A rank with fewer micro-batches takes passes of two tokens without an
    action, whose losses and gradients are 0. Replicas sum their gradients in the last pass of an update alone: where no
    rank has a row of its last batch, they take one without an action for it.

    Args:
        parts: The micro-batches of this rank.
        batch: Their batch.
        actor: The model of the passes.
        trained: The sharded models that get gradients.
        is_last: Whether the batch is the last one of an update that has actions.
        meeting: Called before this rank waits for the others, one of which may write a checkpoint first.
    """
    if not is_sharded(actor):
        yield from parts
        return
    own = list(parts)
    most = torch.tensor(len(own), device=next(actor.parameters()).device)
    meeting()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    passes = int(most)
    if is_last and any(replica_of(model).group is not None for model in trained):
        # FSDP would keep the sums of earlier batches, and add them to those of a later update.
        passes = max(passes, 1)
    for index in range(passes):
        for model in trained:
            model.set_requires_all_reduce(is_last and index == passes - 1)
        yield own[index] if index < len(own) else _without_actions(batch)


def _without_actions(batch: TrainingBatch) -> TrainingBatch:
    """Return one row of two tokens, with the fields of a batch, none of which is an action."""
    none = np.zeros(0, np.int64)
    tokens = torch.zeros(2, dtype=torch.int64, device=batch.flat.tokens.device)
    flat = FlatRows.of(tokens, np.array([2]), none, none)
    return replace(batch.mapped(lambda column: column[:0]), flat=flat, vision=None, tokens_once=None)
