"""Attention of packed rows by a kernel: what the padded batch gives, without a mask, for each model and kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, MistralConfig, MistralForCausalLM

from pipeline.errors import ConfigError, FieldError, ShapeError
from pipeline.models.critic import Critic
from pipeline.models.log_probs import action_log_probs, action_values
from pipeline.models.packing import PackedRows, log_probs_by_packing, prepare_packing, values_by_packing
from pipeline.models.varlen_attention import (
    attend_by,
    kernel_of,
    use_varlen_attention,
    uses_varlen_attention,
    varlen_attention,
)
from tests.support import tiny

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BUILDS = [tiny.llama, tiny.qwen2, tiny.gpt2]
PROMPT, ACTIONS = 7, 9


def padded(seed: int = 0, rows: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of many lengths, two of them equal, padded on both sides, whose actions have holes."""
    draws = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, PROMPT + 1, (rows, 1), generator=draws)
    responses = torch.randint(1, ACTIONS + 1, (rows, 1), generator=draws)
    prompts[1], responses[1] = prompts[0], responses[0]
    columns = torch.arange(PROMPT + ACTIONS)
    real = (columns >= PROMPT - prompts) & (columns < PROMPT + responses)
    actions = real[:, PROMPT:] & (torch.rand(rows, ACTIONS, generator=draws) < 0.8)
    actions[:, 0] = True
    return torch.randint(2, tiny.VOCABULARY_SIZE, real.shape, generator=draws) * real, real.long(), actions


def critic_of(actor: Any) -> Critic:
    critic = Critic.from_actor(actor)
    nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))
    return critic


def assert_same_gradients(mine: nn.Module, its: nn.Module) -> None:
    """Compare the gradients of two models, of which some are not zero."""
    pairs = list(zip(mine.named_parameters(), its.parameters(), strict=True))
    assert any(parameter.grad is not None and parameter.grad.any() for (_, parameter), _ in pairs)
    for (name, parameter), other in pairs:
        largest = 1 if other.grad is None else max(1.0, float(other.grad.abs().max()))
        torch.testing.assert_close(parameter.grad, other.grad, atol=1e-5 * largest, rtol=0, msg=name)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_values_and_gradients_are_those_of_the_padded_batch(build: Any, temperature: float) -> None:
    sequences, mask, actions = padded()
    weights = torch.randn(actions.shape, generator=torch.Generator().manual_seed(5)) * actions
    # In float64: each processor rounds a sum of float32 in its own way.
    plain, packing = build().double(), build().double()
    plain_critic, critic = critic_of(plain), critic_of(packing)
    prepare_packing([packing, critic], CPU)

    expected, expected_entropies = action_log_probs(
        plain, sequences, mask, ACTIONS, temperature=temperature, with_entropy=True
    )
    expected_values = action_values(plain_critic, sequences, mask, ACTIONS)
    log_probs, entropies = log_probs_by_packing(
        packing, sequences, mask, actions, temperature=temperature, with_entropy=True
    )
    values = values_by_packing(critic, sequences, mask, actions)

    assert uses_varlen_attention(packing) and uses_varlen_attention(critic.backbone)
    torch.testing.assert_close(log_probs, expected.masked_fill(~actions, 0), atol=1e-5, rtol=0)
    torch.testing.assert_close(values, expected_values.masked_fill(~actions, 0), atol=1e-5, rtol=0)
    assert entropies is not None
    torch.testing.assert_close(entropies, expected_entropies.masked_fill(~actions, 0), atol=1e-5, rtol=0)
    for loss in (expected + expected_entropies, expected_values, log_probs + entropies, values):
        (loss * weights).masked_fill(~actions, 0).sum().backward()
    assert_same_gradients(packing, plain)
    assert_same_gradients(critic, plain_critic)


@pytest.mark.parametrize("build", BUILDS)
@torch.no_grad()
def test_no_row_sees_another_and_no_mask_is_made(build: Any) -> None:
    model = build()
    prepare_packing([model], CPU)
    masks: list[Any] = []
    for name, module in model.named_modules():
        if name.endswith((".self_attn", ".attn")):
            module.register_forward_pre_hook(
                lambda module, args, named: masks.append(named.get("attention_mask")), with_kwargs=True
            )
    sequences, mask, actions = padded()
    before, _ = log_probs_by_packing(model, sequences, mask, actions)
    # The first call looked at the model's head too, with a pass over whole rows.
    masks.clear()
    log_probs_by_packing(model, sequences, mask, actions)

    assert masks and all(mask.numel() == 1 for mask in masks)
    for row in range(len(sequences)):
        others = torch.where(torch.arange(len(sequences)).unsqueeze(1) == row, sequences, sequences % 20 + 3)
        after, _ = log_probs_by_packing(model, others, mask, actions)
        assert torch.equal(after[row], before[row])
        assert not torch.equal(after, before)


@pytest.mark.parametrize("build", BUILDS)
@torch.no_grad()
def test_a_padded_pass_of_a_prepared_model_is_not_changed(build: Any) -> None:
    """The probe of a published version, and the reference of an adapted actor, are padded passes."""
    plain, prepared = build(), build()
    prepare_packing([prepared], CPU)
    sequences, mask, _ = padded()

    assert torch.equal(
        action_log_probs(prepared, sequences, mask, ACTIONS), action_log_probs(plain, sequences, mask, ACTIONS)
    )
    assert torch.equal(prepared(input_ids=sequences[:1]).logits, plain(input_ids=sequences[:1]).logits)


