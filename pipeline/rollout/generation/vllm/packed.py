"""Packed copies of a model's matrices on a CPU, made anew after each update, one between two steps.

With packed matrices vLLM's steps take three quarters of the time. vLLM packs them once, at its start, and drops the
plain ones: such a model cannot be updated in place. Packing them all takes six to nine times a plain copy, so an
update does not wait for it: the steps after it compute with the plain matrices that are not packed yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# vLLM's class, from which its class of a head is derived.
_EMBEDDING = "VocabParallelEmbedding"

_Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class PackedMatrices:
    """The packed copies, in place of the plain functions of vLLM's layers, ``layer.cpu_linear(x, weight, bias)``.

    Args:
        model: vLLM's model, loaded without packed copies; its float32 matrices are packed, embeddings are not.
        pack: Returns the packed copy of a matrix of shape (in, out).
        multiply: Returns (..., out) of a packed copy, an input (..., in) and a bias.
    """

    def __init__(self, model: torch.nn.Module, pack: Callable[[Tensor], Any], multiply: Callable[..., Tensor]) -> None:
        self._pack = pack
        self._multiply = multiply
        # Nothing multiplies by an embedding that is no head; a tied head may be the embedding itself.
        named = list(model.named_modules(remove_duplicate=False))
        heads = [layer for name, layer in named if name.rpartition(".")[2] == "lm_head"]
        layers: list[Any] = [
            layer
            for layer in model.modules()
            if hasattr(layer, "cpu_linear") and (type(layer).__name__ != _EMBEDDING or layer in heads)
        ]
        self._plain: list[tuple[Any, _Linear]] = [
            (layer, layer.cpu_linear) for layer in layers if _is_matrix(layer.weight)
        ]
        self._left = [layer for layer, _ in self._plain]

    def forget(self) -> None:
        """Drop all copies; to be called before the weights change."""
        for layer, plain in self._plain:
            layer.cpu_linear = plain
        self._left = [layer for layer, _ in self._plain]

    def pack_one(self) -> None:
        """Pack the next matrix, if one is left."""
        if self._left:
            layer = self._left.pop()
            layer.cpu_linear = functools.partial(_multiplied, self._multiply, self._pack(layer.weight.t()))


def _multiplied(
    multiply: Callable[..., Tensor], packed: Any, x: Tensor, _weight: Tensor, bias: Tensor | None
) -> Tensor:
    return multiply(packed, x, bias)


def _is_matrix(weight: Tensor) -> bool:
    return weight.ndim == 2 and weight.dtype == torch.float32 and weight.device.type == "cpu"
