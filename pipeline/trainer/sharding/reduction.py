"""The reduction of gathered gradients to shards on CPUs, a piece at a time.

gloo reduces a copy of its input, which for a head is as large as the vocabulary times the hidden size: here the copy is
a piece. `torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter` takes it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

PIECE_BYTES = 1 << 23
"""Bytes of a piece of one rank."""

# Its name since torch 2.13, where the former one warns.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class ReductionInPieces:
    """Sums flat gradients over the ranks of a gloo group; the order of the sums depends on sizes alone."""

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
            input_tensor: This rank's gradients for each rank, (ranks * n,).
            group: The ranks.
            op: The kind of sum.
            async_op: Ignored: the caller uses the sums at once.
        """
        of_ranks = input_tensor.view(group.size(), -1)
        length = max(PIECE_BYTES // output_tensor.element_size(), 1)
        for start in range(0, output_tensor.numel(), length):
            piece = of_ranks[:, start : start + length].reshape(-1)
            _reduce_scatter(output_tensor[start : start + length], piece, op=op, group=group)
