"""The inputs of a loss from rows: holes, tokens after the last action, rows that are left out, images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.ragged import RaggedRows
from pipeline.experience.types import Experience, ExperienceVL
from pipeline.trainer.batch import TrainingBatch, trained_rows
from tests.support.experiences import made_up_vl

CPU = torch.device("cpu")


def two_turns() -> Experience:
    """Row 0: 2 of the prompt, an action, two of a tool, two actions, one more of a tool. Row 1: 1, and an action."""
    sequences = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 0, 11, 12]])
    actions = torch.tensor([[1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]]).bool()
    numbers = torch.arange(12.0).view(2, 6)
    return Experience(
        sequences, numbers, numbers + 0.5, torch.tensor([1.0, 2.0]), None, torch.tensor([-1.0, 3.0]),
        (sequences != 0).long(), actions, base_action_log_probs=numbers - 100,
        info={"group_mixed": torch.tensor([True, False]), "cut": torch.tensor([True, False])},
    )  # fmt: skip


def test_actions_that_count_have_a_number_each_and_tokens_after_the_last_one_are_left_out() -> None:
    batch = TrainingBatch.of(RaggedRows.of(two_turns()), "grpo", CPU)

    assert batch.flat.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 11, 12]
    assert batch.flat.labels.tolist() == [3, 6, 7, 12]
    assert batch.log_probs is not None and batch.log_probs.tolist() == [0, 3, 4, 11]
    assert batch.base_log_probs is not None and batch.base_log_probs.tolist() == [-100, -97, -96, -89]
    assert batch.advantages.tolist() == [-1, -1, -1, 3]
    assert (batch.flat.lengths.tolist(), batch.flat.prompts.tolist(), batch.counts.tolist()) == ([7, 2], [2, 1], [3, 1])


def test_tokens_are_left_out_by_their_numbers_not_by_a_mask_whose_ones_a_host_would_wait_for() -> None:
    chosen: list[Tensor] = []

    class Indexed(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.index.Tensor:
                chosen.extend(args[1])
            return func(*args, **(kwargs or {}))

    with Indexed():
        TrainingBatch.of(RaggedRows.of(two_turns()), "grpo", CPU)

    assert chosen and all(index.dtype == torch.int64 for index in chosen)


def test_an_attention_mask_with_holes_takes_their_tokens_away() -> None:
    experience = two_turns()
    assert experience.attention_mask is not None
    experience.attention_mask[0, 3] = 0

    batch = TrainingBatch.of(RaggedRows.of(experience), "grpo", CPU)

    assert batch.flat.tokens.tolist() == [1, 2, 3, 5, 6, 7, 11, 12]
    assert batch.flat.labels.tolist() == [3, 6, 7, 12]


def test_of_ppo_values_and_returns_are_an_actions() -> None:
    experience = replace(two_turns(), advantages=torch.ones(2, 6))

    batch = TrainingBatch.of(RaggedRows.of(experience), "ppo", CPU)

    assert batch.values is not None and batch.values.tolist() == [0.5, 3.5, 4.5, 11.5]
    assert batch.returns is not None and batch.returns.tolist() == [1.5, 4.5, 5.5, 12.5]
    given = replace(experience, returns=torch.full((2, 6), 7.0))
    returns = TrainingBatch.of(RaggedRows.of(given), "ppo", CPU).returns
    assert returns is not None and returns.tolist() == [7.0] * 4
    with pytest.raises(ShapeError, match=r"values of shape \(2,\): one number an action is needed"):
        TrainingBatch.of(RaggedRows.of(replace(experience, values=torch.ones(2))), "ppo", CPU)


def test_rows_keep_their_numbers_in_any_selection() -> None:
    batch = TrainingBatch.of(RaggedRows.of(two_turns()), "grpo", CPU)

    assert batch.rows(np.array([0, 1])) is batch
    swapped = batch.rows(np.array([1, 0, 1]))

    assert swapped.flat.labels.tolist() == [12, 3, 6, 7, 12]
    assert swapped.log_probs is not None and swapped.log_probs.tolist() == [11, 0, 3, 4, 11]
    assert swapped.counts.tolist() == [1, 3, 1]


def test_rows_without_signal_and_cut_ones_are_left_out_where_it_is_asked() -> None:
    rows = RaggedRows.of(two_turns())

    assert trained_rows(rows, "grpo").tolist() == [0]
    assert trained_rows(rows, "grpo", equal_groups=True).tolist() == [0, 1]
    assert trained_rows(rows, "ppo").tolist() == [0, 1]
    assert trained_rows(rows, "ppo", skip_cut=True).tolist() == [1]
    assert trained_rows(rows, "grpo", skip_cut=True).tolist() == []
    with pytest.raises(FieldError, match=r"info\['cut'\] is missing"):
        trained_rows(rows.without("info.cut"), "grpo", skip_cut=True)


def test_rows_with_images_keep_all_their_tokens() -> None:
    """A tool's image may follow the last action; its pixels belong to its tokens."""
    experience = made_up_vl(3, seed=2, prompt=3, actions=5)
    assert isinstance(experience, ExperienceVL) and experience.action_mask is not None
    experience.action_mask[:, 2:] = False
    experience.action_mask[:, 1] = True
    rows = RaggedRows.of(experience)

    batch = TrainingBatch.of(rows, "grpo", CPU)

    assert batch.flat.lengths.tolist() == rows.lengths
    assert batch.vision is not None and len(batch.vision) == 3
    assert int(batch.flat.action.max()) < sum(rows.lengths) - 1
    assert len(batch.rows(np.array([2])).vision.pixel_values) == 1  # type: ignore[union-attr]
