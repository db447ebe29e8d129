"""The mistakes of the originals: a test a row, each with what the original gives, so that it fails on that.

The originals are coati's `NaiveExperienceMaker` and `ExperienceBuffer`, and LightRFT's `replay_buffer_utils`. What they
give is worked out here in a line or two of its own, or stated. Models are tables (tests/support/tables.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.advantages import k3_kl
from pipeline.experience.types import Experience
from pipeline.rollout.generation.stops import parse_stop_token_ids
from pipeline.rollout.maker import NaiveExperienceMaker
from tests.support import tiny
from tests.support.tables import EOS, PAD, TableActor, TableCritic, Tokenizer

UNIFORM = torch.zeros(8, 8)
PROMPTS, MASK = torch.tensor([[PAD, 4], [5, 4]]), torch.tensor([[0, 1], [1, 1]])
SAID = [[2, 3, EOS], [3, 2]]
"""In `max_length` 6: the first ends with eos and is padded by 1, the second has no stop and is padded by 2."""


class Recorder:
    """A reward model that scores nothing and keeps its calls, to be compared with what coati passes."""

    def __init__(self, score: float = 0.0) -> None:
        self.score = score
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **call: Any) -> Tensor:
        self.calls.append(call)
        return torch.full((len(call["input_ids"]),), self.score)


def maker(**changes: Any) -> NaiveExperienceMaker:
    arguments: dict[str, Any] = {
        "actor": TableActor(UNIFORM, {4: SAID}),
        "critic": TableCritic({4: 40.0, 5: 50.0, 2: 20.0, 3: 30.0, EOS: 10.0}),
        "reward_model": Recorder(),
        "initial_model": TableActor(UNIFORM),
        "tokenizer": Tokenizer(),
        **changes,
    }
    return NaiveExperienceMaker(**arguments)


def ids_as_values(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """A critic that, unlike `TableCritic`, may be read in the padding, as coati does."""
    return input_ids.float()


def experience_of(**changes: Any) -> Experience:
    return maker(**changes).make_experience(PROMPTS, MASK, max_length=6)


def rows(value: Tensor | None) -> list[Any]:
    assert value is not None
    result: list[Any] = value.tolist()
    return result


# --- the maker


def test_row_seeds_the_global_generator_with_41() -> None:
    torch.manual_seed(41)
    states = [torch.get_rng_state()]
    makers = [maker(actor=tiny.llama(), initial_model=tiny.llama(), critic=ids_as_values) for _ in range(2)]

    first, second, elsewhere = (
        maker_.make_experience(PROMPTS, MASK, max_length=20).sequences for maker_ in (*makers[:1] * 2, makers[1])
    )

    states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert not torch.equal(first, second)
    assert not torch.equal(first, elsewhere)


def test_row_value_read_at_the_token_and_from_the_wrong_columns() -> None:
    """The original takes the last A columns of the right-padded rows [4 2 3 eos pad pad] and [5 4 3 2 pad pad]."""
    original = [[3.0, 1.0, 0.0, 0.0], [3.0, 2.0, 0.0, 0.0]]

    values = rows(experience_of(critic=ids_as_values).values)

    assert values == [[4.0, 2.0, 3.0, 0.0], [4.0, 3.0, 0.0, 0.0]] != original
    assert rows(experience_of(critic=ids_as_values, compat="coati").values) == original


def test_row_score_added_to_every_action() -> None:
    """Gamma and lambda 0 leave the reward minus the value; the values are 0."""
    original = [[3.0, 3.0, 3.0, 0.0], [3.0, 3.0, 0.0, 0.0]]

    def advantages(**changes: Any) -> list[Any]:
        zero: Any = lambda input_ids, attention_mask: input_ids * 0.0  # noqa: E731
        return rows(experience_of(critic=zero, reward_model=Recorder(3.0), gamma=0.0, lam=0.0, **changes).advantages)

    assert advantages() == [[0.0, 0.0, 3.0, 0.0], [0.0, 3.0, 0.0, 0.0]] != original
    assert advantages(compat="coati") == original


@pytest.mark.parametrize(
    ("log_ratio", "right", "original"),
    [(2.0, 1.1353353, 4.3890561), (-2.0, 4.3890561, 1.1353353), (12.0, 11.0000061, -12.0)],
)
def test_row_k3_ratio_inverted_and_negative_above_10(log_ratio: float, right: float, original: float) -> None:
    """Right: exp(-k) - 1 + k. The original: exp(k) - 1 - k, and -k above 10."""
    kl = k3_kl(torch.tensor([[log_ratio]]), torch.tensor([[True]])).item()

    assert kl == pytest.approx(right, rel=1e-6)
    assert kl != pytest.approx(original, rel=1e-2)


def test_row_reward_model_and_critic_attend_one_pad_token() -> None:
    """The original's mask ends at response_end inclusive: 5 and 5 tokens attended, of rows with 4 and 4."""
    original = [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]]
    reward = Recorder()
    maker_ = maker(reward_model=reward)

    maker_.make_experience(PROMPTS, MASK, max_length=6)

    assert reward.calls[0]["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]] != original
    assert reward.calls[0]["response_end"].tolist() == [4, 4]


def test_row_attention_mask_is_sequences_unequal_pad() -> None:
    """With pad = eos the original masks the stop, and an eos that the prompt really contains."""

    class PadIsEos(Tokenizer):
        pad_token_id = EOS

    prompts, mask = torch.tensor([[EOS, EOS, 4]]), torch.tensor([[0, 1, 1]])
    maker_ = maker(actor=TableActor(UNIFORM, {4: [[2, EOS]]}), tokenizer=PadIsEos())

    experience = maker_.make_experience(prompts, mask, max_length=6)

    original = (experience.sequences != EOS).long().tolist()
    assert original == [[0, 0, 1, 1, 0, 0]]
    assert rows(experience.attention_mask) == [[0, 1, 1, 1, 1, 0]] != original
    assert rows(experience.action_mask) == [[True, True, False]]


def test_row_no_position_ids() -> None:
    """A GPT-2 without them numbers the padding too, and is off by far more than rounding on the same row."""
    prompts, mask = torch.tensor([[PAD] * 6 + [4, 9]]), torch.tensor([[0] * 6 + [1, 1]])
    actor = tiny.gpt2()
    maker_ = maker(actor=actor, initial_model=tiny.gpt2(seed=1), critic=None, use_grpo=True, num_generation=2)

    experience = maker_.make_experience(prompts, mask, max_length=12, seed=3)

    assert experience.action_log_probs is not None
    assert experience.action_mask is not None
    bare = experience.sequences[:1, 6:]
    with torch.no_grad():
        without_padding = actor(bare).logits.log_softmax(-1)
        attention = torch.cat([mask, torch.ones(1, 4).long()], dim=1)
        original = actor(experience.sequences[:1], attention_mask=attention).logits[:, 6:].log_softmax(-1)
    length = int(experience.action_mask[0].sum())
    right, wrong = (table[0, 1:-1].gather(1, bare[0, 2:, None])[:length, 0] for table in (without_padding, original))
    torch.testing.assert_close(experience.action_log_probs[0, :length], right, atol=1e-5, rtol=0)
    assert (wrong - right).abs().max() > 0.1


def test_row_without_a_stop_pads_count_as_actions() -> None:
    original = [[True] * 4, [True] * 4]

    experience = maker().make_experience(PROMPTS, MASK, max_length=6, stop_token_ids=[[7]])

    assert rows(experience.action_mask) == [[True, True, True, False], [True, True, False, False]] != original


def test_row_length_truncated_rows_keep_all_their_tokens() -> None:
    maker_ = maker(actor=TableActor(UNIFORM, {4: [[2, 2, 2, 2], [3, EOS]]}))

    experience = maker_.make_experience(PROMPTS, MASK, max_length=6)

    assert rows(experience.action_mask) == [[True] * 4, [True, True, False, False]]


@pytest.mark.parametrize("stops", [None, []])
def test_row_stop_token_ids_none_or_empty_crash(stops: Any) -> None:
    experience = maker().make_experience(PROMPTS, MASK, max_length=6, stop_token_ids=stops)

    assert rows(experience.action_mask)[0] == [True, True, True, False]


def test_row_gt_answer_none_crashes() -> None:
    reward = Recorder()

    maker(reward_model=reward).make_experience(PROMPTS, MASK, max_length=6, gt_answer=None)

    assert reward.calls[0]["gt_answer"] == [None, None]


def test_row_inference_batch_size_freezes_at_the_first_batch() -> None:
    """Frozen at 1, the second call would score its two rows one by one."""
    reward = Recorder()
    maker_ = maker(reward_model=reward)

    maker_.make_experience(PROMPTS[:1], MASK[:1], max_length=6)
    maker_.make_experience(PROMPTS, MASK, max_length=6)

    assert [len(call["input_ids"]) for call in reward.calls] == [1, 2] != [1, 1, 1]
    assert maker_.inference_batch_size is None


def test_row_critic_and_logits_over_the_whole_batch() -> None:
    """Rows and columns of logits computed at a time; the original: 4 rows, all 6 columns."""
    shapes: list[tuple[int, int]] = []
    critic_rows: list[int] = []

    class Bounded(TableActor):
        def __call__(self, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int = 0) -> Any:
            shapes.append((len(input_ids), logits_to_keep))
            return super().__call__(input_ids[:, -logits_to_keep:], attention_mask)

    class Counted(TableCritic):
        def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            critic_rows.append(len(input_ids))
            return super().__call__(input_ids, attention_mask)

    actor = Bounded(UNIFORM, {4: SAID * 2})
    critic = Counted({4: 1.0, 5: 1.0, 2: 1.0, 3: 1.0, EOS: 1.0})
    maker_ = maker(actor=actor, critic=critic, logits_forward_batch_size=2)

    maker_.make_experience(PROMPTS.repeat(2, 1), MASK.repeat(2, 1), max_length=6)

    assert shapes == [(2, 5), (2, 5)] != [(4, 6)]
    assert critic_rows == [2, 2] != [4]


@pytest.mark.parametrize("max_length", [2, 1])
def test_row_a_prompt_that_fills_max_length(max_length: int) -> None:
    with pytest.raises(ValueError, match=f"prompts are 2 columns wide; max_length {max_length} leaves no response"):
        maker().make_experience(PROMPTS, MASK, max_length=max_length)


def test_row_advantages_come_out_of_inference_mode() -> None:
    with torch.inference_mode():
        original = torch.ones(2, 4)
    log_probs = torch.zeros(2, 4, requires_grad=True)
    maker_ = maker()
    advantages = maker_.make_experience(PROMPTS, MASK, max_length=6).advantages
    direct = maker_.calculate_advantage(torch.ones(2, 4), torch.ones(2, 4), 4)
    assert advantages is not None

    (log_probs * (advantages + direct)).sum().backward()

    assert not advantages.is_inference()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        (log_probs * original).sum().backward()


# --- what the originals do and we match


def test_match_stop_token_ids_in_their_three_forms() -> None:
    assert parse_stop_token_ids(7) == ((7,),)
    assert parse_stop_token_ids([7, 8]) == ((7, 8),) != ((7,), (8,))
    assert parse_stop_token_ids([[7], [8, 9]]) == ((7,), (8, 9))


def test_match_the_stop_belongs_to_the_response() -> None:
    experience = maker().make_experience(PROMPTS[:1], MASK[:1], max_length=6, stop_token_ids=[[2, 3]])

    assert experience.sequences.tolist() == [[PAD, 4, 2, 3, PAD, PAD]]
    assert rows(experience.action_mask) == [[True, True, False, False]]


def test_match_the_clip_is_in_ppo_only_and_the_raw_reward_is_kept() -> None:
    def reward(**call: Any) -> Tensor:
        return torch.tensor([5.0, 10.0])

    said = TableActor(UNIFORM, {4: [[2, EOS], [2, EOS]]})
    same = torch.tensor([[4], [4]])
    ppo = maker(actor=said, reward_model=reward).make_experience(same, same != 0, max_length=4)
    said = TableActor(UNIFORM, {4: [[2, EOS], [2, EOS]]})
    grpo = maker(actor=said, reward_model=reward, critic=None, use_grpo=True, num_generation=2)

    group = rows(grpo.make_experience(same[:1], same[:1] != 0, max_length=4).advantages)

    advantages = rows(ppo.advantages)
    assert advantages[0] == advantages[1]
    assert rows(ppo.reward) == [5.0, 10.0]
    assert group == pytest.approx([-0.70709, 0.70709], abs=1e-4)


def test_match_the_kl_of_grpo_is_inside_the_group_score() -> None:
    """Equal scores, and the KL alone tells the responses apart: small noise in place of zero."""
    skewed = UNIFORM.clone()
    skewed[:, 2] = 1e-4
    actor = TableActor(skewed, {4: [[2, EOS], [3, EOS]]})

    experience = maker(actor=actor, critic=None, use_grpo=True, num_generation=2).make_experience(
        PROMPTS[:1], MASK[:1], max_length=6
    )

    noise = max(abs(advantage) for advantage in rows(experience.advantages))
    assert 0 < noise < 0.01


def test_match_prompts_are_left_padded_and_results_padded_to_max_length() -> None:
    experience = maker().make_experience(PROMPTS, MASK, max_length=9)

    assert experience.sequences.shape == (2, 9)
    assert experience.sequences[0].tolist() == [PAD, 4, 2, 3, EOS, PAD, PAD, PAD, PAD]
    with pytest.raises(FieldError, match="row 0: the prompt has padding after a real token; pad on the left"):
        maker().make_experience(PROMPTS.flip(1), MASK.flip(1), max_length=9)
    with pytest.raises(FieldError, match=r"input_ids is torch\.float32; token ids are integers"):
        maker().make_experience(PROMPTS.float(), MASK, max_length=9)
    with pytest.raises(ShapeError, match=r"input_ids of shape \(2, 2\), attention_mask \(2, 1\)"):
        maker().make_experience(PROMPTS, MASK[:, 1:], max_length=9)
