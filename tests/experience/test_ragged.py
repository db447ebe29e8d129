"""Rows without padding: through the doors and back without loss, in any layout, for any rows of any parts."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.errors import DecodeError, FieldError, ShapeError
from pipeline.experience import codec, ragged
from pipeline.experience.ragged import RaggedRows, join, pad
from pipeline.experience.types import Experience, ExperienceVL
from pipeline.experience.vision_rows import VisionRows
from tests.experience.test_codec_reference import experiences
from tests.support.experiences import made_up, made_up_vl, stored


def flat(experience):
    """What each row holds, value by value: its tokens from the first real one to the last, and its actions' columns."""
    width, rows = experience.sequences.shape[1], []
    actions = experience.action_mask if experience.action_mask is not None else experience.action_log_probs
    for row in range(len(experience.sequences)):
        mask = experience.attention_mask
        real = [c for c in range(width) if mask is None or mask[row, c] != 0]
        start, end = real[0], real[-1] + 1
        shift = width - actions.shape[1]
        taken = [
            c for c in range(actions.shape[1]) if experience.action_mask is None or experience.action_mask[row, c] != 0
        ]
        first = max(taken[0] + shift, start) if taken else width
        rows.append((start, end, min(first, end), shift))
    return rows


def assert_same(one, other):
    assert type(one) is type(other)
    for field in dataclasses.fields(other):
        mine, its = getattr(one, field.name), getattr(other, field.name)
        if isinstance(its, torch.Tensor):
            assert mine.dtype == its.dtype and torch.equal(mine, its), field.name
        elif isinstance(its, dict):
            assert mine.keys() == its.keys()
            assert all(mine[key].dtype == its[key].dtype and torch.equal(mine[key], its[key]) for key in its)
        else:
            assert mine == its, field.name


@settings(max_examples=150)
@given(experiences())
def test_each_row_has_its_tokens_and_actions_and_nothing_else(experience):
    rows = RaggedRows.of(experience)

    for row, (start, end, first, shift) in enumerate(flat(experience)):
        tokens, actions = ((rows.starts(kind)[row], rows.starts(kind)[row + 1]) for kind in "SA")
        assert rows.tensor("sequences")[slice(*tokens)].tolist() == experience.sequences[row, start:end].tolist()
        assert (rows.lengths[row], rows.counts[row]) == (end - start, end - first)
        for name in ("action_log_probs", "kl", "values", "reward", "action_mask"):
            was, now = getattr(experience, name), rows.tensor(name)
            if was is None or name in rows.full_masks:
                assert now is None
            elif was.dim() == 1:
                assert now[row] == was[row]
            else:
                assert torch.equal(now[slice(*actions)], was.detach()[row, first - shift : end - shift]), name


@settings(max_examples=100)
@given(experiences())
def test_rows_out_of_the_door_and_in_again_are_the_same_rows(experience):
    # Without an action mask each row has all columns as its actions, as far as it has tokens; nor is padding an action.
    assume(experience.action_mask is not None)
    if experience.attention_mask is not None:
        columns = experience.action_mask.shape[1]
        assume(bool((experience.attention_mask[:, -columns:][experience.action_mask != 0] != 0).all()))
    rows = RaggedRows.of(experience)

    again = RaggedRows.of(padded := rows.padded())

    assert (again.fields, again.lengths, again.counts) == (rows.fields, rows.lengths, rows.counts)
    assert again.full_masks == rows.full_masks
    assert all(np.array_equal(again.columns[name], values, equal_nan=True) for name, values in rows.columns.items())
    assert padded.sequences.shape[1] == max(rows.lengths)
    for name, column in (("sequences", rows.lengths), ("action_log_probs", rows.counts)):
        values = getattr(padded, name)
        padding = torch.arange(values.shape[1]) < values.shape[1] - torch.tensor(column)[:, None]
        assert not values[padding].any(), f"{name} is zero before its rows"


@pytest.mark.parametrize("ppo", [True, False])
def test_rows_in_the_makers_columns_are_the_batch_as_it_was(ppo):
    """Prompts end, and responses begin, at one column; a room that no response fills stays padding."""
    for seed in range(20):
        experience = made_up(5, prompt=6, actions=9, seed=seed, ppo=ppo)
        rows = RaggedRows.of(experience)
        padded = experience.sequences.masked_fill(experience.attention_mask == 0, 77)

        again = rows.in_columns(6, 9, 77)

        assert_same(again, dataclasses.replace(experience, sequences=padded))
        wide = rows.in_columns(8, 12, 77)
        assert wide.sequences.shape == (5, 20) and wide.action_log_probs.shape == (5, 12)
        assert wide.sequences[:, 2:17].tolist() == padded.tolist()
        assert not wide.attention_mask[:, :2].any() and not wide.attention_mask[:, 17:].any()


