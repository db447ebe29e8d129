"""Widths of micro-batches, rounded up: other shapes, the same step."""

import pytest
import torch

from tests.trainer.test_learner import TRAINER, disturbed, experience_for, new_learner, states_of


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_rounded_width_changes_no_step(algorithm):
    plain = new_learner(algorithm)
    rounded = new_learner(algorithm, TRAINER.model_copy(update={"micro_batch_size": 2}), width=64)
    experience = disturbed(experience_for(plain, algorithm))
    widths = []
    rounded._actor.base_model.register_forward_pre_hook(
        lambda module, args, named: widths.append(named["input_ids"].shape[1]), with_kwargs=True
    )

    expected, stats = plain.update([experience]), rounded.update([experience])

    # The first call looks at the model's head, with two tokens.
    assert widths.pop(0) == 2
    assert len(widths) > 1
    assert all(width % 64 == 0 for width in widths)
    assert experience.sequences.shape[1] % 64
    assert stats.loss == pytest.approx(expected.loss, abs=1e-6)
    assert stats.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
    for ours, theirs in zip(states_of(rounded), states_of(plain), strict=True):
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], atol=TRAINER.learning_rate / 100, rtol=0)
