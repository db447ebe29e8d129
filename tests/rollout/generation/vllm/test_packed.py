"""Packed copies of a CPU model's matrices follow the weights; vLLM itself is not needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.rollout.generation.vllm.packed import PackedMatrices


class Model(torch.nn.Module):
    """Two matrices, a convolution, and a matrix of lower precision, with vLLM's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.second = torch.nn.Linear(4, 2, bias=False)
        self.convolution = torch.nn.Conv1d(2, 2, 2)
        self.lower = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
        for layer in (self.first, self.second, self.convolution, self.lower):
            layer.cpu_linear = functional.linear

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        first = self.first.cpu_linear(x, self.first.weight, self.first.bias)
        return self.second.cpu_linear(first, self.second.weight, None)


class Packer:
    """Packs by a copy, and counts the products with copies."""

    def __init__(self) -> None:
        self.packed = self.products = 0

    def pack(self, matrix: Tensor) -> Tensor:
        self.packed += 1
        return matrix.detach().clone()

    def multiply(self, packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        self.products += 1
        return x @ packed if bias is None else x @ packed + bias


class VocabParallelEmbedding(torch.nn.Embedding):
    """By its name vLLM's."""


class ParallelLMHead(VocabParallelEmbedding):
    """By its name vLLM's."""


class WithEmbedding(torch.nn.Module):
    """An embedding, which vLLM gives the same functions, and a head: of its own, or the embedding itself."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(5, 3)
        self.lm_head = self.embed_tokens if tied else ParallelLMHead(5, 3)
        for layer in (self.embed_tokens, self.lm_head):
            layer.cpu_linear = functional.linear


def plain(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return functional.linear(functional.linear(x, model.first.weight, model.first.bias), model.second.weight)


def test_matrices_are_packed_one_by_one_and_compute_the_same() -> None:
    model, packer, x = Model(), Packer(), torch.randn(5, 3)
    matrices = PackedMatrices(model, packer.pack, packer.multiply)

    for products in (0, 1, 2, 2):
        packer.products = 0
        torch.testing.assert_close(model(x), plain(model, x))
        assert packer.products == products
        matrices.pack_one()

    # Neither the convolution nor the matrix of lower precision.
    assert packer.packed == 2


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_packed_and_an_embedding_that_is_no_head_is_not(tied: bool) -> None:
    model, packer = WithEmbedding(tied=tied), Packer()
    matrices = PackedMatrices(model, packer.pack, packer.multiply)

    for _ in range(3):
        matrices.pack_one()

    assert packer.packed == 1
    assert model.lm_head.cpu_linear is not functional.linear
    assert (model.embed_tokens.cpu_linear is functional.linear) != tied


def test_no_copy_of_weights_before_an_update_is_used_after_it() -> None:
    model, packer, x = Model(), Packer(), torch.randn(5, 3)
    matrices = PackedMatrices(model, packer.pack, packer.multiply)

    for packed in (2, 1, 0, 2):
        for _ in range(packed):
            matrices.pack_one()
        matrices.forget()
        with torch.no_grad():
            for weight in (model.first.weight, model.second.weight):
                weight.add_(1.0)
        packer.products = 0
        torch.testing.assert_close(model(x), plain(model, x))
        assert not packer.products
