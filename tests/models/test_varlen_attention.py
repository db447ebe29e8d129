"""Attention of packed rows by a kernel: what the padded batch gives, without a mask, for each model and kernel."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, BloomConfig, BloomForCausalLM

from pipeline.errors import ConfigError, FieldError, ShapeError
from pipeline.models.card_attention import attend_by, kernel_of
from pipeline.models.critic import Critic
from pipeline.models.log_probs import action_log_probs, action_log_probs_and_entropies, action_values
from pipeline.models.packing import PackedRows, prepare_packing
from pipeline.models.varlen_attention import NAME, use_varlen_attention, uses_varlen_attention, varlen_attention
from tests.support import tiny
from tests.support.padded_passes import flat_rows_of, log_probs_by_packing, values_by_packing

CPU, GPU = torch.device("cpu"), torch.device("cuda")
BUILDS = [tiny.llama, tiny.qwen2, tiny.gpt2, tiny.mistral, tiny.gemma3]
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


def assert_as_padded(
    plain: Any,
    model: Any,
    prepare: Callable[..., object],
    rows: tuple[Tensor, Tensor, Tensor],
    temperature: float,
    **shared: bool,
) -> Critic:
    """Compare two equal models and critics over a padded batch, one pair by padded passes; return the other critic."""
    sequences, mask, actions = rows
    weights = torch.randn(actions.shape, generator=torch.Generator().manual_seed(5)) * actions
    plain_critic, critic = critic_of(plain), critic_of(model)
    prepare(model, critic)

    expected, entropies = action_log_probs_and_entropies(plain, sequences, mask, ACTIONS, temperature=temperature)
    values = action_values(plain_critic, sequences, mask, ACTIONS)
    found, found_entropies = log_probs_by_packing(model, *rows, temperature=temperature, with_entropy=True, **shared)
    found_values = values_by_packing(critic, *rows, **shared)

    assert found_entropies is not None
    for one, other in ((found, expected), (found_entropies, entropies), (found_values, values)):
        rtol = 0.0 if one.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(one, other.masked_fill(~actions, 0), atol=1e-5, rtol=rtol)
    for loss in (expected + entropies, values, found + found_entropies, found_values):
        (loss * weights).masked_fill(~actions, 0).sum().backward()
    assert_same_gradients(model, plain)
    assert_same_gradients(critic, plain_critic)
    return critic


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_values_and_gradients_are_those_of_the_padded_batch(build: Any, temperature: float) -> None:
    # In float64: each processor rounds a sum of float32 in its own way.
    plain, packing = build().double(), build().double()

    critic = assert_as_padded(plain, packing, lambda *each: prepare_packing(each, CPU), padded(), temperature)

    assert uses_varlen_attention(packing) and uses_varlen_attention(critic.backbone)


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

    rows = PackedRows.of_flat(flat_rows_of(sequences, mask, actions))

    assert rows.input_ids.tolist() == [[11, 12, 13, 21, 22, 23, 24, 25]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert rows.cu_seqlens.tolist() == [0, 3, 8] and rows.cu_seqlens.dtype == torch.int32
    assert (rows.max_seqlen, rows.row_lengths) == (5, [3, 5])
    assert rows.before.tolist() == [1, 2, 6, 7]


@pytest.mark.parametrize(
    ("mask", "actions"),
    [
        ([[0, 0, 1, 1]], [[True, True]]),
        ([[1, 1, 1, 1]], [[True, True, True, True]]),
    ],
    ids=["no prompt", "no column before"],
)
def test_a_row_without_a_prompt_is_refused(mask: Any, actions: Any) -> None:
    with pytest.raises(ShapeError, match="no token before one of its actions"):
        flat_rows_of(torch.full((1, 4), 5), torch.tensor(mask), torch.tensor(actions))


def test_a_model_with_its_windows_in_masks_alone_keeps_its_own_attention() -> None:
    """Rows of a packed pass have no mask: a row longer than the window would attend to all of itself."""
    model = tiny.with_windows_in_masks_alone(tiny.mistral())
    sequences, mask, actions = padded()
    expected = action_log_probs(model, sequences, mask, ACTIONS)

    prepare_packing([model], CPU)
    assert not uses_varlen_attention(model)
    # What the test of a model has found is not forgotten.
    assert prepare_packing([model], CPU) and not uses_varlen_attention(model)
    assert not prepare_packing([model], CPU, None)

    log_probs, entropies = log_probs_by_packing(model, sequences, mask, actions)
    assert entropies is None
    torch.testing.assert_close(log_probs, expected.masked_fill(~actions, 0), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("window", "given"), [(5, [None] * 3), (None, [None, 5, None]), (5, [5, 5, 5])])
def test_layers_that_give_other_windows_than_those_of_the_configuration_keep_their_own_attention(
    window: int | None, given: list[int | None]
) -> None:
    model = tiny.gemma3()
    for layer, other in zip(model.base_model.layers, given, strict=True):
        layer.self_attn.sliding_window = other
    model.config.sliding_window = window

    assert not prepare_packing([model], CPU, None) and not uses_varlen_attention(model)
    # The trial's own attention, which counts the windows of all passes, is not left behind.
    assert AttentionInterface()[NAME] is varlen_attention


def test_models_that_cannot_be_packed_are_refused_in_one_line() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=tiny.VOCABULARY_SIZE, hidden_size=16, n_layer=1, n_head=2)).eval()

    said = "BloomModel lets a packed row attend to the row before"
    refusal = rf"^trainer\.packing: a BloomForCausalLM cannot be packed: {said}"
    with pytest.raises(ConfigError, match=refusal):
        prepare_packing([bloom], CPU)
    refusal = r"^trainer\.packing: a Linear cannot be packed: only a language model of transformers can$"
    with pytest.raises(ConfigError, match=refusal):
        prepare_packing([nn.Linear(1, 1)], CPU)
    assert not use_varlen_attention(nn.Linear(1, 1))
    query = torch.zeros(1, 1, 3, 4)
    packed: Any = {"cu_seq_lens_q": torch.tensor([0, 3]), "row_lengths": [3]}
    with pytest.raises(FieldError, match="Linear has softcap, with which rows cannot be packed"):
        varlen_attention(nn.Linear(1, 1), query, query, query, None, softcap=30.0, **packed)


@pytest.mark.parametrize("window", [None, 6])
def test_torch_s_kernel_takes_the_rows_in_its_form(window: int | None) -> None:
    """Without a card its arguments and shapes are checked, forward and backward, on tensors that hold no bytes."""
    query, key = (torch.zeros(40, heads, 8, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    query.requires_grad_()
    starts = torch.zeros(3, dtype=torch.int32, device="meta")

    output = attend_by("torch varlen")(query, key, key, starts, 20, None, window)
    output.sum().backward()

    assert output.shape == (40, 4, 8)
    assert query.grad is not None and query.grad.shape == query.shape


def exact_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: list[int], scaling: float, window: int = 99
) -> Tensor:
    """Return causal attention, one token of one head after the other, ``(T, heads, size)`` float64."""
    output = torch.zeros(query.shape, dtype=torch.float64)
    shared = query.shape[1] // key.shape[1]
    for start, end in pairwise(starts):
        for token in range(start, end):
            for head in range(query.shape[1]):
                seen = slice(max(start, token + 1 - window), token + 1), head // shared
                weights = (key[seen].double() @ query[token, head].double() * scaling).softmax(dim=0)
                output[token, head] = weights @ value[seen].double()
    return output


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("takes_groups", [False, True], ids=["torch 2.11", "torch 2.13"])
def test_torch_s_kernel_computes_the_same_with_and_without_a_parameter_for_groups(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, takes_groups: bool, window: int | None
) -> None:
    draws = torch.Generator().manual_seed(0)
    query = torch.randn(9, 4, 8, generator=draws)
    key, value = torch.randn(2, 9, kv_heads, 8, generator=draws).unbind()
    starts = [0, 4, 5, 9]

    def of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):  # type: ignore[no-untyped-def]
        assert key.shape[1] == value.shape[1] == query.shape[1], "heads without a key of their own"
        before, after = window_size
        assert after == 0 and max_q == max_k == 4 and torch.equal(cu_seq_q, cu_seq_k)
        return exact_attention(query, key, value, cu_seq_q.tolist(), scale, 99 if before < 0 else before + 1).float()

    def of_2_13(query, key, value, *others, enable_gqa=False, **keywords):  # type: ignore[no-untyped-def]
        assert enable_gqa
        return of_2_11(
            query, *(each.repeat_interleave(4 // kv_heads, dim=1) for each in (key, value)), *others, **keywords
        )

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", of_2_13 if takes_groups else of_2_11)
    found = attend_by("torch varlen")(query, key, value, torch.tensor(starts, dtype=torch.int32), 4, 0.3, window)

    expected = exact_attention(query, key, value, starts, 0.3, window or 99)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_one_token_attends_to_its_cache_without_a_copy_of_it(
    kv_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask is added to the scores, the window's limits included; transformers' own sdpa may repeat the cache."""
    monkeypatch.delattr("transformers.integrations.sdpa_attention.sdpa_attention_forward")
    draws = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, 1, 8, generator=draws)
    key, value = torch.randn(2, 3, kv_heads, 7, 8, generator=draws).unbind()
    real = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 1]], dtype=torch.bool)
    mask = torch.zeros(3, 1, 1, 7).masked_fill(~real[:, None, None], -torch.inf)

    found, _ = varlen_attention(nn.Identity(), query, key, value, mask, scaling=0.3, sliding_window=window)

    assert found.shape == (3, 1, 4, 8)
    for row in range(3):
        keys, values = (tensor[row, :, real[row]].transpose(0, 1) for tensor in (key, value))
        last = torch.cat([torch.zeros(len(keys) - 1, 4, 8), query[row].transpose(0, 1)])
        expected = exact_attention(last, keys, values, [0, len(keys)], 0.3)[-1]
        torch.testing.assert_close(found[row, 0].double(), expected, atol=1e-6, rtol=0)


