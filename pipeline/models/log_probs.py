"""Log-probs and values of action tokens, from a model and a padded batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

from torch import Tensor

from pipeline.errors import ShapeError
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.chunked_log_probs import head_log_probs, logits_log_probs, plain_head
from pipeline.models.inputs import accepted_keywords, model_inputs


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


def _check_columns(sequences: Tensor, attention_mask: Tensor, num_actions: int) -> None:
    if sequences.dim() != 2 or attention_mask.shape != sequences.shape:
        raise ShapeError(
            f"attention_mask of shape {tuple(attention_mask.shape)}, sequences {tuple(sequences.shape)}: not (B, S)"
        )
    if not 0 < num_actions < sequences.shape[1]:
        raise ShapeError(f"num_actions is {num_actions}; it must be from 1 to {sequences.shape[1] - 1} (S - 1)")
