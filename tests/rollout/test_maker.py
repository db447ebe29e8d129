"""The maker: the originals' faults one by one over small fakes, and real tiny models.

`test_worked_by_hand` has PPO and GRPO from prompts to advantages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from pipeline.config.schema import TrainerConfig
from pipeline.errors import FieldError, RewardError, ShapeError, TokenError
from pipeline.experience import codec
from pipeline.experience.batching import make_experience_batch, remove_padding_in_sequences, split_experience_batch
from pipeline.experience.types import Experience
from pipeline.models.critic import Critic
from pipeline.models.log_probs import action_log_probs, action_values
from pipeline.rollout.generation.interface import Responses, Sampling
from pipeline.rollout.generation.transformers import TransformersGenerator
from pipeline.rollout.maker import ExperienceMaker, NaiveExperienceMaker
from pipeline.rollout.prompt_batch import read_sampling
from pipeline.rollout.reward.functions import FunctionReward
from pipeline.trainer.learner import Learner
from tests.support import tiny
from tests.support.experiences import stored
from tests.support.tiny import Tokenizer

PAD, EOS = 0, 1
L2 = math.log(2.0)


class FakeActor:
    """Generates the given responses row by row; every position has the same distribution over 8 tokens."""

    def __init__(self, responses: list[list[int]], probs: dict[int, float]) -> None:
        self.responses = responses
        self.logits = torch.tensor([probs.get(token, 0.0) for token in range(8)]).log()
        self.generate_calls: list[dict[str, Any]] = []
        self.forward_calls: list[dict[str, Any]] = []

    def generate(self, input_ids: Tensor, attention_mask: Tensor, **keywords: Any) -> Tensor:
        first = sum(len(call["input_ids"]) for call in self.generate_calls) % len(self.responses)
        self.generate_calls.append({"input_ids": input_ids, "attention_mask": attention_mask, **keywords})
        responses = self.responses[first : first + len(input_ids)]
        width = max(len(response) for response in responses)
        padded = [response + [PAD] * (width - len(response)) for response in responses]
        return torch.cat([input_ids, torch.tensor(padded)], dim=1)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, **keywords: Any) -> SimpleNamespace:
        self.forward_calls.append({"input_ids": input_ids, "attention_mask": attention_mask, **keywords})
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, 8))


class FakeCritic:
    """The value after a token is its id."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.calls.append((input_ids, attention_mask))
        return input_ids.float()


class FakeReward:
    """Gives the rows these scores, in order."""

    def __init__(self, scores: list[float]) -> None:
        self.scores = scores
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        response_start: Tensor,
        response_end: Tensor,
        gt_answer: list[Any],
    ) -> Tensor:
        first = sum(len(call["input_ids"]) for call in self.calls) % len(self.scores)
        self.calls.append(
            {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "response_start": response_start,
                "response_end": response_end,
                "gt_answer": gt_answer,
            }
        )
        return torch.tensor(self.scores[first : first + len(input_ids)])


ACTOR_PROBS = {2: 0.5, 3: 0.25, EOS: 0.25}
REFERENCE_PROBS = {2: 0.25, 3: 0.25, EOS: 0.5}
"""So that k is ln 2 for token 2, 0 for token 3 and -ln 2 for eos."""

PROMPTS = torch.tensor([[PAD, 5, 6], [4, 5, 7]])
MASK = torch.tensor([[0, 1, 1], [1, 1, 1]])
RESPONSES = [[2, 3, EOS], [2, 2, 2, 2]]
"""The first ends with its stop, the second is cut off at max_length 7."""


def maker(**changes: Any) -> NaiveExperienceMaker:
    """PPO over the fakes; `changes` name arguments of the maker, or `responses` and `scores` of the fakes."""
    responses = changes.pop("responses", RESPONSES)
    scores = changes.pop("scores", [2.0, 10.0])
    arguments: dict[str, Any] = {
        "actor": FakeActor(responses, ACTOR_PROBS),
        "critic": None if changes.get("use_grpo") else FakeCritic(),
        "reward_model": FakeReward(scores),
        "initial_model": FakeActor(responses, REFERENCE_PROBS),
        "tokenizer": Tokenizer(),
        "kl_coef": 0.1,
        "gamma": 0.5,
        "lam": 0.5,
        **changes,
    }
    return NaiveExperienceMaker(**arguments)


