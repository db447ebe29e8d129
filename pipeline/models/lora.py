"""LoRA (arXiv:2106.09685): adapters, small matrices, are trained in place of the model, and they alone are published.

A linear layer y = W x becomes y = W x + (alpha / rank) B A x, with W frozen and B initially zero. Worker and trainer
both have the base model and compute this in the same way, unmerged, so that the importance ratio of fresh experience is
1. Names are peft's without its prefix: ``model.layers.0.self_attn.q_proj.lora_A.weight`` beside the layer's own.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pipeline.errors import CheckpointError, ConfigError

ADAPTER_FILE = Path("adapter") / "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
_MATRICES = ("lora_A", "lora_B")


class LoraSettings(Protocol):
    """The part of `pipeline.config.sections.ModelConfig` that this module reads."""

    @property
    def lora_rank(self) -> int: ...  # noqa: D102

    @property
    def lora_alpha(self) -> float: ...  # noqa: D102

    @property
    def lora_targets(self) -> Sequence[str]: ...  # noqa: D102


def adapt(actor: nn.Module, settings: LoraSettings, *, seed: int) -> nn.Module:
    """Add adapters to a model's linear layers and freeze all other parameters; with rank 0, do nothing.

    Args:
        actor: The model, changed in place.
        settings: Rank, alpha, and the last part of the names of the layers to adapt.
        seed: Seed of A's values; B starts at zero, so that the model's outputs are unchanged at first.

    Returns:
        The actor.

    Raises:
        ConfigError: If no linear layer has the name of a target.
    """
    if not settings.lora_rank:
        return actor
    linears = {name: module for name, module in actor.named_modules() if isinstance(module, nn.Linear)}
    chosen = {name: layer for name, layer in linears.items() if name.rpartition(".")[2] in settings.lora_targets}
    if unknown := set(settings.lora_targets) - {name.rpartition(".")[2] for name in chosen}:
        kinds = sorted({name.rpartition(".")[2] for name in linears})
        raise ConfigError(f"model.lora_targets: no linear layer is called {min(unknown)!r}, only {', '.join(kinds)}")
    actor.requires_grad_(False)
    draws = torch.Generator().manual_seed(seed)
    for layer in chosen.values():
        _add(layer, settings.lora_rank, settings.lora_alpha / settings.lora_rank, draws)
    return actor


def initial_adapters(actor: nn.Module, settings: LoraSettings, *, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield name and first value of each adapter of a model from `adapt`, one at a time, as `adapt` sets them.

    Args:
        actor: The model; its adapters' values are not used.
        settings: Those of `adapt`.
        seed: That of `adapt`.
    """
    draws = torch.Generator().manual_seed(seed)
    for name, layer in actor.named_modules():
        if hasattr(layer, "lora_scale"):
            up: Any = layer.lora_B
            yield f"{name}.lora_A.weight", _drawn(layer, settings.lora_rank, draws)
            yield f"{name}.lora_B.weight", torch.zeros(up.out_features, up.in_features)


def published(model: nn.Module) -> dict[str, Tensor]:
    """Return the published tensors of a model, not copied: its adapters, or its state dict if it has none."""
    return adapter_of(model) or dict(model.state_dict())


def adapter_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's adapters by name, not copied; empty if it has none."""
    return {name: tensor for name, tensor in model.state_dict().items() if name.split(".")[-2:-1] in _ENDS}


def without_peft_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict under our names, from one under our names or peft's."""
    return {name.removeprefix(PEFT_PREFIX).replace(".default.", "."): tensor for name, tensor in state.items()}


