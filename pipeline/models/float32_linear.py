"""A linear layer of 16 bits with a result in float32, and a backward pass of 16 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def float32_forward(layer: nn.Linear, states: Tensor) -> Tensor:
    """Return the result of a linear layer in float32; a layer has it as its ``forward``."""
    logits: Tensor = _Float32Linear.apply(states, layer.weight, layer.bias)  # type: ignore[no-untyped-call]
    return logits


def float32_product(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``states @ weight.T + bias`` in float32, ``(..., V)``, from states ``(..., H)``."""
    rows = states.flatten(0, -2)
    if states.is_cuda and states.dtype == weight.dtype and weight.dtype.itemsize == 2:
        logits = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    else:
        logits = rows.float() @ weight.float().t()
    if bias is not None:
        logits += bias.float()
    return logits.view(*states.shape[:-1], len(weight))


class _Float32Linear(torch.autograd.Function):
    """`float32_product` with its gradients, which have the dtype of the weight."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(states, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return float32_product(states, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        of_states, of_weight, of_bias = ctx.needs_input_grad
        rounded = gradient.to(weight.dtype)
        return (
            rounded @ weight if of_states else None,
            rounded.flatten(0, -2).t() @ states.flatten(0, -2) if of_weight else None,
            gradient.flatten(0, -2).sum(dim=0).to(ctx.bias_dtype) if of_bias else None,
        )