def test_what_a_layer_adds_to_its_scores_counts_for_one_token_too() -> None:
    draws = torch.Generator().manual_seed(0)
    query, bias = torch.randn(3, 4, 1, 8, generator=draws), torch.randn(3, 4, 1, 7, generator=draws)
    key, value = torch.randn(2, 3, 4, 7, 8, generator=draws).unbind()
    mask = torch.zeros(3, 1, 1, 7)

    found, _ = varlen_attention(nn.Identity(), query, key, value, mask, scaling=0.3, position_bias=bias)

    weights = (query @ key.transpose(-1, -2) * 0.3 + bias).softmax(dim=-1)
    torch.testing.assert_close(found, (weights @ value).transpose(1, 2), atol=1e-6, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 50])
def test_a_kernel_of_a_card_gives_what_rows_by_themselves_give(window: int | None) -> None:
    draws = torch.Generator(device="cuda").manual_seed(0)
    shapes = {"query": (1, 4, 300, 64), "key": (1, 2, 300, 64), "value": (1, 2, 300, 64)}
    given: dict[str, Any] = {
        name: torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=draws) for name, shape in shapes.items()
    }
    starts = torch.tensor([0, 90, 91, 300], device="cuda", dtype=torch.int32)
    rows: dict[str, Any] = {"cu_seq_lens_q": starts, "max_length_q": 209, "row_lengths": [90, 1, 209]}
    rows["sliding_window"] = window
    assert kernel_of(GPU, torch.bfloat16, 64, window is not None) != "sdpa by rows"

    output, _ = varlen_attention(nn.Identity(), **given, attention_mask=None, **rows)

    exact, _ = varlen_attention(
        nn.Identity(), **{name: tensor.float() for name, tensor in given.items()}, attention_mask=None, **rows
    )
    torch.testing.assert_close(output.float(), exact, atol=2e-2, rtol=2e-2)
