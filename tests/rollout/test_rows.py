"""Sampled rows end to end: made of an engine's responses, and the blocks and columns that passes and formulas get."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.ragged import RaggedRows
from pipeline.rollout.environment.turn_rows import TurnsResponse
from pipeline.rollout.generation.blocking import BlockingEngine
from pipeline.rollout.generation.interface import Completed, Response, Responses, Sampling
from pipeline.rollout.prompt_batch import PromptBatch, sample_all
from pipeline.rollout.rows import Rows

PAD = 99
PROMPTS = [[5, 6, 7], [8]]
RESPONSES = [[10, 11], [12], [13, 14, 15], [16, 17]]


def batch() -> PromptBatch:
    prompts = [torch.tensor(ids) for ids in PROMPTS]
    return PromptBatch(prompts, 3, 2, [None] * 4, None, Sampling(max_length=7, pad_token_id=PAD))


def joined(responses: list[Response]) -> Rows:
    return batch().joined([Completed(0, tuple(responses[:2])), Completed(1, tuple(responses[2:]))])


def rows(dtype: torch.dtype = torch.int64, **options: Any) -> Rows:
    return joined([Response(torch.tensor(ids, dtype=dtype), "stop", (), **options) for ids in RESPONSES])


def rows_of(responses: Responses) -> Rows:
    class Given:
        def generate(self, *_: Any, **__: Any) -> Responses:
            return responses

    engine: Any = BlockingEngine(Given())  # type: ignore[arg-type]
    asked = batch()
    return asked.joined(sample_all(engine, asked.requests(itertools.count().__next__)))


def test_a_pass_gets_its_rows_with_the_tokens_together_or_from_the_first_column_on() -> None:
    index = np.array([2, 0])

    ids, mask, columns = rows().padded(index, trim=True)
    assert columns == 3
    assert ids.tolist() == [[PAD, PAD, 8, 13, 14, 15], [5, 6, 7, 10, 11, PAD]]
    assert mask.tolist() == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]
    ids, mask, columns = rows().padded(index, trim=True, multiple=8)
    assert (columns, ids.shape) == (3, (2, 8)) and ids[1].tolist() == [PAD, PAD, 5, 6, 7, 10, 11, PAD]
    ids, mask, columns = rows().padded(index, trim=False)
    assert columns == 4 and ids.tolist() == [[PAD, PAD, 8, 13, 14, 15, PAD], [5, 6, 7, 10, 11, PAD, PAD]]
    ids, mask = rows().right_padded(index, trim=True)
    assert ids.tolist() == [[8, 13, 14, 15, PAD], [5, 6, 7, 10, 11]] and mask.sum(dim=1).tolist() == [4, 5]
    assert rows().right_padded(index, trim=False)[0].shape == (2, 7)


def test_values_change_between_columns_and_rows_end_to_end() -> None:
    made, values = rows(), torch.arange(1.0, 9.0)

    columns = made.columns(values)

    assert columns.tolist() == [[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 0], [7, 8, 0, 0]]
    assert torch.equal(made.flat(columns), values)
    assert [made.row_of(place) for place in (0, 2, 5)] == [(0, 0), (1, 0), (2, 2)]
    some = made.rows(np.array([3, 1]))
    assert some.tokens.tolist() == [8, 16, 17, 5, 6, 7, 12] and some.lengths.tolist() == [2, 1]


def test_an_estimator_that_changes_its_mask_changes_no_row() -> None:
    made = rows()

    made.action_mask.zero_()

    assert made.is_response.sum(dim=1).tolist() == [2, 1, 3, 2]


@pytest.mark.parametrize("blocking", [False, True], ids=["a stream", "blocking"])
def test_what_an_engine_gives_is_taken_in_the_dtypes_of_rows(blocking: bool) -> None:
    """Log-probs of bfloat16 with a gradient, ids of int32, as an engine of the user's may give them."""
    if blocking:
        sequences = torch.full((4, 7), PAD, dtype=torch.int32)
        for row, ids in enumerate(RESPONSES):
            sequences[row, 3 : 3 + len(ids)] = torch.tensor(ids)
        log_probs = torch.full((4, 4), -1.5, dtype=torch.bfloat16, requires_grad=True)
        made = rows_of(Responses(sequences, torch.tensor([2, 1, 3, 2], dtype=torch.int32), log_probs))
    else:
        made = joined([
            Response(torch.tensor(ids, dtype=torch.int32), "stop", (),
                     torch.full((len(ids),), -1.5, dtype=torch.bfloat16, requires_grad=True))
            for ids in RESPONSES
        ])  # fmt: skip

    assert made.tokens.dtype == torch.int64 and made.tokens.tolist() == rows().tokens.tolist()
    found = made.sampled_log_probs
    assert found is not None and found.dtype == torch.float32 and not found.requires_grad
    assert found.tolist() == [-1.5] * 8


def of_lengths(*lengths: int) -> list[Response]:
    return [Response(torch.tensor(ids), "stop", (), torch.zeros(length))
            for ids, length in zip(RESPONSES, lengths, strict=True)]  # fmt: skip


@pytest.mark.parametrize(
    ("responses", "error", "message"),
    [
        # As many as tokens in all: each row would have the log-probs of its neighbour.
        (of_lengths(3, 0, 3, 2), ShapeError, r"row 0: log-probs of shape \(3,\) for 2 tokens"),
        ([*of_lengths(2, 1, 3, 2)[:3], Response(torch.tensor([]), "stop", ())], ShapeError, "row 3: a response of 0"),
        ([*of_lengths(2, 1, 3, 2)[:3], Response(torch.tensor([1.0]), "stop", ())], FieldError, "row 3: the tokens"),
        ([*of_lengths(2, 1, 3, 2)[:3], Response(torch.arange(5), "stop", ())], ShapeError, "row 3: a response of 5"),
    ],
)
def test_an_engine_that_gives_other_lengths_is_refused(
    responses: list[Response], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        joined(responses)


@pytest.mark.parametrize("count", [0, 3, 5])
def test_log_probs_of_another_number_of_rows_are_refused(count: int) -> None:
    responses = Responses(torch.full((4, 7), PAD), torch.ones(4, dtype=torch.int64), torch.zeros(count, 4))

    with pytest.raises(ShapeError, match=rf"^generator returned log-probs \({count}, 4\) for 4 responses$"):
        rows_of(responses)


def test_a_row_whose_last_turn_has_no_token_is_refused() -> None:
    def turns(ids: list[int], observed: list[bool]) -> Response:
        rewards: Tensor = torch.zeros(len(ids), dtype=torch.float64)
        return TurnsResponse(torch.tensor(ids), "stop", (), observed=torch.tensor(observed), rewards=rewards, turns=1)

    whole = [turns(ids, [False] * len(ids)) for ids in RESPONSES]
    assert joined(whole).turns is not None

    with pytest.raises(ShapeError, match="row 1: its last response has no token"):
        joined([whole[0], turns([12, 13], [False, True]), *whole[2:]])


def test_rows_are_sent_to_another_machine_once() -> None:
    made = RaggedRows.of_columns(
        torch.arange(50_000), lengths=[25_000] * 2, counts=[20_000] * 2,
        actions={"action_log_probs": torch.zeros(40_000)}, rows={"reward": torch.zeros(2)}, info={},
    )  # fmt: skip
    before = len(pickle.dumps(made))

    assert set(made.columns) == {"sequences", "action_log_probs", "reward"}

    assert len(pickle.dumps(made)) == before
    assert np.array_equal(pickle.loads(pickle.dumps(made)).columns["sequences"], made.columns["sequences"])
