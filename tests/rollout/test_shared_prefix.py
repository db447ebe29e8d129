"""Log-prob passes of a worker that compute each prompt once: the same log-probs, of fewer tokens."""

from __future__ import annotations

import math
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.experience.types import Experience
from pipeline.models.log_probs import action_log_probs
from pipeline.models.shared_prefix import may_share_prompts, prepare_shared_prefix
from pipeline.rollout.maker import NaiveExperienceMaker
from pipeline.rollout.model_passes import ModelPasses
from pipeline.rollout.rows import Rows
from pipeline.trainer.learner import Learner
from tests.models.test_shared_prefix import ACTIONS, PROMPT, rows_of
from tests.rollout.test_loader import rollers  # noqa: F401 - a fixture
from tests.support import tiny
from tests.support.told import Told
from tests.trainer.test_learner import TRAINER
from tests.trainer.test_out_of_memory import Device

CPU = torch.device("cpu")
PROMPTS = torch.tensor([[5, 6, 7, 2, 4], [0, 0, 7, 8, 9], [0, 0, 0, 4, 3]])
GROUP = 4


def rows(groups: list[int], *, seed: int = 1) -> Rows:
    sequences, mask, actions = rows_of(groups, seed=seed)
    prompts, lengths = mask[:, :PROMPT].sum(dim=1).numpy(), actions.sum(dim=1).numpy()
    return Rows(sequences[mask != 0], prompts, lengths, PROMPT, ACTIONS, tiny.PAD, torch.from_numpy(lengths == ACTIONS))


def passes(most_rows: int | None = None) -> ModelPasses:
    return ModelPasses(most_rows, None, True)


def shared(model: Any, wanted: bool | None = True) -> Any:
    prepare_shared_prefix([model], CPU, wanted, key="trainer.shared_prefix")
    return model


def tokens_of(model: Any) -> list[int]:
    """The tokens of each pass of a model from now on; the first calls look at its head and its attention."""
    passes().log_probs("m", model, rows([2]), 1.0)
    return Device(model).passes


@pytest.mark.parametrize("build", [tiny.llama, tiny.qwen2, tiny.gpt2])
@pytest.mark.parametrize("most_rows", [None, 3])
@torch.no_grad()
def test_log_probs_are_those_of_padded_passes_and_prompts_are_computed_once(build: Any, most_rows: int | None) -> None:
    model, given = shared(build()), rows([4, 3, 4, 1])
    seen = tokens_of(model)

    found = passes(most_rows).log_probs("m", model, given, 0.7)

    sequences, mask, actions = rows_of([4, 3, 4, 1], seed=1)
    expected = action_log_probs(build(), sequences, mask, ACTIONS, temperature=0.7)
    torch.testing.assert_close(found, expected[actions], atol=2e-5, rtol=0)
    # 79 tokens of whole rows.
    assert seen == [52] if most_rows is None else sum(seen) > 52 and len(seen) == 4


@torch.no_grad()
def test_a_group_has_the_log_probs_that_it_has_alone() -> None:
    """A ticket has whole groups, so its other prompts change a log-prob by rounding alone, in any order of rows."""
    model, given = shared(tiny.llama()), rows([4, 4, 4])
    together = given.columns(passes().log_probs("m", model, given, 1.0))
    lengths, last = given.prompts.tolist(), given.tokens[given.starts + given.prompts - 1].tolist()
    prompts = list(zip(lengths, last, strict=True))
    assert len(set(prompts)) == 3
    for prompt in set(prompts):
        index = np.array([row for row, other in enumerate(prompts) if other == prompt])
        assert len(index) == 4
        some = given.rows(index[::-1].copy())
        alone = some.columns(passes().log_probs("m", model, some, 1.0)).flip(0)
        torch.testing.assert_close(together[index], alone, atol=1e-5, rtol=0)
    again = given.columns(passes().log_probs("m", model, given, 1.0))
    assert torch.equal(again, together), "the same rows have the same bits"


