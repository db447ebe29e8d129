"""The losses beside TRL's own numbers: `GRPOTrainer` computes the same batch of the same model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benches import peers
from benches.report import ROOT
from pipeline.config.schema import TrainerConfig
from pipeline.trainer.learner import Learner
from pipeline.trainer.loss.objective import Objective
from tests.support import tiny
from tests.trainer.test_learner import TRAINER, applied_gradients, assert_same, disturbed, experience_of

LONGEST = 7
KL_COEF = 0.05
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token mean, DAPO's bounds": (
        {"clip_low": 0.1, "clip_high": 0.3},
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.3, "beta": KL_COEF},
    ),
    "token mean of a batch": ({"clip_range": 0.2}, {"loss_type": "bnpo", "epsilon": 0.2, "beta": KL_COEF}),
    "GRPO's mean of responses": (
        {"loss_aggregation": "sequence_mean", "clip_range": 0.2},
        {"loss_type": "grpo", "epsilon": 0.2, "beta": KL_COEF},
    ),
    "Dr. GRPO": (
        {"loss_aggregation": "dr_grpo", "dr_grpo_tokens": LONGEST, "clip_range": 0.2},
        {"loss_type": "dr_grpo", "max_completion_length": LONGEST, "epsilon": 0.2, "beta": 0.0},
    ),
    "dual clip": (
        {"clip_range": 0.1, "dual_clip": 1.2},
        {"loss_type": "bnpo", "epsilon": 0.1, "delta": 1.2, "beta": 0.0},
    ),
    "GSPO": (
        {"policy_loss": "gspo", "loss_aggregation": "sequence_mean", "clip_low": 0.03, "clip_high": 0.04},
        {
            "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04,
            "beta": 0.0,
        },
    ),
    "CISPO": (
        {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 0.1},
        {"loss_type": "cispo", "epsilon_high": 1.1, "beta": 0.0},
    ),
}  # fmt: skip


def test_losses_and_gradients_are_those_of_trl(tmp_path: Path) -> None:
    """TRL multiplies the KL by the ratio of the policies by default (DeepSeek-V3.2): that is turned off in its part."""
    if not peers.TRL.folder.exists() and not os.environ.get("CI"):
        pytest.skip("the environment of TRL is made by `bin/bench rollout`, and in CI")
    python = peers.python_of(peers.TRL)
    experience = disturbed(experience_of(tiny.llama(0), "grpo"))
    torch.save(experience, tmp_path / "experience.pt")
    (tmp_path / "cases.json").write_text(json.dumps([theirs for _, theirs in CASES.values()]))
    command = [python, "-m", "tests.trainer.loss.trl_losses", str(tmp_path)]
    subprocess.run(command, check=True, timeout=600, cwd=ROOT)

    found = torch.load(tmp_path / "losses.pt", weights_only=False)

    for (name, (ours, theirs)), (loss, gradients) in zip(CASES.items(), found, strict=True):
        trainer = TrainerConfig.model_validate({**TRAINER.model_dump(exclude={"betas"}), **ours})
        trainer = trainer.model_copy(update={"gradient_clip_norm": 100.0})
        learner = Learner(
            trainer, "grpo", tiny.llama(0), kl_coef=theirs["beta"], objective=Objective.of(trainer, whitens=False)
        )
        stats = learner.update([experience])
        assert 0 < stats.clipped_ratio < 1, f"{name}: nothing is clipped, the bounds are not compared"
        assert stats.loss == pytest.approx(float(loss), rel=1e-4), name
        assert_same(applied_gradients(learner), gradients)
