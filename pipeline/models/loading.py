"""Models at their seams: log-probs and values of action tokens, the critic, and loading from local directories.

The maker and the trainer take log-probs and values with the same two functions, so that the importance ratio of an
unchanged policy is 1 however the rows are padded: position ids always come from the rows themselves.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError, ShapeError
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.chunked_log_probs import head_log_probs, logits_log_probs, plain_head
from pipeline.models.inputs import accepted_keywords, model_inputs, position_ids_from_mask
from pipeline.models.vision_inputs import is_vision_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")

_VALUE_HEAD_FILE = "value_head.safetensors"


@overload
def action_log_probs(
    model: Callable[..., Any],
    sequences: Tensor,
    attention_mask: Tensor,
    num_actions: int,
    *,
    temperature: float = ...,
    chunk_tokens: int | None = ...,
    with_entropy: Literal[False] = ...,
    vision: VisionRows | None = ...,
) -> Tensor: ...


@overload
def action_log_probs(
    model: Callable[..., Any],
    sequences: Tensor,
    attention_mask: Tensor,
    num_actions: int,
    *,
    temperature: float = ...,
    chunk_tokens: int | None = ...,
    with_entropy: Literal[True],
    vision: VisionRows | None = ...,
) -> tuple[Tensor, Tensor]: ...


def action_log_probs(
    model: Callable[..., Any],
    sequences: Tensor,
    attention_mask: Tensor,
    num_actions: int,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
    vision: VisionRows | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probs of the last `num_actions` tokens of each row, log softmax(logits / temperature).

    Differentiable where gradients are enabled. Logits are made at the action positions only: of a transformers model a
    chunk at a time, in the backward pass too (`pipeline.models.chunked_log_probs`); of any other, ``(B, A + 1, V)`` or more.

    Args:
        model: Called with `input_ids`, `attention_mask`, and `position_ids`, `use_cache` and `logits_to_keep` where it
            takes them; returns an object with ``.logits``, ``(B, S, V)`` or its last A + 1 columns. Of a model with a
            `plain_head` the backbone is called instead, and then the head.
        sequences: ``(B, S)`` int64.
        attention_mask: ``(B, S)``, 1 where the token is real, on whichever side the padding is.
        num_actions: Action columns (A), less than S.
        temperature: The sampling temperature, above 0.
        chunk_tokens: Positions whose logits are in float32 at once, or exist at all; None for about 256 MiB.
        with_entropy: Also return the entropy of each position's distribution.
        vision: Images and videos of the rows, if any.

    Returns:
        ``(B, A)`` float32, with the entropies ``(B, A)`` float32 as a second tensor if asked for. Columns of padding
        hold numbers without meaning.

    Raises:
        ShapeError: If the shapes do not agree.
        ValueError: If the temperature is not above 0.
    """
    _check_columns(sequences, attention_mask, num_actions)
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probs need one above 0")
    labels = sequences[:, -num_actions:]
    # The distribution of a token stands one column before it.
    before = slice(-(num_actions + 1), -1)
    inputs, optional = model_inputs(model, sequences, attention_mask, vision)
    optional["use_cache"] = False
    settings: Any = {"temperature": temperature, "chunk_tokens": chunk_tokens, "with_entropy": with_entropy}
    head = plain_head(model, sequences.device)
    if head is not None:
        backbone: Any = getattr(model, "base_model", None)
        states = backbone(**inputs, **accepted_keywords(backbone, optional)).last_hidden_state[:, before]
        log_probs, entropy = head_log_probs(head, states.flatten(0, 1), labels.flatten(), **settings)
    else:
        optional["logits_to_keep"] = num_actions + 1
        logits = model(**inputs, **accepted_keywords(model, optional)).logits
        # A model without logits_to_keep returned all S.
        if len(logits) != len(sequences) or logits.shape[1] not in (num_actions + 1, sequences.shape[1]):
            raise ShapeError(f"logits of shape {tuple(logits.shape)} for sequences {tuple(sequences.shape)}")
        log_probs, entropy = logits_log_probs(logits[:, before].flatten(0, 1), labels.flatten(), **settings)
    return (log_probs.view(labels.shape), entropy.view(labels.shape)) if with_entropy else log_probs.view(labels.shape)