@torch.no_grad()
def test_a_pass_without_memory_is_run_again_in_halves() -> None:
    model, given = shared(tiny.llama()), rows([4, 3, 4, 1])
    expected = passes().log_probs("m", model, given, 1.0)
    device, told = Device(model, most_tokens=30), Told()
    sizes = ModelPasses(None, None, True, told)

    found = sizes.log_probs("m", model, given, 1.0)

    assert told.counted["out_of_memory"] and device.passes[-1] <= 30 < max(device.passes)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def maker_of(wanted: bool | None, reward: Any) -> NaiveExperienceMaker:
    tokenizer = types.SimpleNamespace(pad_token_id=tiny.PAD, eos_token_id=tiny.EOS)
    actor, reference = shared(tiny.llama(), wanted), shared(tiny.llama(seed=4), wanted)
    return NaiveExperienceMaker(
        actor, None, reward, reference, tokenizer, use_grpo=True, num_generation=GROUP,
        logits_forward_batch_size=None, drop_errored=True,
    )  # fmt: skip


def made(maker: NaiveExperienceMaker) -> Experience:
    ids = PROMPTS
    return maker.make_experience(ids, (ids != 0).long(), max_length=12, seed=3)


@pytest.mark.parametrize("drops", [False, True], ids=["", "a group is dropped"])
def test_experience_with_shared_prompts_is_that_without_and_fresh_for_the_trainer(drops: bool) -> None:
    """Importance ratios are 1 whether the worker shares prompts, the trainer, both or none."""

    def reward(*, input_ids: Tensor, response_start: Tensor, **_: Any) -> Tensor:
        scores = (input_ids.sum(dim=1) % 7).float()
        return scores.masked_fill(response_start == 3, math.nan) if drops else scores

    with_rows, once = made(maker_of(False, reward)), made(maker_of(True, reward))

    assert len(once.sequences) == (8 if drops else 12)
    for name, value in vars(with_rows).items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(getattr(once, name), value, atol=2e-5, rtol=0)
    assert torch.equal(once.sequences, with_rows.sequences)
    assert once.base_action_log_probs is not None and bool(once.base_action_log_probs.any())
    for experience in (with_rows, once):
        assert experience.info is not None
        experience.info["group_mixed"] = torch.ones(len(experience.sequences), dtype=torch.bool)
        for wanted in (False, True):
            learner = Learner(TRAINER.model_copy(update={"shared_prefix": wanted}), "grpo", tiny.llama(), kl_coef=0.1)
            stats = learner.update([experience])
            assert stats.row_importance_ratios == pytest.approx([1.0] * len(once.sequences), abs=2e-5)
            assert stats.clipped_ratio == 0


@pytest.mark.parametrize(
    ("log_probs", "shared", "actor", "reference"),
    [
        (None, None, False, True),
        ("worker", None, True, True),
        ("worker", True, True, True),
        ("worker", False, False, False),
    ],
    ids=str,
)
def test_the_models_whose_log_probs_a_worker_computes_share_prompts(
    rollers,  # noqa: F811
    log_probs,
    shared,
    actor,
    reference,
) -> None:
    roller, _, _ = rollers(rollout={"log_probs": log_probs}, trainer={"shared_prefix": shared})

    assert may_share_prompts(roller.maker.actor) == actor
    assert may_share_prompts(roller.maker.initial_model) == reference


def test_a_worker_whose_model_cannot_is_refused_if_it_is_asked_to(rollers, tmp_path, task) -> None:  # noqa: F811
    model = tiny.mistral()
    model.save_pretrained(tmp_path / "reference")

    with pytest.raises(ConfigError, match=r"^trainer\.shared_prefix: a Mistral\w+ cannot share prompts: Mistral"):
        rollers(model={"reference": str(tmp_path / "reference")}, trainer={"shared_prefix": True})