def real(value: Tensor | None) -> Tensor:
    """The field, which must be there."""
    assert value is not None
    return value


def close(value: Tensor | None, expected: list[Any]) -> None:
    torch.testing.assert_close(real(value), torch.tensor(expected, dtype=torch.float32), atol=1e-5, rtol=0)


@pytest.mark.parametrize("use_grpo", [False, True])
def test_shapes_and_dtypes_are_those_of_the_table(use_grpo: bool) -> None:
    maker_ = maker(responses=RESPONSES * 2, scores=[1.0, 2.0, 3.0, 4.0], use_grpo=use_grpo, num_generation=2)

    experience = maker_.make_experience(PROMPTS, MASK, max_length=7)

    rows = 4 if use_grpo else 2
    per_row = (rows,) if use_grpo else (rows, 4)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "sequences": ((rows, 7), torch.int64),
        "attention_mask": ((rows, 7), torch.int64),
        "action_log_probs": ((rows, 4), torch.float32),
        "base_action_log_probs": ((rows, 4), torch.float32),
        "action_mask": ((rows, 4), torch.bool),
        "values": (per_row, torch.float32),
        "kl": (per_row, torch.float32),
        "advantages": (per_row, torch.float32),
        "reward": ((rows,), torch.float32),
    }
    for name, (shape, dtype) in shapes.items():
        value = getattr(experience, name)
        assert (value.shape, value.dtype, value.device.type) == (shape, dtype, "cpu"), name
    assert isinstance(maker_, ExperienceMaker)
    assert isinstance(experience, Experience)


def test_ppo_clips_scores_and_grpo_does_not() -> None:
    ppo = maker(responses=[[2, EOS]] * 2, scores=[5.0, 10.0])
    grpo = maker(responses=[[2, EOS]] * 2, scores=[5.0, 10.0], use_grpo=True, num_generation=2)
    prompts = torch.tensor([[5, 6]])

    clipped = real(ppo.make_experience(prompts.repeat(2, 1), torch.ones(2, 2), max_length=5).advantages)
    group = real(grpo.make_experience(prompts, torch.ones(1, 2), max_length=5).advantages)

    assert torch.equal(clipped[0], clipped[1])
    assert group[0] < -0.7
    assert group[1] > 0.7


def test_coatis_conventions_come_with_compat() -> None:
    """Values AT the token, from the last columns of right-padded rows; the score on every action; the inverted kl.

    The first prompt is left-padded, so that its last four right-padded columns are one further off: 3, eos, pad, pad.
    """
    maker_ = maker(compat="coati", gamma=1.0, lam=0.0)

    experience = maker_.make_experience(PROMPTS, MASK, max_length=7)

    close(experience.values, [[3, 1, 0, 0], [2, 2, 2, 2]])
    close(experience.reward, [2, 10])
    close(experience.kl, [[2 - 1 - L2, 0, 0.5 - 1 + L2, 0], [1 - L2] * 4])
    k = 0.1 * L2
    close(experience.advantages, [[2 - k + 1 - 3, 2 + 0 - 1, 2 + k, 0], [5 - k] * 3 + [5 - k - 2]])


# --- the originals' faults, one by one


def test_calls_without_a_seed_differ_and_no_call_touches_the_random_state() -> None:
    """The original seeds the global generator with 41 in every call: each call, and each worker, samples the same."""
    one, another = (
        maker(actor=tiny.llama(), initial_model=tiny.llama(), reward_model=FakeReward([0.0, 0.0])) for _ in range(2)
    )
    state = torch.get_rng_state()

    first, second, elsewhere = (
        maker_.make_experience(PROMPTS, MASK, max_length=16).sequences for maker_ in (one, one, another)
    )

    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, second)
    assert not torch.equal(first, elsewhere)


