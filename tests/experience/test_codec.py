"""Experience through the bytes of an extent and back."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.lengths import extent_bytes_bound, row_bytes_bound
from pipeline.errors import ArenaFullError, DecodeError, FieldError, ShapeError
from pipeline.experience import codec
from pipeline.experience.types import Experience
from tests.support.experiences import made_up, stored, through

TOKEN_FIELDS = ("sequences", "attention_mask")
ACTION_FIELDS = ("action_log_probs", "base_action_log_probs", "values", "kl", "advantages", "action_mask")


def tokens_of(experience, name, row):
    """The values of a row where it has tokens (or actions), read off with plain indexing."""
    values = getattr(experience, name)[row]
    present = experience.attention_mask[row] != 0
    if name not in TOKEN_FIELDS:
        if values.ndim == 0:
            return values
        present = present[-values.shape[0] :]
    return values[present]


def first_action(experience, row):
    """Columns of the response before which no action is masked in are padding."""
    return int(experience.action_mask[row].int().argmax())


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=4),
    st.integers(0, 2**31),
    st.booleans(),
    st.booleans(),
)
def test_every_token_comes_back_where_it_belongs(shapes, seed, ppo, holes):
    appends = [made_up(*shape, seed=seed + i, ppo=ppo, holes=holes) for i, shape in enumerate(shapes)]

    batch = through(*appends)

    place = 0
    for experience in appends:
        for row in range(len(experience.sequences)):
            for name in TOKEN_FIELDS:
                assert torch.equal(tokens_of(batch, name, place), tokens_of(experience, name, row)), name
            for name in ACTION_FIELDS:
                was = getattr(experience, name)[row]
                now = getattr(batch, name)[place]
                if was.ndim == 0:
                    assert torch.equal(now, was), name
                    continue
                end = int(experience.attention_mask[row].nonzero()[-1]) + 1 - (experience.sequences.shape[1] - len(was))
                kept = was[first_action(experience, row) : end]
                assert torch.equal(now[len(now) - len(kept) :], kept), name
                assert not now[: len(now) - len(kept)].any(), f"{name} is zero-padded on the left"
            assert batch.reward[place] == experience.reward[row]
            assert batch.info["score"][place] == experience.info["score"][row]
            place += 1
    assert batch.sequences.shape == batch.attention_mask.shape
    assert batch.sequences[:, -1].all(), "rows end together at the right"


@pytest.mark.parametrize("columns", [40, 3000])
@pytest.mark.parametrize("place", [0, 4])
def test_what_lay_in_the_padding_before_reaches_no_batch(columns, place):
    """For small and large batches, which are zeroed in two ways, and extents at places of any alignment."""
    lengths = torch.tensor([columns, columns // 2, columns // 3, 2])
    mask = torch.arange(columns) >= columns - lengths.unsqueeze(1)
    experience = Experience(
        sequences=torch.full(mask.shape, 7), attention_mask=mask.long(),
        action_mask=mask, action_log_probs=torch.full(mask.shape, -1.0), kl=torch.full(mask.shape, float("nan")),
    )  # fmt: skip
    dirty = memoryview(bytearray(b"\xff" * (1 << 20)))[place:]
    encoded = codec.encode(experience, dirty)

    batch = codec.gather_padded([(codec.ExtentReader(dirty[: encoded.nbytes]), range(4))])

    assert torch.equal(batch.attention_mask, mask.long())
    assert torch.equal(batch.action_mask, mask)
    assert torch.equal(batch.sequences, 7 * mask)
    assert torch.equal(batch.action_log_probs, -1.0 * mask)
    assert torch.equal(batch.kl.isnan(), mask)
    assert not batch.kl[~mask].any()


def test_dtypes_survive():
    experience = made_up(dtype=torch.bfloat16)

    batch = through(experience)

    assert batch.action_log_probs.dtype is torch.bfloat16
    assert batch.values.dtype is torch.bfloat16
    assert batch.sequences.dtype is torch.int64
    assert batch.action_mask.dtype is torch.bool
    assert batch.info["group_mixed"].dtype is torch.bool


def test_padding_is_not_stored():
    wide = made_up(rows=16, prompt=2000, actions=2000)
    # One token a row, for any width.
    wide.attention_mask.zero_()
    wide.attention_mask[:, 1999:2001] = 1
    wide.action_mask.zero_()
    wide.action_mask[:, 0] = True

    encoded = codec.encode(wide, memoryview(bytearray(1 << 20)))

    assert encoded.nbytes < 4096


def test_no_row_is_stored_with_the_length_of_another():
    rows = 64
    experience = made_up(rows=rows, prompt=2, actions=4000)
    lengths = torch.where(torch.arange(rows) % 8 == 0, 4000, 100)
    columns = torch.arange(4002)
    experience.attention_mask = ((columns >= 1) & (columns < 2 + lengths[:, None])).long()
    experience.action_mask = columns[2:] < 2 + lengths[:, None]
    true_bytes = int((lengths + 1).sum() * 8 + lengths.sum() * 5 * 4)

    encoded = codec.encode(experience, memoryview(bytearray(1 << 24)))

    assert encoded.nbytes < 1.01 * true_bytes + 2000


@pytest.mark.parametrize("rows", [[0, 2, 1, 3], [3, 3], [0, 0, 2], [4, 3, 2, 1, 0]])
def test_rows_may_come_in_any_order_and_twice(rows):
    experience = made_up(rows=5, seed=3)

    batch = codec.gather_padded([(stored(experience), rows)])

    assert torch.equal(batch.reward, experience.reward[rows])
    for place, row in enumerate(rows):
        assert torch.equal(tokens_of(batch, "sequences", place), tokens_of(experience, "sequences", row))


def test_reserved_room_is_always_enough():
    for ppo in (True, False):
        for prompt, actions in ((1, 1), (1, 63), (60, 4), (300, 700)):
            experience = made_up(rows=9, prompt=prompt, actions=actions, ppo=ppo)
            experience.returns = experience.values.clone() if ppo else None
            experience.action_entropy = experience.action_log_probs.clone()
            experience.attention_mask.fill_(1)
            room = extent_bytes_bound(9, row_bytes_bound(prompt + actions))
            of_an_engine = dataclasses.replace(
                experience, returns=None, action_entropy=None, behaviour_log_probs=experience.action_log_probs.clone()
            )

            assert codec.encode(experience, memoryview(bytearray(room))).nbytes <= room
            assert codec.encode(of_an_engine, memoryview(bytearray(room))).nbytes <= room


def test_an_extent_too_small_is_an_error_that_names_both_sizes():
    with pytest.raises(ArenaFullError, match=r"extent of [\d,]+ B does not fit: 100 B reserved"):
        codec.encode(made_up(), memoryview(bytearray(100)))


def test_a_flipped_bit_is_found_by_the_checksum():
    memory = memoryview(bytearray(1 << 16))
    encoded = codec.encode(made_up(), memory)
    memory[encoded.nbytes - 1] ^= 1

    with pytest.raises(DecodeError, match="checksum"):
        codec.ExtentReader(memory[: encoded.nbytes], checksum=encoded.checksum)


@given(st.binary(max_size=300))
def test_bytes_that_are_no_extent_are_refused(data):
    with pytest.raises(DecodeError):
        codec.ExtentReader(memoryview(bytearray(data)))


def test_a_row_without_tokens_is_refused():
    experience = made_up()
    experience.attention_mask[2] = 0

    with pytest.raises(FieldError, match="row 2 has no token"):
        codec.encode(experience, memoryview(bytearray(1 << 16)))


def test_a_field_that_disagrees_is_named_with_both_shapes():
    experience = made_up(rows=4, actions=6)
    experience.values = torch.zeros(4, 5)

    with pytest.raises(ShapeError, match=r"values: \(4, 5\), expected \(4, 6\)"):
        codec.encode(experience, memoryview(bytearray(1 << 16)))


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("name", ["action_log_probs", "kl", "reward", "info.score"])
def test_a_field_that_is_left_out_is_as_if_it_had_never_been_there(name, holes):
    def without(experience):
        if name == "info.score":
            return dataclasses.replace(experience, info={"group_mixed": experience.info["group_mixed"]})
        return dataclasses.replace(experience, **{name: None})

    # Rows of very different length.
    first, second = made_up(40, 3, 900, seed=1, holes=holes), made_up(4, seed=2, holes=holes)
    first.attention_mask[::4, 40:] = 0
    first.action_mask[::4, 37:] = False
    readers = [stored(first), stored(without(second)), stored(second)]

    for reader in readers:
        reader.leave_out(name)
    found = codec.gather_padded([(reader, range(reader.header.rows)) for reader in readers])

    expected = through(*(without(experience) for experience in (first, second, second)))
    for field, tensor in vars(expected).items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(getattr(found, field), tensor), field
        elif field != "info":
            assert getattr(found, field) is None, field
    assert found.info.keys() == expected.info.keys()
    assert all(torch.equal(found.info[key], tensor) for key, tensor in expected.info.items())


def test_a_field_present_in_some_extents_only_is_refused_by_name():
    with_kl, without = made_up(), dataclasses.replace(made_up(), kl=None)

    with pytest.raises(FieldError, match="kl: present"):
        through(with_kl, without)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("note", "hello", "str"),
        ("note", ["a", "b", "c", "d"], "list"),
        ("score", 1.5, "float"),
        ("note", None, "NoneType"),
    ],
)
def test_info_that_is_no_tensor_is_refused(name, value, kind):
    experience = made_up()
    experience.info[name] = value

    with pytest.raises(FieldError, match=rf"info\['{name}'\] is a {kind}; shared memory carries only tensors"):
        codec.encode(experience, memoryview(bytearray(1 << 16)))


def test_a_name_of_info_that_is_no_text_is_refused():
    experience = made_up()
    experience.info[7] = torch.ones(4)

    with pytest.raises(FieldError, match="info has the name 7, a int; shared memory carries names that are str"):
        codec.encode(experience, memoryview(bytearray(1 << 16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_token_ids_that_are_no_integers_are_refused(dtype):
    experience = made_up()
    experience.sequences = experience.sequences.to(dtype)

    with pytest.raises(FieldError, match=f"sequences is {dtype}; .* as a tensor of integers"):
        codec.encode(experience, memoryview(bytearray(1 << 16)))
