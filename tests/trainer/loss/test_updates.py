"""Several updates a step: those of a slow reference, the same for any micro-batches, batches and ranks; early stop."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.config.schema import Config
from pipeline.experience.types import Experience
from pipeline.models.log_probs import action_log_probs, action_values
from pipeline.trainer import process
from pipeline.trainer.learner import Learner
from pipeline.trainer.loss.mini_batches import mini_batch_of_rows
from tests.support import tiny
from tests.trainer.test_learner import (
    ACTION_COLUMNS,
    ROWS,
    TRAINER,
    Algorithm,
    applied_gradients,
    assert_same,
    assert_same_stats,
    experience_for,
    experience_of,
    go_on_from,
    new_learner,
    rows_of,
    weights,
)
from tests.trainer.test_out_of_memory import Device

SLOW = TRAINER.model_copy(update={"learning_rate": 1e-3})


def learner_of(algorithm: Algorithm, **changes: Any) -> Learner:
    return new_learner(algorithm, SLOW.model_copy(update=changes), horizon_rows=8)


def slow_step(
    learner: Learner, e: Experience, algorithm: Algorithm, updates: list[Tensor]
) -> tuple[list[Tensor], float]:
    """Return the weights after an update on each set of rows, by the formulas, clip and AdamW, and the mean loss.

    The weights of the critic are the last ones.
    """
    summed = 0.0
    actor, critic = copy.deepcopy(learner._actor), copy.deepcopy(learner._critic)
    assert e.attention_mask is not None and e.action_mask is not None and e.action_log_probs is not None
    assert e.advantages is not None and e.base_action_log_probs is not None and e.values is not None
    advantages = e.advantages if algorithm == "ppo" else e.advantages.unsqueeze(1).expand(e.action_mask.shape)
    white = advantages
    if algorithm == "ppo":
        chosen = advantages[e.action_mask]
        white = (advantages - chosen.mean()) / (chosen.var(correction=0) + 1e-8).sqrt()
    models = [model for model in (actor, critic) if model is not None]
    rates = (SLOW.learning_rate, SLOW.critic_learning_rate)
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=rate, betas=SLOW.betas, weight_decay=0.0)
        for model, rate in zip(models, rates, strict=False)
    ]
    for rows in updates:
        mask, tokens, real = e.action_mask[rows], e.sequences[rows], e.attention_mask[rows]
        log_probs = action_log_probs(actor, tokens, real, ACTION_COLUMNS)
        ratio = (log_probs - e.action_log_probs[rows]).exp()
        k = log_probs - e.base_action_log_probs[rows]
        losses = -torch.min(ratio * white[rows], ratio.clamp(0.8, 1.2) * white[rows])
        losses = losses + learner._kl_coef * ((-k).exp() - 1 + k)
        total = losses[mask].sum() / mask.sum()
        if critic is not None:
            values, old = action_values(critic, tokens, real, ACTION_COLUMNS), e.values[rows]
            target = advantages[rows] + old
            clipped = old + (values - old).clamp(-0.2, 0.2)
            total = total + (torch.max((values - target) ** 2, (clipped - target) ** 2) / 2)[mask].sum() / mask.sum()
        summed += total.item()
        for optimizer in optimizers:
            optimizer.zero_grad()
        total.backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return [tensor for model in models for tensor in model.state_dict().values()], summed / len(updates)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize(("epochs", "mini_batches"), [(3, 1), (1, 3), (2, 2)])
def test_a_step_takes_the_updates_of_the_formulas(algorithm: Algorithm, epochs: int, mini_batches: int) -> None:
    learner = learner_of(algorithm, epochs=epochs, mini_batches=mini_batches)
    experience = experience_for(learner, algorithm)
    updates = []
    for epoch in range(epochs):
        (dealt,) = mini_batch_of_rows([[ROWS]], 0, mini_batches, step=0, epoch=epoch)
        updates += [dealt == number for number in range(mini_batches)]
    expected, loss = slow_step(learner, experience, algorithm, updates)
    of_one_update, _ = slow_step(learner, experience, algorithm, [torch.ones(ROWS, dtype=torch.bool)])

    stats = learner.update([experience])

    # Adam scales a gradient near 0, all of whose digits are rounding, to a part of the learning rate of 1e-3: on some
    # processors that is one weight of 9,985.
    found = weights(learner)
    assert_same(found, expected, tolerance=5e-5)
    assert sum(int(((one - other).abs() > 1e-5).sum()) for one, other in zip(found, expected, strict=True)) <= 2
    assert any((one - other).abs().max() > 5e-4 for one, other in zip(of_one_update, expected, strict=True))
    assert stats.loss == pytest.approx(loss, rel=1e-4)
    assert (stats.updates, stats.step, learner.step) == (epochs * mini_batches, 1, 1)


def test_each_row_is_in_one_mini_batch_of_each_epoch_and_each_epoch_has_its_own() -> None:
    seen = set()
    for step in (0, 7):
        for epoch in range(3):
            (dealt,) = mini_batch_of_rows([[10]], 0, 4, step=step, epoch=epoch)
            assert sorted(dealt.bincount(minlength=4).tolist()) == [2, 2, 3, 3]
            assert torch.equal(mini_batch_of_rows([[10]], 0, 4, step=step, epoch=epoch)[0], dealt)
            seen.add(tuple(dealt.tolist()))
    assert len(seen) == 6

    assert mini_batch_of_rows([[2]], 0, 5, step=0, epoch=0)[0].unique().numel() == 2
    assert mini_batch_of_rows([[0, 0]], 1, 2, step=0, epoch=0)[0].numel() == 0


def test_mini_batches_follow_the_order_of_leases_whatever_the_ranks() -> None:
    (whole,) = mini_batch_of_rows([[10]], 0, 3, step=5, epoch=1)
    batches = mini_batch_of_rows([[4], [3], [2], [1]], 0, 3, step=5, epoch=1)
    # Rank r has the leases r and r + 2.
    first, second = (mini_batch_of_rows([[4, 3], [2, 1]], rank, 3, step=5, epoch=1) for rank in (0, 1))

    assert torch.equal(torch.cat(batches), whole)
    assert torch.equal(torch.cat([first[0], second[0], first[1], second[1]]), whole)
    # A recorded step is replayed by later releases, too.
    assert torch.equal(whole, torch.randperm(10, generator=torch.Generator().manual_seed(5 * 2**16 + 1)) * 3 // 10)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("settings", [{"epochs": 2, "mini_batches": 3}, {"epochs": 4, "target_kl": 0.02}])
def test_a_step_of_several_updates_does_not_depend_on_micro_batches_or_batches(
    algorithm: Algorithm, settings: dict[str, Any]
) -> None:
    whole = learner_of(algorithm, **settings)
    experience = experience_for(whole, algorithm)
    expected = whole.update([experience])

    for micro_batch_size, cuts in ((1, (slice(8),)), (3, (slice(8),)), (2, (slice(5), slice(5, 6), slice(6, 8)))):
        learner = learner_of(algorithm, micro_batch_size=micro_batch_size, **settings)
        stats = learner.update([rows_of(experience, rows) for rows in cuts])

        # Adam takes a step as large for a gradient that is rounding (5e-8 beside 4e-2) as for any other one.
        is_rounding = [(each != 0) & (each.abs() < 1e-6) for each in applied_gradients(whole)]
        assert sum(int(each.sum()) for each in is_rounding) < 0.01 * sum(each.numel() for each in is_rounding)
        mine, its = (
            [weight.masked_fill(left_out, 0.0) for weight, left_out in zip(weights(of), is_rounding, strict=True)]
            for of in (learner, whole)
        )
        assert_same(mine, its, tolerance=1e-5)
        assert_same_stats(stats, expected)


def test_the_ratios_of_a_step_are_means_over_the_actions_of_all_its_updates() -> None:
    """With a learning rate of nothing they are those of one update of all rows."""
    stats = []
    for mini_batches in (1, 3):
        learner = learner_of("grpo", mini_batches=mini_batches, learning_rate=1e-12)
        stats.append(learner.update([experience_for(learner, "grpo")]))

    one, three = stats
    assert three.importance_ratio == pytest.approx(one.importance_ratio, rel=1e-5)
    assert three.clipped_ratio == pytest.approx(one.clipped_ratio) != 0


def test_a_later_update_that_runs_out_of_memory_is_taken_again_alone() -> None:
    whole, cut = (learner_of("ppo", epochs=3) for _ in range(2))
    experience = experience_for(whole, "ppo")
    Device(cut._actor, fails_backward=1)

    expected, stats = whole.update([experience]), cut.update([experience])

    assert_same(weights(cut), weights(whole), tolerance=1e-5)
    assert_same_stats(stats, expected)
    assert len(stats.row_importance_ratios) == 3 * ROWS


def kl_nats(learner: Learner, e: Experience) -> float:
    """Return the k3 KL of the policy that sampled to the learner's, mean over the actions."""
    assert e.attention_mask is not None and e.action_mask is not None and e.action_log_probs is not None
    with torch.no_grad():
        log_probs = action_log_probs(learner._actor, e.sequences, e.attention_mask, ACTION_COLUMNS)
    log_ratios = (log_probs - e.action_log_probs)[e.action_mask].double()
    return float((log_ratios.exp() - 1 - log_ratios).mean())


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_step_ends_before_the_update_at_which_the_kl_is_beyond_the_target(algorithm: Algorithm) -> None:
    kls, states = [], []
    for epochs in range(1, 6):
        learner = learner_of(algorithm, epochs=epochs)
        experience = experience_for(learner, algorithm)
        stats = learner.update([experience])
        assert stats.updates == epochs
        kls.append(kl_nats(learner, experience))
        states.append(weights(learner))
    stop = next(number for number in range(1, 5) if kls[number] > kls[0])
    target = (max(kls[:stop]) + kls[stop]) / 2

    learner = learner_of(algorithm, epochs=9, target_kl=target)
    stats = learner.update([experience_for(learner, algorithm)])

    assert stats.updates == stop + 1
    assert all(torch.equal(a, b) for a, b in zip(weights(learner), states[stop], strict=True))
    assert stats.policy_kl_nats == pytest.approx(kls[stop], rel=1e-4)
    of_all = learner_of(algorithm, epochs=stop + 1)
    expected = of_all.update([experience_for(of_all, algorithm)])
    assert (stats.loss, stats.gradient_norm, stats.clipped_ratio) == (
        expected.loss,
        expected.gradient_norm,
        expected.clipped_ratio,
    )
    assert learner.step == 1

    # Nothing of the discarded update reaches the next step.
    successor = learner_of(algorithm, epochs=9, target_kl=target)
    go_on_from(successor, learner)
    for one in (learner, successor):
        one.update([experience_for(of_all, algorithm)])
    assert all(torch.equal(a, b) for a, b in zip(weights(learner), weights(successor), strict=True))


