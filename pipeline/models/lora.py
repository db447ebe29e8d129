"""LoRA (arXiv:2106.09685): adapters, small matrices, are trained in place of the model, and they alone are published.

A linear layer y = W x becomes y = W x + s B A x, with W frozen and B initially zero; s is alpha / rank, or alpha /
sqrt(rank) for rsLoRA (arXiv:2312.03732). Worker and trainer both have the base model and compute this in the same way,
unmerged, so that the importance ratio of fresh experience is 1. Names are peft's without its prefix:
``model.layers.0.self_attn.q_proj.lora_A.weight`` beside the layer's own.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from pipeline.errors import CheckpointError, ConfigError
from pipeline.models.layer_streaming import decoder_layers

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
    def lora_targets(self) -> Sequence[str] | str: ...  # noqa: D102

    @property
    def lora_kind(self) -> str: ...  # noqa: D102

    @property
    def lora_adapter(self) -> str | None: ...  # noqa: D102


def adapt(actor: nn.Module, settings: LoraSettings, *, seed: int) -> nn.Module:
    """Add adapters to a model's linear layers and freeze all other parameters; with rank 0, do nothing.

    Args:
        actor: The model, changed in place.
        settings: Kind, rank, alpha, the layers to adapt by the last part of their names, or "all-linear" for the linear
            layers of all decoder layers, and the folder of an adapter to begin with.
        seed: Seed of A's values; B starts at zero, so that the model's outputs are unchanged at first.

    Returns:
        The actor.

    Raises:
        ConfigError: If no linear layer has the name of a target, or the folder has not the adapter of this model and
            these settings.
    """
    if not settings.lora_rank:
        return actor
    chosen = target_layers(actor, settings.lora_targets)
    actor.requires_grad_(False)
    for layer in chosen:
        _add(layer, settings)
    adapters = adapter_of(actor)
    with torch.no_grad():
        for name, value in initial_adapters(actor, settings, seed=seed):
            adapters[name].copy_(value)
    return actor


def target_layers(actor: nn.Module, targets: Sequence[str] | str) -> list[nn.Linear]:
    """Return the linear layers that `lora_targets` names.

    Raises:
        ConfigError: If a name is that of no linear layer, or "all-linear" finds none.
    """
    if isinstance(targets, str):
        within = [module for layer in decoder_layers(actor) for module in layer.modules()]
        if not (chosen := [module for module in within if _is_linear(module)]):
            raise ConfigError(
                f"model.lora_targets: a {type(actor).__name__} has no decoder layers with linear layers for "
                f'"{targets}": list their names'
            )
        return chosen
    linears = {name: module for name, module in actor.named_modules() if _is_linear(module)}
    if unknown := set(targets) - {name.rpartition(".")[2] for name in linears}:
        kinds = sorted({name.rpartition(".")[2] for name in linears})
        hint = "; the experts of a mixture have no adapters" if "experts" in _parts(actor) else ""
        raise ConfigError(
            f"model.lora_targets: no linear layer is called {min(unknown)!r}, only {', '.join(kinds)}{hint}"
        )
    return [layer for name, layer in linears.items() if name.rpartition(".")[2] in targets]


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a linear layer; routers of some models are one with another forward."""
    is_plain = type(module).forward is nn.Linear.forward
    return isinstance(module, nn.Linear) and (is_plain or not type(module).__module__.startswith("transformers.models"))


def _parts(model: nn.Module) -> set[str]:
    """Return the parts of the names of a model's modules."""
    return {part for name, _ in model.named_modules() for part in name.split(".")}


