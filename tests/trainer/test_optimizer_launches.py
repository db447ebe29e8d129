"""Launches of the optimizer beside its update, for weights of bfloat16 with float32 copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from torch.profiler import ProfilerActivity, profile

from pipeline.trainer.optimizer import ModelOptimizer
from pipeline.trainer.sharding.optimizer import sum_of_squares
from tests.support import tiny


def profiled(call: Callable[[], object]) -> profile:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        call()
    return profiler


def outermost(profiler: profile, *names: str) -> Counter[str]:
    """Count operations that no other one calls: the CPU casts within `add_`, which on a card is one kernel."""

    def is_outermost(event: Any) -> bool:
        parent = event.cpu_parent
        return parent is None or (parent.name not in names and is_outermost(parent))

    return Counter(event.name for event in profiler.events() or () if event.name in names and is_outermost(event))


def test_a_micro_batch_is_collected_by_one_launch_a_weight_and_weights_are_copied_by_one_for_all() -> None:
    model = tiny.llama().bfloat16()
    optimizer = ModelOptimizer(model, learning_rate=1e-3, betas=(0.9, 0.99), weight_decay=0.0, clip_norm=1e9)
    parameters = list(model.parameters())
    sums = [torch.zeros_like(one, dtype=torch.float32) for one in parameters]
    for _ in range(2):
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = torch.randn_like(parameter)
            total += parameter.grad.float()
        collecting = profiled(optimizer.collect)

    optimizer.reduce()
    stepping = profiled(lambda: optimizer.step(1.0))

    assert outermost(collecting, "aten::add_", "aten::copy_", "aten::_to_copy") == {"aten::add_": len(parameters)}
    # Those of AdamW and of the norm are within operations of theirs.
    copies = [event for event in stepping.events() or () if event.name in ("aten::_foreach_copy_", "aten::copy_")]
    assert [event.name for event in copies if event.cpu_parent is None] == ["aten::_foreach_copy_"]
    masters = [master for name, master in optimizer.tensors().items() if name.startswith("float32.")]
    for parameter, master, total in zip(parameters, masters, sums, strict=True):
        assert master.grad is not None and torch.equal(master.grad, total)
        assert torch.equal(parameter, master.bfloat16())


def test_norm_clip_and_update_are_one_operation_each_for_all_weights() -> None:
    optimizer = ModelOptimizer(
        tiny.llama().bfloat16(), learning_rate=1e-3, betas=(0.9, 0.99), weight_decay=0.0, clip_norm=1e-3
    )
    for parameter in optimizer._weights:
        parameter.grad = torch.randn_like(parameter)
    optimizer.collect()

    reducing = profiled(optimizer.reduce)
    stepping = profiled(lambda: optimizer.step(1.0))

    found = outermost(reducing, "aten::_foreach_norm", "aten::linalg_vector_norm", "aten::_local_scalar_dense")
    # The norms of the weights, that of these norms, and its value.
    assert found == {"aten::_foreach_norm": 1, "aten::linalg_vector_norm": 1, "aten::_local_scalar_dense": 1}
    assert outermost(stepping, "aten::_foreach_mul_", "aten::_fused_adamw_") == {
        "aten::_foreach_mul_": 1, "aten::_fused_adamw_": 1,
    }  # fmt: skip
    by_weight = outermost(stepping, "aten::_foreach_mul_", "aten::_fused_adamw_", "aten::_foreach_copy_", "aten::mul_")
    assert not by_weight["aten::mul_"]


def test_summed_gradients_are_copied_back_by_one_operation_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.trainer.optimizer._BUCKET_ELEMENTS", 2000)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        optimizer = ModelOptimizer(
            tiny.llama(), learning_rate=1e-3, betas=(0.9, 0.99), weight_decay=0.0, clip_norm=1.0,
            process_group=distributed.group.WORLD,
        )  # fmt: skip
        expected = [torch.randn_like(weight) for weight in optimizer._weights]
        for weight, gradient in zip(optimizer._weights, expected, strict=True):
            weight.grad = gradient.clone()

        reducing = profiled(optimizer.reduce)
    finally:
        distributed.destroy_process_group()

    found = outermost(reducing, "aten::cat", "aten::stack", "aten::_foreach_copy_", "aten::copy_")
    assert 1 < found["aten::cat"] < len(expected)
    assert found["aten::_foreach_copy_"] == found["aten::cat"] and not found["aten::copy_"]
    for weight, gradient in zip(optimizer._weights, expected, strict=True):
        assert weight.grad is not None and torch.equal(weight.grad, gradient)


def test_the_squares_of_shards_are_added_by_as_many_operations_for_any_number_of_them() -> None:
    """The sum has the bits of a loop over the shards."""
    draws = torch.Generator().manual_seed(0)
    launched = []
    for count in (3, 300):
        shards = [torch.randn(1 + 7 * (i % 90), generator=draws) * 10.0 ** (i % 9 - 4) for i in range(count)]
        shards.insert(2, torch.empty(0, 5))
        expected = torch.zeros((), dtype=torch.float64)
        for shard in shards:
            expected += torch.linalg.vector_norm(shard, dtype=torch.float64) ** 2 if shard.numel() else 0.0

        found: list[torch.Tensor] = []
        profiler = profiled(lambda shards=shards, found=found: found.append(sum_of_squares(shards, shards[0].device)))

        assert torch.equal(found[0], expected)
        own = [event.name for event in profiler.events() or () if event.cpu_parent is None]
        launched.append([name for name in own if name.startswith("aten::")])

    assert launched[0] == launched[1] and len(launched[0]) < 10, launched
    nothing = sum_of_squares([torch.empty(0)], torch.device("cpu"))
    assert (float(nothing), nothing.dtype) == (0.0, torch.float64)
