"""Log-probs and values of action tokens, from a model and a padded batch.

The padded passes of maker and trainer compute log-probs and values with these functions. Position ids are always
derived from the rows, so the importance ratio of an unchanged policy is 1 for any padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pipeline.errors import ShapeError
from pipeline.experience.vision_rows import VisionRows
from pipeline.models.attention_kernels import chooses_kernels
from pipeline.models.chunked_log_probs import head_log_probs, logits_log_probs, plain_head
from pipeline.models.inputs import accepted_keywords, backbone_of, model_inputs


def action_log_probs(
    model: Callable[..., Any],
    sequences: Tensor,
    attention_mask: Tensor,
    num_actions: int,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    vision: VisionRows | None = None,
) -> Tensor:
    """Return log-probs of the last `num_actions` tokens of each row, log softmax(logits / temperature).

    Differentiable if gradients are enabled. Logits are computed at the action positions only: for a transformers model
    a chunk at a time, also in the backward pass (`pipeline.models.chunked_log_probs`); for other models all at once,
    ``(B, A + 1, V)`` or more.

    Args:
        model: Called with `input_ids` and `attention_mask`, and with those of `position_ids`, `use_cache` and
            `logits_to_keep` that it accepts; returns an object with ``.logits``, ``(B, S, V)`` or its last A + 1
            columns. For a model with a `plain_head` the backbone and then the head are called instead.
        sequences: ``(B, S)`` int64.
        attention_mask: ``(B, S)``, 1 where the token is real; the padding may be on either side.
        num_actions: Action columns (A), at least 1 and less than S.
        temperature: The sampling temperature, above 0.
        chunk_tokens: Positions whose logits are in float32 at once, and with a `plain_head` the only ones that exist;
            None for 2**26 logits, 256 MiB.
        vision: Images and videos of the rows, if any.

    Returns:
        ``(B, A)`` float32, natural logarithms. The values in columns of padding are undefined.

    Raises:
        ShapeError: If the shapes disagree, `num_actions` is out of range, the model's logits have another shape, or a
            row has fewer image tokens than its grids require.
        FieldError: If rows have images and the model would ignore them, or two images have no token between them.
        ValueError: If the temperature is not above 0.
    """
    return action_log_probs_and_entropies(
        model, sequences, attention_mask, num_actions,
        temperature=temperature, chunk_tokens=chunk_tokens, with_entropy=False, vision=vision,
    )[0]  # fmt: skip


@chooses_kernels
def action_log_probs_and_entropies(
    model: Callable[..., Any],
    sequences: Tensor,
    attention_mask: Tensor,
    num_actions: int,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = True,
    vision: VisionRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of actions and entropies of their distributions; see `action_log_probs` for the arguments.

    Returns:
        Log-probs and entropies in nats, each ``(B, A)`` float32; without `with_entropy` the entropies are ``(0,)``.

    Raises:
        ShapeError, FieldError, ValueError: As `action_log_probs`.
    """
    _check_columns(sequences, attention_mask, num_actions)
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probs need one above 0")
    labels = sequences[:, -num_actions:]
    # The distribution of a token is in the column before it.
    before = slice(-(num_actions + 1), -1)
    inputs, optional = model_inputs(model, sequences, attention_mask, vision)
    optional["use_cache"] = False
    settings: Any = {"temperature": temperature, "chunk_tokens": chunk_tokens, "with_entropy": with_entropy}
    head = plain_head(model, sequences.device)
    if head is not None:
        backbone: Any = backbone_of(model)
        states = backbone(**inputs, **accepted_keywords(backbone, optional)).last_hidden_state[:, before]
        log_probs, entropy = head_log_probs(head, states.flatten(0, 1), labels.flatten(), **settings)
    else:
        optional["logits_to_keep"] = num_actions + 1
        logits = model(**inputs, **accepted_keywords(model, optional)).logits
        # A model without logits_to_keep returns all S columns.
        if len(logits) != len(sequences) or logits.shape[1] not in (num_actions + 1, sequences.shape[1]):
            raise ShapeError(f"logits of shape {tuple(logits.shape)} for sequences {tuple(sequences.shape)}")
        log_probs, entropy = logits_log_probs(logits[:, before].flatten(0, 1), labels.flatten(), **settings)
    return log_probs.view(labels.shape), entropy.view(labels.shape) if with_entropy else entropy


def action_values(
    critic: Callable[..., Any],
    sequences: Tensor,
    attention_mask: Tensor,
    num_actions: int,
    *,
    vision: VisionRows | None = None,
) -> Tensor:
    """Return the value of the state BEFORE each of the last `num_actions` tokens: column S - A + j - 1 for action j.

    Args:
        critic: Called with `input_ids` and `attention_mask`, and with `position_ids` if it accepts them; returns
            ``(B, S)``, the value of the state after each token.
        sequences: ``(B, S)`` int64.
        attention_mask: ``(B, S)``, 1 where the token is real; the padding may be on either side.
        num_actions: Action columns (A), at least 1 and less than S.
        vision: Images and videos of the rows, if any.

    Returns:
        ``(B, A)`` float32, differentiable if gradients are enabled. The values in columns of padding are undefined.

    Raises:
        ShapeError: If the shapes disagree, `num_actions` is out of range, the critic's values are not ``(B, S)``, or a
            row has fewer image tokens than its grids require.
        FieldError: If rows have images and the critic would ignore them, or two images have no token between them.
    """
    _check_columns(sequences, attention_mask, num_actions)
    start = sequences.shape[1] - num_actions - 1
    return all_values(critic, sequences, attention_mask, vision=vision)[:, start:-1]


@chooses_kernels
def all_values(
    critic: Callable[..., Any], sequences: Tensor, attention_mask: Tensor, *, vision: VisionRows | None = None
) -> Tensor:
    """Return the value of the state after each token, ``(B, S)`` float32; arguments and errors: `action_values`."""
    inputs, optional = model_inputs(critic, sequences, attention_mask, vision)
    values: Tensor = critic(**inputs, **accepted_keywords(critic, optional))
    if not isinstance(values, Tensor) or values.shape != sequences.shape:
        found = f"values of shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise ShapeError(f"critic returned {found} for {tuple(sequences.shape)} tokens")
    return values.float()


def _check_columns(sequences: Tensor, attention_mask: Tensor, num_actions: int) -> None:
    if sequences.dim() != 2 or attention_mask.shape != sequences.shape:
        raise ShapeError(
            f"attention_mask of shape {tuple(attention_mask.shape)}, sequences {tuple(sequences.shape)}: not (B, S)"
        )
    if not 0 < num_actions < sequences.shape[1]:
        raise ShapeError(f"num_actions is {num_actions}; it must be from 1 to {sequences.shape[1] - 1} (S - 1)")
