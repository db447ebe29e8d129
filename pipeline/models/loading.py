"""Models and tokenizers, loaded from local directories; nothing is downloaded."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.errors import ConfigError, FieldError
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.critic import VALUE_HEAD_FILE, Critic
from pipeline.models.layer_streaming import stream_layers
from pipeline.models.log_probs import action_log_probs
from pipeline.models.reward_model import SequenceReward
from pipeline.models.tokenizer_file import as_in_file, json_object
from pipeline.models.vision_inputs import is_vision_directory, vision_backbone

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_ROW = (1, 0, 1, 1, 0, 1, 0, 0)
"""Tokens that every model has; with `_PADDING` columns before them a model that does not read the mask differs."""
_PADDING = 24
_MOST_GAP_NATS, _MOST_ROUNDED_GAP_NATS = 0.01, 0.2
_MOST_LATER_NATS = 1e-4

_ARCHIVE_ERROR = "PytorchStreamReader"
_MOST_TOLD = 300
"""Characters of an error of transformers."""


def load_actor(
    path: str | Path,
    *,
    dtype: str | torch.dtype,
    device: torch.device | str,
    field: str = "model.actor",
    streamed: bool = False,
) -> PreTrainedModel:
    """Load a causal language model, or a vision-language one, from a local directory.

    Args:
        path: A directory written by ``save_pretrained``.
        dtype: Dtype of the weights, as "bfloat16" or a torch dtype; it overrides the checkpoint's.
        device: Device of the weights.
        field: The configuration field that names the directory, for the error message.
        streamed: Whether the decoder layers stay in host memory (`pipeline.models.layer_streaming`).

    Returns:
        The model, in eval mode on `device`.

    Raises:
        ConfigError: If the directory is missing or does not load, `dtype` is not a torch dtype, or the model reads
            padding or later tokens, computes no finite numbers, or has no layers to stream.
    """
    resolved = _torch_dtype(dtype)
    model = _load(_class_of(path, field), path, field, "cpu" if streamed else device, dtype=resolved)
    if streamed:
        stream_layers(model, torch.device(device))
    _refuse_wrong_log_probs(model, path, field)
    return model


def shell(
    path: str | Path, *, dtype: str | torch.dtype, field: str = "model.actor", has_head: bool = True
) -> PreTrainedModel:
    """Return a model of a directory's configuration, on the meta device: no memory, no file of weights is read.

    It computes nothing, so that `load_actor`'s checks of its log-probs are left to the process that has the model.

    Args:
        path: A directory with its config.json.
        dtype: Dtype of the weights, as "bfloat16" or a torch dtype.
        field: The configuration field that names the directory, for the error message.
        has_head: Whether it is a language model; else a model without a head.

    Raises:
        ConfigError: If the directory is missing or has no model configuration, or `dtype` is not a torch dtype.
    """
    resolved, auto_class = _torch_dtype(dtype), _class_of(path, field)
    from transformers import AutoConfig, AutoModel

    with _named("model", path, field), torch.device("meta"):
        described = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        model: PreTrainedModel = (auto_class if has_head else AutoModel).from_config(described, dtype=resolved).eval()
    _keep_float32(model, resolved)
    return model


def _keep_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give the tensors that a model keeps in float32 that dtype, as where its weights are loaded."""
    names = {
        *((model._keep_in_fp32_modules or ()) if dtype == torch.float16 else ()),
        *((model._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else ()),
    }
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if names and any(re.search(rf"(^|\.){kept}(\.|$)", name) for kept in names):
            tensor.data = tensor.data.float()


def _class_of(path: str | Path, field: str) -> Any:
    """Return the class by which transformers loads a language model, or a vision-language one, from a directory."""
    takes_images = sees_images(path, field=field)
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if takes_images else AutoModelForCausalLM


def _refuse_wrong_log_probs(model: PreTrainedModel, path: str | Path, field: str) -> None:
    name = f"{field}: the {type(model).__name__} in {path}"
    # First, because a comparison with NaN is never true.
    if not _log_probs(model, _ROW).isfinite().all():
        raise ConfigError(
            f"{name} gives log-probs that are no finite numbers: its files are damaged, or too large for {model.dtype}"
        )
    if not is_causal(model):
        raise ConfigError(
            f"{name} reads the tokens after a token too, as an encoder does: its log-probs would be wrong; take a "
            "causal language model"
        )
    if not ignores_padding(model):
        raise ConfigError(
            f"{name} reads the padding before a row as tokens: its log-probs would be wrong; take a model that reads "
            "its attention_mask"
        )


def is_causal(model: PreTrainedModel) -> bool:
    """Return whether a language model gives a token the same log-prob whatever tokens come after it."""
    before = len(_ROW) // 2
    other = [*_ROW[:before], *(1 - token for token in _ROW[before:])]
    one, two = (_log_probs(model, row)[:, : before - 1] for row in (_ROW, other))
    # Both passes have the same shape, so that a causal model rounds alike in both.
    limit = _MOST_LATER_NATS if model.dtype == torch.float32 else _MOST_ROUNDED_GAP_NATS
    return bool((one - two).abs().mean() < limit)


def _log_probs(model: PreTrainedModel, row: Sequence[int], *, padding: int = 0) -> torch.Tensor:
    """Return the log-probs of all tokens of a row but the first, ``(1, A)``, with columns of padding before it."""
    ids = torch.tensor([[0] * padding + [*row]], device=model.device)
    mask = (torch.arange(ids.shape[1], device=model.device) >= padding).long().unsqueeze(0)
    vision = None if vision_backbone(model) is None else VisionRows.none(1)
    with torch.no_grad():
        return action_log_probs(model, ids, mask, len(row) - 1, vision=vision)


def ignores_padding(model: PreTrainedModel) -> bool:
    """Return whether a causal language model gives a padded row the log-probs of the row alone."""
    alone, beside = _log_probs(model, _ROW), _log_probs(model, _ROW, padding=_PADDING)
    limit = _MOST_GAP_NATS if model.dtype == torch.float32 else _MOST_ROUNDED_GAP_NATS
    return bool((alone - beside).abs().mean() < limit)


def sees_images(path: str | Path, *, field: str = "model.actor") -> bool:
    """Return whether a local directory holds a vision-language model of a kind that rollouts and trainer support.

    Args:
        path: A directory written by ``save_pretrained``.
        field: The configuration field that names the directory, for the error message.

    Raises:
        ConfigError: If the directory is missing or has no model configuration.
    """
    _go_offline()
    _check_directory(path, field)
    with _named("model", path, field):
        return is_vision_directory(path)


def load_tokenizer(path: str | Path, *, field: str = "model.actor") -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local directory.

    Args:
        path: A directory written by ``save_pretrained``.
        field: The configuration field that names the directory, for the error message.

    Returns:
        The tokenizer. It pads on the left; its pad token is the eos token if the directory defines no pad token, and
        without both the first end that generation_config.json lists. Its
        tokens are those of the directory's tokenizer.json, if there is one.

    Raises:
        ConfigError: If the directory is missing or does not load, nothing gives a pad token, or
            transformers does not make the tokenizer that tokenizer.json describes.
    """
    _go_offline()
    _check_directory(path, field)
    try:
        tokenizer = as_in_file(_built_tokenizer(Path(path)), Path(path), field)
    except ConfigError:
        raise
    # Errors of tokenizers have no class of their own, such as that of a tokenizer.json of a later release.
    except Exception as error:
        raise ConfigError(f"{field}: cannot load a tokenizer from {path}: {_told(error)}") from error
    assert tokenizer is not None
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or _listed_end(tokenizer, Path(path))
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"{field}: the tokenizer in {path} has neither a pad token nor an eos token, and generation_config.json "
            "lists no end"
        )
    return tokenizer


def _built_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that transformers builds; None if the class named there expects another vocabulary."""
    from transformers import AutoTokenizer

    try:
        built: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except (AttributeError, KeyError, TypeError):
        if not (path / "tokenizer.json").is_file():
            raise
        return None
    return built


def _listed_end(tokenizer: PreTrainedTokenizerBase, path: Path) -> str | None:
    """Return the first token by which generation_config.json ends a response, and log it; None if it lists none."""
    listed = json_object(path / "generation_config.json").get("eos_token_id")
    first = listed[0] if isinstance(listed, list) and listed else listed
    if type(first) is not int or not 0 <= first < len(tokenizer):
        return None
    token = str(tokenizer.convert_ids_to_tokens(first))
    log.info("the tokenizer has neither a pad nor an eos token, padding is the first end of generation_config.json: "
             "token=%s id=%d path=%s", token, first, path)  # fmt: skip
    return token


def refuse_large_tokenizer(tokenizer: PreTrainedTokenizerBase, vocabulary: int, path: str | Path) -> None:
    """Refuse a tokenizer with ids that the model does not have: on a GPU the first of them would end the process.

    Args:
        tokenizer: The tokenizer.
        vocabulary: Tokens of the model; ids are below it.
        path: Directory of both, for the error message.

    Raises:
        ConfigError: If an id is not below `vocabulary`.
    """
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    if largest >= vocabulary:
        raise ConfigError(
            f"model.actor: the tokenizer in {path} is larger than the model: token {token!r} has the id {largest:,}, "
            f"the model's vocabulary ends at {vocabulary - 1:,}; take its own tokenizer, or resize its embeddings"
        )


def load_critic(
    path: str | Path, *, dtype: str | torch.dtype, device: torch.device | str, field: str = "model.critic"
) -> Critic:
    """Load a critic from a local directory.

    Args:
        path: A directory written by ``save_pretrained`` of a `Critic`, or of any model with a backbone.
        dtype: Dtype of the backbone, as "bfloat16" or a torch dtype; the value head is float32.
        device: Device of the weights.
        field: The configuration field that names the directory, for the error message.

    Returns:
        The critic, in eval mode on `device`. Without a saved value head in the directory the head is zero.

    Raises:
        ConfigError: If the directory is missing or does not load, or `dtype` is not a torch dtype.
    """
    _go_offline()
    from safetensors.torch import load_file
    from transformers import AutoModel

    critic = Critic(_load(AutoModel, path, field, device, dtype=_torch_dtype(dtype)))
    file, own = Path(path) / VALUE_HEAD_FILE, critic.value_head.state_dict()
    if file.is_file():
        with _named("value head", file, field):
            head = load_file(file, device=str(device))
        if {name: tensor.shape for name, tensor in head.items()} != {name: own[name].shape for name in own}:
            raise ConfigError(f"{field}: the value head in {file} is of another model")
        critic.value_head.load_state_dict(head)
    else:
        log.info("critic starts with a value head of zeros: path=%s", path)
    return critic.eval()


def critic_of(
    actor: PreTrainedModel, path: str | Path | None, *, dtype: str | torch.dtype, device: torch.device | str
) -> Critic:
    """Return the critic in a directory, or without one a critic made of the actor's backbone, still without adapters.

    See `load_critic` for the other arguments and the errors.
    """
    return Critic.from_actor(actor) if path is None else load_critic(path, dtype=dtype, device=device)


def load_reward_model(
    path: str | Path, *, dtype: str | torch.dtype, device: torch.device | str, field: str = "model.reward"
) -> SequenceReward:
    """Load a reward model from a local directory: a sequence-classification model with one label.

    Args:
        path: A directory written by ``save_pretrained``.
        dtype: Dtype of the weights, as "bfloat16" or a torch dtype; it overrides the checkpoint's.
        device: Device of the weights.
        field: The configuration field that names the directory, for the error message.

    Returns:
        A callable with `input_ids` and `attention_mask`, ``(B, S)``, that returns the scores, ``(B,)`` float32.

    Raises:
        ConfigError: If the directory is missing or does not load, its model does not have exactly one label, its score
            of a row depends on the rows beside it, or `dtype` is not a torch dtype.
    """
    _go_offline()
    from transformers import AutoModelForSequenceClassification

    model = _load(AutoModelForSequenceClassification, path, field, device, dtype=_torch_dtype(dtype))
    if model.config.num_labels != 1:
        raise ConfigError(f"{field}: the model in {path} has {model.config.num_labels} labels, a reward model has 1")
    reward = SequenceReward(model)
    try:
        reward.check()
    except FieldError as error:
        raise ConfigError(f"{field}: {path} cannot be a reward model: {error}") from None
    return reward


def _go_offline() -> None:
    # huggingface_hub reads it at its first import; loading a local directory must never wait for the hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _check_directory(path: str | Path, field: str) -> None:
    # transformers takes a missing directory for the name of a model on the hub, and its error says so.
    if not Path(path).is_dir():
        raise ConfigError(f"{field}: no such directory: {path}")


def _torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype):
        raise ConfigError(f"model.dtype: {dtype!r} is not a torch dtype")
    return resolved


