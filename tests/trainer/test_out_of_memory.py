"""A device without memory for a micro-batch: the step is taken with halves, and is the same step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.config.schema import Config
from pipeline.errors import DeviceMemoryError, RlhfdError
from pipeline.trainer import process
from tests.support.told import Told
from tests.trainer.test_learner import (
    TRAINER,
    Algorithm,
    applied_gradients,
    assert_same_stats,
    experience_for,
    new_learner,
)


class Device:
    """Raises OutOfMemoryError in passes of a model over more than some tokens, or in one backward pass midway."""

    def __init__(self, model: torch.nn.Module, *, most_tokens: int = 2**30, fails_backward: int = -1) -> None:
        self.passes: list[int] = []
        self._most_tokens, self._fails_backward = most_tokens, fails_backward
        model.base_model.register_forward_pre_hook(self._forward, with_kwargs=True)
        # The embedding's gradient is the last one: those of all other weights are added by then.
        model.get_input_embeddings().weight.register_hook(self._backward)
        self._backwards = 0

    def _forward(self, module: Any, words: Any, keywords: dict[str, Any]) -> None:
        tokens = (words[0] if words else keywords["input_ids"]).numel()
        self.passes.append(tokens)
        if tokens > self._most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    def _backward(self, gradient: torch.Tensor) -> None:
        self._backwards += 1
        if self._backwards - 1 == self._fails_backward:
            raise torch.OutOfMemoryError("CUDA out of memory in a backward pass")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("fault", [{"most_tokens": 30}, {"fails_backward": 0}], ids=["forward", "backward"])
def test_a_step_that_runs_out_of_memory_is_the_same_step(
    algorithm: Algorithm, fault: dict[str, int], dtype: torch.dtype
) -> None:
    told = Told()
    whole, cut = new_learner(algorithm), new_learner(algorithm, telemetry=told)
    if dtype != torch.float32:
        whole, cut = (
            type(one)(TRAINER, algorithm, one._actor.to(dtype), one._critic, kl_coef=one._kl_coef, **more)
            for one, more in ((whole, {}), (cut, {"telemetry": told}))
        )
    experience = experience_for(whole, algorithm)
    device = Device(cut._actor, **fault)

    expected, stats = whole.update([experience]), cut.update([experience])

    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    for mine, its in zip(applied_gradients(cut), applied_gradients(whole), strict=True):
        assert torch.allclose(mine, its, atol=tolerance, rtol=0)
    if dtype == torch.float32:
        assert_same_stats(stats, expected)
    assert stats.rows_trained == expected.rows_trained and stats.step == 1
    assert len(stats.row_importance_ratios) == len(expected.row_importance_ratios)
    assert told.counted["out_of_memory"], "counted"
    assert device.passes[-1] < max(device.passes)

    before = len(told.counted["out_of_memory"])
    cut.update([experience])
    assert len(told.counted["out_of_memory"]) == before, "the halved bound stays"


def test_a_row_that_does_not_fit_alone_ends_training_and_names_the_keys() -> None:
    learner = new_learner("grpo")
    experience = experience_for(learner, "grpo")
    Device(learner._actor, most_tokens=1)
    before = [parameter.clone() for parameter in learner._actor.parameters()]

    with pytest.raises(DeviceMemoryError, match=r"one row of \d+ tokens: .*trainer\.micro_batch_size is 1 row already"):
        learner.update([experience])

    assert all(torch.equal(mine, its) for mine, its in zip(learner._actor.parameters(), before, strict=True))


@pytest.mark.parametrize("computes_log_probs", [False, True])
def test_a_rank_of_a_sharded_model_repeats_no_pass_alone(
    computes_log_probs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = new_learner("grpo", computes_log_probs=computes_log_probs)
    experience = experience_for(learner, "grpo")
    Device(learner._actor, most_tokens=30)
    monkeypatch.setattr("pipeline.trainer.sharding.optimizer.is_sharded", lambda _: True)

    with pytest.raises(DeviceMemoryError, match="a rank of a sharded model cannot repeat a pass alone: set a lower"):
        learner.update([experience])


def test_micro_batches_are_cut_by_tokens_unless_rows_are_configured() -> None:
    learner = new_learner("grpo")
    assert (learner._micro_batch.most_rows, learner._micro_batch.most_tokens) == (48, 2048)

    learner = new_learner("grpo", TRAINER.model_copy(update={"micro_batch_size": 4}))
    assert (learner._micro_batch.most_rows, learner._micro_batch.most_tokens) == (4, None)


def test_a_rank_on_a_card_has_its_segments_grow_before_it_loads_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoDaemonError(RlhfdError):
        pass

    def connect(config: Config, context: Any) -> Any:
        raise NoDaemonError

    calls: list[str] = []
    card, context = torch.device("cuda", 0), None
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", calls.append)
    monkeypatch.setattr("pipeline.models.device._first_tensor", lambda device: None)
    monkeypatch.setattr(process, "process_device", lambda: card)

    with pytest.raises(NoDaemonError):
        process.run(Config(), context, connect)

    assert calls == ["expandable_segments:True"]
