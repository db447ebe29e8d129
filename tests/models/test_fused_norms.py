"""Norms by torch's operator: the models that have such norms, their numbers, and the operations of a pass."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from pipeline.models.critic import Critic
from pipeline.models.fused_kernels import fuse, fuse_norms
from pipeline.models.log_probs import action_log_probs
from tests.models.test_families import ATTENTION, OTHERS, built, ragged
from tests.support import tiny
from tests.support.launches import launches

UNFUSED = {
    "gemma", "gemma2", "gemma3_text",  # 1 + weight
    "phi", "gpt_neox", "opt", "cohere", "cohere2", "starcoder2", "stablelm", "nemotron", "bloom", "olmo",  # LayerNorm
    "recurrent_gemma", "qwen3_next",  # 1 + weight, too
}  # fmt: skip


def log_probs_and_gradients(model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    ids, mask, actions = ragged()
    found = action_log_probs(model, ids, mask, actions.shape[1]).masked_fill(~actions, 0)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return found, [one for one in torch.autograd.grad(found.mean(), weights, allow_unused=True) if one is not None]


@pytest.mark.parametrize("family", [*ATTENTION, *OTHERS])
def test_a_family_with_such_norms_computes_as_before_and_another_one_is_left_alone(family: str) -> None:
    model = built(family, {**ATTENTION, **OTHERS}[family])
    kinds = [type(module) for module in model.modules()]
    expected, gradients = log_probs_and_gradients(model)

    fused = fuse_norms([model])

    assert bool(fused) == (family not in UNFUSED)
    if not fused:
        assert [type(module) for module in model.modules()] == kinds
    found, theirs = log_probs_and_gradients(model)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for mine, its in zip(theirs, gradients, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-5, rtol=1e-3)


def test_in_16_bits_a_norm_rounds_once_and_is_nearer_to_float32() -> None:
    norm = tiny.llama().model.norm.to(torch.bfloat16)
    draws = torch.Generator().manual_seed(0)
    norm.weight.data.normal_(1.0, 0.3, generator=draws)
    rows = torch.randn(512, len(norm.weight), generator=draws).bfloat16()
    exact = nn.functional.rms_norm(rows.double(), norm.weight.shape, norm.weight.double(), norm.variance_epsilon)
    before = norm(rows)

    assert fuse_norms([nn.ModuleList([norm])]) == 1
    after = norm(rows)

    assert after.dtype == torch.bfloat16
    assert torch.equal(after, exact.bfloat16())
    assert (after.double() - exact).abs().mean() < 0.8 * (before.double() - exact).abs().mean()


class RMSNormGated(nn.Module):
    """As that of Bamba and of GraniteMoeHybrid in transformers 5.17."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is not None:
            hidden_states = hidden_states * nn.functional.silu(gate)
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def test_a_norm_with_an_optional_gate_stays_as_it_is() -> None:
    norm = RMSNormGated(8)
    rows, gate = torch.randn(2, 3, 8)

    assert fuse_norms([nn.ModuleList([norm])]) == 0
    assert norm(rows, gate).shape == rows.shape


def test_a_weight_in_another_dtype_than_the_rows_gives_the_dtype_of_before() -> None:
    norm = tiny.llama().model.norm
    rows = torch.randn(3, len(norm.weight)).bfloat16()
    before = norm(rows)

    fuse_norms([nn.ModuleList([norm])])

    assert before.dtype == norm(rows).dtype == torch.float32
    assert torch.equal(norm(rows), before)


def test_copies_names_and_hooks_stay_those_of_the_model() -> None:
    model, seen = tiny.llama(), []
    names, layers = list(model.state_dict()), model.config.num_hidden_layers
    model.model.norm.register_forward_hook(lambda *_: seen.append(1))

    assert fuse_norms([model, Critic(copy.deepcopy(model))]) == 2 * (2 * layers + 1)
    assert fuse_norms([model]) == 0, "they are"

    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.norm.weight.mul_(2)
    assert list(twin.state_dict()) == names
    assert not torch.equal(log_probs_and_gradients(twin)[0], log_probs_and_gradients(model)[0])
    assert seen
    assert type(model.model.norm).__name__ == "LlamaRMSNorm"


def test_on_a_cpu_nothing_is_changed() -> None:
    model = tiny.llama()
    kinds = [type(module) for module in model.modules()]

    fuse([model], torch.device("cpu"))

    assert [type(module) for module in model.modules()] == kinds


def operations(call: Callable[[], Any]) -> Counter[str]:
    """Return what a call computes; an operator of a norm counts as one, whatever it is made of on a CPU."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        call()
    found: Counter[str] = Counter()
    for event in launches(profiler):
        above, name = event.cpu_parent, event.name
        while above is not None:
            name, above = ("", None) if above.name == "aten::rms_norm" else (name, above.cpu_parent)
        found[name] += bool(name)
    found["aten::rms_norm"] = sum(event.name == "aten::rms_norm" for event in profiler.events() or ())
    return found


def test_a_norm_is_one_operation_of_a_pass_in_place_of_eight() -> None:
    model = tiny.llama().to(torch.bfloat16)
    ids = torch.ones(2, 5, dtype=torch.long)
    norms = 2 * model.config.num_hidden_layers + 1
    with torch.no_grad():
        model(ids)
        before = operations(lambda: model(ids))

        fuse_norms([model])

        after = operations(lambda: model(ids))
    assert after["aten::rms_norm"] == norms and after["aten::rsqrt"] == 0 == before["aten::rms_norm"]
    assert before.total() - after.total() >= 7 * norms, before - after