def action_values(
    critic: Callable[..., Any],
    sequences: Tensor,
    attention_mask: Tensor,
    num_actions: int,
    *,
    vision: VisionRows | None = None,
) -> Tensor:
    """Value of the state BEFORE each of the last `num_actions` tokens: column S - A + j - 1 for action j.

    Args:
        critic: Called with `input_ids`, `attention_mask`, and `position_ids` where it takes them; returns ``(B, S)``.
        sequences: ``(B, S)`` int64.
        attention_mask: ``(B, S)``, 1 where the token is real, on whichever side the padding is.
        num_actions: Action columns (A), less than S.
        vision: Images and videos of the rows, if any.

    Returns:
        ``(B, A)`` float32, differentiable where gradients are enabled.

    Raises:
        ShapeError: If the shapes do not agree, or the critic's values are not ``(B, S)``.
    """
    _check_columns(sequences, attention_mask, num_actions)
    start = sequences.shape[1] - num_actions - 1
    return all_values(critic, sequences, attention_mask, vision=vision)[:, start:-1]


def all_values(
    critic: Callable[..., Any], sequences: Tensor, attention_mask: Tensor, *, vision: VisionRows | None = None
) -> Tensor:
    """Value of the state after each token, ``(B, S)`` float32; arguments and errors as in `action_values`."""
    inputs, optional = model_inputs(critic, sequences, attention_mask, vision)
    values: Tensor = critic(**inputs, **accepted_keywords(critic, optional))
    if values.shape != sequences.shape:
        raise ShapeError(f"critic returned values of shape {tuple(values.shape)} for {tuple(sequences.shape)} tokens")
    return values.float()


class Critic(nn.Module):
    """A backbone and a value head that starts at zero, so that an untrained critic says 0 everywhere.

    Args:
        backbone: A model without a head that returns ``last_hidden_state``.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        hidden_size = backbone.config.get_text_config().hidden_size
        # float32 whatever the backbone is: a bfloat16 value of 1 moves in steps of 0.008.
        self.value_head = nn.Linear(hidden_size, 1, device=backbone.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @classmethod
    def from_actor(cls, actor: PreTrainedModel) -> Self:
        """Make a critic of a copy of an actor's backbone; the actor is left alone."""
        backbone: Any = copy.deepcopy(actor.base_model)
        backbone.requires_grad_(True)
        return cls(backbone)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None, **pixels: Tensor
    ) -> Tensor:
        """Value of the state after each token.

        Args:
            input_ids: ``(B, S)`` int64.
            attention_mask: ``(B, S)``, 1 where the token is real.
            position_ids: ``(B, S)`` int64; None takes them from the mask. ``(3, B, S)`` of a vision-language backbone.
            **pixels: Pixels and grids, of a vision-language backbone.

        Returns:
            ``(B, S)`` float32.
        """
        if position_ids is None:
            position_ids = position_ids_from_mask(attention_mask)
        output = self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False, **pixels
        )
        values: Tensor = self.value_head(output.last_hidden_state.float())
        return values.squeeze(-1)

    def save_pretrained(self, path: str | Path) -> None:
        """Write the backbone as transformers does, and the value head beside it, for `load_critic`."""
        from safetensors.torch import save_file

        self.backbone.save_pretrained(path)
        save_file(dict(self.value_head.state_dict()), Path(path) / _VALUE_HEAD_FILE)


