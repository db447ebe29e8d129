"""A model's sizes from config.json and the headers of its safetensors files; no weight is read, no library loaded."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import ConfigError

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEADER_BYTES = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100_000_000
_HEADS = ("lm_head.", "value_head.", "score.")
_LAYER_LISTS = ("layers", "h", "blocks", "block")


class ModelSizes(NamedTuple):
    """The sizes of one model.

    Attributes:
        tensors: Shape of each tensor in the files; tied tensors count once.
        layers: Decoder layers.
        hidden: Width of the hidden states.
        inner: Width inside the MLP of a layer.
        cached: Elements of keys and values that a cache holds a token and layer.
        vocabulary: Tokens of the vocabulary.
    """

    tensors: dict[str, tuple[int, ...]]
    layers: int
    hidden: int
    inner: int
    cached: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return sum(math.prod(shape) for shape in self.tensors.values())

    @property
    def backbone_parameters(self) -> int:
        """Parameters without the head."""
        return sum(math.prod(shape) for name, shape in self.tensors.items() if not name.startswith(_HEADS))

    @property
    def layer_parameters(self) -> int:
        """Parameters of the largest decoder layer."""
        found: dict[str, int] = {}
        for name, shape in self.tensors.items():
            parts = name.split(".")
            numbers = [place for place, part in enumerate(parts) if part.isdecimal() and place]
            if numbers and parts[numbers[0] - 1] in _LAYER_LISTS:
                layer = ".".join(parts[: numbers[0] + 1])
                found[layer] = found.get(layer, 0) + math.prod(shape)
        return max(found.values(), default=0)

    def adapter_parameters(self, rank: int, targets: list[str]) -> int:
        """Return the parameters of LoRA adapters of a rank on the linear layers with these names."""
        ends = tuple(f".{target}.weight" for target in targets)
        return sum(rank * sum(shape) for name, shape in self.tensors.items() if name.endswith(ends))


def model_sizes(folder: Path, field: str) -> ModelSizes:
    """Return the sizes of the model in a folder of transformers' format.

    Args:
        folder: The folder.
        field: The configuration field that names it, for the error messages.

    Raises:
        ConfigError: If the folder has no readable config.json, or no readable safetensors file.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{field}: {folder} has no config.json")
    try:
        described = json.loads(path.read_bytes())
        text: dict[str, Any] = described.get("text_config") or described
        hidden = _first(text, "hidden_size", "n_embd", "d_model")
        heads = _first(text, "num_attention_heads", "n_head")
        head_size = text.get("head_dim") or hidden // heads
        return ModelSizes(
            _tensors(folder, field),
            layers=_first(text, "num_hidden_layers", "n_layer"),
            hidden=hidden,
            inner=text.get("intermediate_size") or text.get("n_inner") or 4 * hidden,
            cached=2 * (text.get("num_key_value_heads") or heads) * head_size,
            vocabulary=_first(text, "vocab_size"),
        )
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{field}: {path} does not give the model's sizes: {error}") from error


def has_images(folder: Path) -> bool:
    """Return whether config.json describes a vision-language model; False if it cannot be read."""
    try:
        return "vision_config" in json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def _first(described: dict[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(described.get(name), int):
            return int(described[name])
    raise KeyError(names[0])


def _tensors(folder: Path, field: str) -> dict[str, tuple[int, ...]]:
    try:
        files = _weight_files(folder)
        found = {name: shape for file in files for name, shape in _header(file).items()}
    except (OSError, ValueError, KeyError, AttributeError, struct.error) as error:
        raise ConfigError(f"{field}: a safetensors file in {folder} cannot be read: {error}") from error
    if not found:
        raise ConfigError(f"{field}: {folder} has no safetensors file")
    return found


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights, in the order in which transformers looks for them.

    A checkpoint has the trainer's state beside them.
    """
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    if (folder / _INDEX).is_file():
        return [
            folder / name for name in sorted(set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values()))
        ]
    return sorted(folder.glob("*.safetensors"))


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    with path.open("rb") as file:
        (nbytes,) = _HEADER_BYTES.unpack(file.read(_HEADER_BYTES.size))
        if nbytes > _MOST_HEADER_BYTES:
            raise ValueError(f"{path.name} has a header of {nbytes:,} B")
        header = json.loads(file.read(nbytes))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
