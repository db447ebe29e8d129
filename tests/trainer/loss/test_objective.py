"""The loss of a configuration in a step: the same for any micro-batches, batches and ranks, and that of its formula."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.schema import Config, TrainerConfig
from pipeline.errors import FieldError
from pipeline.experience.types import Experience
from pipeline.models.log_probs import action_log_probs_and_entropies
from pipeline.trainer.learner import Learner
from pipeline.trainer.loss.objective import Objective
from pipeline.trainer.loss.policy import PolicyInputs
from pipeline.trainer.process import objective_of
from tests.support import forked_ranks, tiny
from tests.trainer.test_learner import (
    ACTION_COLUMNS,
    ROWS,
    TRAINER,
    applied_gradients,
    assert_same,
    assert_same_stats,
    disturbed,
    experience_of,
    rows_of,
)

CONSTANT_TOKENS = 5
CASES: list[dict[str, Any]] = [
    {"policy_loss": "ppo", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5, "importance_correction": "token"},
    {"policy_loss": "gspo", "loss_aggregation": "sequence_mean", "importance_correction": "sequence"},
    {"policy_loss": "cispo", "loss_aggregation": "dr_grpo", "importance_correction": "icepop", "kl_estimator": "k2"},
    {"policy_loss": "reinforce", "importance_correction": "sequence_mask", "entropy_coef": 0.02, "kl_estimator": "k1"},
    {"loss_aggregation": "sequence_mean", "importance_correction": "token_mask", "entropy_coef": 0.02, "whitens": True},
    {"loss_aggregation": "dr_grpo", "importance_correction": "none", "mask_cut_responses": True},
    {"advantage_scale": "batch", "mask_cut_responses": True, "importance_correction": "none"},
]
OF_SEVERAL_UPDATES: list[dict[str, Any]] = [
    {"epochs": 2, "mini_batches": 3, "loss_aggregation": "dr_grpo", "kl_coef_target": 0.004},
    {"epochs": 3, "target_kl": 0.1, "whitens": True, "importance_correction": "none"},
    {"epochs": 2, "mini_batches": 3, "advantage_scale": "batch"},
]
IDS = [f"{case.get('policy_loss', 'ppo')}-{case.get('loss_aggregation', 'token_mean')}" for case in CASES]


def new_learner(case: dict[str, Any], *, seed: int = 0, **settings: Any) -> Learner:
    changes = {"importance_cap": 1.3, **case}
    whitens = changes.pop("whitens", False)
    micro_batch_size = settings.pop("micro_batch_size", None)
    trainer = TrainerConfig.model_validate({**TRAINER.model_dump(exclude={"betas"}), **changes})
    trainer = trainer.model_copy(update={"micro_batch_size": micro_batch_size, "gradient_clip_norm": 100.0})
    objective = Objective.of(trainer, whitens=whitens, response_tokens=CONSTANT_TOKENS)
    objective = replace(objective, floor=0.8)
    return Learner(trainer, "grpo", tiny.llama(seed), kl_coef=0.05, objective=objective, horizon_rows=8, **settings)


def sampled() -> Experience:
    """Return rows of an engine that computes other log-probs, one group of equal scores and two cut responses."""
    experience = disturbed(experience_of(tiny.llama(), "grpo"))
    assert experience.action_log_probs is not None and experience.info is not None
    noise = torch.randn(experience.action_log_probs.shape, generator=torch.Generator().manual_seed(5))
    experience.behaviour_log_probs = experience.action_log_probs + 0.3 * noise
    experience.info["group_mixed"] = torch.arange(ROWS) < ROWS - 2
    experience.info["cut"] = torch.tensor([False, True, False, False, True, False, False, False])
    return experience


def expected_loss(learner: Learner, experience: Experience) -> Tensor:
    """Return the loss of the trained rows, in one piece without micro-batches."""
    objective = learner._objective
    assert experience.info is not None
    kept = experience.info["group_mixed"] & ~(experience.info["cut"] & objective.trainer.mask_cut_responses)
    e = rows_of(experience, kept)
    assert e.action_mask is not None and e.attention_mask is not None and e.advantages is not None
    assert e.action_log_probs is not None and e.behaviour_log_probs is not None
    assert e.base_action_log_probs is not None
    mask = e.action_mask
    log_probs, entropy = action_log_probs_and_entropies(learner._actor, e.sequences, e.attention_mask, ACTION_COLUMNS)
    advantages = e.advantages.unsqueeze(1).expand(mask.shape)
    if learner._trainer.advantage_scale == "batch":
        assert experience.reward is not None
        # Of all rows, those that are not trained included.
        advantages = (advantages.double() / (experience.reward.double().std() + 1e-4)).float()
    if objective.whitens:
        taken = advantages[mask]
        advantages = (advantages - taken.mean()) / (taken.var(correction=0) + 1e-8).sqrt()
    k = e.action_log_probs - e.behaviour_log_probs
    if objective.trainer.importance_correction.startswith("sequence"):
        k = (k * mask).sum(dim=1, keepdim=True).expand(mask.shape)
    weights = k.exp()
    is_outside = (weights > 1.3) | ((weights < 0.8) & (objective.trainer.importance_correction == "icepop"))
    if objective.trainer.importance_correction in ("token", "sequence"):
        weights = weights.clamp(max=1.3)
    elif objective.trainer.importance_correction == "none":
        weights = torch.ones_like(weights)
    else:
        weights = weights * ~is_outside
    given = PolicyInputs(
        log_probs[mask], e.action_log_probs[mask], advantages[mask], mask.sum(dim=1), objective.clip_low,
        objective.clip_high, objective.trainer.dual_clip,
    )  # fmt: skip
    losses = torch.zeros_like(log_probs).masked_scatter(mask, objective.policy_loss(given).losses)
    k_base = log_probs - e.base_action_log_probs
    kl = {"k1_kl": k_base, "k2_kl": k_base**2 / 2, "k3_kl": (-k_base).exp() - 1 + k_base}
    per_action = losses * weights + 0.05 * kl[objective.kl_estimator.__name__]  # type: ignore[attr-defined]
    per_action = (per_action - objective.trainer.entropy_coef * entropy) * mask
    if objective.aggregate.__name__ == "token_mean":  # type: ignore[attr-defined]
        return per_action.sum() / mask.sum()
    if objective.aggregate.__name__ == "sequence_mean":  # type: ignore[attr-defined]
        return (per_action.sum(dim=1) / mask.sum(dim=1)).mean()
    return per_action.sum() / (ROWS * CONSTANT_TOKENS)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_step_has_the_loss_and_the_gradients_of_its_formula(case: dict[str, Any]) -> None:
    learner, experience = new_learner(case), sampled()
    loss = expected_loss(learner, experience)
    parameters = [one for one in learner._actor.parameters() if one.requires_grad]
    expected = [gradient.clone() for gradient in torch.autograd.grad(loss, parameters)]

    stats = learner.update([experience])

    assert stats.loss == pytest.approx(float(loss.detach()), rel=1e-4)
    assert_same(applied_gradients(learner), expected)
    assert (stats.entropy_loss is None) == ("entropy_coef" not in case)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_step_does_not_depend_on_micro_batches_or_batches(case: dict[str, Any]) -> None:
    whole, experience = new_learner(case), sampled()
    expected = whole.update([experience])

    for micro_batch_size, cuts in ((1, (slice(8),)), (3, (slice(8),)), (2, (slice(5), slice(5, 6), slice(6, 8)))):
        learner = new_learner(case, micro_batch_size=micro_batch_size)
        stats = learner.update([rows_of(experience, rows) for rows in cuts])

        assert_same(applied_gradients(learner), applied_gradients(whole))
        assert_same_stats(stats, expected)


@pytest.mark.ranks
def test_two_and_four_ranks_take_the_step_of_one(tmp_path: Path) -> None:
    experience = sampled()
    torch.save(experience, tmp_path / "experience.pt")

    forked_ranks.run(4, "tests.trainer.loss.test_objective:train_rank", tmp_path, timeout_s=200)

    for number, case in enumerate(CASES + OF_SEVERAL_UPDATES):
        one = new_learner(case)
        expected = one.update([experience])
        for world_size in (2, 4):
            for rank in range(world_size):
                name = f"{number}-{world_size}-{rank}.pt"
                stats, gradients = torch.load(tmp_path / name, weights_only=False)
                assert_same_stats(stats, expected)
                assert_same(gradients, applied_gradients(one))


SHARES = {2: (slice(5), slice(5, 8)), 4: (slice(3), slice(3, 4), slice(4, 6), slice(6, 8))}


def train_rank(rank: int, directory: str) -> None:
    """Take a step of each case as one of four ranks, and as one of two; the last of four has no row to train."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/ranks", rank=rank, world_size=4)
    try:
        experience = torch.load(f"{directory}/experience.pt", weights_only=False)
        pair = dist.new_group([0, 1])
        for world_size, group in ((2, pair), (4, dist.group.WORLD)):
            for number, case in enumerate(CASES + OF_SEVERAL_UPDATES if rank < world_size else []):
                learner = new_learner(case, seed=rank, process_group=group, micro_batch_size=2)
                stats = learner.update([rows_of(experience, SHARES[world_size][rank])])
                torch.save((stats, applied_gradients(learner)), f"{directory}/{number}-{world_size}-{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_ratios_to_the_engine_are_reported() -> None:
    experience = sampled()
    assert experience.info is not None and experience.action_mask is not None
    assert experience.action_log_probs is not None and experience.behaviour_log_probs is not None
    mask = experience.action_mask & experience.info["group_mixed"].unsqueeze(1)
    ratios = (experience.action_log_probs - experience.behaviour_log_probs).exp()[mask]

    stats = new_learner({}).update([experience])
    plain = new_learner({}).update([replace(experience, behaviour_log_probs=None)])
    mixed = new_learner({}).update([experience, replace(experience, behaviour_log_probs=None)])

    assert stats.behaviour_ratio_mean == pytest.approx(float(ratios.mean()), rel=1e-5)
    assert stats.behaviour_ratio_min == pytest.approx(float(ratios.min()), rel=1e-5)
    assert stats.behaviour_ratio_max == pytest.approx(float(ratios.max()), rel=1e-5)
    assert stats.behaviour_cut_ratio == pytest.approx(float((ratios > 1.3).float().mean()))
    assert 0 < stats.behaviour_cut_ratio < 1
    assert plain.behaviour_ratio_mean is plain.behaviour_ratio_min is plain.behaviour_ratio_max is None
    # Rows without log-probs of the engine are no part of any of them.
    for name in ("mean", "min", "max"):
        assert getattr(mixed, f"behaviour_ratio_{name}") == getattr(stats, f"behaviour_ratio_{name}")
    assert mixed.row_gap_nats == stats.row_gap_nats and plain.row_gap_nats == ()
    assert plain.behaviour_cut_ratio is None


@pytest.mark.parametrize(
    ("settings", "bounds"),
    [
        ({}, (0.2, 0.2)),
        ({"clip_range": 0.3}, (0.3, 0.3)),
        ({"clip_low": 0.1, "clip_high": 0.4}, (0.1, 0.4)),
        ({"clip_low": 0.1}, (0.1, 0.2)),
        ({"clip_high": 0.4}, (0.2, 0.4)),
    ],
)
def test_each_bound_of_the_ratio_is_that_of_its_key(settings: dict[str, float], bounds: tuple[float, float]) -> None:
    objective = objective_of(Config.model_validate({"trainer": settings}))

    assert (objective.clip_low, objective.clip_high) == bounds
    assert objective.floor == 0.5, "IcePop's, whatever the clip range is"


def test_a_batch_without_a_trained_row_has_no_ratios() -> None:
    experience = sampled()
    assert experience.info is not None
    experience.info["group_mixed"] = torch.zeros(ROWS, dtype=torch.bool)

    stats = new_learner({}).update([experience])

    assert stats.rows_trained == 0
    assert stats.behaviour_ratio_mean is stats.behaviour_ratio_min is stats.behaviour_ratio_max is None


def test_log_probs_of_an_engine_that_is_the_trainers_own_function_change_no_bit() -> None:
    experience = sampled()
    same = replace(experience, behaviour_log_probs=experience.action_log_probs)
    without = replace(experience, behaviour_log_probs=None)
    first, second = new_learner({}), new_learner({})

    first.update([same])
    second.update([without])

    assert all(torch.equal(a, b) for a, b in zip(first._actor.parameters(), second._actor.parameters(), strict=True))


def test_an_entropy_bonus_raises_the_entropy() -> None:
    def entropy(learner: Learner) -> float:
        e = experience
        assert e.attention_mask is not None and e.action_mask is not None
        _, per_action = action_log_probs_and_entropies(learner._actor, e.sequences, e.attention_mask, ACTION_COLUMNS)
        return float(per_action[e.action_mask].mean().detach())

    experience = replace(sampled(), advantages=torch.zeros(ROWS), behaviour_log_probs=None)
    learner = new_learner({"entropy_coef": 0.1})
    before = entropy(learner)

    stats = learner.update([experience])

    assert entropy(learner) > before
    assert stats.entropy_loss is not None and stats.entropy_loss < 0


def test_rows_that_were_cut_are_not_trained_and_without_the_column_the_error_names_it() -> None:
    experience = sampled()
    assert experience.info is not None

    stats = new_learner({"mask_cut_responses": True}).update([experience])

    assert stats.rows_trained == 4
    with pytest.raises(FieldError, match=r"info\['cut'\] is missing"):
        new_learner({"mask_cut_responses": True}).update([replace(experience, info={"score": torch.zeros(ROWS)})])


def test_the_constant_length_is_that_of_the_longest_response() -> None:
    def constant(**rollout: Any) -> int:
        trainer = {"loss_aggregation": "dr_grpo"}
        return objective_of(Config.model_validate({"rollout": rollout, "trainer": trainer})).constant_tokens

    assert constant(max_length=32, max_new_tokens=20) == 20
    assert constant(max_length=32) == 32
    set_by_key = {"loss_aggregation": "dr_grpo", "dr_grpo_tokens": 7}
    assert objective_of(Config.model_validate({"trainer": set_by_key})).constant_tokens == 7
    with pytest.raises(ValueError, match="dr_grpo needs a constant length"):
        Learner(TRAINER.model_copy(update={"loss_aggregation": "dr_grpo"}), "grpo", tiny.llama())


@pytest.mark.parametrize(
    ("rollout", "trainer", "whitens"),
    [
        ({}, {}, False),
        ({"algorithm": "ppo"}, {}, True),
        ({"algorithm": "ppo"}, {"whiten_advantages": False}, False),
        ({"advantages": "rloo"}, {}, False),
        ({"advantages": "reinforce_baseline"}, {"whiten_advantages": False}, True),
    ],
)
def test_advantages_are_whitened_for_ppo_and_reinforce_plus_plus(
    rollout: dict[str, Any], trainer: dict[str, Any], whitens: bool
) -> None:
    assert objective_of(Config.model_validate({"rollout": rollout, "trainer": trainer})).whitens == whitens


@pytest.mark.parametrize(
    ("rollout", "trainer", "trained"),
    [
        ({}, {}, 6),
        ({"advantages": "rloo"}, {}, 6),
        ({"advantages": "rloo"}, {"loss_rows": "all"}, 8),
        ({"advantages": "rloo", "kl_coef": 0.05}, {}, 8),
        ({"advantages": "grpo", "kl_coef": 0.05, "max_refill": 2}, {}, 8),
        ({"algorithm": "grpo"}, {"kl_coef": 0.05}, 6),
        ({"advantages": "reinforce_baseline"}, {}, 8),
        ({"advantages": "my_advantages:of_mine"}, {}, 8),
    ],
)
def test_groups_of_equal_scores_are_trained_where_their_advantages_need_not_be_0(
    rollout: dict[str, Any], trainer: dict[str, Any], trained: int
) -> None:
    config = Config.model_validate({"rollout": rollout, "trainer": trainer})
    learner = Learner(TRAINER, "grpo", tiny.llama(), objective=objective_of(config))

    stats = learner.update([sampled()])

    # The rows say of two that the scores of their group are equal, whatever the estimator.
    assert (stats.rows, stats.rows_trained) == (8, trained)
