"""Rows of a pass: bounded by rows and tokens, halved where the device has no more memory, and by default what fits."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from pipeline.errors import DeviceMemoryError, ExitCode
from pipeline.models.pass_size import PassSize, RowBound, default_tokens, released_when_full, tokens_once
from pipeline.progress import Telemetry
from tests.support import tiny
from tests.support.told import Told

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def parts_of(size: PassSize, lefts: list[int], rights: list[int]) -> list[tuple[int, int]]:
    return [(part.start, part.stop) for part in size.parts(lefts, rights)]


def test_without_a_bound_all_rows_are_one_part() -> None:
    assert parts_of(PassSize("key"), [1, 2, 3], [1, 1, 1]) == [(0, 3)]
    assert parts_of(PassSize("key"), [], []) == []


def test_a_part_is_within_the_rows_and_its_padding_counts_as_tokens() -> None:
    assert parts_of(PassSize("key", most_rows=2), [1] * 5, [1] * 5) == [(0, 2), (2, 4), (4, 5)]
    # Rows 0 and 1 together are 3 + 4 columns wide: 14 tokens, though they hold 4 + 5.
    assert parts_of(PassSize("key", most_tokens=13), [3, 1, 1], [1, 4, 4]) == [(0, 1), (1, 3)]
    assert parts_of(PassSize("key", most_tokens=14), [3, 1, 1], [1, 4, 4]) == [(0, 2), (2, 3)]
    # Packed rows have no padding.
    assert parts_of(PassSize("key", most_tokens=14, packed=True), [3, 1, 1], [1, 4, 4]) == [(0, 3)]
    assert parts_of(PassSize("key", most_tokens=13, packed=True), [3, 1, 1], [1, 4, 4]) == [(0, 2), (2, 3)]


def test_a_row_longer_than_the_bound_is_a_part_of_its_own() -> None:
    assert parts_of(PassSize("key", most_tokens=4), [9, 2, 2], [0, 0, 0]) == [(0, 1), (1, 3)]


def test_of_a_group_the_lefts_count_once_in_a_part_and_an_eighth_for_each_further_row() -> None:
    size, lefts, rights, groups = PassSize("key", most_tokens=26), [16] * 5, [2] * 5, [0, 0, 0, 0, 1]

    # 16 + 2, and for each further row 2 + 2; the next part computes the prompt again, and not a second one with it.
    assert [(part.start, part.stop) for part in size.parts(lefts, rights, groups)] == [(0, 3), (3, 4), (4, 5)]
    assert [tokens_once(part, lefts, rights, groups) for part in (slice(0, 4), slice(3, 5))] == [24, 36]
    size.most_rows = 1
    assert len(list(size.parts(lefts, rights, groups))) == 5


def test_a_part_of_groups_without_memory_is_halved_by_the_tokens_that_it_computes() -> None:
    size, done = PassSize("key"), list[slice]()

    def step(part: slice) -> None:
        if part.stop - part.start > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        done.append(part)

    size.run([16] * 4, [2] * 4, step, [0] * 4)

    assert done == [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4)]
    assert size.most_tokens == 12, "half of 16 + 4 x 2"


def test_a_row_that_begins_right_of_the_common_column_is_no_wider_than_its_tokens() -> None:
    assert parts_of(PassSize("key", most_tokens=6), [-2, -2], [5, 5]) == [(0, 2)]


def test_the_largest_pass_is_of_the_nearer_bound_and_of_one_row_at_least() -> None:
    sizes = [(None, None), (3, None), (None, 50), (3, 50), (3, 70), (None, 10)]

    largest = [PassSize("key", most_rows=rows, most_tokens=tokens).largest(20) for rows, tokens in sizes]

    assert largest == [20, 60, 50, 50, 60, 20]


def test_a_part_without_memory_is_halved_by_the_width_of_both_sides() -> None:
    size, parts = PassSize("key"), []

    def step(part: slice) -> None:
        parts.append((part.start, part.stop))
        if len(parts) == 1:
            raise torch.OutOfMemoryError

    size.run([1, 5], [7, 2], step)

    # 2 rows of 5 + 7 columns.
    assert size.most_tokens == 12 and parts == [(0, 2), (0, 1), (1, 2)]


def test_a_part_without_memory_is_run_again_in_halves_and_the_bound_stays(caplog: pytest.LogCaptureFixture) -> None:
    """A device with memory for 10 tokens at a time."""
    told = Told()
    size = PassSize("rollout.x", telemetry=told)
    done: list[tuple[int, int]] = []

    def step(part: slice) -> None:
        if (part.stop - part.start) * 4 > 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        done.append((part.start, part.stop))

    with caplog.at_level(logging.WARNING):
        size.run([4] * 7, [0] * 7, step)
    assert done == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]
    assert size.most_tokens == 6 and len(told.counted["out_of_memory"]) == 2
    assert "rows=7 tokens=28 most_tokens=14 key=rollout.x" in caplog.messages[0]

    size.run([2] * 6, [0] * 6, done.append)  # type: ignore[arg-type]
    assert len(told.counted["out_of_memory"]) == 2, "shorter rows of the next call fit in parts of the halved bound"
    assert done[7:] == [slice(0, 3), slice(3, 6)]


class Holder:
    """An object with memory that it can make anew."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def release(self) -> None:
        self._calls.append("release")