def test_sampling_depends_on_the_seed_alone() -> None:
    def made(seed: int, constructor_seed: int, **changes: Any) -> Experience:
        maker_ = real_maker(tiny.llama, seed=constructor_seed, **changes)
        return maker_.make_experience(LONG_PROMPTS, LONG_MASK, max_length=17, seed=seed)

    torch.manual_seed(1)
    first = made(seed=7, constructor_seed=1)
    torch.manual_seed(2)

    again = made(seed=7, constructor_seed=2)
    for name in ("sequences", "action_log_probs", "base_action_log_probs", "values", "kl", "advantages", "reward"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
    assert torch.equal(first.sequences, made(seed=7, constructor_seed=1, inference_batch_size=1).sequences)
    assert not torch.equal(first.sequences, made(seed=8, constructor_seed=1).sequences)


def test_a_keyword_of_sampling_that_is_none_has_its_default() -> None:
    """As in the calls of coati and transformers."""
    none: dict[str, Any] = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "do_sample"))
    tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS)
    options: Any = {"temperature": 0.5, "seeds": torch.Generator()}

    given, others = read_sampling({"max_length": 7, "seed": 1, **none}, 3, tokenizer, **options)

    assert (given, others) == read_sampling({"max_length": 7, "seed": 1}, 3, tokenizer, **options)
    assert (given.temperature, given.top_p, given.top_k, given.do_sample) == (0.5, 1.0, 0, True)


def test_a_maker_with_a_seed_repeats_its_calls() -> None:
    def calls() -> list[Tensor]:
        maker_ = maker(actor=tiny.llama(), initial_model=tiny.llama(), reward_model=FakeReward([0.0, 0.0]), seed=5)
        return [maker_.make_experience(PROMPTS, MASK, max_length=16).sequences for _ in range(2)]

    first, second = calls()

    assert not torch.equal(first, second)
    assert all(torch.equal(*pair) for pair in zip(calls(), (first, second), strict=True))


@pytest.mark.parametrize("padding", [0, 1, 5])
def test_values_are_those_of_the_state_before_the_token_however_the_prompt_is_padded(padding: int) -> None:
    prompts, mask = (torch.nn.functional.pad(tensor, (padding, 0)) for tensor in (PROMPTS, MASK))

    experience = maker().make_experience(prompts, mask, max_length=7 + padding)

    close(experience.values, [[6, 2, 3, 0], [7, 2, 2, 2]])