def _load(
    auto_class: Any, path: str | Path, field: str, device: torch.device | str, *, dtype: torch.dtype
) -> PreTrainedModel:
    _check_directory(path, field)
    with _named("model", path, field):
        model, found = auto_class.from_pretrained(
            str(path), dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
    _refuse_random_tensors(found, path, field)
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


@contextlib.contextmanager
def _named(part: str, path: str | Path, field: str) -> Iterator[None]:
    """Have the errors that files of a directory cause name it and its field.

    Values that transformers does not expect in config.json end in errors of any of these classes, and a quantized model
    that lacks packages in an ImportError.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except (
        OSError, ValueError, ImportError, SafetensorError, StrictDataclassError,
        LookupError, TypeError, AttributeError, ArithmeticError,
    ) as error:  # fmt: skip
        raise ConfigError(f"{field}: cannot load a {part} from {path}: {_told(error)}") from error
    except RuntimeError as error:
        # torch has no class of its own for an archive that it cannot read.
        if _ARCHIVE_ERROR not in str(error):
            raise
        raise ConfigError(
            f"{field}: cannot load a {part} from {path}: a .bin file of it is damaged; download it again, or take "
            "model.safetensors"
        ) from error


def _told(error: Exception) -> str:
    """Return an error of transformers on one line; some list all models that it has."""
    if "trust_remote_code" in str(error):
        return "it needs Python code of its own folder, which rlhfd does not run: take a model that transformers has"
    text = " ".join(str(error).split())
    if isinstance(error, LookupError | ArithmeticError):
        # Of which the text alone says nothing.
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _MOST_TOLD else f"{text[:_MOST_TOLD]}..."


def _refuse_random_tensors(found: Mapping[str, Any], path: str | Path, field: str) -> None:
    """Refuse weights that do not give all tensors of a model: transformers leaves the others random, and warns.

    Args:
        found: The names that transformers did not find, did not expect, or found in another shape.
        path: Directory of the model, for the error message.
        field: The configuration field that names the directory, for the error message.

    Raises:
        ConfigError: If a tensor is missing, or has another shape.
    """
    if different := sorted(found["mismatched_keys"]):
        name, in_file, in_model = different[0][:3]
        raise ConfigError(
            f"{field}: {name} is {_shape(in_file)} in the weights in {path}, and {_shape(in_model)} by its config.json "
            f"({len(different):,} tensors differ): both are not of one model"
        )
    if missing := sorted(found["missing_keys"]):
        advice = "take the weights of this model"
        for unexpected in sorted(found["unexpected_keys"]):
            prefix = unexpected.removesuffix(missing[0])
            if prefix != unexpected:
                advice = f'they have {unexpected}: remove the prefix "{prefix}" from the names'
        raise ConfigError(
            f"{field}: the weights in {path} lack {len(missing):,} tensors of the model, such as {missing[0]}, which "
            f"would be random; {advice}"
        )


def _shape(sizes: Any) -> str:
    return " x ".join(str(size) for size in sizes)
