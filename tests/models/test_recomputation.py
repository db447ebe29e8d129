"""Activation checkpointing: the same gradients bit for bit, and a fraction of the saved bytes."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config.schema import ModelConfig
from pipeline.errors import ConfigError
from pipeline.models.critic import Critic
from pipeline.models.log_probs import action_log_probs
from pipeline.models.lora import adapt
from pipeline.models.recomputation import checkpoint_activations, checkpointed_layers
from tests.support import tiny

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def rows(count: int = 6, columns: int = 32) -> tuple[Tensor, Tensor]:
    sequences = torch.randint(2, tiny.VOCABULARY_SIZE, (count, columns), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(columns) >= torch.arange(count).unsqueeze(1)).long()
    return sequences * mask, mask


def loss_of(model: nn.Module) -> Tensor:
    return action_log_probs(model, *rows(), 20).square().mean()


def gradients(model: nn.Module) -> list[Tensor]:
    loss_of(model).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def saved_bytes(model: nn.Module) -> int:
    """Return the bytes that the forward pass keeps for the backward pass, each storage once, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model)
    loss.backward()
    return sum(kept.values())


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2, tiny.qwen2])
def test_gradients_are_the_same_bit_for_bit(build: Any) -> None:
    plain, checkpointed = build(), build()

    assert checkpoint_activations([checkpointed], CPU, True)

    assert len(list(checkpointed_layers(checkpointed))) == 2
    expected = gradients(plain)
    assert len(expected) > 10
    for mine, its in zip(gradients(checkpointed), expected, strict=True):
        assert torch.equal(mine, its)


def test_adapters_get_the_same_gradients() -> None:
    """With frozen weights the first layer's inputs require no gradient."""
    plain, checkpointed = tiny.llama(), tiny.llama()
    for model in (plain, checkpointed):
        adapt(model, ModelConfig(lora_rank=2), seed=0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
    checkpoint_activations([checkpointed], CPU, True)

    expected = gradients(plain)

    assert len(expected) == 28
    assert all(gradient.any() for gradient in expected)
    for mine, its in zip(gradients(checkpointed), expected, strict=True):
        assert torch.equal(mine, its)


def test_layers_keep_their_inputs_alone() -> None:
    """8 layers of width 64: a layer keeps 28 numbers of that width a token, and its input alone if checkpointed."""
    settings = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8}
    plain, checkpointed = tiny.llama(**settings), tiny.llama(**settings)
    checkpoint_activations([checkpointed], CPU, True)
    tokens = rows()[0].numel()

    kept, kept_all = saved_bytes(checkpointed), saved_bytes(plain)

    layer_inputs = 8 * tokens * 64 * 4
    assert layer_inputs < kept < 2.5 * layer_inputs
    assert kept < 0.15 * kept_all


def test_a_forward_pass_without_gradients_is_not_changed() -> None:
    plain, checkpointed = tiny.llama(), tiny.llama()
    checkpoint_activations([checkpointed], CPU, True)

    with torch.no_grad():
        assert torch.equal(action_log_probs(checkpointed, *rows(), 20), action_log_probs(plain, *rows(), 20))


def test_a_copy_computes_with_its_own_weights() -> None:
    model = tiny.llama()
    checkpoint_activations([model], CPU, True)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.5)

    assert len(gradients(copied)) > 10

    assert not torch.allclose(loss_of(copied), loss_of(model))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_it_is_on_by_default_on_a_card_alone() -> None:
    models = [tiny.llama(), Critic.from_actor(tiny.llama())]

    assert not checkpoint_activations(models, CPU, None)
    assert not checkpoint_activations(models, GPU, False)
    assert not any("forward" in vars(layer) for model in models for layer in checkpointed_layers(model))
    assert checkpoint_activations(models, GPU, None)
    assert [len(list(checkpointed_layers(model))) for model in models] == [2, 2]
    assert all("forward" in vars(layer) for model in models for layer in checkpointed_layers(model))


def test_a_model_without_such_layers_is_refused_or_told_of(caplog: pytest.LogCaptureFixture) -> None:
    plain = nn.Sequential(nn.Linear(2, 2))

    with pytest.raises(ConfigError, match=r"trainer\.activation_checkpointing: Sequential has no layers"):
        checkpoint_activations([tiny.llama(), plain], CPU, True)
    with caplog.at_level(logging.WARNING):
        assert not checkpoint_activations([plain], GPU, None)

    assert "model=Sequential" in caplog.messages[0]
