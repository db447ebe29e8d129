"""The rollout benchmark compares equal work: its ways make equal rows, and a difference is reported."""

import dataclasses

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benches import rollout_peers as peers
from benches.rollout import _COATI, _GENERATE, _OURS, check, coati, ours
from benches.rollout_card import read_bytes
from benches.rollout_peers import EOS, PAD, Work

WORK = Work(prompts=3, prompt_tokens=12, group_size=2, new_tokens=10)


@pytest.fixture(scope="module")
def made():
    actor, reference = (peers.model(32, 2, 60, seed=seed) for seed in (0, 0))
    return {
        _OURS: [ours(actor, reference, WORK, 60)],
        _GENERATE: [ours(actor, reference, WORK, 60, plain=True)],
        _COATI: [coati(actor, reference, WORK, 60)],
    }


def test_all_ways_make_the_same_tokens_and_log_probs(made):
    check(made)
    assert int(made[_OURS][0].lengths.sum()) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda one: {"tokens": one.tokens.flip(1)}, "generate made other tokens"),
        (lambda one: {"lengths": one.lengths - 1}, "generate made other tokens"),
        (lambda one: {"log_probs": one.log_probs + 3e-5}, "generate: log_probs are off by"),
        (lambda one: {"base_log_probs": one.base_log_probs * 1.01}, "generate: base_log_probs are off by"),
    ],
)
def test_a_way_that_makes_something_else_is_refused(made, changes, message):
    (one,) = made[_GENERATE]
    wrong = {**made, _GENERATE: [dataclasses.replace(one, **changes(one))]}

    with pytest.raises(RuntimeError, match=message):
        check(wrong)


def test_a_response_ends_with_its_first_eos():
    tokens = torch.tensor([[5, EOS, 7, EOS], [5, 6, 7, 8], [EOS, PAD, PAD, PAD]])

    assert peers.lengths_of(tokens).tolist() == [2, 4, 1]


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_on_a_card_reads_the_input_embedding_as_the_head_alone(tied):
    config = LlamaConfig(
        vocab_size=10, hidden_size=4, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip

    found = read_bytes(LlamaForCausalLM(config))

    # The head; queries and the output, keys and values; the MLP; three norms. Four bytes each.
    assert found == 4 * (10 * 4 + 2 * 4 * 4 + 2 * 4 * 2 + 3 * 4 * 6 + 3 * 4)


def test_texts_are_prompts_without_their_padding():
    assert peers.texts(torch.tensor([[0, 7, 12]]), torch.tensor([[0, 1, 1]])) == ["7 12"]
    assert peers.tokenizer(20)("7 12")["input_ids"] == [7, 12]
