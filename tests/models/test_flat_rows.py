"""Rows end to end: those of a padded batch in any layout, selections of them, and the padded pass made of them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ShapeError
from pipeline.models.flat_rows import FlatRows, ranges
from tests.support.padded_passes import flat_rows_of


@st.composite
def padded(draw):
    """Tokens, both masks, and each row's tokens up to its last action with the places of its actions in them."""
    rows = draw(st.integers(1, 5))
    prompts = draw(st.lists(st.integers(1, 4), min_size=rows, max_size=rows))
    taken = [draw(st.lists(st.booleans(), min_size=1, max_size=5).filter(any)) for _ in range(rows)]
    side = draw(st.sampled_from(["left", "maker"]))
    width, columns = max(prompts) + max(map(len, taken)) + draw(st.integers(0, 2)), max(map(len, taken))
    sequences, real = torch.zeros(rows, width, dtype=torch.int64), torch.zeros(rows, width, dtype=torch.int64)
    mask, expected = torch.zeros(rows, columns, dtype=torch.bool), []
    for row, (prompt, actions) in enumerate(zip(prompts, taken, strict=True)):
        start = width - columns - prompt if side == "maker" else width - prompt - len(actions)
        tokens = torch.arange(prompt + len(actions)) + 100 * row + 1
        sequences[row, start : start + len(tokens)] = tokens
        real[row, start : start + len(tokens)] = 1
        first = start + prompt - (width - columns)
        mask[row, first : first + len(actions)] = torch.tensor(actions)
        places = [prompt + place for place, is_action in enumerate(actions) if is_action]
        expected.append((tokens[: places[-1] + 1].tolist(), places))
    return sequences, real, mask, expected


@given(padded())
def test_rows_of_a_padded_batch_end_with_their_last_actions(made):
    *columns, expected = made

    rows = flat_rows_of(*columns)

    starts = np.cumsum(rows.lengths) - rows.lengths
    for row, (tokens, places) in enumerate(expected):
        assert rows.tokens[starts[row] :][: rows.lengths[row]].tolist() == tokens
        own = rows.action[rows.row == row] - int(starts[row])
        assert own.tolist() == places
        assert (rows.counts[row], rows.prompts[row]) == (len(places), places[0])


@given(padded(), st.data())
def test_selected_rows_are_those_rows(made, data):
    *columns, expected = made
    rows = flat_rows_of(*columns)
    index = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6)))

    some, actions = rows.rows(index)

    assert torch.equal(some.labels, rows.labels[torch.from_numpy(actions)])
    assert some.tokens.tolist() == [token for row in index for token in expected[row][0]]
    assert some.row.tolist() == [place for place, row in enumerate(index) for _ in expected[row][1]]
    assert some.prompts.tolist() == [expected[row][1][0] for row in index]


@given(padded(), st.sampled_from([1, 8]))
def test_the_padded_pass_has_each_row_at_its_end(made, multiple):
    *columns, expected = made
    rows = flat_rows_of(*columns)

    batch = rows.padded(multiple)

    width = batch.sequences.shape[1]
    assert width % multiple == 0 and width - rows.lengths.max() < multiple
    for row, (tokens, _) in enumerate(expected):
        assert batch.sequences[row].tolist() == [0] * (width - len(tokens)) + tokens
        assert batch.attention_mask[row].tolist() == [0] * (width - len(tokens)) + [1] * len(tokens)
    assert torch.equal(batch.flat(batch.sequences[:, -batch.num_actions :]), rows.labels)
    assert batch.num_actions == max(len(tokens) - places[0] for tokens, places in expected)


def test_a_row_whose_first_token_is_an_action_is_refused_by_its_number():
    tokens, lengths = torch.arange(5), np.array([3, 2])

    with pytest.raises(ShapeError, match="row 1 has no token before one of its actions"):
        FlatRows.of(tokens, lengths, np.array([2, 3]), np.array([0, 1]))


def test_rows_without_an_action_have_a_padded_pass():
    rows = FlatRows.of(torch.tensor([7, 8]), np.array([2]), np.zeros(0, np.int64), np.zeros(0, np.int64))

    batch = rows.padded()

    assert (batch.sequences.tolist(), batch.num_actions) == ([[7, 8]], 1)
    assert batch.flat(torch.ones(1, 1)).shape == (0,)
    assert rows.prompts.tolist() == [2]


def test_ranges_are_laid_end_to_end():
    assert ranges(np.array([5, 0, 9]), np.array([2, 3, 0])).tolist() == [5, 6, 0, 1, 2]
