"""The rules of `trainer.optimizer`: their changes of weights, and the state that they keep."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config.optimizers import Optimizer, moment_bytes
from pipeline.errors import ConfigError
from pipeline.models.critic import Critic
from pipeline.trainer import update_rules
from pipeline.trainer.optimizer import ModelOptimizer
from tests.support import tiny

RATE = 1e-3


def optimizer_of(model: nn.Module, kind: Optimizer, **settings: Any) -> ModelOptimizer:
    given = {"learning_rate": RATE, "betas": (0.9, 0.99), "weight_decay": 0.0, "clip_norm": 1e9, **settings}
    return ModelOptimizer(model, kind=kind, **given)


def a_step(model: nn.Module, optimizer: ModelOptimizer, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draws)
    optimizer.collect()
    optimizer.reduce()
    optimizer.step(1.0)
    optimizer.clear()


def changes(kind: Optimizer, model: nn.Module, steps: int = 1, **settings: Any) -> dict[str, Tensor]:
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = optimizer_of(model, kind, **settings)
    for seed in range(steps):
        a_step(model, optimizer, seed)
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


def test_a_weight_decays_alike_in_any_units() -> None:
    layer = nn.Linear(3, 2)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    optimizer = optimizer_of(layer, "adamw", weight_decay=0.1, in_units=["weight", "bias"])

    optimizer.unit = 100.0
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.collect()
    optimizer.reduce()
    optimizer.step(1.0)

    for parameter, was in zip(layer.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), was * (1 - RATE * 0.1), atol=0, rtol=1e-6)


def is_hidden(name: str, change: Tensor) -> bool:
    return ".layers." in name and change.dim() == 2


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_muon_turns_matrices_of_layers_by_near_rotations_and_leaves_the_rest_to_adamw(decay: float) -> None:
    """All directions of a matrix change alike, as much as by AdamW's step in the root mean square."""
    before = dict(tiny.llama().named_parameters())

    muon, adamw = (changes(kind, tiny.llama(), weight_decay=decay) for kind in ("muon", "adamw"))

    hidden = [name for name, change in muon.items() if is_hidden(name, change)]
    assert len(hidden) == 14 and len(muon) > len(hidden) + 4
    for name, change in muon.items():
        if name in hidden:
            turned = change + RATE * decay * before[name].detach()
            strengths = torch.linalg.svdvals(turned) / (RATE * 0.2 * math.sqrt(max(change.shape)))
            assert strengths.min() > 0.3 and strengths.max() < 1.3
        else:
            assert torch.equal(change, adamw[name]), name


def test_muons_state_is_one_moment_of_a_matrix() -> None:
    model = tiny.llama()
    optimizer = optimizer_of(model, "muon")

    state = optimizer.tensors()

    names = {name for name, parameter in model.named_parameters() if is_hidden(name, parameter)}
    assert {name for name in state if name.startswith("momentum_buffer.")} == {f"momentum_buffer.{n}" for n in names}
    moments = sum(tensor.nbytes for name, tensor in state.items() if not name.startswith("step."))
    matrices = sum(parameter.numel() for name, parameter in model.named_parameters() if name in names)
    assert moments == moment_bytes("muon", sum(one.numel() for one in model.parameters()), matrices)


def test_muon_trains_the_layers_of_a_critic_and_refuses_a_model_without_layers() -> None:
    critic = Critic.from_actor(tiny.llama())

    found = changes("muon", critic)

    assert sum(is_hidden(name, change) for name, change in found.items()) == 14
    with pytest.raises(
        ConfigError, match=r'trainer\.optimizer: "muon" trains matrices of decoder layers, and a Linear has'
    ):
        optimizer_of(nn.Linear(4, 4), "muon")


@pytest.mark.needs("bitsandbytes")
def test_moments_of_8_bits_follow_adamw_in_a_quarter_of_the_bytes() -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(128, 96), nn.Linear(96, 2))

    settings: dict[str, Any] = {"steps": 10, "weight_decay": 0.1}
    mine, exact = (changes(kind, model(), **settings) for kind in ("adamw_8bit", "adamw"))

    # The second layer and the biases are small: their moments have 32 bits.
    assert all(torch.equal(mine[name], exact[name]) for name in ("0.bias", "1.weight", "1.bias"))
    assert not torch.equal(mine["0.weight"], exact["0.weight"])
    assert (mine["0.weight"] - exact["0.weight"]).norm() < 0.05 * exact["0.weight"].norm()
    state = optimizer_of(model(), "adamw_8bit").tensors()
    nbytes = sum(tensor.nbytes for name, tensor in state.items() if "0.weight" in name and not name.startswith("step."))
    assert nbytes == moment_bytes("adamw_8bit", 128 * 96, 0) < 0.26 * moment_bytes("adamw", 128 * 96, 0)


@pytest.mark.gpu
@pytest.mark.needs("bitsandbytes")
def test_moments_of_8_bits_follow_adamw_on_a_gpu() -> None:
    torch.manual_seed(1)
    models = [nn.Linear(512, 512, bias=False, device="cuda") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def steps(model: nn.Module, kind: Optimizer) -> Tensor:
        before = next(model.parameters()).detach().clone()
        optimizer = optimizer_of(model, kind)
        for seed in range(10):
            torch.manual_seed(seed)
            next(model.parameters()).grad = torch.randn(512, 512, device="cuda")
            optimizer.reduce()
            optimizer.step(1.0)
        return next(model.parameters()).detach() - before

    mine, exact = (steps(model, kind) for model, kind in zip(models, ("adamw_8bit", "adamw"), strict=True))

    assert 0 < (mine - exact).norm() < 0.05 * exact.norm()


def test_without_its_package_8_bits_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(
        "pipeline.config.user_modules.importlib.util.find_spec", lambda name: None if name == "bitsandbytes" else 1
    )

    with pytest.raises(ConfigError) as refused:
        update_rules.new_rules("adamw_8bit", [], [], nn.Linear(1, 1), update_rules.RuleSettings(1.0, (0.9, 0.99), 0.0))

    said = str(refused.value)
    assert said.startswith("trainer.optimizer: adamw_8bit needs the package bitsandbytes: ")
    assert said.endswith("-m pip install bitsandbytes") and "\n" not in said