class SequenceReward:
    """A sequence-classification model at the reward seam: one score a row, read at the last real token.

    Args:
        model: A model with one label. Where it has a ``score`` head, the head is read at the last attended token: its
            own ``logits`` are read before the last token equal to the pad token, which may be the stop itself.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, attention_mask: Tensor, **_ignored: Any) -> Tensor:
        """Score rows.

        Args:
            input_ids: ``(B, S)`` int64.
            attention_mask: ``(B, S)``, 1 where the token is real.

        Returns:
            ``(B,)`` float32.
        """
        device = self.model.device
        input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        positions = {"position_ids": position_ids_from_mask(attention_mask)}
        score = getattr(self.model, "score", None)
        if score is None:
            logits: Tensor = self.model(**inputs, **accepted_keywords(self.model, positions)).logits
            return logits[:, 0].float()
        backbone = self.model.base_model
        hidden = backbone(**inputs, **accepted_keywords(backbone, positions)).last_hidden_state
        columns = torch.arange(input_ids.shape[1], device=device)
        last = torch.where(attention_mask != 0, columns, 0).amax(dim=1)
        scores: Tensor = score(hidden[torch.arange(len(hidden), device=device), last])
        return scores[:, 0].float()


def load_actor(
    path: str | Path, *, dtype: str | torch.dtype, device: torch.device | str, field: str = "model.actor"
) -> PreTrainedModel:
    """Load a causal language model, or a vision-language one, from a local directory, in eval mode.

    Args:
        path: A directory that ``save_pretrained`` wrote.
        dtype: Of the weights, as "bfloat16" or a torch dtype; the checkpoint's own is not kept.
        device: Where it goes.
        field: The configuration field that named the directory, for the error.

    Returns:
        The model.

    Raises:
        ConfigError: If the directory is missing or does not load.
    """
    _go_offline()
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    resolved = _torch_dtype(dtype)
    auto_class = AutoModelForImageTextToText if sees_images(path, field=field) else AutoModelForCausalLM
    return _load(auto_class, path, field, device, dtype=resolved)


def sees_images(path: str | Path, *, field: str = "model.actor") -> bool:
    """Tell whether a local directory holds a vision-language model that rollouts and trainer can speak to.

    Raises:
        ConfigError: If the directory is missing or holds no configuration of a model.
    """
    _go_offline()
    _check_directory(path, field)
    try:
        return is_vision_directory(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}: cannot load a model from {path}: {error}") from error


def load_tokenizer(path: str | Path, *, field: str = "model.actor") -> PreTrainedTokenizerBase:
    """Load a tokenizer from a local directory; it pads on the left, with eos where it has no pad token.

    Raises:
        ConfigError: If the directory is missing, does not load, or has neither a pad nor an eos token.
    """
    _go_offline()
    from transformers import AutoTokenizer

    _check_directory(path, field)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}: cannot load a tokenizer from {path}: {error}") from error
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"{field}: the tokenizer in {path} has neither a pad token nor an eos token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


class Preprocessing:
    """What stands beside the weights in a model's directory: its tokenizer, and what its image processor is made of.

    Args:
        path: The model's directory.
        tokenizer: Its tokenizer.
    """

    def __init__(self, path: str | Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Copied, not loaded: a trainer never sees an image file, and needs no pillow.
        self._files = {name: file.read_bytes() for name in _PROCESSOR_FILES if (file := Path(path) / name).is_file()}

    def save_pretrained(self, path: str | Path) -> None:
        """Write them into a directory."""
        self._tokenizer.save_pretrained(path)
        for name, content in self._files.items():
            (Path(path) / name).write_bytes(content)


def load_critic(
    path: str | Path, *, dtype: str | torch.dtype, device: torch.device | str, field: str = "model.critic"
) -> Critic:
    """Load a critic from a local directory; without a saved value head (any other model) the head starts at zero.

    Arguments, errors: as `load_actor`.
    """
    _go_offline()
    from safetensors.torch import load_file
    from transformers import AutoModel

    critic = Critic(_load(AutoModel, path, field, device, dtype=_torch_dtype(dtype)))
    head = Path(path) / _VALUE_HEAD_FILE
    if head.is_file():
        critic.value_head.load_state_dict(load_file(head, device=str(device)))
    else:
        log.info("critic starts with a value head of zeros: path=%s", path)
    return critic.eval()


def load_reward_model(
    path: str | Path, *, dtype: str | torch.dtype, device: torch.device | str, field: str = "model.reward"
) -> SequenceReward:
    """Load a sequence-classification model with one label from a local directory.

    Arguments: as `load_actor`.

    Raises:
        ConfigError: If the directory is missing, does not load, or its model has another number of labels.
    """
    _go_offline()
    from transformers import AutoModelForSequenceClassification

    model = _load(AutoModelForSequenceClassification, path, field, device, dtype=_torch_dtype(dtype))
    if model.config.num_labels != 1:
        raise ConfigError(f"{field}: the model in {path} has {model.config.num_labels} labels, a reward model has 1")
    return SequenceReward(model)


def _check_columns(sequences: Tensor, attention_mask: Tensor, num_actions: int) -> None:
    if sequences.dim() != 2 or attention_mask.shape != sequences.shape:
        raise ShapeError(
            f"attention_mask of shape {tuple(attention_mask.shape)}, sequences {tuple(sequences.shape)}: not (B, S)"
        )
    if not 0 < num_actions < sequences.shape[1]:
        raise ShapeError(f"num_actions is {num_actions}; it must be from 1 to {sequences.shape[1] - 1} (S - 1)")


def _go_offline() -> None:
    # Read by huggingface_hub when it is first imported; a local directory must never wait for a hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _check_directory(path: str | Path, field: str) -> None:
    # transformers takes a missing directory for the name of a model on the hub, and says so.
    if not Path(path).is_dir():
        raise ConfigError(f"{field}: no such directory: {path}")


def _torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype):
        raise ConfigError(f"model.dtype: {dtype!r} is no torch dtype")
    return resolved


def _load(
    auto_class: Any, path: str | Path, field: str, device: torch.device | str, *, dtype: torch.dtype
) -> PreTrainedModel:
    _check_directory(path, field)
    try:
        model: Any = auto_class.from_pretrained(str(path), dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}: cannot load a model from {path}: {error}") from error
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded
