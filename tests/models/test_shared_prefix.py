"""A pass that computes each prompt once gives the log-probs, values and gradients of the padded batch."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError, FieldError, ShapeError
from pipeline.models import prefix_attention
from pipeline.models.flat_rows import FlatRows
from pipeline.models.shared_prefix import (
    PromptGroups,
    SharedRows,
    groups_to_share,
    may_share_prompts,
    prepare_shared_prefix,
)
from pipeline.models.varlen_attention import uses_varlen_attention
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.interface import Request, Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator
from tests.models.test_varlen_attention import assert_as_padded
from tests.support import tiny
from tests.support.fake_card import CARD, fake_card
from tests.support.padded_passes import flat_rows_of, log_probs_by_packing

CPU = torch.device("cpu")
BUILDS = [tiny.llama, tiny.qwen2, tiny.gpt2]
PROMPT, ACTIONS = 7, 9
GROUPS = {
    "whole groups": [4, 4, 4],
    "groups that lost rows": [1, 4, 3, 2],
    "one row a prompt": [1] * 6,
    "one prompt": [8],
}
Rows = tuple[Tensor, Tensor, Tensor]


def rows_of(groups: list[int], *, holes: bool = False, seed: int = 0) -> Rows:
    """Rows of prompts of many lengths, two of them equal, in any order; one response has one token alone."""
    draws = torch.Generator().manual_seed(seed)
    of_row = torch.tensor([prompt for prompt, rows in enumerate(groups) for _ in range(rows)])
    lengths = torch.randint(1, PROMPT + 1, (len(groups),), generator=draws)
    lengths[-1] = lengths[0]
    responses = torch.randint(1, ACTIONS + 1, (len(of_row), 1), generator=draws)
    responses[0], responses[-1] = 1, ACTIONS
    prompts = torch.randint(2, tiny.VOCABULARY_SIZE, (len(groups), PROMPT), generator=draws)
    ids = torch.cat(
        [prompts[of_row], torch.randint(2, tiny.VOCABULARY_SIZE, (len(of_row), ACTIONS), generator=draws)], dim=1
    )
    columns = torch.arange(PROMPT + ACTIONS)
    real = (columns >= PROMPT - lengths[of_row].unsqueeze(1)) & (columns < PROMPT + responses)
    actions = real[:, PROMPT:].clone()
    if holes:
        actions &= torch.rand(actions.shape, generator=draws) < 0.7
        actions[:, 0] = True
    order = torch.randperm(len(of_row), generator=draws)
    return (ids * real)[order], real.long()[order], actions[order]


def shared(*models: nn.Module) -> None:
    prepare_shared_prefix(models, CPU, True, key="trainer.shared_prefix")


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("holes", [False, True], ids=["", "holes"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_log_probs_values_and_gradients_are_those_of_the_padded_batch(
    build: Any, groups: list[int], holes: bool, dtype: torch.dtype
) -> None:
    plain, model = build().to(dtype), build().to(dtype)
    if dtype == torch.float32:
        # Logits of some tens, as of these models else, have a rounding error of 1e-5 by themselves.
        for parameter in [*plain.parameters(), *model.parameters()]:
            parameter.data.mul_(0.5)

    assert_as_padded(plain, model, shared, rows_of(groups, holes=holes), 0.7, shared=True)


@pytest.mark.parametrize("build", BUILDS)
@torch.no_grad()
def test_no_row_sees_another_response_or_another_prompt(build: Any) -> None:
    """Other tokens there change no bit of a row; one other token in its own prompt changes it."""
    model = build()
    shared(model)
    sequences, mask, actions = rows_of([4, 1, 3])
    before, _ = log_probs_by_packing(model, sequences, mask, actions, shared=True)

    groups = PromptGroups.of(flat_rows_of(sequences, mask, actions))
    number = dict(zip(groups.order.tolist(), groups.groups, strict=True))
    for row in range(len(sequences)):
        others = sequences % 20 + 3
        others[row] = sequences[row]
        own = torch.tensor([number[other] == number[row] for other in range(len(sequences))])
        # The prompt of its group stays: one that differed would be another prompt.
        others[own, :PROMPT] = sequences[own, :PROMPT]
        after, _ = log_probs_by_packing(model, others, mask, actions, shared=True)
        assert torch.equal(after[row], before[row])
        assert not torch.equal(after, before)
    first = mask.argmax(dim=1, keepdim=True)
    changed = sequences.scatter(1, first, sequences.gather(1, first) % 20 + 3)
    after, _ = log_probs_by_packing(model, changed, mask, actions, shared=True)
    assert not any(torch.equal(now, then) for now, then in zip(after, before, strict=True))


def test_a_pass_has_each_prompt_once_and_no_last_tokens() -> None:
    r"""Prompts [5, 6, 7] of rows 0 and 2, [8] of row 1.

    Each response is without its last token; the first action of rows 0 and 2 follows one and the same token::

        index      0  1  2  3  4  5  6  7
        token      8  5  6  7  3  2  4  9
        position   0  0  1  2  1  3  3  4
                   |  prompt|  |  |  \ row 2
                   row 1's     |  \ row 0
                               \ row 1's response
    """
    sequences = torch.tensor([[5, 6, 7, 2, 3, 0], [0, 0, 8, 3, 4, 0], [5, 6, 7, 4, 9, 2]])
    actions = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 1]]).bool()

    flat = flat_rows_of(sequences, (sequences != 0).long(), actions)
    rows = SharedRows.of_flat(flat)
    groups = PromptGroups.of(flat)

    assert rows.input_ids.tolist() == [[8, 5, 6, 7, 3, 2, 4, 9]]
    assert rows.position_ids.tolist() == [[0, 0, 1, 2, 1, 3, 3, 4]]
    assert rows.before.tolist() == [3, 5, 0, 4, 3, 7]
    assert rows.layout.prompt_lengths == [1, 3]
    assert [(run.prompt_tokens, run.response_tokens, run.rows, run.longest) for run in rows.layout.runs] == [
        ((0, 1), (4, 5), 1, 1), ((1, 4), (5, 8), 2, 2)
    ]  # fmt: skip
    assert rows.layout.runs[1].mask.tolist() == [[True] * 4 + [False], [True] * 5]
    assert (groups.order.tolist(), groups.groups) == ([1, 0, 2], [0, 1, 1])
    assert (groups.prompts, groups.responses) == ([1, 3, 3], [1, 1, 2])
    # 8 tokens in place of 2 + 4 + 5.
    assert groups.saves


def test_15_percent_of_the_tokens_have_to_be_saved() -> None:
    def groups(response: int) -> PromptGroups:
        return PromptGroups(np.arange(2), [0, 0], [4, 4], [response, response])

    assert groups(9).saves, "22 tokens of 26"
    assert not groups(10).saves, "24 tokens of 28"


@torch.no_grad()
def test_left_to_itself_a_model_shares_where_it_saves_and_wanted_always_but_without_a_repeated_prompt() -> None:
    auto, always, never, unasked = (tiny.llama() for _ in range(4))
    prepare_shared_prefix([auto], CPU, None, key="k")
    prepare_shared_prefix([always], CPU, True, key="k")
    prepare_shared_prefix([never], CPU, False, key="k")
    many, few, none = rows_of([4, 4]), rows_of([2, *[1] * 12]), rows_of([1] * 6)

    assert [may_share_prompts(model) for model in (auto, always, never, unasked)] == [True, True, False, False]
    assert [groups_to_share(auto, flat_rows_of(*rows)) is not None for rows in (many, few, none)] == [
        True,
        False,
        False,
    ]
    assert [groups_to_share(always, flat_rows_of(*rows)) is not None for rows in (many, few, none)] == [
        True,
        True,
        False,
    ]
    flat = flat_rows_of(*many)
    of_others = flat.row != 0
    first_without = FlatRows.of(flat.tokens, flat.lengths, flat.action[of_others].numpy(), flat.row[of_others].numpy())
    assert groups_to_share(always, first_without) is None
    assert groups_to_share(always, flat.rows(np.zeros(0, np.int64))[0]) is None


def test_on_a_card_prompts_are_shared_only_if_it_is_wanted() -> None:
    model = tiny.llama()

    prepare_shared_prefix([model], torch.device("meta"), None, key="k")

    assert not may_share_prompts(model) and not uses_varlen_attention(model)


def test_the_layout_of_a_pass_on_a_card_is_made_without_a_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays go there by `on_device`, in the order of the stream; all else is made there."""
    sent: list[str] = []

    def on_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
        sent.append(str(array.dtype))
        return torch.empty(array.shape, dtype=getattr(torch, str(array.dtype)), device=device)

    monkeypatch.setattr(prefix_attention, "on_device", on_device)

    with fake_card() as operations:
        layout = prefix_attention.PrefixLayout.of([3, 3, 5], [[2, 4], [1], [3, 3]], CARD)

    assert sent == ["int64", "int64", "int64", "int32"]
    assert set(operations) == {"arange", "add", "le"}
    assert [run.mask.shape for run in layout.runs] == [(4, 7), (3, 8)]