def test_reward_model_and_critic_attend_exactly_the_real_tokens() -> None:
    maker_ = maker()

    maker_.make_experience(PROMPTS, MASK, max_length=7, gt_answer=["a", "b"])

    (call,) = maker_.reward_model.calls
    assert call["input_ids"].tolist() == [[5, 6, 2, 3, EOS, PAD, PAD], [4, 5, 7, 2, 2, 2, 2]]
    assert call["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0], [1] * 7]
    assert call["response_start"].tolist() == [2, 3]
    assert call["response_end"].tolist() == [5, 7]
    assert call["gt_answer"] == ["a", "b"]
    ((ids, mask),) = maker_.critic.calls
    assert torch.equal(ids, call["input_ids"])
    assert torch.equal(mask, call["attention_mask"])


def test_pad_that_is_eos_masks_neither_the_stop_nor_real_tokens() -> None:
    """The original takes `sequences != pad` for the mask. The prompt holds the pad token as a real one, too."""
    tokenizer = Tokenizer()
    tokenizer.pad_token_id = EOS
    prompts = torch.tensor([[EOS, 5, EOS]])
    maker_ = maker(responses=[[2, 3, EOS, EOS]], scores=[1.0], tokenizer=tokenizer)

    experience = maker_.make_experience(prompts, torch.tensor([[0, 1, 1]]), max_length=8)

    assert real(experience.attention_mask).tolist() == [[0, 1, 1, 1, 1, 1, 0, 0]]
    assert real(experience.action_mask).tolist() == [[True, True, True, False, False]]
    # Without the column that is padding in all prompts.
    assert maker_.actor.generate_calls[0]["attention_mask"].tolist() == [[1, 1]]
    assert maker_.actor.generate_calls[0]["input_ids"].tolist() == [[5, EOS]]


def test_position_ids_come_from_the_mask_in_every_forward() -> None:
    maker_ = maker()

    maker_.make_experience(PROMPTS, MASK, max_length=7, seed=0)

    for model in (maker_.actor, maker_.initial_model):
        (call,) = model.forward_calls
        assert call["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 0], [1] * 7]
        assert call["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize(
    ("stops", "response", "length"),
    [
        ([[3, 3], [7]], [2, 3, 3, 2], 3),
        ([3, 3], [2, 3, 2, 3, 3], 5),
        (7, [2, 7, 2], 2),
        ([[7]], [2, EOS, 2], 2),
        (None, [2, EOS, 2], 2),
        ([], [2, EOS, 2], 2),
        (None, [2, 3, 2], 3),
        ([[7]], [2, 2, 2, 2, 2], 5),
    ],
)
def test_a_response_ends_at_its_stop_else_at_eos_else_before_the_padding(
    stops: Any, response: list[int], length: int
) -> None:
    """Shorter ones are padded by the actor; the last one is cut off at max_length and keeps all its tokens."""
    maker_ = maker(
        actor=FakeActor([response + [PAD] * (5 - len(response))], dict.fromkeys(range(8), 0.125)),
        initial_model=FakeActor([response], dict.fromkeys(range(8), 0.125)),
        scores=[1.0],
    )

    experience = maker_.make_experience(PROMPTS[1:], MASK[1:], max_length=8, stop_token_ids=stops)

    assert real(experience.action_mask).sum().item() == length
    assert experience.sequences[0].tolist() == [4, 5, 7, *response[:length], *[PAD] * (5 - length)]


def test_without_answers_the_reward_model_gets_none_for_each_row() -> None:
    maker_ = maker()

    maker_.make_experience(PROMPTS, MASK, max_length=7)

    assert maker_.reward_model.calls[0]["gt_answer"] == [None, None]


def test_answers_are_repeated_with_their_prompts() -> None:
    maker_ = maker(responses=[[2, EOS]] * 4, scores=[1.0] * 4, use_grpo=True, num_generation=2)

    maker_.make_experience(PROMPTS, MASK, max_length=7, gt_answer=["a", "b"])

    assert maker_.reward_model.calls[0]["gt_answer"] == ["a", "a", "b", "b"]


def test_the_mini_batch_is_not_frozen_at_the_first_batchs_size() -> None:
    maker_ = maker(responses=[[2, EOS]] * 6, scores=[1.0] * 6)

    maker_.make_experience(PROMPTS[:1], MASK[:1], max_length=7)
    maker_.make_experience(PROMPTS.repeat(2, 1), MASK.repeat(2, 1), max_length=7)

    assert [len(call["input_ids"]) for call in maker_.actor.generate_calls] == [1, 4]
    assert [len(call["input_ids"]) for call in maker_.reward_model.calls] == [1, 4]


def test_every_model_runs_in_mini_batches_and_nothing_changes() -> None:
    prompts, mask = PROMPTS.repeat(3, 1)[:5], MASK.repeat(3, 1)[:5]
    changes: dict[str, Any] = {"responses": (RESPONSES * 3)[:5], "scores": [1.0, 2.0, 3.0, 4.0, 5.0]}
    whole = maker(**changes, logits_forward_batch_size=None).make_experience(prompts, mask, max_length=7)
    maker_ = maker(**changes, inference_batch_size=4, logits_forward_batch_size=2)

    parts = maker_.make_experience(prompts, mask, max_length=7)

    for name in ("sequences", "action_log_probs", "base_action_log_probs", "values", "kl", "advantages", "reward"):
        assert torch.equal(real(getattr(parts, name)), real(getattr(whole, name))), name
    assert [len(call["input_ids"]) for call in maker_.actor.generate_calls] == [4, 1]
    assert [len(call["input_ids"]) for call in maker_.reward_model.calls] == [4, 1]
    assert [len(ids) for ids, _ in maker_.critic.calls] == [2, 2, 1]
    for model in (maker_.actor, maker_.initial_model):
        assert [len(call["input_ids"]) for call in model.forward_calls] == [2, 2, 1]
        assert {call["logits_to_keep"] for call in model.forward_calls} == {5}


def test_a_prompt_that_fills_max_length_is_refused_with_both_lengths() -> None:
    for max_length in (3, 2):
        with pytest.raises(ValueError, match=f"prompts are 3 columns wide; max_length {max_length}"):
            maker().make_experience(PROMPTS, MASK, max_length=max_length)


@pytest.mark.parametrize("use_grpo", [False, True])
def test_no_field_is_an_inference_tensor_and_advantages_work_in_a_backward_pass(use_grpo: bool) -> None:
    """The original computes advantages in inference_mode."""
    maker_ = maker(use_grpo=use_grpo, num_generation=2, responses=RESPONSES * 2, scores=[1.0, 2.0, 3.0, 4.0])
    experience = maker_.make_experience(PROMPTS, MASK, max_length=7)
    log_probs = torch.zeros_like(real(experience.action_log_probs), requires_grad=True)
    advantages = real(experience.advantages)

    (log_probs * (advantages.unsqueeze(1) if use_grpo else advantages)).sum().backward()

    assert real(log_probs.grad).abs().sum() > 0
    for name in ("sequences", "action_log_probs", "values", "reward", "kl", "advantages", "action_mask"):
        assert not getattr(experience, name).is_inference(), name


def test_equal_scores_leave_small_noise_from_the_kl_alone() -> None:
    maker_ = maker(responses=[[2, 2, EOS], [3, EOS]], scores=[1.0, 1.0], use_grpo=True, num_generation=2, kl_coef=1e-6)

    experience = maker_.make_experience(PROMPTS[:1], MASK[:1], max_length=7)

    assert 0 < real(experience.advantages).abs().max() < 0.01
    assert experience.info is not None
    assert experience.info["group_mixed"].tolist() == [False, False]


# --- what is refused


@pytest.mark.parametrize(
    ("prompts", "mask", "error", "message"),
    [
        (PROMPTS, MASK[:, 1:], ShapeError, r"\(2, 3\), attention_mask \(2, 2\)"),
        (PROMPTS[:0], MASK[:0], ShapeError, "at least one prompt"),
        (PROMPTS, None, FieldError, "attention_mask is a NoneType, not a tensor"),
        ([[4, 5]], MASK, FieldError, "input_ids is a list, not a tensor"),
        (PROMPTS, MASK * 0, ShapeError, "row 0: attention_mask has no real token"),
        (PROMPTS, MASK.flip(1), FieldError, "row 0: the prompt has padding after a real token"),
        (PROMPTS, torch.tensor([[1, 0, 1], [1, 1, 1]]), FieldError, "row 0: .* pad on the left"),
    ],
)
def test_prompts_that_are_not_left_padded_are_refused(
    prompts: Any, mask: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        maker().make_experience(prompts, mask, max_length=7)


def test_advantages_of_more_actions_than_there_are_columns_are_refused() -> None:
    value, reward = torch.ones(2, 4), torch.ones(2, 4)
    assert maker().calculate_advantage(value, reward, 3).shape == (2, 3)
    for num_actions in (0, 5):
        with pytest.raises(ShapeError, match=rf"value has shape \(2, 4\), num_actions is {num_actions}"):
            maker().calculate_advantage(value, reward, num_actions)
    with pytest.raises(ShapeError, match=r"values \(2, 4\), rewards \(2, 3\)"):
        maker().calculate_advantage(value, reward[:, :3], 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_grpo": True, "num_generation": 1}, "num_generation is 1"),
        ({"critic": None}, "critic is None"),
        # coati asserts the same; an assertion is gone under -O.
        ({"use_grpo": True, "critic": FakeCritic()}, "critic is a FakeCritic with use_grpo=True.* it must be None"),
        ({"initial_model": None}, "initial_model is None with kl_coef 0.1"),
        ({"compat": "trl"}, "compat is 'trl'"),
        ({"inference_batch_size": 0}, "inference_batch_size is 0"),
        ({"logits_forward_batch_size": 0}, "logits_forward_batch_size is 0"),
    ],
)
def test_impossible_arguments_are_refused_at_construction(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=message):
        maker(**changes)


def test_missing_or_unknown_generation_keywords_are_refused() -> None:
    class Engine:
        def generate(self, *_: Any, **__: Any) -> Responses:
            raise AssertionError

    with pytest.raises(FieldError, match="max_length is missing"):
        maker().make_experience(PROMPTS, MASK)
    with pytest.raises(FieldError, match="unknown generation keyword temprature"):
        maker(generator=Engine()).make_experience(PROMPTS, MASK, max_length=7, temprature=0.5)
    with pytest.raises(ShapeError, match="gt_answer has 1 elements, input_ids has 2 rows"):
        maker().make_experience(PROMPTS, MASK, max_length=7, gt_answer=["a"])


def test_numbers_that_are_not_finite_are_refused_by_model_and_row() -> None:
    broken_reference = FakeActor(RESPONSES, {2: 0.5, EOS: 0.5})
    broken_actor = tiny.llama()
    broken_actor.lm_head.weight.data.fill_(torch.nan)

    with pytest.raises(FieldError, match="row 0: initial_model gave a log-prob of -inf"):
        maker(initial_model=broken_reference).make_experience(PROMPTS, MASK, max_length=7)
    with pytest.raises(FieldError, match="row 0: actor gave a log-prob of nan"):
        maker(actor=broken_actor).make_experience(PROMPTS, MASK, max_length=7)
    with pytest.raises(FieldError, match="row 1: critic gave a value of inf"):
        maker(critic=lambda input_ids, attention_mask: input_ids.float() / (input_ids - 7)).make_experience(
            PROMPTS, MASK, max_length=7
        )
    for rows in (None, 1):
        with pytest.raises(RewardError, match="FakeReward returned nan for row 1"):
            maker(scores=[1.0, math.nan], inference_batch_size=rows).make_experience(PROMPTS, MASK, max_length=7)


def test_log_probs_of_the_sampler_are_looked_at_too_unless_that_is_left_to_the_taker() -> None:
    broken = tiny.llama()
    broken.lm_head.weight.data[7] = torch.nan
    models: dict[str, Any] = {"actor": broken, "initial_model": tiny.llama(), "reuse_sampling_log_probs": True}

    with pytest.raises(FieldError, match="row 0: generator gave a log-prob of nan"):
        maker(**models).make_experience(PROMPTS, MASK, max_length=7)
    experience = maker(**models, refuse_not_finite=False).make_experience(PROMPTS, MASK, max_length=7)

    assert experience.action_log_probs is not None and bool(experience.action_log_probs.isnan().any())


@pytest.mark.parametrize("token", [tiny.VOCABULARY_SIZE, -1])
def test_a_token_that_the_actor_does_not_have_is_refused_before_a_model_dies_of_it(token: int) -> None:
    class Engine:
        def generate(self, input_ids: Tensor, *_: Any, **__: Any) -> Responses:
            sequences = torch.nn.functional.pad(input_ids, (0, 7 - input_ids.shape[1]), value=2)
            sequences[1, 5] = token
            return Responses(sequences, torch.full((len(input_ids),), 7 - input_ids.shape[1]))

    with pytest.raises(TokenError, match=f"row 1: token {token} at position 5; the vocabulary has 23"):
        maker(actor=tiny.llama(), generator=Engine()).make_experience(PROMPTS, MASK, max_length=7)
    prompts = PROMPTS.clone()
    prompts[1, 2] = token
    with pytest.raises(TokenError, match=f"row 1: token {token} at position 2; the vocabulary has 23"):
        maker(actor=tiny.llama()).make_experience(prompts, MASK, max_length=7)


@pytest.mark.parametrize(
    ("lengths", "columns", "message"),
    [([2, 2, 2], 7, r"lengths \(3,\)"), ([2, 2], 6, r"sequences \(2, 6\)"), ([2, 0], 7, "row 1: a response of 0")],
)
def test_an_engine_that_breaks_the_seam_is_refused(lengths: list[int], columns: int, message: str) -> None:
    class Engine:
        def generate(self, input_ids: Tensor, attention_mask: Tensor, sampling: Sampling, **_: Any) -> Responses:
            width = columns - input_ids.shape[1]
            sequences = torch.nn.functional.pad(input_ids, (0, width), value=2)
            return Responses(sequences=sequences, lengths=torch.tensor(lengths))

    with pytest.raises(ShapeError, match=message):
        maker(generator=Engine()).make_experience(PROMPTS, MASK, max_length=7)


# --- with real, tiny models


def real_maker(build: Any, **changes: Any) -> NaiveExperienceMaker:
    actor = build()
    critic = None
    if not changes.get("use_grpo"):
        critic = Critic.from_actor(build(seed=4))
        torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))

    def length_reward(ids: Tensor, mask: Tensor, *, response_start: int, response_end: int, **_: Any) -> float:
        return float(response_end - response_start)

    return NaiveExperienceMaker(
        actor=actor,
        critic=critic,
        reward_model=FunctionReward([length_reward], Tokenizer()),
        initial_model=build(seed=1),
        tokenizer=Tokenizer(),
        **{"seed": 0, "logits_forward_batch_size": None, **changes},
    )


