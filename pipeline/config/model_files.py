"""A model's sizes and problems from config.json and the headers of its safetensors files.

No weight is read, and no library loaded.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import ConfigError

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEADER_BYTES = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100_000_000
_LFS_POINTER = b"version https://git-lfs"
_OLD_WEIGHTS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt",
    "tekken.json", "*.tiktoken",
)  # fmt: skip
_HEADS = ("lm_head.", "value_head.", "score.")
_LAYER_LISTS = ("layers", "h", "blocks", "block")

VLLM_IMAGE_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Types of the models whose images the vLLM engine takes."""


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
            if layer := _layer_of(name):
                found[layer] = found.get(layer, 0) + math.prod(shape)
        return max(found.values(), default=0)

    @property
    def end_parameters(self) -> int:
        """Parameters of the embedding, or of the head, which is as large; 0 if both are one tensor."""
        ends = [math.prod(shape) for shape in self.tensors.values() if shape == (self.vocabulary, self.hidden)]
        return ends[0] if len(ends) > 1 else 0

    def adapter_parameters(self, rank: int, targets: Sequence[str] | str) -> int:
        """Return the parameters of LoRA adapters of a rank on linear layers with these names, or "all-linear"."""
        adapted: list[tuple[int, ...]]
        if isinstance(targets, str):
            adapted = [shape for name, shape in self.tensors.items() if _layer_of(name) and len(shape) == 2]
        else:
            ends = tuple(f".{target}.weight" for target in targets)
            adapted = [shape for name, shape in self.tensors.items() if name.endswith(ends)]
        return sum(rank * sum(shape) for shape in adapted)


def _layer_of(name: str) -> str:
    """Return the name of the decoder layer that a tensor is part of; empty if it is of none."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal() and place]
    return ".".join(parts[: numbers[0] + 1]) if numbers and parts[numbers[0] - 1] in _LAYER_LISTS else ""


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


def problem_of_model(folder: Path, *, is_actor: bool, is_trained: bool) -> str:
    """Return why the model in a folder with a config.json cannot be loaded or trained, else an empty text.

    Args:
        folder: The folder.
        is_actor: Whether it is the language model that is sampled, with its tokenizer.
        is_trained: Whether its weights are trained.
    """
    try:
        described = json.loads((folder / "config.json").read_bytes())
        quantized = described.get("quantization_config")
    except (OSError, ValueError, AttributeError) as error:
        return f"config.json in {folder} cannot be read: {error}"
    if is_trained and isinstance(quantized, dict):
        return (
            f"{folder} is quantized ({quantized.get('quant_method', 'quantization_config')}), its weights cannot be "
            "trained: take the model that it was made of"
        )
    if is_actor and described.get("is_encoder_decoder"):
        return f"{folder} is an encoder-decoder ({described.get('model_type')}): take a causal language model"
    if problem := _problem_of_weights(folder):
        return problem
    if is_actor and not any(any(folder.glob(name)) for name in _TOKENIZER_FILES):
        return f"no tokenizer in {folder}: copy the model's tokenizer.json and tokenizer_config.json into it"
    return ""


def _problem_of_weights(folder: Path) -> str:
    try:
        files = _weight_files(folder)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"{_INDEX} in {folder} cannot be read: {error}"
    for file in files:
        if problem := _problem_of_file(file):
            return problem
    if files or any(any(folder.glob(name)) for name in _OLD_WEIGHTS):
        return ""
    form = "GGUF is not read, " if any(folder.glob("*.gguf")) else ""
    return f"no weights in {folder}: {form}take model.safetensors as save_pretrained wrote it"


def _problem_of_file(path: Path) -> str:
    try:
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return f"{path} is a pointer of Git LFS without the weights: run git lfs pull in its folder"
            file.seek(0)
            whole = _HEADER_BYTES.size + _HEADER_BYTES.unpack(file.read(_HEADER_BYTES.size))[0]
        whole += max((entry["data_offsets"][1] for entry in _entries(path).values()), default=0)
    except FileNotFoundError:
        return f"{path} is missing, {_INDEX} names it: download the model again"
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error) as error:
        return f"{path} is no safetensors file: {error}"
    if nbytes < whole:
        return f"{path} is cut: it has {nbytes:,} B of {whole:,} B, download it again"
    return ""


def has_images(folder: Path) -> bool:
    """Return whether config.json describes a vision-language model; False if it cannot be read."""
    return "vision_config" in _described(folder)


def model_type(folder: Path) -> str:
    """Return the type of model that config.json names; an empty text if it names none or cannot be read."""
    return str(_described(folder).get("model_type", ""))


def _described(folder: Path) -> dict[str, Any]:
    try:
        described = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return described if isinstance(described, dict) else {}


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
    return {name: tuple(entry["shape"]) for name, entry in _entries(path).items()}


def _entries(path: Path) -> dict[str, Any]:
    """Return the entry of each tensor in a file."""
    with path.open("rb") as file:
        (nbytes,) = _HEADER_BYTES.unpack(file.read(_HEADER_BYTES.size))
        if nbytes > _MOST_HEADER_BYTES:
            raise ValueError(f"{path.name} has a header of {nbytes:,} B")
        header = json.loads(file.read(nbytes))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}