def initial_adapters(actor: nn.Module, settings: LoraSettings, *, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield name and first value of each adapter of a model from `adapt`, one at a time, as `adapt` sets them.

    Args:
        actor: The model; its adapters' values are not used.
        settings: The settings of `adapt`.
        seed: The seed of `adapt`.

    Raises:
        ConfigError: As `adapt`.
    """
    if settings.lora_adapter is not None:
        shapes = {name: tuple(tensor.shape) for name, tensor in adapter_of(actor).items()}
        yield from read_adapter(Path(settings.lora_adapter), settings, shapes).items()
        return
    draws = torch.Generator().manual_seed(seed)
    for name, layer in adapted_layers(actor):
        yield f"{name}.lora_A.weight", _drawn(layer, settings.lora_rank, draws)
        yield f"{name}.lora_B.weight", torch.zeros(layer.lora_B.out_features, layer.lora_B.in_features)


def published(model: nn.Module) -> dict[str, Tensor]:
    """Return the published tensors of a model, not copied: its adapters, or its state dict if it has none."""
    return adapter_of(model) or dict(model.state_dict())


def adapter_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's adapters by name, not copied; empty if it has none."""
    return {name: tensor for name, tensor in model.state_dict().items() if name.split(".")[-2:-1] in _ENDS}


def adapted_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the layers of a model that have an adapter, with their names."""
    return [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "lora_scale")]


def without_peft_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict under our names, from one under our names or peft's."""
    return {name.removeprefix(PEFT_PREFIX).replace(".default.", "."): tensor for name, tensor in state.items()}


def merged(model: nn.Module, adapter: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return a model's state dict with W + s B A in place of each adapted W, and no adapters.

    Args:
        model: An adapted model.
        adapter: A and B of each adapted layer, by name; None for the model's own. They are
            merged on their device.
    """
    adapter = adapter_of(model) if adapter is None else adapter
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in adapter}
    for name, layer in adapted_layers(model):
        down, up = adapter[f"{name}.lora_A.weight"], adapter[f"{name}.lora_B.weight"]
        state[f"{name}.weight"] = merged_weight(layer.weight.to(up.device), down, up, layer.lora_scale)
    return state


def merged_weight(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return W + s B A in the dtype of W, computed in float32."""
    return (weight.float() + up.float() @ down.float() * scale).to(weight.dtype)


def without_other_hooks(layer: Any, states: Tensor) -> Tensor:
    """Return a linear layer's result with its adapter's change, if it has one, and without its other hooks.

    Args:
        layer: The layer; ``layer.forward(states)`` alone would leave its adapter out.
        states: ``(..., in_features)``.
    """
    output: Tensor = layer.forward(states)
    return _adapted(layer, (states,), output) if hasattr(layer, "lora_scale") else output


@contextlib.contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Compute with the base model alone inside the block; a model without adapters is not changed."""
    adapted = [layer for _, layer in adapted_layers(model)]
    for layer in adapted:
        layer.lora_is_off = True
    try:
        yield
    finally:
        for layer in adapted:
            layer.lora_is_off = False


def twin_of_adapted_head(model: Any) -> nn.Parameter | None:
    """Return the weight of an adapted head that is the embedding's too; None without one.

    Merged, the head has a weight of its own, and the embedding, which has no adapter, keeps its own.
    """
    find_head, find_embedding = (getattr(model, f"get_{end}_embeddings", lambda: None) for end in ("output", "input"))
    head, embedding = find_head(), find_embedding()
    if head is None or embedding is None or not hasattr(head, "lora_scale"):
        return None
    return head.weight if head.weight is embedding.weight else None


@contextlib.contextmanager
def untied_where_adapted(model: Any) -> Iterator[None]:
    """Let a model's configuration say that head and embedding differ, where they do once the adapter is merged."""
    if twin_of_adapted_head(model) is None:
        yield
        return
    configs = list({id(c): c for c in (model.config, model.config.get_text_config())}.values())
    before = [getattr(config, "tie_word_embeddings", None) for config in configs]
    for config in configs:
        config.tie_word_embeddings = False
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.tie_word_embeddings = value


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
        # Merged in host memory: a card would need room for the whole model once more.
        adapter = {name: tensor.cpu() for name, tensor in (self._state or adapter).items()}
        with untied_where_adapted(self._model):
            self._model.save_pretrained(path, state_dict=merged(self._model, adapter))
        file = Path(path) / ADAPTER_FILE
        file.parent.mkdir()
        save_file({PEFT_PREFIX + name: tensor.contiguous() for name, tensor in adapter.items()}, file)
        write_description(file.parent, self._model, self._settings)


def write_description(folder: Path, model: nn.Module, settings: LoraSettings) -> None:
    """Write ``adapter_config.json`` beside the adapter of a model."""
    (folder / "adapter_config.json").write_text(json.dumps(described(model, settings), indent=2) + "\n")


def described(model: nn.Module, settings: LoraSettings) -> dict[str, Any]:
    """Return the description of a model's adapter that peft reads from ``adapter_config.json``."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    adapted = [name for name, module in linears.items() if hasattr(module, "lora_scale")]
    ends = {name.rpartition(".")[2] for name in adapted}
    # peft adapts each layer whose name ends so: layers outside the decoder may have the same ends.
    others = {name for name in linears if name.rpartition(".")[2] in ends} - {*adapted}
    named = str(getattr(settings, "actor", ""))
    # The embedded model has no folder by its name; transformers knows the one that it was loaded from.
    base = getattr(model, "name_or_path", "") if named.startswith("builtin:") else named
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base or getattr(model, "name_or_path", ""),
        "task_type": "CAUSAL_LM",
        "r": settings.lora_rank,
        "lora_alpha": settings.lora_alpha,
        "use_rslora": settings.lora_kind == "rslora",
        "target_modules": adapted if others else sorted(ends),
    }


def read_adapter(folder: Path, settings: LoraSettings, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the adapter in a folder of peft's format, to begin a run with.

    Args:
        folder: A folder of ``adapter_config.json`` and ``adapter_model.safetensors``.
        settings: The settings of the run, with which those of the folder must agree.
        shapes: The run's adapters.

    Returns:
        A and B of each adapted layer, by our names.

    Raises:
        ConfigError: If it cannot be read, or is of another kind, rank or alpha, or of other layers.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / "adapter_config.json").read_bytes())
        state = without_peft_names(load_file(folder / ADAPTER_FILE.name))
        problem = _disagreement(config, settings)
    except (OSError, SafetensorError, ValueError, AttributeError) as error:
        raise ConfigError(f"model.lora_adapter: no adapter of peft can be read in {folder}: {error}") from error
    if problem:
        raise ConfigError(f"model.lora_adapter: {folder} {problem}")
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if odd := sorted(name for name in {*found, *shapes} if found.get(name) != shapes.get(name)):
        told = [" x ".join(map(str, of[odd[0]])) if odd[0] in of else "absent" for of in (found, shapes)]
        raise ConfigError(
            f"model.lora_adapter: {folder} is of other layers: {odd[0]} is {told[0]} there, {told[1]} by "
            f"model.lora_targets and model.actor ({len(odd):,} tensors differ)"
        )
    return state


_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Values of peft's ``init_lora_weights`` that leave the base model as it is."""


def _disagreement(config: Mapping[str, Any], settings: LoraSettings) -> str:
    """Return how the adapter that peft describes differs from the one of settings; empty if they agree."""
    kind = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
    if config.get("peft_type") != "LORA":
        return f"has an adapter of the kind {config.get('peft_type')}, none of LoRA"
    for key, its, ours in (
        ("lora_kind", kind, settings.lora_kind),
        ("lora_rank", config.get("r", 8), settings.lora_rank),
        ("lora_alpha", config.get("lora_alpha", 8), settings.lora_alpha),
    ):
        if its != ours:
            return f"has {key} = {json.dumps(its)}, model.{key} is {json.dumps(ours)}"
    if config.get("alpha_pattern"):
        return "has an alpha of its own for some layers (alpha_pattern)"
    if (start := config.get("init_lora_weights", True)) not in _STARTS:
        return f"has init_lora_weights = {json.dumps(start)}, which changes the base model: convert it to plain LoRA"
    return ""


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


def _add(layer: nn.Linear, settings: LoraSettings) -> None:
    rank = settings.lora_rank
    scale = settings.lora_alpha / (math.sqrt(rank) if settings.lora_kind == "rslora" else rank)
    options: Any = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    down = nn.Linear(layer.in_features, rank, bias=False, **options)
    up = nn.Linear(rank, layer.out_features, bias=False, **options)
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
    if output.is_cuda:
        # One kernel, and one rounding; on a CPU the sum would have other bits.
        return torch.add(output, change, alpha=layer.lora_scale)
    total: Tensor = output + layer.lora_scale * change
    return total