def test_a_model_that_cannot_is_refused_in_one_line_or_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Custom(nn.Module):
        pass

    caplog.set_level(logging.INFO)
    with pytest.raises(ConfigError) as refused:
        prepare_shared_prefix([tiny.mistral()], CPU, True, key="trainer.shared_prefix")
    assert str(refused.value) == (
        "trainer.shared_prefix: a MistralForCausalLM cannot share prompts: MistralAttention slides a window"
    )
    with pytest.raises(
        ConfigError, match=r"^k: a Custom cannot share prompts: only a language model of transformers can$"
    ):
        prepare_shared_prefix([Custom()], CPU, True, key="k")
    actor, other = tiny.llama(), tiny.mistral()
    prepare_shared_prefix([actor, other], CPU, None, key="k")
    assert not may_share_prompts(actor) and not may_share_prompts(other)
    assert caplog.messages == [
        "prompts are computed once a row: model=MistralForCausalLM reason=MistralAttention slides a window"
    ]
    with pytest.raises(FieldError, match="LlamaModel does not compute a response after a shared prompt as in a row"):
        log_probs_by_packing(tiny.llama(), *rows_of([4, 4]), shared=True)
    ids, mask, _ = rows_of([4, 4])
    with pytest.raises(ShapeError, match="no token before one of its actions"):
        flat_rows_of(ids, mask, mask.bool())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", ["mask", "prompt", "positions"])
