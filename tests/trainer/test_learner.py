"""The learner: one step equals a slow reference for any micro-batches; its refusals, skipped steps and counts."""

from __future__ import annotations

import copy
import math
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.config.schema import TrainerConfig
from pipeline.errors import FieldError, ShapeError
from pipeline.experience.advantage_estimators import ADVANTAGES, AdvantageInputs
from pipeline.experience.batching import make_experience_batch, remove_padding_in_sequences, split_experience_batch
from pipeline.experience.ragged import RaggedRows
from pipeline.experience.types import Experience, ExperienceVL
from pipeline.models.critic import Critic
from pipeline.models.log_probs import action_log_probs, action_values
from pipeline.models.pass_size import PassSize
from pipeline.trainer import update_rules
from pipeline.trainer.batch import TrainingBatch
from pipeline.trainer.learner import Learner
from pipeline.trainer.optimizer import ModelOptimizer
from pipeline.trainer.step_stats import StepStats
from tests.support import forked_ranks, tiny
from tests.trainer.test_resume import OPTIMIZERS

Algorithm = Literal["ppo", "grpo"]
CPU = torch.device("cpu")
PROMPT_COLUMNS, ACTION_COLUMNS, ROWS = 5, 6, 8
# Padded passes: those that packed and shared ones are held against.
TRAINER = TrainerConfig(warmup_steps=0, decay_steps=0, critic_warmup_steps=0, learning_rate=1e-2, packing=False)
NORMALIZED = TRAINER.model_copy(update={"normalize_values": True})
OF_RANKS = {"plain": TRAINER, "normalized": NORMALIZED}
"""Each crew of ranks costs the imports of a process: one takes the steps of both."""
REFERENCE_SHIFT = 0.1