@settings(max_examples=100)
@given(experiences())
def test_an_extent_of_rows_is_that_of_their_padded_batch(experience):
    ours, theirs = memoryview(bytearray(1 << 18)), memoryview(bytearray(1 << 18))

    assert codec.encode(RaggedRows.of(experience), ours) == codec.encode(experience, theirs)

    assert ours == theirs


@settings(max_examples=100)
@given(st.data())
def test_any_rows_of_any_parts_are_joined_and_padded_alike(data):
    """Among them parts whose masks have holes and parts whose masks have none, above and below the short width."""
    holes = data.draw(st.lists(st.booleans(), min_size=1, max_size=4))
    shape = data.draw(st.sampled_from([(3, 4, 5), (4, 30, 40), (2, 60, 3)]))
    made = [made_up(*shape, seed=place, holes=each) for place, each in enumerate(holes)]
    chosen = [data.draw(st.lists(st.integers(0, shape[0] - 1), min_size=1, max_size=5)) for _ in made]
    parts = [(stored(each), rows) for each, rows in zip(made, chosen, strict=True)]

    gathered, padded = codec.gather(parts), codec.gather_padded(parts)

    assert_same(gathered.padded(), padded)
    place = 0
    for experience, rows in zip(made, chosen, strict=True):
        alone = RaggedRows.of(experience)
        for row in rows:
            for name, kind in (("sequences", "S"), ("kl", "A"), ("reward", "")):
                here, there = gathered.starts(kind), alone.starts(kind)
                found = gathered.columns[name][here[place] : here[place + 1]]
                assert np.array_equal(found, alone.columns[name][there[row] : there[row + 1]])
            place += 1
    assert place == len(gathered)


def test_the_columns_of_gathered_rows_are_one_block():
    rows = codec.gather([(stored(made_up()), range(4)), (stored(made_up(seed=1)), [2, 0])])

    start = rows.block.data_ptr()
    for name, values in rows.columns.items():
        offset = values.ctypes.data - start
        assert offset >= 0 and offset + values.nbytes <= rows.block.numel() and offset % 64 == 0, name


@pytest.mark.parametrize("columns", [ragged._SHORT_COLUMNS, ragged._SHORT_COLUMNS + 1])
def test_rows_at_the_short_width_and_above_it_are_taken_alike(columns):
    lengths = torch.tensor([columns, columns // 2, 1])
    mask = torch.arange(columns) >= columns - lengths[:, None]
    experience = Experience(torch.arange(3 * columns).view(3, columns), attention_mask=mask.long())

    rows = RaggedRows.of(experience)

    assert torch.equal(rows.tensor("sequences"), experience.sequences[mask])
    assert torch.equal(rows.padded().sequences, experience.sequences * mask)
    assert torch.equal(rows.padded().attention_mask, mask.long())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_field_of_any_dtype_is_padded_with_zeros_beside_rows_without_actions(dtype):
    counts, columns = [[60, 0, 7], [0, 0], [59]], 60
    parts = [
        RaggedRows.of_columns(
            torch.arange(1, 70 * len(each) + 1),
            lengths=[70] * len(each),
            counts=each,
            actions={"action_log_probs": torch.arange(1, sum(each) + 1).to(dtype)},
            rows={},
            info={},
        )
        for each in counts
    ]
    assert columns > ragged._SHORT_COLUMNS

    found = pad([(part, range(len(part))) for part in parts])["action_log_probs"]

    assert found.dtype is dtype
    expected = torch.zeros((6, columns))
    for row, values in ((0, range(1, 61)), (2, range(61, 68)), (5, range(1, 60))):
        expected[row, columns - len(values) :] = torch.tensor(values)
    assert torch.equal(found.float(), expected)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ({"actions": {"action_log_probs": torch.zeros(2)}}, r"action_log_probs has shape \(2,\), expected 3 values"),
        ({"actions": {"values": torch.zeros(3, 1)}}, r"values has shape \(3, 1\), expected 3 values"),
        ({"rows": {"reward": torch.zeros(3)}}, r"reward has shape \(3,\), expected 2 values"),
        ({"info": {"score": torch.tensor(1.0)}}, r"info.score has shape \(\), expected 2 values"),
        ({"tokens": torch.arange(4)}, r"sequences has shape \(4,\), expected 5 values"),
    ],
)
def test_columns_of_another_length_are_refused_by_name(column, said):
    given = {"tokens": torch.arange(5), "actions": {}, "rows": {}, "info": {}, **column}

    with pytest.raises(ShapeError, match=said):
        RaggedRows.of_columns(given.pop("tokens"), lengths=[3, 2], counts=[2, 1], **given)