def rebatched(experience: Experience) -> Experience:
    """Every row stripped, in another order, padded anew: on the left only, next to a longer neighbour."""
    items = remove_padding_in_sequences(split_experience_batch(experience))[::-1]
    batch = make_experience_batch(items)
    return batch


LONG_PROMPTS = torch.tensor([[0, 0, 0, 5, 9], [0, 7, 3, 11, 2], [0, 0, 6, 6, 4]])
LONG_MASK = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1]])


def through_an_extent(experience: Experience) -> Experience:
    """The rows written into an extent and read out of it in another order."""
    reader = stored(experience)
    return codec.gather_padded([(reader, list(range(reader.header.rows))[::-1])])


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
@pytest.mark.parametrize("use_grpo", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("way", [rebatched, through_an_extent])
@pytest.mark.parametrize(("padding", "reuse"), [(0, True), (4, False)])
def test_a_step_on_fresh_experience_has_ratio_one_and_no_kl(
    build: Any, use_grpo: bool, temperature: float, way: Callable[[Experience], Experience], padding: int, reuse: bool
) -> None:
    """With the policy itself as the reference; at the first step of the trainer, for every action and every value."""
    settings = {"use_grpo": use_grpo, "temperature": temperature, "reuse_sampling_log_probs": reuse}
    maker_ = real_maker(build, num_generation=3, **settings)
    maker_.initial_model = maker_.actor
    # Groups of one score are left out of a step.
    maker_.reward_model = FunctionReward([lambda ids, mask, **_: float((ids * mask).sum())], Tokenizer())
    prompts = torch.nn.functional.pad(LONG_PROMPTS, (padding, 0))
    experience = maker_.make_experience(prompts, torch.nn.functional.pad(LONG_MASK, (padding, 0)), max_length=17)
    batch = way(experience)
    mask = real(batch.action_mask)
    inputs = batch.sequences, real(batch.attention_mask), mask.shape[1]
    with torch.no_grad():
        log_probs = action_log_probs(maker_.actor, *inputs, temperature=temperature)
        values = None if use_grpo else action_values(maker_.critic, *inputs)
    trainer = TrainerConfig(warmup_steps=0, critic_warmup_steps=0)
    algorithm: Literal["ppo", "grpo"] = "grpo" if use_grpo else "ppo"
    critic = None if use_grpo else maker_.critic
    learner = Learner(trainer, algorithm, maker_.actor, critic, temperature=temperature, kl_coef=0.5)

    stats = learner.update([batch])

    assert len(set(inputs[1].sum(dim=1).tolist())) > 1, "rows of one length would show nothing"
    assert stats.row_importance_ratios == pytest.approx([1.0] * len(mask), abs=1e-5)
    assert stats.clipped_ratio == 0
    assert stats.kl_loss == pytest.approx(0.0, abs=1e-6)
    assert stats.kl_nats == (pytest.approx(0.0, abs=1e-9) if reuse else 0)
    ratios = (log_probs - real(batch.action_log_probs))[mask].exp()
    torch.testing.assert_close(ratios, torch.ones_like(ratios), atol=1e-5, rtol=0)
    to_reference = (log_probs - real(batch.base_action_log_probs))[mask]
    torch.testing.assert_close(to_reference, torch.zeros_like(to_reference), atol=1e-5, rtol=0)
    if values is not None:
        torch.testing.assert_close(values[mask], real(batch.values)[mask], atol=1e-5, rtol=0)


@pytest.mark.parametrize("build", [tiny.llama, tiny.gpt2])
@torch.no_grad()
def test_the_trainers_values_are_the_makers(build: Any) -> None:
    maker_ = real_maker(build)
    experience = maker_.make_experience(LONG_PROMPTS, LONG_MASK, max_length=41)

    batch = rebatched(experience)

    action_mask = real(batch.action_mask)
    values = action_values(maker_.critic, batch.sequences, real(batch.attention_mask), action_mask.shape[1])
    torch.testing.assert_close(values[action_mask], real(batch.values)[action_mask], atol=1e-5, rtol=0)


@torch.no_grad()
def test_log_probs_are_taken_at_the_sampling_temperature_given_to_the_call() -> None:
    maker_ = real_maker(tiny.llama)

    experience = maker_.make_experience(LONG_PROMPTS, LONG_MASK, max_length=17, temperature=0.5)

    mask = real(experience.action_mask)
    expected = action_log_probs(
        maker_.actor, experience.sequences, real(experience.attention_mask), 12, temperature=0.5
    )
    torch.testing.assert_close(real(experience.action_log_probs)[mask], expected[mask], atol=1e-5, rtol=0)


def test_mini_batches_by_length_give_each_row_its_own_log_probs() -> None:
    def made(**options: Any) -> Experience:
        maker_ = real_maker(tiny.llama, use_grpo=True, **options)
        # In float32 one token of the reference, whose attention is near a tie, is off by 6e-5 on some processors.
        maker_.actor.double()
        maker_.initial_model.double()
        return maker_.make_experience(LONG_PROMPTS, LONG_MASK, max_length=17, seed=3)

    whole, parts = made(), made(logits_forward_batch_size=5)

    assert len(set(real(whole.action_mask).sum(1).tolist())) > 1
    for name in ("action_log_probs", "base_action_log_probs"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), atol=1e-6, rtol=0)


