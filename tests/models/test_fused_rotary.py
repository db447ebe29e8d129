"""Rotary positions by fewer kernels: the families that have them, their numbers and gradients, and the launches."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers.models.qwen2 import modeling_qwen2

from pipeline.models import fused_kernels
from pipeline.models.compiled_layers import Uses, compile_layers
from pipeline.models.fused_kernels import fuse, fuse_rotary, rotated
from tests.models.test_compiled_layers import Graphs
from tests.models.test_families import ATTENTION, built
from tests.support import tiny
from tests.support.fake_card import CARD, fake_card
from tests.support.launches import launches

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

CPU = torch.device("cpu")
UNFUSED = {"glm4", "cohere", "cohere2", "gpt_oss", "opt", "bloom", "llama4_text"}
"""Families that rotate pairs, or other halves, or nothing."""


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The families' own functions, for other tests of this process."""
    name = "apply_rotary_pos_emb"
    before = {module: vars(module)[name] for module in list(sys.modules.values()) if name in vars(module)}
    yield
    for module in list(sys.modules.values()):
        if name in vars(module):
            own = vars(module)[name]
            setattr(module, name, before.get(module, getattr(own, "__wrapped__", own)))


def drawn(dtype: torch.dtype) -> tuple[Tensor, ...]:
    draws = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 7, 16, generator=draws).to(dtype).requires_grad_() for heads in (4, 2))
    angles = torch.rand(2, 7, 8, generator=draws).repeat(1, 1, 2) * 6
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("unsqueezed", [1, 2])
def test_queries_keys_and_gradients_are_those_of_transformers(unsqueezed: int) -> None:
    q, k, cos, sin = drawn(torch.float32)
    if unsqueezed == 2:
        q, k = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k))

    expected = modeling_qwen2.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=unsqueezed)
    found = rotated(q, k, cos, sin, unsqueezed)

    for mine, its, x in zip(found, expected, (q, k), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=1e-6)
        (ours,), (theirs,) = (torch.autograd.grad(each.square().sum(), x) for each in (mine, its))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_in_16_bits_they_are_nearer_to_the_exact_ones() -> None:
    q, k, cos, sin = drawn(torch.bfloat16)
    exact = modeling_qwen2.apply_rotary_pos_emb(q.double(), k.double(), cos.double(), sin.double())[0]

    errors = [
        (rotary(q, k, cos, sin)[0].double() - exact).abs().mean()
        for rotary in (rotated, modeling_qwen2.apply_rotary_pos_emb)
    ]

    assert errors[0] < 0.9 * errors[1]


@pytest.mark.parametrize("family", ATTENTION)
def test_a_family_that_rotates_halves_is_changed_once_and_computes_the_same_on_a_cpu(family: str) -> None:
    model = built(family, ATTENTION[family])
    ids = torch.tensor([[5, 9, 3, 7]])
    expected = model(input_ids=ids).logits

    fused = fuse_rotary([model])

    assert fuse_rotary([model]) == 0, "they are"
    assert bool(fused) == (family not in UNFUSED)
    assert torch.equal(model(input_ids=ids).logits, expected)


def test_on_a_cpu_nothing_is_changed() -> None:
    before = modeling_qwen2.apply_rotary_pos_emb

    fuse([tiny.qwen2()], CPU)

    assert modeling_qwen2.apply_rotary_pos_emb is before


def test_a_layer_has_six_launches_on_a_card_in_place_of_ten_and_a_pass_two_more() -> None:
    given = drawn(torch.float32)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler, torch.no_grad():
        modeling_qwen2.apply_rotary_pos_emb(*given)
    assert len(launches(profiler)) == 10

    assert fuse_rotary([tiny.qwen2()]) == 1
    with fake_card() as operations, torch.no_grad():
        q, k = (torch.empty(2, heads, 1, 16, device=CARD) for heads in (4, 2))
        cos, sin = (torch.empty(2, 1, 16, device=CARD) for _ in range(2))
        for layer in range(2):
            operations.clear()
            modeling_qwen2.apply_rotary_pos_emb(q, k, cos, sin)
            assert operations == ["neg", "cat"] * (layer == 0) + ["mul", "cat", "addcmul"] * 2


def test_vectors_that_are_rotated_in_part_or_by_numbers_of_another_dtype_are_rotated_as_before() -> None:
    called: list[int] = []

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        called.append(unsqueeze_dim)
        return q, k

    fused = fused_kernels._fused_rotary(rotary)
    with fake_card():
        q, k = (torch.empty(2, heads, 1, 16, device=CARD) for heads in (4, 2))
        for size, dtype in ((8, torch.float32), (16, torch.bfloat16)):
            cos, sin = (torch.empty(2, 1, size, dtype=dtype, device=CARD) for _ in range(2))
            fused(q, k, cos, sin, 1)

    assert called == [1, 1]


def test_layers_whose_function_was_exchanged_are_still_compiled_as_one_graph() -> None:
    assert fuse_rotary([model := tiny.qwen2()]) == 1

    assert compile_layers({model: Uses()}, CPU, backend=Graphs()) == len(model.model.layers)
