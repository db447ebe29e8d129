"""The codec writes the same bytes and makes the same batches with loops that numba has compiled, and without them."""

import contextlib
import dataclasses
import importlib.util
import sys

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeline.experience
from pipeline.experience import codec, row_blocks, row_kernels, row_loops
from tests.experience.test_codec_reference import experiences
from tests.support.experiences import made_up
from tests.support.loops import LOOPS, loops_of


def written(experience):
    memory = bytearray(1 << 18)
    return codec.encode(experience, memoryview(memory)), bytes(memory)


@contextlib.contextmanager
def counted():
    """Go numba's way; yield the names of the loops that are called."""
    called = []
    with loops_of("numba"), pytest.MonkeyPatch.context() as patch:
        compiled = row_kernels.kernels()

        def counting(name):
            return lambda *arrays: called.append(name) or getattr(compiled, name)(*arrays)

        patch.setattr(row_kernels, "kernels", lambda: row_kernels.Kernels(*map(counting, compiled._fields)))
        yield called


@settings(max_examples=200)
@given(experiences(masks=[torch.int64], action_masks=[torch.bool]))
def test_an_extent_has_the_same_bytes_either_way(experience):
    experience.action_mask = (
        experience.action_mask
        if experience.action_mask is None
        else experience.action_mask.clone(memory_format=torch.contiguous_format)
    )
    with loops_of("numpy"):
        plain = written(experience)

    with counted() as called:
        assert written(experience) == plain

    has_masks = experience.attention_mask is not None and experience.action_mask is not None
    assert called.count("find_spans") == has_masks


def fields_of(batch):
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    values |= values.pop("info") or {}
    return {name: (value.dtype, value.shape, as_bytes(value)) for name, value in values.items() if value is not None}


def as_bytes(value):
    return value.contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else value.item()


@settings(max_examples=100)
@given(st.data())
def test_a_batch_has_the_same_bytes_either_way(data):
    holes, short = data.draw(st.booleans()), data.draw(st.booleans())
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    parts = []
    with loops_of("numpy"):
        for seed in range(data.draw(st.integers(1, 3))):
            rows, prompt, actions = (data.draw(st.integers(1, most)) for most in (5, 4, 6))
            experience = made_up(rows, prompt, actions, seed=seed, holes=holes, dtype=dtype)
            experience.kl[0, 0] = float("nan")
            # Padding that is not zero.
            memory = memoryview(bytearray(b"\xff" * (1 << 16)))
            parts.append((memory[: codec.encode(experience, memory).nbytes], rows))
    chosen = [data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=7)) for _, rows in parts]

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_blocks, "SHORT_ROW_TOKENS", row_blocks.SHORT_ROW_TOKENS if short else 0)
        for way in LOOPS:
            with loops_of(way):
                readers = [codec.ExtentReader(memory) for memory, _ in parts]
                found.append(fields_of(codec.gather([*zip(readers, chosen, strict=True)])))

    assert found[0] == found[1]


def test_the_compiled_loops_do_all_rows_of_a_makers_batch(monkeypatch):
    monkeypatch.setattr(row_blocks, "_windows_of_line", None)
    monkeypatch.setattr(codec.Spans, "_in_general", None)
    memory = memoryview(bytearray(1 << 16))
    with counted() as called:
        encoded = codec.encode(made_up(), memory)
        # As a trainer maps the arena's extents.
        codec.gather([(codec.ExtentReader(memory[: encoded.nbytes].toreadonly()), range(4))])

    assert sorted(set(called)) == ["copy_rows", "copy_windows", "fill_bool", "fill_int64", "find_spans"]


def test_bools_of_other_bytes_are_counted_as_ones():
    action_mask = torch.tensor([[1, 0, 2]], dtype=torch.uint8).view(torch.bool).numpy()
    with loops_of("numba"):
        assert row_kernels.find_spans(np.ones((1, 3), np.int64), action_mask)[1] == [True, False, True]


ONES = np.ones((2, 3), np.int64)


@pytest.mark.parametrize(
    ("mask", "action_mask"),
    [
        (ONES.astype(np.int32), ONES > 0),
        (np.ones((3, 2), np.int64).T, ONES > 0),
        (ONES, ONES),
        (ONES, np.ones((3, 2), bool).T),
        (ONES, np.ones((3, 3), bool)),
        (np.ones((2, 0), np.int64), ONES > 0),
    ],
    ids=["int32", "transposed", "int64 actions", "transposed actions", "other rows", "empty"],
)
def test_masks_of_another_kind_go_the_other_way(mask, action_mask):
    with loops_of("numba"):
        assert row_kernels.find_spans(ONES, ONES > 0) is not None
        assert row_kernels.find_spans(mask, action_mask) is None


def test_a_compiler_that_is_turned_off_or_missing_or_broken_costs_speed_alone(monkeypatch, caplog):
    find_spec = importlib.util.find_spec
    with loops_of("numpy"):
        assert row_kernels.kernels() is None

    with loops_of("numba"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numba" else find_spec(name))
        assert row_kernels.kernels() is None
    assert not caplog.records

    with loops_of("numba"):
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        # The import fails, as with a numpy that this numba does not support.
        monkeypatch.delattr(pipeline.experience, "row_loops")
        monkeypatch.setitem(sys.modules, "pipeline.experience.row_loops", None)
        assert row_kernels.kernels() is None
    assert "the codec's loops are NumPy's" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("no locator available"), OSError("disk full")], ids=str)
def test_without_room_for_its_cache_a_process_compiles_for_itself(error, monkeypatch):
    compiled = row_loops._compiled

    def failing(*, cache):
        if cache:
            raise error
        return compiled(cache=False)

    with loops_of("numba"):
        monkeypatch.setattr(row_loops, "_compiled", failing)
        assert row_kernels.find_spans(ONES, ONES > 0)[0] == [[3, 3]] * 3


@pytest.mark.parametrize("place", range(5), ids=row_kernels.Kernels._fields)
def test_code_with_other_results_is_not_used(place, monkeypatch, caplog):
    with loops_of("numba"):
        compiled = row_loops.compiled()
        compiled[place] = lambda *arrays: True
        monkeypatch.setattr(row_loops, "compiled", lambda: compiled)
        assert row_kernels.kernels() is None

    assert "numba's code is wrong" in caplog.text


def test_a_compiler_that_fails_is_a_warning(monkeypatch, caplog):
    def failing(*signature, **options):
        raise numba.core.errors.TypingError("no such type")

    with loops_of("numba"):
        monkeypatch.setattr(numba, "njit", failing)
        assert row_kernels.kernels() is None

    assert "numba cannot be used, the codec's loops are NumPy's: no such type" in caplog.text