def test_a_model_that_computes_a_shared_row_otherwise_than_alone_is_refused(
    wrong: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_shared_prefix([tiny.llama().to(dtype)], CPU, True, key="k")

    if wrong == "mask":
        plain = prefix_attention.functional.scaled_dot_product_attention
        monkeypatch.setattr(
            prefix_attention.functional,
            "scaled_dot_product_attention",
            lambda *given, **more: plain(*given[:3], *(torch.ones_like(mask) for mask in given[3:]), **more),
        )
    elif wrong == "prompt":
        keys = prefix_attention._keys
        monkeypatch.setattr(prefix_attention, "_keys", lambda key, run: keys(key.roll(1, dims=1), run))
    else:
        given = SharedRows.keywords
        monkeypatch.setattr(
            SharedRows, "keywords", lambda rows, model: {**given(rows, model), "position_ids": rows.position_ids * 2}
        )
    model = tiny.llama().to(dtype)
    with pytest.raises(ConfigError, match=r"^k: a LlamaForCausalLM cannot share prompts: LlamaModel does not compute"):
        prepare_shared_prefix([model], CPU, True, key="k")
    assert not uses_varlen_attention(model), "left as it was"


def test_the_tokens_that_a_prepared_model_samples_are_the_same() -> None:
    def sampled(model: Any) -> tuple[list[Tensor], Tensor]:
        engine = BlockingEngine(TransformersGenerator(model))
        sampling = Sampling(max_length=40, pad_token_id=tiny.PAD, eos_token_ids=(tiny.EOS,), seed=5)
        for key, prompt in enumerate(([5, 9], [7, 3, 11, 2])):
            engine.submit(Request(key, torch.tensor(prompt), 4, 9, sampling, first_row=4 * key))
        found: list[Any] = []
        while engine.load.running + engine.load.waiting:
            found += [one for ended in engine.step() for one in ended.responses]
        return [one.token_ids for one in found], torch.cat([one.log_probs for one in found])

    plain, prepared = tiny.qwen2(), tiny.qwen2()
    shared(prepared)

    (tokens, log_probs), (expected, of_plain) = sampled(prepared), sampled(plain)
    assert len(tokens) == 8 and all(torch.equal(one, other) for one, other in zip(tokens, expected, strict=True))
    # One token attends to its cache by another call, whose sums some versions of torch add in another order.
    torch.testing.assert_close(log_probs, of_plain, atol=1e-5, rtol=0)
