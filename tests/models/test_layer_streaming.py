"""Layers streamed from host memory: the numbers of a whole model, and two layers on the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.errors import ConfigError
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.layer_streaming import InOrder, _part_bytes, decoder_layers, stream_layers
from pipeline.models.loading import load_actor
from pipeline.models.log_probs import action_log_probs
from tests.support import tiny, tiny_vision

CPU, META = torch.device("cpu"), torch.device("meta")
LARGE = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 8}


class Late(InOrder):
    """Copies made at the last moment that is allowed; `events` has the order of begins, waits and layers."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
        self.events.append("begin")

        def copied() -> None:
            self.events.append("wait")
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)

        return copied


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages on a device that are made inside and still alive; `peak` is their maximum."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor) and tensor.device.type == self._device.type:
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._alive:
                    self._alive[key] = storage.nbytes()
                    weakref.finalize(storage, self._alive.pop, key, None)
        self.peak = max(self.peak, sum(self._alive.values()))
        return made


def rows() -> tuple[Tensor, Tensor]:
    ids = torch.randint(2, tiny.VOCABULARY_SIZE, (3, 12), generator=torch.Generator().manual_seed(0))
    return ids, (torch.arange(12) >= torch.tensor([[0], [3], [5]])).long()


def log_probs(model: nn.Module, device: torch.device = CPU) -> Tensor:
    ids, mask = (tensor.to(device) for tensor in rows())
    vision = VisionRows.none(len(ids)) if hasattr(model.config, "vision_config") else None
    with torch.no_grad():
        return action_log_probs(model, ids, mask, 5, vision=vision)


def streamed(model: nn.Module, copier: InOrder | None = None) -> nn.Module:
    stream_layers(model, CPU, copier)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copier", [InOrder, Late], ids=["copies at once", "copies at the last moment"])
@pytest.mark.parametrize(
    "make",
    [tiny.gpt2, tiny.qwen2, tiny_vision.model, *(lambda n=n: tiny.llama(num_hidden_layers=n) for n in (1, 3, 6))],
    ids=["gpt2", "qwen2", "qwen2-vl", "1 layer", "3 layers", "6 layers"],
)
def test_log_probs_are_those_of_the_whole_model_bit_for_bit(
    make: Callable[[], nn.Module], copier: type[InOrder], dtype: torch.dtype
) -> None:
    whole, other = make().to(dtype), streamed(make().to(dtype), copier())
    expected = log_probs(whole)

    # A pass begins with the layers that the pass before it left.
    assert [torch.equal(log_probs(other), expected) for _ in range(3)] == [True] * 3


def test_a_pass_after_one_that_failed_in_a_layer_is_right() -> None:
    whole, other = tiny.llama(num_hidden_layers=6), streamed(tiny.llama(num_hidden_layers=6), Late())
    for place in range(6):

        def fail(*_: Any) -> None:
            raise MemoryError

        failing = decoder_layers(other)[place].mlp.register_forward_pre_hook(fail)  # type: ignore[union-attr,operator]
        with pytest.raises(MemoryError):
            log_probs(other)
        failing.remove()

        assert torch.equal(log_probs(other), log_probs(whole)), place


def test_the_next_layers_copy_is_begun_before_a_layer_runs_and_after_its_slot_is_free() -> None:
    copier = Late()
    model = streamed(tiny.llama(num_hidden_layers=4), copier)
    for place, layer in enumerate(decoder_layers(model)):
        name = f"layer {place}"
        layer.mlp.register_forward_hook(lambda *_, name=name: copier.events.append(name))  # type: ignore[union-attr,operator]

    model.base_model(rows()[0])
    first, copier.events = copier.events, []
    model.base_model(rows()[0])

    whole = [event for place in range(4) for event in ("wait", f"layer {place}", "begin")]
    assert first == ["begin", "begin", *whole]
    assert copier.events == whole


