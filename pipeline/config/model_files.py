"""A model's sizes and problems from config.json and the headers of its safetensors files.

No weight is read, and no library loaded.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from pipeline.errors import ConfigError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""A model's weights in one file, and the index of those in several."""
_HEADER_BYTES = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100_000_000
LFS_POINTER = b"version https://git-lfs"
"""Begins a file whose content Git LFS has not fetched."""

_MOST_POINTER_BYTES = 1024
_OLD_WEIGHTS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
_ARCHIVE = b"PK\x03\x04"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt",
    "tekken.json", "*.tiktoken",
)  # fmt: skip
_HEADS = ("lm_head.", "value_head.", "score.")
_ROUTERS = (".gate.weight", ".router.weight", ".router.layer.weight")
"""Ends of the names of matrices that choose experts, no linear layers in the model."""
_MOST_TOLD = 60
"""Characters of a value in a note."""
_SLIDING = ("mistral", "mixtral", "phi3", "starcoder2")
"""Types of models of which all layers slide the window of config.json, if it has one."""
_LAYER_LISTS = ("layers", "h", "blocks", "block")

VLLM_IMAGE_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Types of the models whose images the vLLM engine takes."""


class ModelSizes(NamedTuple):
    """The sizes of one model.

    Attributes:
        tensors: Shape of each tensor in the files; tied tensors count once.
        layers: Decoder layers.
        hidden: Width of the hidden states.
        inner: Width inside the MLP of a layer, of a mixture that of all experts of a token.
        cached: Elements of keys and values that a cache holds a token and layer, or of the latent of both.
        vocabulary: Tokens of the vocabulary.
        cached_heads: Heads of which these are, the most parts that cards hold of them.
        sliding: Layers that slide a window.
        window: Tokens of the window.
    """

    tensors: dict[str, tuple[int, ...]]
    layers: int
    hidden: int
    inner: int
    cached: int
    vocabulary: int
    cached_heads: int
    sliding: int = 0
    window: int = 0

    def cached_of_row(self, tokens: int) -> int:
        """Return the elements that a cache holds of a row, where layers that slide a window hold no more than it."""
        return self.cached * ((self.layers - self.sliding) * tokens + self.sliding * min(self.window, tokens))

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
    def matrix_parameters(self) -> int:
        """Parameters of the matrices of decoder layers, of the largest stack of layers."""
        found: dict[str, int] = {}
        for name, shape in self.tensors.items():
            # The experts of a layer, a matrix each in the files, are one parameter of three dimensions in the model.
            if (layer := _layer_of(name)) and len(shape) == 2 and not _is_of_experts(name):
                stack = layer.rpartition(".")[0]
                found[stack] = found.get(stack, 0) + math.prod(shape)
        return max(found.values(), default=0)

    @property
    def linear_parameters(self) -> int:
        """Parameters of the matrices of decoder layers, experts included."""
        return sum(math.prod(shape) for name, shape in self.tensors.items() if _layer_of(name) and len(shape) == 2)

    @property
    def end_parameters(self) -> int:
        """Parameters of the embedding, or of the head, which is as large; 0 if both are one tensor."""
        ends = [math.prod(shape) for shape in self.tensors.values() if shape == (self.vocabulary, self.hidden)]
        return ends[0] if len(ends) > 1 else 0

    def adapter_parameters(self, rank: int, targets: Sequence[str] | str) -> int:
        """Return the parameters of LoRA adapters of a rank on linear layers with these names, or "all-linear"."""
        adapted: list[tuple[int, ...]]
        linear = {
            name: shape for name, shape in self.tensors.items() if not (_is_of_experts(name) or name.endswith(_ROUTERS))
        }
        if isinstance(targets, str):
            adapted = [shape for name, shape in linear.items() if _layer_of(name) and len(shape) == 2]
        else:
            ends = tuple(f".{target}.weight" for target in targets)
            adapted = [shape for name, shape in linear.items() if name.endswith(ends)]
        return sum(rank * sum(shape) for shape in adapted)

    def expert_parameters(self, targets: Sequence[str] | str) -> int:
        """Return the parameters of experts that have one of these names, or any for "all-linear"."""
        ends = ("",) if isinstance(targets, str) else tuple(f".{target}.weight" for target in targets)
        # One of three dimensions holds all experts of a layer, but for the kernel of a convolution.
        found = [
            shape
            for name, shape in self.tensors.items()
            if name.endswith(ends) and (_is_of_experts(name) or (len(shape) == 3 and _layer_of(name) and shape[1] > 1))
        ]
        return sum(map(math.prod, found))


def _is_of_experts(name: str) -> bool:
    """Return whether a tensor is of experts of a mixture, which are one parameter a layer in the model."""
    return ".experts." in name


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
    if not folder.is_dir():
        raise ConfigError(f"{field}: no such directory: {folder}")
    if not path.is_file():
        raise ConfigError(f"{field}: {folder} has no config.json")
    try:
        described = _json(path.read_bytes())
        text: dict[str, Any] = described.get("text_config") or described
        hidden = _first(text, "hidden_size", "n_embd", "d_model")
        heads = _first(text, "num_attention_heads", "n_head")
        head_size = text.get("head_dim") or hidden // heads
        cached_heads = text.get("num_key_value_heads") or heads
        cached = 2 * cached_heads * head_size
        if text.get("kv_lora_rank"):
            # The latent, its rotated part, and the keys of an index.
            beside = (text.get(name) or 0 for name in ("qk_rope_head_dim", "index_head_dim"))
            cached, cached_heads = _first(text, "kv_lora_rank") + sum(beside), 1
        tensors, layers = _tensors(folder, field), _first(text, "num_hidden_layers", "n_layer")
        window = text.get("sliding_window")
        window = window if isinstance(window, int) and window > 0 else 0
        # Where neither says which layers slide, all are counted with whole rows.
        kinds = text.get("layer_types") or ["sliding_attention"] * (layers if text.get("model_type") in _SLIDING else 0)
        return ModelSizes(
            tensors,
            layers=layers,
            hidden=hidden,
            inner=_inner(text, hidden),
            cached=cached,
            vocabulary=_first(text, "vocab_size"),
            cached_heads=cached_heads,
            sliding=kinds[:layers].count("sliding_attention") if window else 0,
            window=window,
        )
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{field}: {path} does not give the model's sizes: {error}") from error


def _inner(text: Mapping[str, Any], hidden: int) -> int:
    """Return the width inside the MLP of a layer; of a mixture that of all experts of a token.

    Each of these experts has a copy of the hidden state, too.
    """
    dense: int = text.get("intermediate_size") or text.get("n_inner") or 4 * hidden
    chosen = text.get("num_experts_per_tok") or 0
    if not chosen:
        return dense
    expert = text.get("moe_intermediate_size") or dense
    shared: int = text.get("shared_expert_intermediate_size") or expert * (text.get("n_shared_experts") or 0)
    return max(dense, chosen * (expert + hidden) + shared)


def end_token_ids(folder: Path) -> dict[str, list[int]]:
    """Return the tokens with which a model ends a response, by the file of its folder that lists them.

    A file that is missing, cannot be read or names none is left out.
    """
    found = {}
    for name in ("generation_config.json", "config.json"):
        described = json_object(folder / name)
        parts = [described, described.get("text_config")]
        listed = [part.get("eos_token_id") for part in parts if isinstance(part, dict)]
        ids = itertools.chain.from_iterable(ids if isinstance(ids, list) else [ids] for ids in listed)
        if tokens := list(dict.fromkeys(token for token in ids if type(token) is int and token >= 0)):
            found[name] = tokens
    return found


def problem_of_model(folder: Path, *, is_actor: bool, is_trained: bool) -> str:
    """Return why the model in a folder with a config.json cannot be loaded or trained, else an empty text.

    Args:
        folder: The folder.
        is_actor: Whether it is the language model that is sampled, with its tokenizer.
        is_trained: Whether its weights are trained.
    """
    if problem := problem_of_pointers(folder):
        return problem
    try:
        described = _json((folder / "config.json").read_bytes())
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


def problem_of_pointers(folder: Path) -> str:
    """Return the files of a model's folder that Git LFS has not fetched, as a problem; else an empty text.

    Files in its own folders count if they are chat templates, or weights that an index names.
    """
    pointers = []
    try:
        inner = {*folder.glob("additional_chat_templates/*"), *_indexed(folder)}
        for path in sorted({*folder.iterdir(), *inner}):
            if path.is_file() and path.stat().st_size <= _MOST_POINTER_BYTES:
                with path.open("rb") as file:
                    if file.read(len(LFS_POINTER)) == LFS_POINTER:
                        pointers.append(path)
    except OSError as error:
        return f"{folder} cannot be read: {error}"
    if not pointers:
        return ""
    which = f"{pointers[0]} is a pointer" if len(pointers) == 1 else f"{len(pointers)} files of {folder} are pointers"
    return f"{which} of Git LFS without the content: run git lfs pull in its folder"


def _indexed(folder: Path) -> set[Path]:
    """Return the files that an index of weights names; none if it cannot be read."""
    found = set[Path]()
    for index in folder.glob("*.index.json"):
        with contextlib.suppress(ValueError, KeyError, AttributeError, TypeError):
            found |= {folder / name for name in _json(index.read_bytes())["weight_map"].values()}
    return found


def _problem_of_weights(folder: Path) -> str:
    try:
        files = weight_files(folder)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"{_named_weights(folder) or INDEX} in {folder} cannot be read: {error}"
    for file in files:
        if problem := _problem_of_file(file, _named_weights(folder)):
            return problem
    old = [] if files else [path for name in _OLD_WEIGHTS for path in sorted(folder.glob(name))]
    for path in old:
        if problem := _problem_of_archive(path):
            return problem
    if files or old:
        return ""
    others = sorted(folder.glob("*.safetensors"))
    form = f"transformers does not load {others[0].name} without {INDEX}, " if others else ""
    form = "GGUF is not read, " if any(folder.glob("*.gguf")) else form
    return f"no weights in {folder}: {form}take model.safetensors as save_pretrained wrote it"


def _problem_of_file(path: Path, named: str) -> str:
    """Return why a file of weights cannot be read, else an empty text; `named` is that of `_named_weights`."""
    try:
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            if not nbytes:
                return f"{path} is empty: download it again"
            whole = _HEADER_BYTES.size + _HEADER_BYTES.unpack(file.read(_HEADER_BYTES.size))[0]
        whole += max((entry["data_offsets"][1] for entry in _entries(path).values()), default=0)
    except FileNotFoundError:
        by = "config.json" if path.name == named else named or INDEX
        return f"{path} is missing, {by} names it: download the model again"
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error) as error:
        return f"{path} is no safetensors file: {error}"
    if nbytes < whole:
        return f"{path} is cut: it has {nbytes:,} B of {whole:,} B, download it again"
    return ""


def _problem_of_archive(path: Path) -> str:
    """Return why an old file of weights, an archive of torch, cannot be read; else an empty text.

    Files of torch before 1.6 are no archives. Tensors are not read.
    """
    with path.open("rb") as file:
        begin = file.read(len(_ARCHIVE))
    if not begin:
        return f"{path} is empty: download it again"
    if begin != _ARCHIVE:
        return ""
    # The directory of an archive stands at its end.
    if not zipfile.is_zipfile(path):
        return f"{path} is cut: download it again"
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                # 0 if torch has computed none.
                if entry.filename.endswith("/data.pkl") and entry.CRC:
                    archive.read(entry)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        return f"{path} is damaged: {error}; download it again"
    return ""


def problem_of_parts(folder: Path, parts: int) -> str:
    """Return why vLLM cannot split the model in a folder over GPUs, else an empty text.

    Args:
        folder: The folder.
        parts: The number of GPUs.
    """
    text = text_settings(folder)
    if "vision_config" in text:
        return f"must be 1: {folder} is a vision-language model, which is not split over GPUs"
    heads = text.get("num_attention_heads") or text.get("n_head")
    pairs = text.get("num_key_value_heads") or heads
    for name, count in (("attention heads", heads), ("values inside the MLP", text.get("intermediate_size"))):
        if isinstance(count, int) and count % parts:
            return f"must divide the {count:,} {name} of {folder}, got {parts}"
    # With fewer of them than GPUs each has copies on several.
    if isinstance(pairs, int) and pairs % parts and parts % pairs:
        return f"must divide the {pairs:,} heads of keys and values of {folder}, or be a multiple, got {parts}"
    return ""


def has_images(folder: Path) -> bool:
    """Return whether config.json describes a vision-language model; False if it cannot be read."""
    return "vision_config" in json_object(folder / "config.json")


def model_type(folder: Path) -> str:
    """Return the type of model that config.json names; an empty text if it names none or cannot be read."""
    return str(json_object(folder / "config.json").get("model_type", ""))


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if the file cannot be read, or holds anything else."""
    try:
        found = _json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def text_settings(folder: Path) -> dict[str, Any]:
    """Return config.json with its text part over it, of a model with images; empty if it cannot be read."""
    described = json_object(folder / "config.json")
    text = described.get("text_config")
    return {**described, **text} if isinstance(text, dict) else described


