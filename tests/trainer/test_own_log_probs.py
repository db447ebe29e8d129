"""Log-probs of the policy that sampled, computed by the trainer before its step (`rollout.log_probs = "trainer"`)."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from pipeline.errors import FieldError
from pipeline.experience.ragged import RaggedRows
from pipeline.experience.types import Experience
from pipeline.progress import Telemetry
from pipeline.trainer.batch import TrainingBatch
from pipeline.trainer.learner import Learner
from pipeline.trainer.sharding.ranks import _without_actions
from pipeline.trainer.state import digest_after
from pipeline.trainer.step_stats import Clock, Stopwatch
from tests.support import tiny
from tests.support.told import Told
from tests.trainer.loss.test_objective import sampled
from tests.trainer.test_learner import CPU, TRAINER, assert_same, experience_of, weights
from tests.trainer.test_out_of_memory import Device

PACKED = {"packing": True}


def without(experience: Experience) -> Experience:
    """Return the rows as a worker makes them that leaves log-probs to the trainer."""
    bare = copy.copy(experience)
    bare.action_log_probs = None
    return bare


def stepped(experience: Experience, *, computes: bool, seed: int = 0, **changes: Any) -> tuple[Any, Any]:
    """Return the weights and the statistics of one step."""
    actor = tiny.llama(seed)
    trainer = TRAINER.model_copy(update={"gradient_clip_norm": 100.0, **changes})
    learner = Learner(trainer, "grpo", actor, kl_coef=0.05, computes_log_probs=computes)
    stats = learner.update([experience])
    return weights(learner), stats


@pytest.mark.parametrize(
    "changes", [{}, {"micro_batch_size": 1}, {"micro_batch_size": 3}, PACKED, {"micro_batch_tokens": 20}],
    ids=["whole", "row by row", "three rows", "packed", "by tokens"],
)  # fmt: skip
def test_a_step_on_rows_without_log_probs_is_that_on_rows_with_those_of_the_same_weights(changes) -> None:
    experience = experience_of(tiny.llama(), "grpo")

    expected, with_them = stepped(experience, computes=False)
    found, stats = stepped(without(experience), computes=True, **changes)

    assert_same(found, expected)
    assert stats.row_importance_ratios == pytest.approx([1.0] * len(stats.row_importance_ratios), abs=1e-5)
    assert stats.entropy_nats == pytest.approx(with_them.entropy_nats, abs=1e-5)
    assert stats.kl_nats == pytest.approx(with_them.kl_nats, abs=1e-5)
    assert stats.forward_s > 0


def test_the_ratio_to_the_engine_is_that_of_the_present_weights() -> None:
    """Rows of an older policy: the policy's ratio is 1, and the correction goes from the engine to the trainer."""
    experience = sampled()
    mask, behaviour = experience.action_mask, experience.behaviour_log_probs
    assert mask is not None and behaviour is not None
    newer = tiny.llama(seed=1)
    present = experience_of(newer, "grpo").action_log_probs

    _, stats = stepped(without(experience), computes=True, seed=1)

    assert present is not None and experience.info is not None
    trained = mask.bool() & experience.info["group_mixed"][:, None]
    ratios = (present - behaviour)[trained].exp()
    assert stats.importance_ratio == pytest.approx(1.0, abs=1e-5)
    assert stats.behaviour_ratio_mean == pytest.approx(float(ratios.mean()), rel=1e-4)
    assert stats.behaviour_ratio_max == pytest.approx(float(ratios.max()), rel=1e-4)
    gaps = (present - behaviour).abs()
    assert stats.behaviour_gap_nats == pytest.approx(float(gaps[trained].mean()), rel=1e-4)
    rows = [float(gaps[row][trained[row]].mean()) for row in range(len(mask)) if trained[row].any()]
    assert stats.row_gap_nats == pytest.approx(rows, rel=1e-4)


def test_rows_with_log_probs_are_computed_anew() -> None:
    experience = experience_of(tiny.llama(), "grpo")
    assert experience.action_log_probs is not None
    off = replace(experience, action_log_probs=experience.action_log_probs - 0.5)

    expected, _ = stepped(without(experience), computes=True)
    found, stats = stepped(off, computes=True)

    assert_same(found, expected)
    assert stats.importance_ratio == pytest.approx(1.0, abs=1e-5)


def test_without_the_key_rows_without_log_probs_are_refused() -> None:
    with pytest.raises(FieldError, match="action_log_probs is missing"):
        stepped(without(experience_of(tiny.llama(), "grpo")), computes=False)


def test_a_pass_without_memory_is_repeated_with_half_the_tokens() -> None:
    experience = experience_of(tiny.llama(), "grpo")
    actor, told = tiny.llama(), Told()
    learner = Learner(
        TRAINER.model_copy(update={"gradient_clip_norm": 100.0}), "grpo", actor, kl_coef=0.05,
        computes_log_probs=True, telemetry=told,
    )  # fmt: skip
    device = Device(actor, most_tokens=30)

    learner.update([without(experience)])

    expected, _ = stepped(experience, computes=False)
    assert told.counted["out_of_memory"] and max(device.passes) > 30
    assert max(device.passes[device.passes.index(max(device.passes)) + 1 :]) < max(device.passes), "the bound stays"
    assert_same(weights(learner), expected)


def test_a_pass_of_another_rank_alone_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a sharded model with fewer micro-batches: the places of no action."""
    learner = Learner(TRAINER, "grpo", tiny.llama(), computes_log_probs=True)
    batch = TrainingBatch.of(RaggedRows.of(experience_of(tiny.llama(), "grpo")), "grpo", CPU)
    part = _without_actions(batch.to_score())
    monkeypatch.setattr("pipeline.trainer.learner.in_step", lambda *_, **__: iter([part]))

    found = learner._log_probs_of(learner._actor, batch, Stopwatch(Telemetry.none(), Clock()))

    assert (len(part), len(part.advantages), part.flat.lengths.tolist()) == (1, 0, [2])
    assert found.shape == batch.advantages.shape and not found.any()


def test_the_digest_of_rows_without_log_probs_tells_them_apart() -> None:
    experience = experience_of(tiny.llama(), "grpo")
    other = replace(without(experience), sequences=experience.sequences + 1)

    digests = {digest_after(0, [one]) for one in (experience, without(experience), other)}

    assert len(digests) == 3
    with pytest.raises(FieldError, match="advantages or reward is missing"):
        digest_after(0, [replace(experience, advantages=None)])
