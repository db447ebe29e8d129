"""Micro-batches that are filled by tokens: little padding, every action once, and the same step for any budget."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.experience.ragged import RaggedRows
from pipeline.experience.types import Experience
from pipeline.models.pass_size import PassSize, training_size
from pipeline.progress import Telemetry
from pipeline.trainer.batch import TrainingBatch
from pipeline.trainer.learner import Learner
from tests.support import tiny
from tests.trainer.test_learner import (
    TRAINER,
    Algorithm,
    applied_gradients,
    assert_same_stats,
    experience_for,
    new_learner,
)
from tests.trainer.test_out_of_memory import Device

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def ragged(rows: int, *, seed: int = 0) -> Experience:
    """Rows whose prompts and responses have lengths from a few tokens to hundreds, as a rollout makes them."""
    draws = torch.Generator().manual_seed(seed)
    prompts = torch.randn(rows, 1, generator=draws).mul(0.8).add(3.5).exp().long().clamp(1, 300)
    responses = torch.randn(rows, 1, generator=draws).mul(1.0).add(4.0).exp().long().clamp(1, 600)
    before, after = int(prompts.max()), int(responses.max())
    columns = torch.arange(before + after)
    real = (columns >= before - prompts) & (columns < before + responses)
    mask = real[:, before:]
    ones = torch.randn(mask.shape, generator=draws)
    sequences = torch.randint(2, tiny.VOCABULARY_SIZE, real.shape, generator=draws) * real
    return Experience(sequences, ones, None, ones[:, 0], None, ones[:, 0], real.long(), mask, info={})


def batch_of(experience: Experience) -> TrainingBatch:
    return TrainingBatch.of(RaggedRows.of(experience), "grpo", CPU)


def shares_of_padding(batch: TrainingBatch, size: PassSize) -> tuple[list[TrainingBatch], float]:
    parts = list(batch.micro_batches(size))
    real = sum(int(part.flat.lengths.sum()) for part in parts)
    return parts, 1 - real / sum(part.flat.padded().sequences.numel() for part in parts)


def size_of(tokens: int) -> PassSize:
    return training_size(tiny.llama(), CPU, rows=None, tokens=tokens, telemetry=Telemetry.none())


@pytest.mark.parametrize("tokens", [1024, 4096, 1 << 20])
def test_padding_of_ragged_rows_stays_under_a_tenth(tokens: int) -> None:
    batch = batch_of(ragged(256))

    parts, share = shares_of_padding(batch, size_of(tokens))
    whole, share_whole = shares_of_padding(batch, PassSize("", most_rows=256))

    assert share <= 0.1 < 0.25 < share_whole
    for part in parts:
        padded = part.flat.padded()
        real = int(padded.attention_mask.sum())
        assert padded.sequences.numel() - real <= 0.1 * padded.sequences.numel()
        assert padded.sequences.numel() <= tokens or len(part) == 1
        assert (padded.attention_mask[:, -1] == 1).all(), "the rows end together"
        ends = np.cumsum(part.flat.counts) - 1
        assert (part.flat.action[ends].numpy() == np.cumsum(part.flat.lengths) - 1).all(), "with their last actions"
    for field in ("log_probs", "advantages"):
        seen, there = (torch.cat([getattr(part, field) for part in of]).sort().values for of in (parts, whole))
        assert torch.equal(seen, there)


def real_rows(batch: TrainingBatch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Each row's tokens up to its last action, its actions and their log-probs, in an order of their own."""
    assert batch.log_probs is not None
    tokens, labels = batch.flat.tokens.split(batch.flat.lengths.tolist()), batch.flat.labels
    columns = (values.split(batch.flat.counts.tolist()) for values in (labels, batch.log_probs))
    return sorted(zip(tokens, *columns, strict=True), key=lambda row: row[2].tolist())


def test_a_row_keeps_its_tokens_and_actions() -> None:
    batch = batch_of(ragged(40))

    parts = list(batch.micro_batches(size_of(2048)))

    there = real_rows(batch)
    seen = sorted((row for part in parts for row in real_rows(part)), key=lambda row: row[2].tolist())
    assert len(seen) == len(there) == 40
    for one, other in zip(seen, there, strict=True):
        assert all(torch.equal(mine, its) for mine, its in zip(one, other, strict=True))


def test_the_learner_fills_passes_by_tokens_on_a_card_and_where_it_is_configured() -> None:
    def size(
        device: torch.device, rows: int | None, tokens: int | None, **settings: bool
    ) -> tuple[int | None, int | None, float | None]:
        made = training_size(tiny.llama(), device, rows=rows, tokens=tokens, telemetry=Telemetry.none(), **settings)
        return made.most_rows, made.most_tokens, made.most_padding

    assert size(CPU, None, None) == (48, 2048, None), "as always: the digests of runs on a CPU depend on it"
    assert size(CPU, 4, None) == size(GPU, 4, None) == (4, None, None)
    assert size(CPU, None, 500) == size(GPU, None, 500) == (None, 500, 0.1)
    assert size(GPU, None, None) == (None, 8192, 0.1)
    assert size(GPU, None, None, checkpointed=True) == (None, 16384, 0.1)
    assert size(CPU, None, None, packed=True) == (None, 2048, None)
    assert size(CPU, 4, None, packed=True) == (4, None, None)


def test_a_row_without_an_action_is_in_no_pass() -> None:
    experience = ragged(6)
    assert experience.action_mask is not None
    experience.action_mask[2] = False
    batch = batch_of(experience)

    parts = list(batch.micro_batches(size_of(4096)))

    assert sum(len(part) for part in parts) == 5
    experience.action_mask[:] = False
    assert not list(batch_of(experience).micro_batches(size_of(4096)))


def test_a_pass_with_a_rounded_width_that_runs_out_of_memory_is_cut() -> None:
    """Rows of 11 tokens are padded to 64: half of the 512 that ran out is more than the 88 by which they are cut."""
    trainer = TRAINER.model_copy(update={"micro_batch_tokens": 100})
    whole, cut = new_learner("grpo"), new_learner("grpo", trainer, width=64)
    experience = experience_for(whole, "grpo")
    Device(cut._actor, most_tokens=130)

    expected, stats = whole.update([experience]), cut.update([experience])

    assert_same_stats(stats, expected)
    assert isinstance(cut, Learner) and cut._micro_batch.most_tokens is not None
    assert cut._micro_batch.most_tokens < 50


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_step_with_checkpointed_activations_is_the_same_step(algorithm: Algorithm) -> None:
    plain = new_learner(algorithm)
    checkpointed = new_learner(algorithm, TRAINER.model_copy(update={"activation_checkpointing": True}))
    experience = experience_for(plain, algorithm)
    passes = Device(checkpointed._actor).passes

    expected, stats = plain.update([experience]), checkpointed.update([experience])

    assert_same_stats(stats, expected)
    for mine, its in zip(applied_gradients(checkpointed), applied_gradients(plain), strict=True):
        assert torch.equal(mine, its)
    # The look at the head, and one pass: the model's forward is not computed again, its layers' are.
    assert len(passes) == 2