def test_the_first_update_is_taken_however_stale_the_rows_are() -> None:
    learner, once = learner_of("grpo", epochs=4, target_kl=1e-9), learner_of("grpo")
    experience = experience_for(learner, "grpo")
    assert kl_nats(learner, experience) > 1e-3

    stats = learner.update([experience])
    once.update([experience])

    assert stats.updates == 1
    assert all(torch.equal(a, b) for a, b in zip(weights(learner), weights(once), strict=True))


def test_the_kl_of_the_first_pass_on_fresh_rows_is_0_and_that_of_stale_rows_is_their_distance() -> None:
    learner = learner_of("grpo")
    fresh, stale = experience_of(learner._actor, "grpo"), experience_for(learner, "grpo")
    distance = kl_nats(learner, stale)

    assert learner_of("grpo").update([fresh]).policy_kl_nats == pytest.approx(0.0, abs=1e-9)
    assert learner.update([stale]).policy_kl_nats == pytest.approx(distance, rel=1e-5)


def test_a_step_that_trains_the_critic_alone_stops_at_no_kl() -> None:
    learner = learner_of("ppo", epochs=3, target_kl=1e-9, critic_warmup_steps=1)
    experience = experience_for(learner, "ppo")

    assert learner.update([experience]).updates == 3
    assert learner.update([experience]).updates == 1