def experience_of(
    actor: nn.Module, algorithm: Algorithm, *, critic: nn.Module | None = None, seed: int = 0, temperature: float = 1.0
) -> Experience:
    """Return rows in the maker's format, with prompts and responses of many lengths and arbitrary scores."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, PROMPT_COLUMNS + 1, (ROWS, 1), generator=generator)
    responses = torch.randint(1, ACTION_COLUMNS + 1, (ROWS, 1), generator=generator)
    columns = torch.arange(PROMPT_COLUMNS + ACTION_COLUMNS)
    attention_mask = (columns >= PROMPT_COLUMNS - prompts) & (columns < PROMPT_COLUMNS + responses)
    action_mask = attention_mask[:, PROMPT_COLUMNS:]
    sequences = torch.randint(2, tiny.VOCABULARY_SIZE, attention_mask.shape, generator=generator) * attention_mask
    with torch.no_grad():
        log_probs = action_log_probs(
            actor, sequences, attention_mask.long(), ACTION_COLUMNS, temperature=temperature
        ).masked_fill(~action_mask, 0.0)
    score = torch.randn(ROWS, generator=generator)
    values = torch.zeros(ROWS)
    if critic is not None:
        values = action_values(critic, sequences, attention_mask.long(), ACTION_COLUMNS).detach() * action_mask
    advantages = torch.randn((ROWS, ACTION_COLUMNS) if algorithm == "ppo" else (ROWS,), generator=generator)
    return Experience(
        sequences,
        log_probs,
        values,
        score,
        torch.zeros_like(advantages),
        advantages * action_mask if algorithm == "ppo" else advantages,
        attention_mask.long(),
        action_mask,
        base_action_log_probs=(log_probs - REFERENCE_SHIFT) * action_mask,
        info={"score": score, "group_mixed": torch.ones(ROWS, dtype=torch.bool)},
    )


def disturbed(experience: Experience, seed: int = 9) -> Experience:
    """Return the same rows as if another policy had sampled them, so that ratios spread and some are clipped."""
    assert experience.action_log_probs is not None
    noise = torch.randn(experience.action_log_probs.shape, generator=torch.Generator().manual_seed(seed))
    return replace(experience, action_log_probs=experience.action_log_probs + 0.2 * noise)


def new_learner(algorithm: Algorithm, trainer: TrainerConfig = TRAINER, *, seed: int = 0, **settings: Any) -> Learner:
    actor = tiny.llama(seed)
    critic = None
    if algorithm == "ppo":
        critic = Critic.from_actor(actor)
        nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(3))
    kl_coef = 0.0 if algorithm == "ppo" else 0.05
    return Learner(trainer, algorithm, actor, critic, **{"kl_coef": kl_coef, **settings})


def states_of(learner: Learner) -> list[dict[str, Tensor]]:
    return [model.state_dict() for model in learner._models]


def go_on_from(learner: Learner, other: Learner) -> None:
    """Copy weights, optimizer tensors and step, as a successor does."""
    with torch.no_grad():
        for mine, its in zip(states_of(learner), states_of(other), strict=True):
            for name, tensor in mine.items():
                tensor.copy_(its[name])
        its_tensors = other.tensors()
        for name, tensor in learner.tensors().items():
            tensor.copy_(its_tensors[name])
    learner.step = other.step


def weights(learner: Learner) -> list[Tensor]:
    return [tensor.clone() for model in states_of(learner) for tensor in model.values()]


def experience_for(learner: Learner, algorithm: Algorithm, seed: int = 0) -> Experience:
    return disturbed(experience_of(learner._actor, algorithm, critic=learner._critic, seed=seed))


def assert_same_stats(stats: StepStats, expected: StepStats) -> None:
    for field in fields(StepStats):
        # The padding alone follows from the cut into micro-batches.
        if not field.name.startswith("row_") and not field.name.endswith("_s") and field.name != "padding_ratio":
            value, wanted = getattr(stats, field.name), getattr(expected, field.name)
            assert value == (wanted if wanted is None else pytest.approx(wanted, rel=1e-4, abs=1e-6)), field.name


def assert_same(first: list[Tensor], second: list[Tensor], tolerance: float = 2e-5) -> None:
    assert all(torch.allclose(one, other, atol=tolerance, rtol=0) for one, other in zip(first, second, strict=True))


def rows_of(experience: Experience, rows: slice | Tensor) -> Experience:
    columns: dict[str, Any] = {name: value for name, value in vars(experience).items() if value is not None}
    info = {name: value[rows] for name, value in columns.pop("info").items()}
    return Experience(**{name: value[rows] for name, value in columns.items()}, info=info)


def changed(experience: Experience, **changes: Any) -> Experience:
    return replace(experience, **changes)


def moved(then: dict[str, Tensor], now: dict[str, Tensor]) -> bool:
    return any(not torch.equal(now[name], then[name]) for name in now)


def slow_gradients(learner: Learner, experience: Experience, algorithm: Algorithm) -> list[Tensor]:
    """Return gradients by the formulas, one action at a time over rows without padding, clipped; the critic's last."""
    actor, critic = copy.deepcopy(learner._actor), copy.deepcopy(learner._critic)
    e = experience
    assert e.attention_mask is not None and e.action_mask is not None and e.action_log_probs is not None
    assert e.advantages is not None and e.base_action_log_probs is not None and e.values is not None
    taken = [(row, column) for row in range(ROWS) for column in range(ACTION_COLUMNS) if e.action_mask[row, column]]
    advantages = e.advantages if algorithm == "ppo" else e.advantages.unsqueeze(1).expand(-1, ACTION_COLUMNS)
    chosen = torch.tensor([float(advantages[at]) for at in taken])
    scale, shift = (chosen.var(correction=0) + 1e-8).sqrt(), chosen.mean()
    actor_loss, critic_loss = torch.zeros(()), torch.zeros(())
    for row, column in taken:
        real = e.attention_mask[row].bool() & (torch.arange(PROMPT_COLUMNS + ACTION_COLUMNS) <= PROMPT_COLUMNS + column)
        tokens = e.sequences[row][real].unsqueeze(0)
        log_prob = actor(input_ids=tokens[:, :-1]).logits[0, -1].log_softmax(-1)[tokens[0, -1]]
        ratio = (log_prob - e.action_log_probs[row, column]).exp()
        advantage = advantages[row, column]
        if algorithm == "ppo":
            advantage = (advantage - shift) / scale
        actor_loss = actor_loss - torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        k = log_prob - e.base_action_log_probs[row, column]
        actor_loss = actor_loss + learner._kl_coef * ((-k).exp() - 1 + k)
        if critic is not None:
            value, old = critic(tokens[:, :-1], torch.ones_like(tokens[:, :-1]))[0, -1], e.values[row, column]
            target = advantages[row, column] + old
            clipped = old + (value - old).clamp(-0.2, 0.2)
            critic_loss = critic_loss + torch.max((value - target) ** 2, (clipped - target) ** 2) / 2
    gradients: list[Tensor] = []
    for model, loss in ((actor, actor_loss), (critic, critic_loss)):
        if model is not None:
            (loss / len(taken)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            gradients += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return gradients


def applied_gradients(learner: Learner) -> list[Tensor]:
    """Return the gradients of the one step taken, from AdamW's first moments; the weights show little but signs."""
    return [tensor * 10 for name, tensor in learner.tensors().items() if ".exp_avg." in name]


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_step_follows_the_gradients_of_the_formulas(algorithm: Algorithm) -> None:
    learner = new_learner(algorithm)
    experience = experience_for(learner, algorithm)
    expected = slow_gradients(learner, experience, algorithm)

    stats = learner.update([experience])

    assert_same(applied_gradients(learner), expected)
    assert 0 < stats.clipped_ratio < 1
    assert stats.nonfinite == ()


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize(
    "more", [*({"micro_batch_size": rows} for rows in (1, 3, 8)),
             *({"micro_batch_tokens": tokens} for tokens in (1, 25, 60, 10_000))], ids=str
)  # fmt: skip
def test_a_step_does_not_depend_on_micro_batches(algorithm: Algorithm, more: dict[str, int]) -> None:
    whole = new_learner(algorithm)
    cut = new_learner(algorithm, TRAINER.model_copy(update=more))
    experience = experience_for(whole, algorithm)
    passes: list[int] = []
    cut._actor.base_model.register_forward_pre_hook(
        lambda module, words, keywords: passes.append(keywords["input_ids"].numel()), with_kwargs=True
    )

    expected, stats = whole.update([experience]), cut.update([experience])

    assert_same(applied_gradients(cut), applied_gradients(whole))
    assert_same_stats(stats, expected)
    assert sorted(stats.row_importance_ratios) == pytest.approx(sorted(expected.row_importance_ratios))
    width = PROMPT_COLUMNS + ACTION_COLUMNS
    assert max(passes) <= max(more.get("micro_batch_tokens", 0), more.get("micro_batch_size", 1) * width)
    if "micro_batch_tokens" in more:
        assert stats.padding_ratio <= 0.1 < expected.padding_ratio


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_step_does_not_depend_on_where_the_padding_is(algorithm: Algorithm) -> None:
    of_maker, of_stream = new_learner(algorithm), new_learner(algorithm)
    experience = experience_for(of_maker, algorithm)
    right_aligned = make_experience_batch(remove_padding_in_sequences(split_experience_batch(experience)))

    expected, stats = of_maker.update([experience]), of_stream.update([right_aligned])

    assert not torch.equal(right_aligned.sequences, experience.sequences)
    assert_same(applied_gradients(of_stream), applied_gradients(of_maker))
    assert_same_stats(stats, expected)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_fresh_experience_ratios_are_1_and_nothing_is_clipped(algorithm: Algorithm, temperature: float) -> None:
    learner = new_learner(algorithm, temperature=temperature, kl_coef=0.5)
    experience = experience_of(learner._actor, algorithm, critic=learner._critic, temperature=temperature)
    experience.base_action_log_probs = experience.action_log_probs

    stats = learner.update([experience])

    assert stats.row_importance_ratios == pytest.approx([1.0] * ROWS, abs=1e-5)
    assert stats.importance_ratio == pytest.approx(1.0, abs=1e-5)
    assert stats.clipped_ratio == 0
    assert stats.kl_loss == pytest.approx(0.0, abs=1e-6)
    assert stats.kl_nats == 0


@pytest.mark.ranks
def test_two_ranks_with_some_of_the_rows_each_take_the_step_of_one_rank(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    ones, expected = [], []
    for case, trainer in OF_RANKS.items():
        ones.append(new_learner("ppo", trainer))
        experience = experience_for(ones[-1], "ppo")
        if trainer.normalize_values:
            assert experience.advantages is not None and experience.action_mask is not None
            experience.advantages = (300.0 * experience.advantages + 1000.0) * experience.action_mask
        expected.append(ones[-1].update([experience]))
        for rank, rows in enumerate((slice(5), slice(5, 8))):
            torch.save(rows_of(experience, rows), tmp_path / f"experience-{case}-{rank}.pt")

    forked_ranks.run(2, "tests.trainer.test_learner:train_rank", tmp_path, timeout_s=100)

    for case, one, stats in zip(OF_RANKS, ones, expected, strict=True):
        with subtests.test(case):
            results = [torch.load(tmp_path / f"result-{case}-{rank}.pt", weights_only=False) for rank in (0, 1)]
            assert_same(results[0]["gradients"], applied_gradients(one))
            assert all(torch.equal(a, b) for a, b in zip(results[0]["weights"], results[1]["weights"], strict=True))
            assert_same_stats(results[0]["stats"], stats)
            assert_same_stats(results[1]["stats"], stats)
            moments = one.tensors().get("return_moments")
            assert (moments is None) == (case == "plain")
            if moments is not None:
                assert torch.equal(results[0]["moments"], results[1]["moments"])
                torch.testing.assert_close(results[0]["moments"], moments, rtol=1e-12, atol=0)


def train_rank(rank: int, directory: str) -> None:
    """Take one step of each case in a group of two, from the weights of rank 0: rank 1 starts with others."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/ranks", rank=rank, world_size=2)
    try:
        for case, trainer in OF_RANKS.items():
            learner = new_learner("ppo", trainer, seed=rank, process_group=dist.group.WORLD)
            stats = learner.update([torch.load(f"{directory}/experience-{case}-{rank}.pt", weights_only=False)])
            result = {
                "stats": stats, "weights": weights(learner), "gradients": applied_gradients(learner),
                "moments": learner.tensors().get("return_moments"),
            }  # fmt: skip
            torch.save(result, f"{directory}/result-{case}-{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_groups_of_equal_score_are_left_out() -> None:
    all_rows, mixed_rows = new_learner("grpo"), new_learner("grpo")
    experience = experience_for(all_rows, "grpo")
    assert experience.info is not None
    mixed = torch.tensor([True, True, False, False, True, True, False, False])
    experience.info["group_mixed"] = mixed

    stats, expected = (
        all_rows.update([experience]),
        mixed_rows.update([rows_of(experience, mixed.nonzero().squeeze(1))]),
    )

    assert_same(applied_gradients(all_rows), applied_gradients(mixed_rows))
    assert (stats.rows, stats.rows_trained) == (8, 4)
    assert (expected.rows, expected.rows_trained) == (4, 4)
    assert stats.tokens_trained == expected.tokens_trained
    assert len(stats.row_kl_nats) == 8
    assert len(stats.row_importance_ratios) == 4


def test_with_all_rows_equal_groups_count_in_the_divisors() -> None:
    learners = [
        Learner(TRAINER.model_copy(update={"loss_rows": rows}), "grpo", tiny.llama(1), None, kl_coef=0.0)
        for rows in ("trained", "all")
    ]
    experience = experience_for(learners[0], "grpo")
    assert experience.info is not None and experience.action_mask is not None and experience.advantages is not None
    mixed = torch.tensor([True, True, False, False, True, True, False, False])
    experience.info["group_mixed"] = mixed
    experience.advantages = experience.advantages.masked_fill(~mixed, 0.0)
    share = float(experience.action_mask[mixed].sum() / experience.action_mask.sum())

    trained, every = (learner.update([experience]) for learner in learners)

    assert (trained.rows_trained, every.rows_trained) == (4, 8)
    assert every.gradient_norm == pytest.approx(trained.gradient_norm * share, rel=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("micro_batch_size", [1, 3, None])
def test_batch_scaled_advantages_are_rewards_less_their_group_by_the_deviation_of_the_step(
    offset: float, micro_batch_size: int | None
) -> None:
    """As TRL's scale_rewards = batch, computed in float64; and with the same bits in any micro-batches."""
    size = {"micro_batch_size": micro_batch_size}
    scaled = new_learner("grpo", TRAINER.model_copy(update={"advantage_scale": "batch", **size}))
    plain = new_learner("grpo", TRAINER.model_copy(update=size))
    experience = experience_for(plain, "grpo")
    rewards = (torch.randn(ROWS, generator=torch.Generator().manual_seed(4)) + offset).float()
    experience.reward = rewards
    centered = AdvantageInputs(rewards.double(), 2, experience.action_mask)  # type: ignore[arg-type]
    experience.advantages = ADVANTAGES["dr_grpo"](centered).float()
    exact = rewards.numpy().astype(np.float64)
    groups = exact.reshape(-1, 2)
    expected = (groups - groups.mean(axis=1, keepdims=True)).reshape(-1) / (exact.std(ddof=1) + 1e-4)
    reference = changed(experience, advantages=torch.from_numpy(expected).float())

    stats, wanted = scaled.update([experience]), plain.update([reference])

    assert stats.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert_same(weights(scaled), weights(plain), 1e-7)
    halves = new_learner("grpo", TRAINER.model_copy(update={"advantage_scale": "batch", **size}))
    assert halves.update([rows_of(experience, slice(4)), rows_of(experience, slice(4, 8))]).loss == pytest.approx(
        wanted.loss, rel=1e-5
    )


def test_equal_rewards_of_a_whole_step_scale_nothing_beyond_bounds() -> None:
    learner = new_learner("grpo", TRAINER.model_copy(update={"advantage_scale": "batch"}))
    experience = changed(experience_for(learner, "grpo"), reward=torch.full((ROWS,), 0.3), advantages=torch.zeros(ROWS))

    assert not learner.update([experience]).nonfinite


def test_where_no_group_teaches_anything_no_weight_moves_but_the_step_counts() -> None:
    learner = new_learner("grpo")
    experience = experience_for(learner, "grpo")
    learner.update([experience])
    before = weights(learner)
    assert experience.info is not None
    experience.info["group_mixed"] = torch.zeros(ROWS, dtype=torch.bool)

    stats = learner.update([experience])

    # With a gradient of zero AdamW would still step by its momentum.
    assert all(torch.equal(a, b) for a, b in zip(weights(learner), before, strict=True))
    assert (stats.step, learner.step, stats.rows_trained, stats.tokens_trained) == (2, 2, 0, 0)
    assert (stats.loss, stats.gradient_norm, stats.nonfinite) == (0.0, 0.0, ())


def test_the_first_steps_of_ppo_train_the_critic_alone() -> None:
    learner = new_learner("ppo", TRAINER.model_copy(update={"critic_warmup_steps": 2, "warmup_steps": 4}))
    experience = experience_for(learner, "ppo")
    states, stats = [copy.deepcopy(states_of(learner))], []

    for _ in range(3):
        stats.append(learner.update([experience]))
        states.append(copy.deepcopy(states_of(learner)))

    actors, critics = ([state[model] for state in states] for model in (0, 1))
    assert [moved(then, now) for then, now in pairwise(actors)] == [False, False, True]
    assert [moved(then, now) for then, now in pairwise(critics)] == [True, True, True]
    assert [one.learning_rate for one in stats] == pytest.approx([0.0, 0.0, 0.25e-2])
    assert [one.critic_learning_rate for one in stats] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3])
    assert [one.gradient_norm > 0 for one in stats] == [False, False, True]
    assert all(one.importance_ratio > 0 for one in stats)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_step_with_nan_changes_nothing_but_the_count(algorithm: Algorithm) -> None:
    learner, untouched = new_learner(algorithm), new_learner(algorithm)
    untouched.step = 1
    good = experience_for(learner, algorithm)
    bad = experience_for(learner, algorithm)
    assert bad.action_log_probs is not None
    bad.action_log_probs[3, 0] = math.nan

    stats = learner.update([bad])

    assert "loss" in stats.nonfinite
    assert (stats.step, learner.step) == (1, 1)
    assert all(torch.equal(a, b) for a, b in zip(weights(learner), weights(untouched), strict=True))
    assert_same_stats(learner.update([good]), untouched.update([good]))
    assert all(torch.equal(a, b) for a, b in zip(weights(learner), weights(untouched), strict=True))


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_weights_and_state_change_only_once_they_may(algorithm: Algorithm) -> None:
    """Another thread may copy them until then."""
    more = {"kl_coef_target": 1e-9, "normalize_values": algorithm == "ppo"}
    learner = new_learner(algorithm, TRAINER.model_copy(update=more), kl_coef=0.1)
    live = [*weights(learner), *learner.tensors().values()]
    before, seen = [tensor.clone() for tensor in live], []

    learner.update(
        [experience_for(learner, algorithm)], before_change=lambda: seen.append([tensor.clone() for tensor in live])
    )

    assert all(torch.equal(then, now) for then, now in zip(before, seen[0], strict=True))
    assert not all(torch.equal(then, now) for then, now in zip(before, live, strict=True))
    assert "kl_coef" in learner.tensors()
    assert algorithm == "grpo" or learner.tensors()["return_moments"].all()


