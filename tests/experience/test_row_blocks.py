"""Copies of blocks of rows agree with copies of one row after the other."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.experience import codec, row_blocks
from pipeline.experience.row_blocks import BatchRows, write_windows
from tests.support.experiences import made_up
from tests.support.loops import loops  # noqa: F401

pytestmark = pytest.mark.usefixtures("loops")

KINDS = ("int64", "float32", "bool", "int16", "float64")


def random_values(rng, shape, kind):
    """Return random bits: some floats are NaN."""
    if kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(0, 256, (*shape, np.dtype(kind).itemsize), np.uint8).view(kind)[..., 0]


@settings(max_examples=200)
@given(st.data())
def test_windows_hold_each_row_right_aligned(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    count, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    stops = np.array([data.draw(st.integers(-2, columns)) for _ in range(count)])
    lengths = [data.draw(st.integers(0, max(0, stop))) for stop in stops]
    chosen = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    width = data.draw(st.integers(max(lengths[row] for row in chosen), columns))
    sources = [random_values(rng, (count, columns), kind) for kind in ("float32", "float32")]
    out = np.zeros((2, len(chosen), width), np.float32)

    write_windows(out, sources, chosen, stops[chosen])

    for target, source in zip(out, sources, strict=True):
        for place, row in enumerate(chosen):
            expected = source[row, max(0, stops[row]) - lengths[row] : max(0, stops[row])]
            assert target[place, width - lengths[row] :].tobytes() == expected.tobytes()


@settings(max_examples=300)
@given(st.data())
def test_rows_arrive_with_zeros_before_them(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    kind = data.draw(st.sampled_from(KINDS))
    short = data.draw(st.booleans())
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any))
    targets = data.draw(st.permutations(range(len(lengths))))
    count = data.draw(st.integers(1, len(lengths)))
    targets = slice(0, count) if data.draw(st.booleans()) else list(targets[:count])
    placed = list(range(len(lengths)))[targets] if isinstance(targets, slice) else targets
    stored = data.draw(st.integers(max(lengths[row] for row in placed), 9))
    sources = [data.draw(st.integers(0, 3)) for _ in placed]
    values = random_values(rng, (2, 4, stored), kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_blocks, "SHORT_ROW_TOKENS", row_blocks.SHORT_ROW_TOKENS if short else 0)
        rows = BatchRows(lengths)
    out = random_values(rng, (2, len(lengths), rows.width), kind)
    untouched = out.copy()
    mask = np.full((len(lengths), rows.width), 7, data.draw(st.sampled_from(["int64", "bool", "uint8"])))

    rows.fill_mask(mask)
    rows.copy(values, sources, out, targets)
    if rows.has_padding:
        rows.zero_padding([out, mask[None]])

    for row, length in enumerate(lengths):
        start = rows.width - length
        assert not mask[row, :start].any() and (mask[row, start:] == 1).all()
        if row not in placed:
            assert out[:, row, start:].tobytes() == untouched[:, row, start:].tobytes()
            continue
        assert not out[:, row, :start].view(np.uint8).any()
        source = sources[placed.index(row)]
        assert out[:, row, start:].tobytes() == values[:, source, stored - length :].tobytes()


def test_a_stored_mask_and_one_left_out_come_into_one_batch():
    plain, holes = made_up(rows=3, seed=1), made_up(rows=4, seed=2, holes=True)
    holes.action_mask[0, 0], holes.action_mask[0, 1:] = True, False
    holes.action_mask[1] = torch.tensor([True, False, True, False, False, False])
    holes.attention_mask[:2] = 1
    holes.attention_mask[0, 4], holes.sequences[0, 4] = 0, 7
    memories, readers = [], []
    for experience in (plain, holes):
        memories.append(memoryview(bytearray(b"\xff" * (1 << 16))))
        encoded = codec.encode(experience, memories[-1])
        readers.append(codec.ExtentReader(memories[-1][: encoded.nbytes]))
    assert set(readers[0].header.full_masks) == {"attention_mask", "action_mask"}
    assert not readers[1].header.full_masks

    together = codec.gather([(readers[0], range(3)), (readers[1], range(4))])

    alone = [codec.gather([(readers[0], range(3))]), codec.gather([(readers[1], range(4))])]
    for name in ("sequences", "attention_mask", "action_mask", "kl"):
        value, start = getattr(together, name), 0
        for batch in alone:
            own = getattr(batch, name)
            part = value[start : start + len(own)]
            assert torch.equal(part[:, part.shape[1] - own.shape[1] :], own), name
            assert not part[:, : part.shape[1] - own.shape[1]].any(), name
            start += len(own)


@pytest.mark.parametrize("columns", [1, 40])
def test_rows_of_tensors_that_are_not_contiguous_are_stored_alike(columns):
    experience = made_up(rows=5, prompt=3, actions=columns)
    memory, other = memoryview(bytearray(1 << 16)), memoryview(bytearray(1 << 16))
    transposed = {
        field.name: value.t().contiguous().t() if isinstance(value, torch.Tensor) and value.dim() == 2 else value
        for field in dataclasses.fields(experience)
        if (value := getattr(experience, field.name)) is not None
    }

    encoded = codec.encode(experience, memory)
    again = codec.encode(dataclasses.replace(experience, **transposed), other)

    assert encoded.nbytes == again.nbytes
    batches = [codec.gather([(codec.ExtentReader(m[: encoded.nbytes]), range(5))]) for m in (memory, other)]
    for name in ("sequences", "attention_mask", "action_mask", "kl", "reward"):
        assert torch.equal(getattr(batches[0], name), getattr(batches[1], name)), name
