"""Passes of reward models: rows of similar length together, each model within its own bound, packed on a card."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralForSequenceClassification,
)

from pipeline import batched
from pipeline.config.rewards import RewardModel
from pipeline.errors import FieldError
from pipeline.models import packing
from pipeline.models.packing import pack_scored_rows, packs_scored_rows
from pipeline.models.reward_model import SequenceReward
from pipeline.rollout.model_passes import ModelPasses
from pipeline.rollout.reward.functions import FunctionReward
from pipeline.rollout.reward.summed import SummedReward
from pipeline.rollout.rows import Rows
from tests.support import tiny
from tests.support.told import Told
from tests.trainer.test_out_of_memory import Device

CPU = torch.device("cpu")
# Of each of six rows the tokens of its prompt, and of its response.
PROMPTS, RESPONSES = np.array([2, 5, 3, 1, 4, 2]), np.array([9, 1, 2, 1, 8, 3])
LENGTHS = PROMPTS + RESPONSES


def given() -> Rows:
    tokens = torch.randint(2, tiny.VOCABULARY_SIZE, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(1))
    return Rows(tokens, PROMPTS, RESPONSES, 5, 9, tiny.PAD, torch.zeros(len(PROMPTS)))


def scorer(model_class: Any, config: Any, seed: int = 3) -> Any:
    config.num_labels = 1
    return tiny.seeded(model_class, config, seed)


def llama(seed: int = 3) -> Any:
    return scorer(LlamaForSequenceClassification, tiny.llama().config, seed)


def gpt2() -> Any:
    return scorer(GPT2ForSequenceClassification, tiny.gpt2().config)


def mistral() -> Any:
    return scorer(MistralForSequenceClassification, tiny.mistral().config)


def bert() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=tiny.VOCABULARY_SIZE, max_position_embeddings=30, **sizes)
    return scorer(BertForSequenceClassification, config)


@torch.no_grad()
def alone(model: Any) -> Tensor:
    """The score of each row in a pass of its own."""
    rows, found = given(), []
    for row in rows.tokens.split(LENGTHS.tolist()):
        if hasattr(model, "score"):
            found.append(model.score(model.base_model(input_ids=row[None]).last_hidden_state[0, -1])[0])
        else:
            found.append(model(input_ids=row[None]).logits[0, 0])
    return torch.stack(found)


def scored(reward: Any, told: Told | None = None, *, rows: int | None = None, multiple: int | None = None) -> Tensor:
    return scores_of(ModelPasses(rows, None, True, told or Told(), multiple), reward)


def scores_of(passes: ModelPasses, reward: Any) -> Tensor:
    return passes.scores(reward, given(), [None] * len(LENGTHS), keep_errored=False)


def shapes_of(model: torch.nn.Module) -> list[tuple[int, int]]:
    shapes: list[tuple[int, int]] = []

    def look(_: Any, words: Any, keywords: dict[str, Any]) -> None:
        shapes.append(tuple((words[0] if words else keywords["input_ids"]).shape))

    model.base_model.register_forward_pre_hook(look, with_kwargs=True)  # type: ignore[union-attr]
    return shapes


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device for which packed rows have a kernel, as a card; the attention itself is that of the CPU."""
    monkeypatch.setattr(packing, "kernel_of", lambda *_: "torch varlen")


@pytest.mark.parametrize("build", [llama, gpt2, bert])
@pytest.mark.parametrize("multiple", [None, 4])
def test_rows_of_similar_length_share_a_pass_and_keep_their_places(build: Any, multiple: int | None) -> None:
    reward, told = SequenceReward(build()), Told()
    reward.check()
    shapes = shapes_of(reward.model)

    found = scored(reward, told, rows=2, multiple=multiple)

    widths = [5, 6, 12] if multiple is None else [8, 8, 12]
    assert sorted(LENGTHS) == [2, 5, 5, 6, 11, 12] and shapes == [(2, width) for width in widths]
    assert [beat[:2] for beat in told.beats] == [(2, 6), (4, 6), (6, 6)]
    torch.testing.assert_close(found, alone(reward.model), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("dtype", "is_taken"), [(torch.float32, False), (torch.bfloat16, True)])
def test_only_in_16_bits_a_gap_may_be_that_of_rounding(dtype: torch.dtype, is_taken: bool) -> None:
    model = bert().to(dtype)

    def lean(_: Any, __: Any, keywords: dict[str, Tensor], output: Any) -> None:
        ids, mask = keywords["input_ids"], keywords["attention_mask"]
        output.logits = ((ids * mask).sum(dim=1, keepdim=True) + 0.05 * ids.shape[1]).to(dtype)

    model.register_forward_hook(lean, with_kwargs=True)

    with contextlib.nullcontext() if is_taken else pytest.raises(FieldError, match="another score beside a longer row"):
        SequenceReward(model).check()