def merged(model: nn.Module, adapter: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return a model's state dict with W + (alpha / rank) B A in place of each adapted W, and no adapters.

    Args:
        model: An adapted model.
        adapter: A and B of each adapted layer, by name; None for the model's own. They are
            merged on their device.
    """
    adapter = adapter_of(model) if adapter is None else adapter
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in adapter}
    layers: list[tuple[str, Any]] = list(model.named_modules())
    for name, layer in layers:
        if hasattr(layer, "lora_scale"):
            down, up = adapter[f"{name}.lora_A.weight"], adapter[f"{name}.lora_B.weight"]
            change = up.float() @ down.float() * layer.lora_scale
            state[f"{name}.weight"] = (layer.weight.to(up.device).float() + change).to(layer.weight.dtype)
    return state


@contextlib.contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Compute with the base model alone inside the block; a model without adapters is not changed."""
    adapted: list[Any] = [layer for layer in model.modules() if hasattr(layer, "lora_scale")]
    for layer in adapted:
        layer.lora_is_off = True
    try:
        yield
    finally:
        for layer in adapted:
            layer.lora_is_off = False


class Saved:
    """An adapted model in a checkpoint: merged weights for general use, and the adapter, for resuming and for peft.

    Args:
        model: A model from `adapt`; a model without adapters is saved unchanged.
        settings: The settings it was adapted with.
        state: The published tensors to write (`published`); None for the model's own.
    """

    def __init__(self, model: Any, settings: LoraSettings, state: Mapping[str, Tensor] | None = None) -> None:
        self._model = model
        self._settings = settings
        self._state = state

    def save_pretrained(self, path: str | Path) -> None:
        """Write merged weights and adapter into a directory."""
        from safetensors.torch import save_file

        adapter = adapter_of(self._model)
        if not adapter:
            self._model.save_pretrained(path, state_dict=None if self._state is None else dict(self._state))
            return
        adapter = adapter if self._state is None else dict(self._state)
        self._model.save_pretrained(path, state_dict=merged(self._model, adapter))
        file = Path(path) / ADAPTER_FILE
        file.parent.mkdir()
        save_file({PEFT_PREFIX + name: tensor.contiguous() for name, tensor in adapter.items()}, file)
        (file.parent / "adapter_config.json").write_text(json.dumps(described(self._settings), indent=2) + "\n")


def described(settings: LoraSettings) -> dict[str, Any]:
    """Return the description of an adapter that peft reads from ``adapter_config.json``."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": settings.lora_rank,
        "lora_alpha": settings.lora_alpha,
        "target_modules": list(settings.lora_targets),
    }


def load_adapter(folder: Path) -> dict[str, Tensor]:
    """Return the adapter that `Saved` wrote into a checkpoint.

    Raises:
        CheckpointError: If the checkpoint has no adapter, or the adapter cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / ADAPTER_FILE
    try:
        return without_peft_names(load_file(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error


_ENDS = [[matrix] for matrix in _MATRICES]


def _add(layer: nn.Linear, rank: int, scale: float, draws: torch.Generator) -> None:
    place: Any = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    down = nn.Linear(layer.in_features, rank, bias=False, **place)
    up = nn.Linear(rank, layer.out_features, bias=False, **place)
    with torch.no_grad():
        down.weight.copy_(_drawn(layer, rank, draws))
        up.weight.zero_()
    layer.lora_A, layer.lora_B, layer.lora_scale = down, up, scale  # type: ignore[assignment]
    layer.lora_is_off = False  # type: ignore[assignment]
    # A hook, not a layer of another class: the base keeps its names, and a search for linear layers still finds it.
    layer.register_forward_hook(_adapted)


def _drawn(layer: Any, rank: int, draws: torch.Generator) -> Tensor:
    """Return the first values of A, with peft's initialization: uniform within 1 / sqrt(in_features)."""
    bound = 1 / math.sqrt(layer.in_features)
    return torch.rand((rank, layer.in_features), generator=draws) * 2 * bound - bound


def _adapted(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    if layer.lora_is_off:
        return output
    change: Tensor = layer.lora_B(layer.lora_A(inputs[0]))
    total: Tensor = output + layer.lora_scale * change
    return total
