"""Log-probs of the reference, computed by the trainer before its step (`model.reference_device = "trainer"`)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config.schema import Config
from pipeline.config.sections import ModelConfig
from pipeline.errors import ConfigError
from pipeline.experience.types import Experience
from pipeline.models.log_probs import action_log_probs
from pipeline.models.lora import adapt, adapter_of
from pipeline.trainer.learner import Learner
from pipeline.trainer.prefetch import Gathering
from pipeline.trainer.process import new_learner, whole_models
from pipeline.trainer.step_stats import StepStats
from tests.support import tiny
from tests.support.told import Told
from tests.trainer.test_learner import (
    ACTION_COLUMNS,
    CPU,
    TRAINER,
    applied_gradients,
    assert_same,
    assert_same_stats,
    disturbed,
    experience_of,
    states_of,
    weights,
)
from tests.trainer.test_out_of_memory import Device

LORA = ModelConfig(lora_rank=4)
KL_COEF = 0.3
PROMPT = (3, 4, 5)


def policy(*, lora: bool) -> nn.Module:
    """Return a policy that is a little away from its start."""
    actor: Any = adapt(tiny.llama(), LORA, seed=2) if lora else tiny.llama()
    draws = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for tensor in (adapter_of(actor) or dict(actor.named_parameters())).values():
            tensor += 0.05 * torch.randn(tensor.shape, generator=draws)
    return actor


def rows_of(actor: nn.Module, reference: nn.Module, seed: int = 0) -> Experience:
    """Return rows as the worker makes them that holds the reference."""
    made = disturbed(experience_of(actor, "grpo", seed=seed), seed)
    assert made.attention_mask is not None and made.action_mask is not None
    with torch.no_grad():
        base = action_log_probs(reference, made.sequences, made.attention_mask, ACTION_COLUMNS)
    made.base_action_log_probs = base.masked_fill(~made.action_mask, 0.0)
    return made


def with_base(experience: Experience, base: Tensor | None) -> Experience:
    changed = copy.copy(experience)
    changed.base_action_log_probs = base
    return changed


def learner_of(*, lora: bool = False, reference: nn.Module | None = None, **changes: Any) -> Learner:
    """Return a learner; with adapters and a reference, the reference is the actor."""
    trainer = TRAINER.model_copy(update={"gradient_clip_norm": 100.0, **changes})
    actor = policy(lora=lora)
    return Learner(trainer, "grpo", actor, kl_coef=KL_COEF, reference=actor if lora and reference else reference)


def stepped(learner: Learner, experiences: list[Experience]) -> tuple[list[Tensor], StepStats]:
    """Return gradients and statistics of a step."""
    stats = learner.update(experiences)
    return applied_gradients(learner), stats


CUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "row by row": {"micro_batch_size": 1},
    "by tokens": {"micro_batch_tokens": 20},
    "packed": {"packing": True},
    "with entropies": {"entropy_coef": 0.01},
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("lora", [False, True], ids=["a model", "lora"])
def test_a_step_is_that_on_the_log_probs_of_the_workers_reference(lora: bool, cut: str) -> None:
    changes = CUTS[cut]
    reference = tiny.llama()
    rows = [rows_of(policy(lora=lora), reference, seed) for seed in (0, 1)]
    theirs, ours = learner_of(lora=lora, **changes), learner_of(lora=lora, reference=reference, **changes)

    expected, wanted = stepped(theirs, rows)
    found, stats = stepped(ours, [with_base(one, None) for one in rows])

    # The largest gradient is 2.
    assert_same(found, expected, 3e-6)
    moments, changed = ours.tensors(), states_of(ours)[0]
    for name, its in states_of(theirs)[0].items():
        # The first step of AdamW keeps little but the sign of a gradient, which is that of its rounding near zero.
        moment = moments.get(f"actor.exp_avg.{name}")
        tells = torch.ones_like(its, dtype=torch.bool) if moment is None else moment.abs() * 10 > 2e-5
        torch.testing.assert_close(changed[name][tells], its[tells], atol=1e-6, rtol=0)
    assert stats.loss == pytest.approx(wanted.loss, abs=1e-6)
    assert_same_stats(stats, wanted)
    assert (
        stats.row_kl_nats == pytest.approx(wanted.row_kl_nats, rel=1e-5, abs=1e-6) and stats.kl_loss and stats.kl_nats
    )
    assert ours.tensors().keys() == theirs.tensors().keys(), "the optimizer has no tensor of the reference"


@pytest.mark.parametrize("lora", [False, True], ids=["a model", "lora"])
def test_the_reference_stays_what_it_was_and_the_actor_keeps_its_adapters(lora: bool) -> None:
    reference = tiny.llama()
    rows, before = rows_of(policy(lora=lora), reference), [tensor.clone() for tensor in reference.state_dict().values()]
    theirs, ours = learner_of(lora=lora), learner_of(lora=lora, reference=reference)

    for _ in range(3):
        theirs.update([rows])
        stats = ours.update([with_base(rows, None)])

    assert_same(weights(ours), weights(theirs))
    assert stats.importance_ratio != pytest.approx(1.0, abs=1e-3), "the passes of the step have their adapters"
    assert all(torch.equal(*pair) for pair in zip(reference.state_dict().values(), before, strict=True))
    assert all(parameter.grad is None for parameter in reference.parameters())


def test_rows_with_log_probs_of_a_reference_are_computed_anew() -> None:
    reference = tiny.llama()
    rows = rows_of(policy(lora=False), reference)
    assert rows.base_action_log_probs is not None

    expected, _ = stepped(learner_of(reference=reference), [with_base(rows, None)])
    found, _ = stepped(learner_of(reference=reference), [with_base(rows, rows.base_action_log_probs - 0.7)])

    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_the_reference_is_asked_once_a_step_of_several_updates() -> None:
    reference = tiny.llama()
    rows = rows_of(policy(lora=False), reference)
    once, often = tiny.llama(), tiny.llama()
    asked, asked_often = Device(once), Device(often)
    several = {"epochs": 3, "mini_batches": 2}

    learner_of(reference=once).update([with_base(rows, None)])
    ours, theirs = learner_of(reference=often, **several), learner_of(**several)
    found, stats = stepped(ours, [with_base(rows, None)])
    expected, _ = stepped(theirs, [rows])

    assert stats.updates == 6 and asked.passes and asked_often.passes == asked.passes
    assert_same(found, expected)


def test_a_pass_of_the_reference_without_memory_is_repeated_with_half_the_tokens() -> None:
    reference, told = tiny.llama(), Told()
    actor = policy(lora=False)
    rows = rows_of(actor, reference)
    device = Device(reference, most_tokens=30)
    learner = Learner(
        TRAINER.model_copy(update={"gradient_clip_norm": 100.0}), "grpo", actor, kl_coef=KL_COEF, reference=reference,
        telemetry=told,
    )  # fmt: skip

    found, _ = stepped(learner, [with_base(rows, None)])

    expected, _ = stepped(learner_of(), [rows])
    assert told.counted["out_of_memory"] and max(device.passes) > 30
    assert max(device.passes[-2:]) <= 30
    assert_same(found, expected, 3e-6 * max(1.0, *(float(gradient.abs().max()) for gradient in expected)))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for seed, name in enumerate(("actor", "other")):
        tiny.llama(seed).save_pretrained(tmp_path / name)
    return tmp_path / "actor", tmp_path / "other"


def loaded(actor: Path, *, kl_coef: float = 0.1, **model: Any) -> tuple[dict[str, nn.Module], nn.Module | None]:
    """Return the models of a trainer as its process makes them, and the reference."""
    config = Config.model_validate(
        {
            "model": {"actor": str(actor), "reference_device": "trainer", **model},
            "trainer": {"kl_coef": kl_coef},
            "rollout": {"max_length": 24},
        }
    )
    models = whole_models(config, CPU)
    return models, new_learner(config, models, PROMPT, CPU)._reference


def test_the_trainer_loads_the_reference_that_its_configuration_asks_for(folders: tuple[Path, Path]) -> None:
    actor, other = folders

    of_start, of_folder = loaded(actor), loaded(actor, reference=str(other))
    of_adapters, beside_adapters = loaded(actor, lora_rank=2), loaded(actor, lora_rank=2, reference=str(other))

    assert of_adapters[1] is of_adapters[0]["actor"]
    for (models, reference), seed in ((of_start, 0), (of_folder, 1), (beside_adapters, 1)):
        assert models.keys() == {"actor"} and reference is not None and reference is not models["actor"]
        assert not adapter_of(reference)
        expected = tiny.llama(seed).state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in reference.state_dict().items())
    for nothing in (loaded(actor, kl_coef=0.0), loaded(actor, reference_device="worker")):
        assert nothing[1] is None


def test_the_logits_of_the_reference_are_float32_if_the_actors_are(folders: tuple[Path, Path]) -> None:
    tokens = torch.tensor([PROMPT])

    for given in (True, False):
        models, reference = loaded(folders[0], dtype="bfloat16", float32_logits=given)
        assert reference is not None
        dtypes = {model(input_ids=tokens).logits.dtype for model in (models["actor"], reference)}
        assert dtypes == {torch.float32 if given else torch.bfloat16}


def test_a_reference_whose_rows_cannot_be_packed_is_refused_at_the_start() -> None:
    trainer = TRAINER.model_copy(update={"packing": True})

    with pytest.raises(ConfigError, match="packing"):
        Learner(trainer, "grpo", tiny.llama(), kl_coef=KL_COEF, reference=nn.Linear(1, 1))


def test_the_reference_is_in_eval_mode() -> None:
    reference = tiny.llama().train()

    learner_of(reference=reference)

    assert not reference.training


def test_rows_need_no_log_probs_of_a_reference_that_is_the_trainers() -> None:
    worker, trainer = (Config.model_validate({"model": {"reference_device": role}}) for role in ("worker", "trainer"))

    assert Gathering.of(worker).needs_reference and not Gathering.of(trainer).needs_reference