def test_a_direct_call_takes_rows_that_are_padded_on_either_side() -> None:
    reward, rows = SequenceReward(llama()), given()
    ids, mask = rows.right_padded(np.arange(len(rows)), trim=True, multiple=16)

    found = [reward(input_ids=ids.roll(by, 1), attention_mask=mask.roll(by, 1)) for by in (0, 3)]
    found.append(reward(input_ids=ids[1:2], attention_mask=mask[1:2].bool()))

    torch.testing.assert_close(found[0], alone(reward.model), atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[2], found[0][1:2], atol=1e-5, rtol=0)


def test_functions_get_as_many_rows_at_once_as_are_generated_at_once() -> None:
    """Their limits of time are of a call; networks beside them cut their own passes."""
    sizes: list[int] = []

    @batched
    def judge(input_ids: Tensor, attention_mask: Tensor, *, response_start: list[int], **_: Any) -> list[float]:
        sizes.append(len(input_ids))
        return [float(start) for start in response_start]

    settings = RewardModel("model", "", 1.0, "policy", "model.reward", "model.reward_tokenizer")
    network, functions = SequenceReward(llama()), FunctionReward([judge], None, labels=["judge"])
    alone_ = scored(functions, rows=4)
    shapes = shapes_of(network.model)

    found = scored(SummedReward([(settings, network)], functions), rows=4)

    assert sizes == [4, 2] * 2 and shapes == [(4, 6), (2, 12)]
    assert alone_.tolist() == PROMPTS.tolist()
    torch.testing.assert_close(found.float(), alone(network.model) + alone_.float(), atol=1e-5, rtol=0)
    assert scored(functions).tolist() == PROMPTS.tolist() and sizes[-1] == 6
    assert functions.parts[:, 0].tolist() == PROMPTS.tolist()


def test_the_bound_of_log_probs_is_that_of_scores_too() -> None:
    """As `rlhfd plan` counts the passes of a worker."""
    by_rows, by_tokens = SequenceReward(llama()), SequenceReward(llama())
    shapes, tokens = shapes_of(by_rows.model), Device(by_tokens.model).passes

    scores_of(ModelPasses(None, 4, True), by_rows)
    scores_of(ModelPasses(None, None, True, logits_forward_tokens=24), by_tokens)

    assert shapes == [(4, 6), (2, 12)]
    assert tokens == [24, 24]


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("build", [llama, gpt2, mistral])
def test_on_a_card_rows_are_packed(build: Any) -> None:
    reward = SequenceReward(build())
    expected = alone(reward.model)
    pack_scored_rows([reward.model], CPU)
    assert packs_scored_rows(reward.model)
    scored(reward)
    seen = Device(reward.model).passes

    found = scored(reward)

    assert seen == [LENGTHS.sum()], "each token once"
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    device, told = Device(reward.model, most_tokens=30), Told()
    torch.testing.assert_close(scored(reward, told), expected, atol=1e-5, rtol=0)
    assert told.counted["out_of_memory"] == ["pass"]
    # The rows by length are 2, 5, 5, 6, 11 and 12 tokens, and half of their sum is the bound.
    assert device.passes == [41, 18, 11, 12]


def test_each_model_of_a_sum_has_a_bound_of_its_own() -> None:
    settings = RewardModel("model", "", 1.0, "policy", "model.reward", "model.reward_tokenizer")
    first, second = SequenceReward(llama()), SequenceReward(llama(seed=4))
    told, summed = Told(), SummedReward([(settings, first), (settings, second)])
    expected = alone(first.model) + alone(second.model)
    passes = ModelPasses(None, None, True, told)
    calls, device = shapes_of(first.model), Device(second.model, most_tokens=40)

    found = scores_of(passes, summed)

    assert calls == [(6, 12)], "memory that another model lacks costs it no second pass"
    assert told.counted["out_of_memory"] == ["pass"] and device.passes[0] == 72 and max(device.passes[1:]) <= 40
    torch.testing.assert_close(found.float(), expected, atol=1e-5, rtol=0)
    device.passes.clear()
    scores_of(passes, summed)
    assert max(device.passes) <= 40, "the bound stays"


@pytest.mark.gpu
def test_a_kernel_of_a_card_packs_a_reward_model_in_16_bits() -> None:
    config = LlamaConfig(
        vocab_size=tiny.VOCABULARY_SIZE, hidden_size=128, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    exact = scorer(LlamaForSequenceClassification, config)
    reward = SequenceReward(scorer(LlamaForSequenceClassification, config).to("cuda", torch.bfloat16))

    pack_scored_rows([reward.model], reward.model.device)

    assert packs_scored_rows(reward.model)
    torch.testing.assert_close(scored(reward).cpu(), alone(exact), atol=0.4, rtol=0)
