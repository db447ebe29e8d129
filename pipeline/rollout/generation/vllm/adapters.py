"""LoRA adapters in vLLM's slot for them, which each version replaces without a file in between.

vLLM computes W x + (alpha / rank) B A x as worker and trainer do, unmerged: in bfloat16 most changes of a merged W
would be lost, and each version would need a second copy of the base to start from. Every request names the one adapter.

vLLM leaves an adapter out whose layer it does not know, and copies one that is too small into a part of its target:
each version is compared with the layers of the engine, and at the first one of given names all values are read back.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.config.lora import MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from pipeline.errors import WeightsMismatchError
from pipeline.models.lora import PEFT_PREFIX
from pipeline.rollout.generation.vllm.releases import renames_of
from pipeline.rollout.generation.vllm.targets import fills

ADAPTER = 1
"""vLLM's number of the adapter."""


def least_rank(rank: int) -> int:
    """Return the least rank of vLLM's slots that adapters of a rank, 512 at most, fit into."""
    ranks: tuple[int, ...] = typing.get_args(MaxLoRARanks)
    return min(one for one in ranks if one >= rank)


class Adapters:
    """The adapters of a vLLM worker.

    Args:
        worker_manager: The vLLM worker's LoRA manager; the slot gets an adapter that changes nothing.
        rank: Rank of the adapters.
        alpha: Their weight is alpha / rank.
        targets: The last part of the names of the adapted layers.
    """

    def __init__(self, worker_manager: Any, rank: int, alpha: float, targets: list[str]) -> None:
        self._worker_manager = worker_manager
        self._manager = worker_manager._adapter_manager
        self._described = PEFTHelper(r=rank, lora_alpha=alpha, target_modules=targets)
        self._names: frozenset[str] | None = None
        worker_manager.add_dummy_lora(LoRARequest("actor", ADAPTER, "in memory"), rank)
        self._manager.activate_adapter(ADAPTER)

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Compute with these adapters from the next step on.

        Args:
            tensors: A and B of each adapted layer, by published name; not read afterwards, and changed.

        Raises:
            WeightsMismatchError: If they are no adapters of the engine's layers.
        """
        adapter = self._adapter_of(tensors)
        try:
            self._manager.remove_adapter(ADAPTER)
            # Packs the parts of fused layers and multiplies B by the weight.
            self._manager.add_adapter(adapter)
            if unknown := sorted(set(adapter.loras) - set(self._manager.modules)):
                raise WeightsMismatchError(f"the engine's model has no layer {unknown[0]} that takes an adapter")
            self._manager.activate_adapter(ADAPTER)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, RuntimeError, AssertionError) as error:
            raise WeightsMismatchError(f"the adapters do not fit the engine's model: {_line(error)}") from error
        if self._names != (names := frozenset(tensors)):
            self._read_back(adapter)
            self._names = names

    def _adapter_of(self, tensors: Mapping[str, Tensor]) -> Any:
        try:
            adapter = LoRAModel.from_lora_tensors(
                ADAPTER,
                {PEFT_PREFIX + name: tensor for name, tensor in tensors.items()},
                self._described,
                device="cpu",
                dtype=self._worker_manager.lora_config.lora_dtype,
                weights_mapper=renames_of(self._manager.model),
            )
        except (ValueError, RuntimeError, AssertionError) as error:
            raise WeightsMismatchError(f"the weights are no adapters: {_line(error)}") from error
        if not adapter.loras:
            raise WeightsMismatchError("the weights have no adapters")
        for name, layer in adapter.loras.items():
            if layer.lora_a is None or layer.lora_b is None:
                raise WeightsMismatchError(f"the weights have one matrix alone of the adapter of {name}")
        return adapter

    def _read_back(self, adapter: Any) -> None:
        """Compare the slot with an adapter, value by value, and the shapes with those of the layers."""
        slot = self._manager.lora_index_to_id.index(ADAPTER)
        for name, layer in adapter.loras.items():
            module = self._manager.modules[name]
            for given, held, rank_axis in (
                (layer.lora_a, module.lora_a_stacked, 0),
                (layer.lora_b, module.lora_b_stacked, 1),
            ):
                parts = zip(_each(given), _each(held), strict=True)
                if not all(part is None or fills(part, target[slot, 0], rank_axis) for part, target in parts):
                    raise WeightsMismatchError(f"the adapter of {name} is not that of the engine's layer")


def _each(of: Any) -> tuple[Any, ...]:
    return tuple(of) if isinstance(of, list | tuple) else (of,)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