def test_the_cached_loop_replaces_generate_and_an_own_generate_is_called() -> None:
    actor = tiny.llama()
    calls: list[dict[str, Any]] = []
    original = actor.generate
    lean = real_maker(tiny.llama).make_experience(LONG_PROMPTS, LONG_MASK, max_length=17, do_sample=False)

    def own(**keywords: Any) -> Any:
        calls.append(keywords)
        return original(**keywords)

    actor.generate = own
    maker_ = real_maker(tiny.llama)
    maker_.actor = actor
    experience = maker_.make_experience(LONG_PROMPTS, LONG_MASK, max_length=17, do_sample=False, use_cache=True)

    assert len(calls) == 1
    assert torch.equal(experience.sequences, lean.sequences)


def test_dropout_is_off_while_experience_is_made_and_on_again_after() -> None:
    maker_ = real_maker(tiny.gpt2)
    maker_.actor.train()
    maker_.actor.transformer.h[0].eval()

    first, second = (maker_.make_experience(LONG_PROMPTS, LONG_MASK, max_length=17, seed=1) for _ in range(2))

    assert torch.equal(real(first.action_log_probs), real(second.action_log_probs))
    assert maker_.actor.training
    assert not maker_.actor.transformer.h[0].training
    assert maker_.actor.transformer.h[1].training