def test_the_device_holds_two_layers_embeddings_and_head() -> None:
    """On the meta device, which computes shapes alone: host memory is told apart from it."""
    model = tiny.llama(**LARGE)
    layers = decoder_layers(model)
    (layer_bytes,) = {sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers}
    whole = sum(parameter.nbytes for parameter in model.parameters())
    others = whole - 8 * layer_bytes
    ids = torch.zeros(1, 4, dtype=torch.int64, device=META)

    with LiveBytes(META) as live, torch.no_grad():
        stream_layers(model, META)
        held = live.peak
        for _ in range(2):
            model.base_model(ids)

    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert 2 * layer_bytes + others <= held < 2 * layer_bytes + others + 10_000
    # Activations of four tokens, and no third layer.
    assert live.peak < held + 0.3 * layer_bytes < 0.4 * whole


def test_host_memory_never_holds_the_model_twice() -> None:
    model = tiny.llama(**LARGE)
    originals = [[weakref.ref(one) for one in layer.parameters()] for layer in decoder_layers(model)]
    alive: list[int] = []

    class Watching(InOrder):
        def allocate(self, nbytes: int) -> Tensor:
            alive.append(sum(any(one() is not None for one in layer) for layer in originals))
            return super().allocate(nbytes)

    streamed(model, Watching())

    assert sorted(set(alive), reverse=True) == [8, 7, 6, 5, 4, 3, 2, 1]
    assert not any(one() for layer in originals for one in layer)


@pytest.mark.parametrize("nbytes", [0, 256, 1 << 20, (1 << 20) + 256, 466_000_128, 3 << 30])
def test_page_locked_memory_is_not_rounded_up(nbytes: int) -> None:
    """Torch rounds a request up to a power of two."""
    parts = list(_part_bytes(nbytes))

    rounded = sum(1 << (part - 1).bit_length() for part in parts)
    assert sum(parts) == nbytes <= rounded < nbytes + (1 << 20) + 1


def test_a_layer_longer_than_a_part_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.models.layer_streaming._LEAST_PART_BYTES", 300)

    assert torch.equal(log_probs(streamed(tiny.llama(**LARGE))), log_probs(tiny.llama(**LARGE)))


def test_tied_embeddings_stay_one_tensor() -> None:
    model = streamed(tiny.qwen2())

    assert model.lm_head.weight is model.base_model.embed_tokens.weight  # type: ignore[union-attr]


def test_a_model_without_layers_to_stream_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError) as refused:
        stream_layers(nn.Sequential(nn.Linear(2, 2)), CPU)

    assert str(refused.value) == (
        'model.reference_device: a Sequential has no decoder layers that can be streamed; take "worker" or "trainer"'
    )


def test_a_reference_loaded_in_layers_is_the_one_loaded_whole(tmp_path: Path) -> None:
    tiny.llama(num_hidden_layers=5).save_pretrained(tmp_path)

    one, two = (
        load_actor(tmp_path, dtype="bfloat16", device=CPU, streamed=is_streamed) for is_streamed in (True, False)
    )

    assert torch.equal(log_probs(one), log_probs(two))
    slots = {parameter.untyped_storage().data_ptr() for parameter in one.base_model.layers.parameters()}
    assert len(slots) == 2


@pytest.mark.gpu
def test_on_a_card_numbers_are_those_of_the_whole_model_and_the_card_holds_two_layers() -> None:
    device = torch.device("cuda")
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}
    whole = tiny.llama(**sizes).to(torch.bfloat16)
    layer_bytes = sum(parameter.nbytes for parameter in decoder_layers(whole)[0].parameters())
    others = sum(parameter.nbytes for parameter in whole.parameters()) - 12 * layer_bytes
    expected = log_probs(whole.to(device), device)
    del whole
    model = tiny.llama(**sizes).to(torch.bfloat16)
    before = torch.cuda.memory_allocated(device)

    stream_layers(model, device)
    held = torch.cuda.memory_allocated(device) - before

    # Passes without a pause between them: a copy that did not wait for the layer before it would change a number.
    found = [log_probs(model, device) for _ in range(5)]
    assert all(torch.equal(one, expected) for one in found)
    assert held < 2 * layer_bytes + others + (4 << 20)