def _first(described: dict[str, Any], *names: str) -> int:
    for name in names:
        if type(value := described.get(name)) is int and value > 0:
            return value
    raise KeyError(names[0])


def _tensors(folder: Path, field: str) -> dict[str, tuple[int, ...]]:
    try:
        files = weight_files(folder)
        found = {name: tuple(entry["shape"]) for file in files for name, entry in _entries(file).items()}
    except (OSError, ValueError, KeyError, AttributeError, struct.error) as error:
        problem = problem_of_pointers(folder) or _problem_of_weights(folder)
        raise ConfigError(f"{field}: {problem or f'a safetensors file in {folder} cannot be read: {error}'}") from error
    if not found:
        raise ConfigError(f"{field}: {folder} has no safetensors file")
    return found


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights, in the order in which transformers looks for them; empty without any.

    A checkpoint has the trainer's state beside them.

    Raises:
        OSError: If the index cannot be read.
        ValueError: If it is no JSON; KeyError or AttributeError: if it names no files.
    """
    named = _named_weights(folder)
    paths = [folder / name for name in ([named] if named else (WHOLE, INDEX)) if named or (folder / name).is_file()]
    if paths and paths[0].suffix == ".json":
        return [folder / name for name in sorted(set(_json(paths[0].read_bytes())["weight_map"].values()))]
    return paths[:1]


def _named_weights(folder: Path) -> str:
    """Return the file or index that config.json names as the model's weights, also if it is missing; else ""."""
    named = json_object(folder / "config.json").get("transformers_weights")
    return named if isinstance(named, str) else ""