def test_without_a_reference_there_is_no_kl() -> None:
    maker_ = maker(initial_model=None, kl_coef=0.0)

    experience = maker_.make_experience(PROMPTS, MASK, max_length=7)

    assert experience.base_action_log_probs is None
    assert real(experience.kl).abs().sum() == 0


def test_a_tokenizer_without_a_pad_token_pads_with_eos() -> None:
    tokenizer = Tokenizer()
    tokenizer.pad_token_id = None
    maker_ = maker(responses=[[2, EOS, EOS], [3, 3, EOS]], tokenizer=tokenizer)

    experience = maker_.make_experience(PROMPTS, MASK, max_length=7)

    assert experience.sequences[0].tolist() == [EOS, 5, 6, 2, EOS, EOS, EOS]
    assert real(experience.action_mask).sum(1).tolist() == [2, 3]


@pytest.mark.parametrize("listed", [None, 3, [EOS, 2, 3]])
def test_a_maker_alone_ends_responses_as_the_models_files_list(listed: Any) -> None:
    actor = tiny.llama()
    assert actor.generation_config is not None
    actor.generation_config.eos_token_id = listed
    seen: list[set[int]] = []

    class Watched(TransformersGenerator):
        def generate(self, input_ids: Tensor, attention_mask: Tensor, sampling: Sampling, **others: Any) -> Responses:
            seen.append(set(sampling.eos_token_ids))
            return super().generate(input_ids, attention_mask, sampling, **others)

    maker_ = maker(actor=actor, initial_model=actor, scores=[1.0, 2.0], generator=Watched(actor))
    prompts = {"input_ids": PROMPTS, "attention_mask": MASK, "max_length": 40, "seed": 0}

    ends = {EOS, *(listed if isinstance(listed, list) else [listed])}
    experience = maker_.make_experience(**prompts)
    maker_.make_experience(**prompts, eos_token_id=7)

    assert seen == [ends - {None}, {7}]

    for row, mask in zip(experience.sequences, real(experience.action_mask), strict=True):
        response = row[-len(mask) :][mask].tolist()
        assert not ends & set(response[:-1]) and (response[-1] in ends or len(response) == len(mask))
