"""The reduction of gathered gradients to shards on CPUs, without a copy of the gradients.

gloo's reduce-scatter is an all-reduce of a copy of its input, which for a head is as large as the vocabulary times the
hidden size. `torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter` takes this one in its place: the same sums.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class ReductionInPlace:
    """Sums flat gradients over the ranks of a gloo group, in the input's memory."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for an input or an output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Fill this rank's sums; a collective, of which nothing is under way at the end.

        Args:
            output_tensor: This rank's sums, (n,).
            input_tensor: This rank's gradients for each rank, (ranks * n,); overwritten.
            group: The ranks.
            op: The kind of sum.
            async_op: Ignored: the caller uses the sums at once.
        """
        dist.all_reduce(input_tensor, op=op, group=group)
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
