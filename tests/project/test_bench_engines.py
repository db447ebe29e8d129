"""The benchmark of engines gives all ways the same work: prompts choose the lengths, and one in 64 is a straggler."""

import json

import torch

from benches import chain
from benches.engine_ways import Prompts, plain_generate
from benches.rollout_peers import EOS, PAD


def test_a_response_is_the_tokens_after_its_prompts_last_one_up_to_eos():
    actor, lengths = chain.model(64, 2), (2, 9, 40)
    prompts = torch.tensor([[5, 900, chain.last_token(length)] for length in lengths])

    torch.manual_seed(0)
    made = actor.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=50, do_sample=True, temperature=1.0, top_k=0,
        eos_token_id=EOS, pad_token_id=PAD,
    )[:, 3:]  # fmt: skip

    for row, length in zip(made.tolist(), lengths, strict=True):
        after = [*range(chain.last_token(length) + 1, chain.VOCABULARY), EOS]
        assert len(after) == length
        assert row[:length] == after
        assert set(row[length:]) <= {PAD}


def test_a_way_counts_the_tokens_that_the_prompts_choose(tmp_path):
    actor, lengths = chain.model(64, 2), chain.ragged(12, 16)
    chain.write(tmp_path, actor, lengths)
    written = [json.loads(line)["prompt"].split() for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [chain.VOCABULARY - int(words[-1]) for words in written] == lengths
    assert max(map(len, written)) <= chain.LONGEST_PROMPT
    prompts = Prompts(tmp_path)

    turn = plain_generate(actor, prompts, 0, 12, 4, 16)

    # A first epoch has each prompt once; two responses of each.
    assert (turn.prompts, turn.tokens) == (12, 2 * sum(lengths))
    prompts.close()


def test_one_response_in_64_is_ten_times_as_long():
    lengths = chain.straggling(256, 7)

    assert sorted(lengths) == [7] * 252 + [70] * 4
