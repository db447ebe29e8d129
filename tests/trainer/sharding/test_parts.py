"""The parts in which a sharded model is gathered: one process, a group of one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile

from pipeline.config.sections import ModelConfig
from pipeline.models import chunked_log_probs
from pipeline.models.inputs import inside
from pipeline.models.log_probs import action_log_probs
from pipeline.models.weights.shards import Shard
from pipeline.trainer.sharding import reduction
from pipeline.trainer.sharding.models import load_actor_shards, shards_of
from pipeline.trainer.sharding.replicas import Replica
from tests.support import tiny
from tests.support.adapted_reference import reference_log_probs

CPU = torch.device("cpu")
TOKENS = torch.arange(3, 15).reshape(2, 6) % tiny.VOCABULARY_SIZE


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # Before any test: gloo keeps a socket for the life of the process.
    store = tmp_path_factory.mktemp("group") / "ranks"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loaded(folder: Path, *, tied: bool) -> torch.nn.Module:
    tiny.llama(tie_word_embeddings=tied).save_pretrained(folder)
    return load_actor_shards(folder, dtype="float32", device=CPU, replica=Replica.of(CPU), lora=ModelConfig())


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_gathered_apart_unless_they_share_their_weight(
    tmp_path: Path, alone: None, tied: bool
) -> None:
    model = loaded(tmp_path / "model", tied=tied)

    parts = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}

    layers = {"", "model.layers.0", "model.layers.1"}
    assert parts == layers if tied else parts == {*layers, "model.embed_tokens", "lm_head"}


def test_the_head_is_gathered_once_for_all_chunks_and_freed_after_its_backward_pass(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(tmp_path / "model", tied=False)
    monkeypatch.setattr(chunked_log_probs, "CHUNK_ELEMENTS", 3 * tiny.VOCABULARY_SIZE)
    head = model.get_output_embeddings()
    gathered: Counter[str] = Counter()
    to_unsharded = head._get_fsdp_state()._fsdp_param_group._to_unsharded

    def counted() -> None:
        gathered["head"] += 1
        to_unsharded()

    monkeypatch.setattr(head._get_fsdp_state()._fsdp_param_group, "_to_unsharded", counted)
    mask = torch.ones_like(TOKENS)

    log_probs = inside(model, lambda: action_log_probs(model, TOKENS, mask, 5))
    forward = gathered["head"]
    log_probs.sum().backward()

    # The backward pass finds it there.
    assert (forward, gathered["head"]) == (1, 1)
    assert head._get_fsdp_state()._fsdp_param_group.is_sharded


def test_without_gradients_nothing_stays_gathered(tmp_path: Path, alone: None) -> None:
    model = loaded(tmp_path / "model", tied=False)
    with torch.no_grad():
        inside(model, lambda: action_log_probs(model, TOKENS, torch.ones_like(TOKENS), 5))

    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [state._fsdp_param_group for state in states]
    assert len(groups) == 5
    assert [group.is_sharded for group in groups if group is not None] == [True] * 5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("elements", [2**26, 3 * tiny.VOCABULARY_SIZE])
def test_an_adapter_of_the_head_counts_in_log_probs_and_learns(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch, tied: bool, elements: int
) -> None:
    monkeypatch.setattr(chunked_log_probs, "CHUNK_ELEMENTS", elements)
    base = tiny.llama(tie_word_embeddings=tied)
    base.save_pretrained(tmp_path)
    lora = ModelConfig(lora_rank=2, lora_alpha=4, lora_targets=["lm_head", "q_proj"])
    model = load_actor_shards(tmp_path, dtype="float32", device=CPU, replica=Replica.of(CPU), lora=lora)
    draws = torch.Generator().manual_seed(3)
    adapters = {name: torch.randn(shard.shape, generator=draws) * 0.3 for name, shard in adapter_shards(model).items()}
    for name, shard in adapter_shards(model).items():
        shard.local.copy_(adapters[name])
    expected = reference_log_probs(base, adapters, 2.0, TOKENS.tolist())

    found = inside(model, lambda: action_log_probs(model, TOKENS, torch.ones_like(TOKENS), 5))
    found.sum().backward()

    torch.testing.assert_close(found.detach(), torch.tensor(expected), atol=1e-4, rtol=0)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert gradients.keys() == adapters.keys()
    assert all(gradient is not None and bool(gradient.full_tensor().any()) for gradient in gradients.values())


def adapter_shards(model: torch.nn.Module) -> dict[str, Shard]:
    return shards_of(model, published=True)


def test_gradients_are_reduced_in_the_memory_that_holds_them(alone: None) -> None:
    gradients, sums = torch.randn(10), torch.empty(10)
    given = gradients.clone()

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        reduction.ReductionInPlace()(sums, given, dist.group.WORLD, dist.ReduceOp.SUM)

    assert torch.equal(sums, gradients)
    assert max(event.self_cpu_memory_usage for event in profiled.events()) == 0
