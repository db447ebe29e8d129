"""The copies of a sharded trainer's models: with `trainer.sharding = "hybrid"` each machine's ranks hold one.

    replica 0, the daemon's machine     rank 0: shard 0    rank 1: shard 1    publishes and saves
    replica 1, another machine          rank 2: shard 0    rank 3: shard 1    has the same values after each step

Parameters are gathered over the ranks of one replica. Gradients are summed over these ranks to shards, then over the
ranks of all replicas with the same shard. With "full" all ranks are the one replica.
"""

from __future__ import annotations

import datetime
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TIMEOUT = datetime.timedelta(days=7)
"""Timeout of a collective: a rank may wait for data without limit; the supervisor detects hangs."""


class Replica(NamedTuple):
    """The replica of this rank, and the rank's shard in it.

    Attributes:
        shard: This rank's shard.
        shards: Number of shards, one for each rank of the replica.
        is_published: Whether the shards of this replica are those that are published and saved.
        mesh: All ranks, as `torch.distributed.fsdp.fully_shard` takes them.
        group: The ranks of the replica; None if they are all ranks.
    """

    shard: int
    shards: int
    is_published: bool
    mesh: DeviceMesh
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, device: torch.device, replicas: int = 1) -> Replica:
        """Return this rank's replica; a collective of all ranks.

        Args:
            device: Device of the models.
            replicas: Number of replicas; the first ranks are the first one.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        shards = world_size // replicas
        if replicas == 1:
            return cls(rank, shards, True, init_device_mesh(device.type, (world_size,)))
        ranks = torch.arange(world_size).view(replicas, shards)
        within, across = _own_group(ranks.tolist()), _own_group(ranks.T.tolist())
        mesh = DeviceMesh.from_group([across, within], device.type, mesh=ranks, mesh_dim_names=("replicate", "shard"))
        return cls(rank % shards, shards, rank < shards, mesh, within)

    def gloo_group(self) -> dist.ProcessGroup:
        """Return a new group of the replica's ranks, on the CPU; a collective of all ranks."""
        if self.group is None:
            every: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=TIMEOUT)
            return every
        first = range(0, dist.get_world_size(), self.shards)
        return _own_group([[*range(start, start + self.shards)] for start in first], backend="gloo")


def _own_group(groups: list[list[int]], backend: str | None = None) -> dist.ProcessGroup:
    """Make groups, each on all ranks, and return that of this rank."""
    own: dist.ProcessGroup
    own, _ = dist.new_subgroups_by_enumeration(groups, timeout=TIMEOUT, backend=backend)
    return own