def test_no_rows_at_all_are_a_batch_of_none():
    rows = RaggedRows.of(Experience(sequences=torch.zeros((0, 4), dtype=torch.int64), reward=torch.zeros(0)))

    padded = rows.padded()

    assert padded.sequences.shape == (0, 0) and padded.reward.shape == (0,)


def test_values_of_rows_are_the_same_on_a_device_those_outside_the_block_and_pixels_too():
    experience = made_up_vl(4, seed=3)
    rows = join([(RaggedRows.of(experience), [2, 0])]).with_info("policy_version", np.array([3, 4]))
    rows = dataclasses.replace(rows, vision=VisionRows.of(experience).rows([2, 0]))
    there = torch.device("meta")

    same, moved = rows.to_device(torch.device("cpu")), rows.to_device(there)

    assert rows.block is not None
    assert same.tensors.keys() == moved.tensors.keys() == rows.tensors.keys()
    for name, values in rows.tensors.items():
        assert torch.equal(same.tensors[name], values) and same.tensors[name].dtype == values.dtype
        assert (moved.tensors[name].device, moved.tensors[name].shape) == (there, values.shape)
    of_all, of_same, of_moved = (each.vision_experience().pixel_values for each in (rows, same, moved))
    assert torch.equal(of_same, of_all) and (of_moved.device, of_moved.shape) == (there, of_all.shape)
    assert moved.on(there) is moved and moved.on(torch.device("cpu")) is not moved


def test_a_field_may_be_left_out_and_a_number_a_row_added():
    rows = RaggedRows.of(made_up())

    changed = rows.without("kl").with_info("policy_version", np.array([3, 3, 4, 5]))

    assert "kl" not in changed.columns and "kl" in rows.columns
    batch = changed.padded()
    assert batch.kl is None
    assert batch.info["policy_version"].tolist() == [3, 3, 4, 5]
    assert torch.equal(batch.values, rows.padded().values)
    again = changed.with_info("policy_version", np.array([1, 1, 1, 1]))
    assert again.padded().info["policy_version"].tolist() == [1, 1, 1, 1]


def test_images_go_through_the_doors_with_their_rows():
    experience = made_up_vl(4, seed=3, raw=True)
    gathered = codec.gather([(stored(experience), [3, 1])])

    assert isinstance(gathered.padded(), ExperienceVL)
    assert_same(gathered.padded(), codec.gather_padded([(stored(experience), [3, 1])]))
    memory = memoryview(bytearray(1 << 18))
    again = codec.ExtentReader(memory[: codec.encode(gathered, memory).nbytes])
    assert_same(codec.gather_padded([(again, range(2))]), gathered.padded())
    with pytest.raises(FieldError, match="rows of text alone have no images"):
        RaggedRows.of(made_up()).vision_experience()


def test_parts_with_other_fields_and_rows_that_are_not_there_are_refused():
    one, other = RaggedRows.of(made_up()), RaggedRows.of(dataclasses.replace(made_up(), kl=None))

    for way in (join, pad):
        with pytest.raises(FieldError, match="kl: present, or of one dtype and shape, in some of the batch's rows"):
            way([(one, [0]), (other, [0])])
    for way in (codec.gather, codec.gather_padded):
        with pytest.raises(DecodeError, match="row 4 is requested from an extent of 4 rows"):
            way([(stored(made_up()), [0, 4])])


def test_rows_in_memory_that_is_read_only_are_read_without_a_warning():
    """As those that Ray gives a worker of its actor; a warning fails the test."""
    rows = RaggedRows.of(made_up(rows=2))
    for values in rows.columns.values():
        values.flags.writeable = False

    torch.set_warn_always(True)
    try:
        read = rows.tensor("sequences")
    finally:
        torch.set_warn_always(False)

    assert read.tolist() == rows.columns["sequences"].tolist()