def test_memory_that_can_be_made_anew_goes_to_the_device_before_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    holder = Holder(calls)
    released_when_full(holder)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))

    def full_once(*_: object) -> None:
        calls.append("try")
        if calls.count("try") == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    PassSize("key").run([1] * 2, [1] * 2, full_once)
    assert calls == ["try", "release", "empty", "try", "try"]

    calls.clear()
    RowBound(Telemetry.none()).run(4, None, full_once)
    assert calls == ["try", "release", "empty", "try"]


def test_a_single_row_without_memory_ends_the_process_and_names_the_keys() -> None:
    def step(part: slice) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(
        DeviceMemoryError, match=r"one row of 5 tokens: lower rollout\.max_length.*\(trainer\.x is 1"
    ) as e:
        PassSize("trainer.x").run([3], [2], step)
    assert e.value.exit_code == ExitCode.GAVE_UP


def test_an_error_of_another_kind_is_raised_as_it_is() -> None:
    def step(part: slice) -> None:
        raise RuntimeError("device-side assert")

    with pytest.raises(RuntimeError, match="device-side assert"):
        PassSize("key").run([1], [1], step)


def test_rows_generated_at_once_are_halved_down_to_one() -> None:
    told = Told()
    tried: list[int | None] = []
    bound = RowBound(told)

    def call(rows: int | None) -> str:
        tried.append(rows)
        if rows is None or rows > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "made"

    assert bound.run(9, None, call) == "made"
    assert tried == [None, 4, 2] and len(told.counted["out_of_memory"]) == 2
    assert bound.run(9, 3, call) == bound.run(9, 1, call) == "made"
    assert tried[3:] == [2, 1] and len(told.counted["out_of_memory"]) == 2, "the lower one of both bounds holds"

    def full(rows: int | None) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(
        DeviceMemoryError, match=r"no memory to generate one row.*\(rollout\.inference_batch_size is 1 row"
    ):
        bound.run(9, None, full)


def qwen(layers: int, hidden: int, intermediate: int, heads: int) -> nn.Module:
    config = Qwen2Config(
        vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize(
    ("shape", "parameters", "megabytes_a_token", "state_gb"),
    [((24, 896, 4864, 14), 0.494e9, 1.6, 9.9), ((28, 1536, 8960, 12), 1.544e9, 3.3, 31)],
    ids=["0.5B", "1.5B"],
)
def test_a_training_pass_of_the_default_size_fits_80_gb(
    shape: tuple[int, int, int, int], parameters: float, megabytes_a_token: float, state_gb: float
) -> None:
    """Saved activations by measurement of meta models; weights, gradients and AdamW in float32 at their peak."""
    model = qwen(*shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(parameters, rel=0.01)

    tokens = default_tokens(model, GPU, backward=True)

    assert tokens >= 4 * 2048, "a pass of few rows leaves a card idle"
    assert tokens * megabytes_a_token / 1000 + state_gb < 0.8 * 80


def test_a_pass_on_a_cpu_is_a_minute_at_most_and_small_models_are_not_cut() -> None:
    slow_core_flops = 20e9
    for model, backward in ((qwen(24, 896, 4864, 14), False), (qwen(24, 896, 4864, 14), True)):
        parameters = sum(parameter.numel() for parameter in model.parameters())
        tokens = default_tokens(model, CPU, backward=backward)
        assert tokens * parameters * (6 if backward else 2) / slow_core_flops < 60
    # The embedded task's ticket of 128 rows and micro-batch of 48 rows, of 24 tokens each, stay whole.
    assert default_tokens(tiny.llama(), CPU, backward=False) >= 128 * 24
    assert default_tokens(tiny.llama(), CPU, backward=True) >= 48 * 24


def test_passes_on_a_gpu_are_larger_where_activations_are_checkpointed() -> None:
    tokens = default_tokens(tiny.llama(), GPU, backward=True, checkpointed=True)

    assert tokens == 2 * default_tokens(tiny.llama(), GPU, backward=True)


def test_a_pass_on_a_gpu_without_a_backward_pass_is_twice_one_with_it() -> None:
    model = tiny.llama()

    assert default_tokens(model, GPU, backward=False) == 2 * default_tokens(model, GPU, backward=True)