@pytest.mark.parametrize("more", [*({"optimizer": name} for name in OPTIMIZERS), {"normalize_values": True}], ids=str)
def test_a_learner_goes_on_bit_for_bit_where_another_left_off(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else the matrices of the tiny model are too small for moments of 8 bits.
    monkeypatch.setattr(update_rules, "_LEAST", 64)
    settings = TRAINER.model_copy(update=more)
    first, second = new_learner("ppo", settings), new_learner("ppo", settings, seed=5)
    batches = [experience_for(first, "ppo", seed) for seed in range(3)]
    for batch in batches[:2]:
        first.update([batch])
    go_on_from(second, first)

    expected, stats = first.update([batches[2]]), second.update([batches[2]])

    assert second.step == 3
    assert_same_stats(stats, expected)
    assert all(torch.equal(a, b) for a, b in zip(weights(second), weights(first), strict=True))


def test_steps_too_small_for_bfloat16_add_up() -> None:
    trainer = TRAINER.model_copy(update={"learning_rate": 2e-4})
    actor = tiny.llama().bfloat16()
    nn.init.constant_(actor.model.norm.weight, 1.0)
    learner, resumed = Learner(trainer, "grpo", actor), Learner(trainer, "grpo", tiny.llama().bfloat16())
    batch = experience_for(learner, "grpo")

    for _ in range(5):
        learner.update([batch])
    go_on_from(resumed, learner)
    for _ in range(20):
        resumed.update([batch])

    # 1 + 2e-4 is 1 in bfloat16, whose next numbers are 0.996 and 1.008; 25 steps of one sign are 0.005.
    assert states_of(learner)[0]["model.norm.weight"].eq(1).all()
    assert states_of(resumed)[0]["model.norm.weight"].ne(1).any()
    assert states_of(resumed)[0]["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_rewarded_token_becomes_likely(algorithm: Algorithm) -> None:
    learner = new_learner(algorithm, TRAINER.model_copy(update={"learning_rate": 3e-3}), kl_coef=0.0)
    prompt = torch.tensor([[2, 3]])
    generator = torch.Generator().manual_seed(0)

    def probabilities() -> Tensor:
        with torch.no_grad():
            return torch.as_tensor(learner._actor(input_ids=prompt).logits)[0, -1].softmax(-1)

    wanted = int((probabilities() - 0.05).abs().argmin())
    before = probabilities()[wanted].item()
    for _ in range(40):
        tokens = torch.multinomial(probabilities(), 64, replacement=True, generator=generator)
        score = (tokens == wanted).float()
        sequences = torch.cat([prompt.expand(64, -1), tokens.unsqueeze(1)], dim=1)
        advantages, values = score - score.mean(), torch.zeros(64)
        if learner._critic is not None:
            values = action_values(learner._critic, sequences, torch.ones_like(sequences), 1).detach()
            advantages = score.unsqueeze(1) - values
        learner.update(
            [
                Experience(
                    sequences,
                    probabilities()[tokens].log().unsqueeze(1),
                    values,
                    score,
                    None,
                    advantages,
                    torch.ones_like(sequences),
                    torch.ones(64, 1, dtype=torch.bool),
                )
            ]
        )

    assert before == pytest.approx(0.05, abs=0.02)
    assert probabilities()[wanted] > 0.9


def test_the_numbers_of_a_step_by_hand() -> None:
    learner = new_learner("grpo", kl_coef=0.0)
    experience = experience_of(learner._actor, "grpo")
    mask = experience.action_mask
    assert mask is not None and experience.action_log_probs is not None and experience.info is not None
    assert experience.advantages is not None
    experience.info["score"] = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    experience.base_action_log_probs = (experience.action_log_probs - math.log(2)) * mask
    lengths = mask.sum(dim=1)

    stats = learner.update([experience])

    assert (stats.step, stats.rows, stats.rows_trained, stats.tokens_trained) == (1, 8, 8, int(mask.sum()))
    assert (stats.reward_mean, stats.reward_stddev) == (0.5, 0.5)
    assert stats.kl_nats == pytest.approx(0.5 - 1 + math.log(2))
    assert stats.row_kl_nats == pytest.approx([0.5 - 1 + math.log(2)] * 8, rel=1e-5)
    assert stats.entropy_nats == pytest.approx(-float(experience.action_log_probs.sum() / mask.sum()))
    assert stats.policy_loss == pytest.approx(-float((experience.advantages * lengths).sum() / lengths.sum()), abs=1e-5)
    assert stats.loss == stats.policy_loss
    assert stats.kl_loss is None and stats.value_loss is None and stats.critic_gradient_norm is None
    assert min(stats.forward_s, stats.backward_s, stats.optimizer_s) > 0


def test_a_weight_that_no_row_of_a_step_used_has_a_gradient_of_zero() -> None:
    used, unused = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    settings: dict[str, Any] = {"learning_rate": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1, "clip_norm": 1e9}
    optimizer = ModelOptimizer(nn.ModuleList([used, unused]), process_group=None, **settings)
    expected = unused.weight.detach().clone().requires_grad_()
    reference = torch.optim.AdamW([expected], lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)

    for seen in (True, False):
        loss = used(torch.ones(2)).sum() + (unused(torch.ones(2)).sum() if seen else 0.0)
        loss.backward()
        optimizer.collect()
        optimizer.reduce()
        optimizer.step(1.0)
        optimizer.clear()
        expected.grad = torch.full_like(expected, float(seen))
        reference.step()

    torch.testing.assert_close(unused.weight, expected)


@pytest.mark.parametrize("micro_batch_rows", [3, 8, None])
def test_micro_batches_hold_every_action_once_without_columns_of_padding(micro_batch_rows: int | None) -> None:
    experience = experience_of(tiny.llama(), "grpo")
    batch = TrainingBatch.of(RaggedRows.of(experience), "grpo", CPU, needs_reference=True)

    parts = list(batch.micro_batches(PassSize("", most_rows=micro_batch_rows)))

    assert [len(part) for part in parts] == ([3, 3, 2] if micro_batch_rows == 3 else [8])
    for part in parts:
        padded = part.flat.padded()
        assert padded.attention_mask.any(dim=0).all()
        labels = padded.flat(padded.sequences[:, -padded.num_actions :])
        assert torch.equal(labels, part.flat.labels)
    seen = torch.cat([part.log_probs for part in parts if part.log_probs is not None])
    assert batch.log_probs is not None and experience.action_log_probs is not None
    assert torch.equal(seen.sort().values, batch.log_probs.sort().values)
    assert torch.equal(batch.log_probs, experience.action_log_probs[experience.action_mask])
    widths = [int(part.flat.lengths.max()) for part in parts]
    assert widths == sorted(widths)


@pytest.mark.parametrize("name", ["action_log_probs", "advantages", "attention_mask", "action_mask", "values"])
def test_a_missing_field_is_named(name: str) -> None:
    learner = new_learner("ppo")
    experience = experience_for(learner, "ppo")

    with pytest.raises(FieldError, match=f"{name} is missing"):
        learner.update([changed(experience, **{name: None})])


def test_what_cannot_be_trained_on_is_refused() -> None:
    learner = new_learner("grpo")
    good = experience_for(learner, "grpo")
    assert good.attention_mask is not None and good.action_mask is not None and good.advantages is not None

    with pytest.raises(FieldError, match="base_action_log_probs is missing"):
        learner.update([replace(good, base_action_log_probs=None)])
    with pytest.raises(FieldError, match="sequences is a list, a packed batch"):
        learner.update([changed(good, sequences=list(good.sequences))])
    pixels = {"pixel_values": torch.ones(32, 2), "image_grid_thws": torch.tensor([[1, 2, 2]] * 8)}
    with pytest.raises(FieldError, match="images for a LlamaForCausalLM: not a vision-language model"):
        learner.update([ExperienceVL(**vars(good), **pixels)])
    with pytest.raises(FieldError, match="attention_mask: row 0 has no token"):
        learner.update([replace(good, attention_mask=torch.zeros_like(good.attention_mask))])
    with pytest.raises(ShapeError, match=r"advantages: \(8, 3\), expected \(8, 6\)"):
        learner.update([replace(good, advantages=torch.zeros(8, 3))])
    with pytest.raises(ShapeError, match=r"attention_mask: \(8, 4\), expected \(8, 11\)"):
        learner.update([replace(good, attention_mask=good.attention_mask[:, :4])])
    with pytest.raises(ShapeError, match=r"action_log_probs: \(8, 6\), expected \(8, 11\)"):
        learner.update([replace(good, action_mask=torch.ones(8, 11, dtype=torch.bool))])
    alone = replace(good, sequences=good.sequences[:, 5:], attention_mask=good.attention_mask[:, 5:])
    with pytest.raises(ShapeError, match="row 0 has no token before one of its actions"):
        learner.update([alone])
    holes = good.attention_mask.clone()
    holes[int(good.action_mask.sum(dim=1).argmax()), 5] = 0
    with pytest.raises(FieldError, match="action_mask marks columns that attention_mask says are padding"):
        learner.update([replace(good, attention_mask=holes)])
    assert learner.step == 0


def test_ppo_needs_a_critic_and_grpo_has_none() -> None:
    actor = tiny.llama()

    with pytest.raises(ValueError, match="ppo without a critic"):
        Learner(TRAINER, "ppo", actor)
    with pytest.raises(ValueError, match="grpo with a critic"):
        Learner(TRAINER, "grpo", actor, Critic.from_actor(actor))
    with pytest.raises(FieldError, match="LlamaForCausalLM has no parameter that requires a gradient"):
        Learner(TRAINER, "grpo", actor.requires_grad_(False))
