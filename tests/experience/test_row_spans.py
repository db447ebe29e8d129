"""Spans of rows in their padding: the fast paths for common batches agree with the general one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pipeline.errors import FieldError
from pipeline.experience.row_spans import Spans


def spans(mask, action_mask=None, columns=None):
    columns = columns if action_mask is None else action_mask.shape[1]
    return Spans.of(mask.shape, columns, mask, action_mask)


def in_general(mask, action_mask):
    return Spans._in_general(mask.shape, action_mask.shape[1], mask, action_mask)


VALUES = {"int64": st.integers(-1, 2), "uint8": st.integers(0, 2), "bool": st.booleans(), "float32": st.integers(0, 1)}


@pytest.mark.parametrize(("dtype", "action_dtype"), [*zip(VALUES, VALUES, strict=True), ("int64", "bool")])
@given(data=st.data())
def test_both_ways_find_the_same(dtype, action_dtype, data):
    rows, width, columns = (data.draw(st.integers(1, most)) for most in (4, 6, 6))
    made = arrays.arrays(dtype, (rows, width), elements=VALUES[dtype])
    plain = st.lists(st.integers(0, width), min_size=rows, max_size=rows).map(
        lambda starts: (np.arange(width) >= np.array(starts)[:, None]).astype(dtype)
    )
    mask = data.draw(st.one_of(plain, made))
    action_mask = data.draw(arrays.arrays(action_dtype, (rows, columns), elements=VALUES[action_dtype]))
    try:
        expected = in_general(mask, action_mask)
    except FieldError as error:
        with pytest.raises(FieldError, match=str(error)):
            spans(mask, action_mask)
        return
    assert spans(mask, action_mask) == expected


def test_a_row_without_an_action_may_end_before_the_action_columns():
    found = spans(np.array([[1, 0, 0, 0], [1, 1, 1, 1]]), np.array([[0, 0], [0, 1]]))

    assert (found.tokens, found.actions, found.end) == ([1, 4], [0, 1], [1, 4])
    with pytest.raises(FieldError, match="row 0 masks in an action behind its last token"):
        spans(np.array([[1, 0, 0, 0], [1, 1, 1, 1]]), np.array([[1, 0], [0, 1]]))


@pytest.mark.parametrize(
    "mask",
    [
        [[0, 1, 0, 1], [0, 0, 1, 1]],
        # As many in all as if each row were ones from its first on.
        [[0, 2, 0, 1], [0, 0, 1, 1]],
        [[0, 1, 1, 1], [-1, 1, 2, 1]],
        # Rows that end in different columns, without holes.
        [[1, 2, 1, 0], [0, 1, 1, 1]],
        [[1, -1, 1, 0], [0, 1, 1, 1]],
    ],
    ids=["a hole", "a two", "a minus", "a two before padding", "a minus before padding"],
)
def test_a_mask_with_anything_else_in_it_is_stored(mask):
    assert "attention_mask" not in spans(np.array(mask), columns=2).full_masks


def test_a_row_without_a_token_is_refused_by_its_number():
    with pytest.raises(FieldError, match="row 1 has no token"):
        spans(np.array([[0, 1], [0, 0]]), columns=1)


@pytest.mark.parametrize(("mask", "action_mask"), [([0, 1, 1], [1, 0, 1]), ([0, 0, 0, 1, 1], [0, 0, 1, 0, 1])])
def test_an_action_in_padding_does_not_hide_a_hole_behind_it(mask, action_mask):
    found = spans(np.array([mask]), np.array([action_mask]))

    assert found.tokens == found.actions == [2]
    assert found.full_masks == ("attention_mask",)