def test_an_update_with_nan_is_the_last_of_its_step_and_those_before_stay() -> None:
    learner, once = learner_of("grpo", epochs=3), learner_of("grpo")
    experience = experience_for(learner, "grpo")
    policy_loss, calls = learner._objective.policy_loss, []

    def poisoned(inputs: Any) -> Any:
        calls.append(1)
        found = policy_loss(inputs)
        return found._replace(losses=found.losses * math.nan) if len(calls) == 2 else found

    learner._objective = replace(learner._objective, policy_loss=poisoned)
    stats = learner.update([experience])
    once.update([experience])

    assert (stats.updates, stats.nonfinite, len(calls)) == (1, ("loss", "gradient"), 2)
    assert all(torch.equal(a, b) for a, b in zip(weights(learner), weights(once), strict=True))


def test_a_policy_loss_that_draws_draws_the_same_in_a_step_that_is_taken_again() -> None:
    """What it draws depends on the run's seed and on the step: no other step, and no other run, draws the same."""
    found = []
    for number, (run_seed, step) in enumerate([(3, 0), (3, 0), (3, 1), (4, 0)]):
        config = Config.model_validate({"daemon": {"seed": run_seed}, "trainer": {"warmup_steps": 0}})
        learner = process.new_learner(config, {"actor": tiny.llama()}, [2, 3], torch.device("cpu"))
        drawn: list[Tensor] = []
        policy_loss = learner._objective.policy_loss

        def drawing(inputs: Any, drawn: list[Tensor] = drawn, policy_loss: Any = policy_loss) -> Any:
            drawn.append(torch.rand(len(inputs.log_probs)))
            return policy_loss(inputs)

        learner._objective, learner.step = replace(learner._objective, policy_loss=drawing), step
        torch.manual_seed(number)
        learner.update([experience_for(learner, "grpo")])
        found.append(torch.cat(drawn))

    first, again, *others = found
    assert torch.equal(first, again)
    assert not any(torch.equal(one, other) for one, other in itertools.combinations([first, *others], 2))