def test_rows_of_a_padded_batch_are_laid_end_to_end_without_their_last_actions() -> None:
    sequences = torch.tensor([[0, 11, 12, 13, 14, 0], [21, 22, 23, 24, 25, 26]])
    mask = (sequences != 0).long()
    actions = torch.tensor([[True, True, False], [False, True, True]])

    rows = PackedRows.of_padded(sequences, mask, actions)

    assert rows.input_ids.tolist() == [[11, 12, 13, 21, 22, 23, 24, 25]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert rows.cu_seqlens.tolist() == [0, 3, 8] and rows.cu_seqlens.dtype == torch.int32
    assert (rows.max_seqlen, rows.row_lengths, rows.num_actions) == (5, [3, 5], [2, 2])
    assert rows.before.tolist() == [1, 2, 6, 7]


@pytest.mark.parametrize(
    ("mask", "actions"),
    [
        ([[0, 0, 1, 1]], [[True, True]]),
        ([[1, 1, 1, 1]], [[False, False]]),
        ([[1, 1, 1, 1]], [[True, True, True, True]]),
    ],
    ids=["no prompt", "no action", "no column before"],
)
def test_a_row_without_a_prompt_or_an_action_is_refused(mask: Any, actions: Any) -> None:
    with pytest.raises(ShapeError, match="a row has no action, or no token before one of its actions"):
        PackedRows.of_padded(torch.full((1, 4), 5), torch.tensor(mask), torch.tensor(actions))


def test_a_model_that_slides_a_window_keeps_its_own_attention() -> None:
    config = MistralConfig(
        vocab_size=tiny.VOCABULARY_SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval()
    sequences, mask, actions = padded()
    expected = action_log_probs(model, sequences, mask, ACTIONS)

    prepare_packing([model], CPU)

    assert not uses_varlen_attention(model)
    log_probs, entropies = log_probs_by_packing(model, sequences, mask, actions)
    assert entropies is None
    torch.testing.assert_close(log_probs, expected.masked_fill(~actions, 0), atol=1e-5, rtol=0)


def test_models_that_cannot_be_packed_are_refused_in_one_line() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=tiny.VOCABULARY_SIZE, hidden_size=16, n_layer=1, n_head=2)).eval()

    with pytest.raises(ConfigError, match=r"^trainer\.packing: BloomModel lets a packed row attend to the row before"):
        prepare_packing([bloom], CPU)
    with pytest.raises(ConfigError, match=r"^trainer\.packing: a Linear cannot be packed, only a model of text alone$"):
        prepare_packing([nn.Linear(1, 1)], CPU)
    assert not use_varlen_attention(nn.Linear(1, 1))
    query = torch.zeros(1, 1, 3, 4)
    packed: Any = {"cu_seq_lens_q": torch.tensor([0, 3]), "row_lengths": [3]}
    with pytest.raises(FieldError, match="Linear has softcap, with which rows cannot be packed"):
        varlen_attention(nn.Linear(1, 1), query, query, query, None, softcap=30.0, **packed)


def test_the_kernel_follows_device_dtype_and_size() -> None:
    half = torch.bfloat16
    kernel = "torch varlen"

    assert kernel_of(GPU, half, 128) == kernel
    assert kernel_of(GPU, torch.float32, 128) == kernel_of(CPU, half, 64) == kernel_of(GPU, half, 512) == "sdpa by rows"


def test_torch_s_kernel_takes_the_rows_in_its_form() -> None:
    """Without a card its arguments and shapes are checked, forward and backward, on tensors that hold no bytes."""
    query, key = (torch.zeros(40, heads, 8, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    query.requires_grad_()
    starts = torch.zeros(3, dtype=torch.int32, device="meta")

    output = attend_by("torch varlen")(query, key, key, starts, 20, None)
    output.sum().backward()

    assert output.shape == (40, 4, 8)
    assert query.grad is not None and query.grad.shape == query.shape


@pytest.mark.gpu
def test_a_kernel_of_a_card_gives_what_rows_by_themselves_give() -> None:
    draws = torch.Generator(device="cuda").manual_seed(0)
    shapes = {"query": (1, 4, 300, 64), "key": (1, 2, 300, 64), "value": (1, 2, 300, 64)}
    given: dict[str, Any] = {
        name: torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=draws) for name, shape in shapes.items()
    }
    starts = torch.tensor([0, 90, 91, 300], device="cuda", dtype=torch.int32)
    rows: dict[str, Any] = {"cu_seq_lens_q": starts, "max_length_q": 209, "row_lengths": [90, 1, 209]}
    assert kernel_of(GPU, torch.bfloat16, 64) != "sdpa by rows"

    output, _ = varlen_attention(nn.Identity(), **given, attention_mask=None, **rows)

    exact, _ = varlen_attention(
        nn.Identity(), **{name: tensor.float() for name, tensor in given.items()}, attention_mask=None, **rows
    )
    torch.testing.assert_close(output.float(), exact, atol=2e-2, rtol=2e-2)