def _entries(path: Path) -> dict[str, Any]:
    """Return the entry of each tensor in a file."""
    with path.open("rb") as file:
        (nbytes,) = _HEADER_BYTES.unpack(file.read(_HEADER_BYTES.size))
        if nbytes > _MOST_HEADER_BYTES:
            raise ValueError(f"{path.name} has a header of {nbytes:,} B")
        header = _json(file.read(nbytes))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


_NEUTRAL: Final[Mapping[str, Any]] = {
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "sequence_bias": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "forced_decoder_ids": None, "min_length": 0, "min_new_tokens": 0, "exponential_decay_length_penalty": None,
    "guidance_scale": 1.0, "watermarking_config": None, "typical_p": 1.0, "min_p": 0.0, "top_h": None,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "renormalize_logits": False, "remove_invalid_values": False,
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "penalty_alpha": 0.0, "dola_layers": None,
    "constraints": None, "force_words_ids": None, "max_time": None, "stop_strings": None,
}  # fmt: skip
"""Keys of generation_config.json that change which tokens `generate` samples, each with the value that does not."""


def processors_of(folder: Path) -> list[str]:
    """Return the keys of a model's generation settings that would change its samples, with their values.

    Args:
        folder: The model's folder; older models have such keys in config.json.
    """
    found: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        described = json_object(folder / name)
        found |= {key: described[key] for key in _NEUTRAL if key in described}
    changes = {key: value for key, value in found.items() if value not in (None, [], {}, False, _NEUTRAL[key])}
    return [f"{key} = {json.dumps(value)[:_MOST_TOLD]}" for key, value in sorted(changes.items())]