def test_groups_without_signal_count_for_each_mini_batch_in_proportion() -> None:
    """With `dr_grpo` all rows are in the divisor; the rows of an update then are rows x its share of the kept rows."""
    divisors: list[tuple[float, float]] = []
    learner = learner_of("grpo", mini_batches=2, loss_aggregation="dr_grpo", dr_grpo_tokens=5)
    aggregate = learner._objective.aggregate

    def noting(losses: Tensor, counts: Tensor, totals: Any) -> Tensor:
        divisors.append((totals.rows, totals.actions))
        return aggregate(losses, counts, totals)

    learner._objective = replace(learner._objective, aggregate=noting)
    experience = experience_for(learner, "grpo")
    assert experience.info is not None and experience.action_mask is not None
    experience.info["group_mixed"] = torch.arange(ROWS) < 5

    stats = learner.update([experience])

    assert stats.updates == 2
    assert sorted({rows for rows, _ in divisors}) == pytest.approx([ROWS * 2 / 5, ROWS * 3 / 5])
    assert sum({actions for _, actions in divisors}) == float(experience.action_mask[:5].sum())


def test_a_step_without_an_action_takes_no_update() -> None:
    learner = learner_of("grpo", epochs=2, mini_batches=3)
    experience = experience_for(learner, "grpo")
    assert experience.info is not None
    before = weights(learner)
    experience.info["group_mixed"] = torch.zeros(ROWS, dtype=torch.bool)

    stats = learner.update([experience])

    assert (stats.updates, stats.step, stats.loss, stats.gradient_norm) == (0, 1, 0.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(weights(learner), before, strict=True))


def test_fewer_rows_than_mini_batches_give_the_updates_of_a_row_each() -> None:
    of_six, of_four = learner_of("grpo", mini_batches=6), learner_of("grpo", mini_batches=4)
    experience = experience_for(of_six, "grpo")
    assert experience.info is not None
    experience.info["group_mixed"] = torch.arange(ROWS) < 4

    stats, expected = of_six.update([experience]), of_four.update([experience])

    assert stats.updates == expected.updates == 4
    assert_same_stats(stats, expected)
    assert all(torch.equal(a, b) for a, b in zip(weights(of_six), weights(of_four), strict=True))


def test_a_successor_takes_the_updates_of_its_predecessor_bit_for_bit() -> None:
    settings = {"epochs": 2, "mini_batches": 3, "kl_coef_target": 0.001}
    undisturbed, killed, successor = (learner_of("grpo", **settings) for _ in range(3))
    experiences = [experience_for(undisturbed, "grpo", seed) for seed in range(3)]

    expected = [undisturbed.update([each]) for each in experiences]
    for each in experiences[:2]:
        killed.update([each])
    go_on_from(successor, killed)
    stats = successor.update([experiences[2]])

    assert all(torch.equal(a, b) for a, b in zip(weights(successor), weights(undisturbed), strict=True))
    assert stats.kl_coef == expected[2].kl_coef > expected[1].kl_coef > expected[0].kl_coef == 0.05
    assert successor._kl_coef == undisturbed._kl_coef
