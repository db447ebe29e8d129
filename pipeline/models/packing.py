"""Forward passes over packed rows, concatenated to ``(1, T)`` without a padding column.

Position ids restart at 0 in each row. From them transformers builds a block-diagonal mask under eager and sdpa
attention; the variable-length kernels of flash attention receive the start of each row. A model that ignores both would
let a row attend to the row before it, so the first packed pass of a model tests it on two tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pipeline.errors import FieldError, ShapeError
from pipeline.experience.types import Experience, is_vl_experience
from pipeline.models.chunked_log_probs import head_log_probs, logits_log_probs, plain_head
from pipeline.models.critic import Critic
from pipeline.models.inputs import accepted_keywords

_isolates_rows: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class PackedRows:
    """B rows, concatenated: T tokens, of which N are actions.

    Attributes:
        input_ids: ``(1, T)`` int64.
        position_ids: ``(1, T)`` int64, 0 at the start of each row.
        cu_seqlens: ``(B + 1,)`` int32, the start of each row, and T.
        max_seqlen: Tokens of the longest row.
        before: ``(N,)`` int64, the index of the token before each action.
        num_actions: Actions of each row, at its end; their sum is N.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    before: Tensor
    num_actions: list[int]

    @classmethod
    def of(cls, experience: Experience) -> Self:
        """Return the rows of a packed batch, concatenated.

        Args:
            experience: A batch from `make_experience_batch(..., packing_samples=True)`, with an `action_mask`.

        Raises:
            FieldError: If the batch is not packed, is a vision-language one, or has no action mask.
            ShapeError: If a row has no token before its first action.
        """
        if is_vl_experience(experience):
            raise FieldError("a vision-language experience cannot be packed, only one of text alone")
        mask, starts, position_ids = experience.action_mask, experience.cu_seqlens, experience.position_ids
        if isinstance(experience.sequences, Tensor) or starts is None or position_ids is None:
            raise FieldError("the batch is padded; packed rows come from make_experience_batch(packing_samples=True)")
        if mask is None or experience.max_seqlen is None:
            raise FieldError(f"{'action_mask' if mask is None else 'max_seqlen'} is missing")
        lengths, num_actions = [len(row) for row in experience.sequences], [len(row) for row in mask]
        before, start = [], 0
        for row, (length, actions) in enumerate(zip(lengths, num_actions, strict=True)):
            if actions >= length:
                raise ShapeError(f"row {row}: {actions} actions of {length} tokens; one must stand before them")
            start += length
            before.append(torch.arange(start - actions - 1, start - 1, device=position_ids.device))
        return cls(
            input_ids=torch.cat(list(experience.sequences)).unsqueeze(0),
            position_ids=position_ids,
            cu_seqlens=starts,
            max_seqlen=experience.max_seqlen,
            before=torch.cat(before),
            num_actions=num_actions,
        )

    def keywords(self) -> dict[str, Any]:
        """Return a backbone's keywords besides the ids; transformers passes the last four to its attention."""
        return {
            "position_ids": self.position_ids,
            "use_cache": False,
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_seqlen,
            "max_length_k": self.max_seqlen,
        }


def packed_action_log_probs(
    model: nn.Module, experience: Experience, *, temperature: float = 1.0, chunk_tokens: int | None = None
) -> list[Tensor]:
    """Return log-probs of the actions of a packed batch, from one forward pass; the packed form of `action_log_probs`.

    Args:
        model: A causal language model of transformers. Its ``.logits`` are used if it has no `plain_head`.
        experience: A batch from `make_experience_batch(..., packing_samples=True)`, with an `action_mask`.
        temperature: The sampling temperature, above 0.
        chunk_tokens: Positions whose logits exist at once; None for 2**26 logits, 256 MiB in float32.

    Returns:
        For each row ``(A_i,)`` float32, natural logarithms, differentiable if gradients are enabled: the layout of the
        batch's per-action fields.

    Raises:
        FieldError: If the batch is not packed, is a vision-language one or has no action mask, or if packed rows would
            attend to each other in this model.
        ShapeError: If a row has no token before its first action.
        ValueError: If the temperature is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probs need one above 0")
    rows = PackedRows.of(experience)
    labels = rows.input_ids[0, rows.before + 1]
    head = plain_head(model, rows.input_ids.device)
    if head is not None:
        states = packed_states(model.base_model, rows)
        log_probs, _ = head_log_probs(head, states, labels, temperature=temperature, chunk_tokens=chunk_tokens)
    else:
        _check_isolation(model, "logits", rows.input_ids.device)
        optional = accepted_keywords(model, {**rows.keywords(), "logits_to_keep": rows.before})
        logits = model(input_ids=rows.input_ids, **optional).logits[0]
        # N is less than T: every row has a token that is not an action.
        logits = logits if len(logits) == len(labels) else logits[rows.before]
        log_probs, _ = logits_log_probs(logits, labels, temperature=temperature, chunk_tokens=chunk_tokens)
    return list(log_probs.split(rows.num_actions))


def packed_action_values(critic: Critic, experience: Experience) -> list[Tensor]:
    """Return the value of the state before each action of a packed batch; the packed form of `action_values`.

    Args:
        critic: A critic, as from `load_critic`; its backbone runs one forward pass.
        experience: A batch from `make_experience_batch(..., packing_samples=True)`, with an `action_mask`.

    Returns:
        For each row ``(A_i,)`` float32, differentiable if gradients are enabled.

    Raises:
        FieldError: If the batch is not packed, is a vision-language one or has no action mask, or if packed rows would
            attend to each other in this model.
        ShapeError: If a row has no token before its first action.
    """
    rows = PackedRows.of(experience)
    values: Tensor = critic.value_head(packed_states(critic.backbone, rows).float())
    return list(values.squeeze(-1).split(rows.num_actions))


def packed_states(backbone: Any, rows: PackedRows) -> Tensor:
    """Return the last hidden states at the token before each action, ``(N, H)``.

    Raises:
        FieldError: If packed rows would attend to each other in this backbone.
    """
    _check_isolation(backbone, "last_hidden_state", rows.input_ids.device)
    output = backbone(input_ids=rows.input_ids, **accepted_keywords(backbone, rows.keywords()))
    states: Tensor = output.last_hidden_state[0, rows.before]
    return states


@torch.no_grad()
def _check_isolation(model: nn.Module, field: str, device: torch.device) -> None:
    """Refuse a model in which the second of two packed rows depends on the first."""
    if model not in _isolates_rows:

        def second_token(first: int) -> Tensor:
            ids = torch.tensor([[first, 0]], device=device)
            starts = torch.arange(3, dtype=torch.int32, device=device)
            rows = PackedRows(ids, torch.zeros_like(ids), starts, 1, ids.new_empty(0), [])
            # The same random state, so the same dropout, in both calls.
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                output = model(input_ids=ids, **accepted_keywords(model, rows.keywords()))
            outputs: Tensor = getattr(output, field)
            return outputs[0, 1].float()

        _isolates_rows[model] = torch.allclose(second_token(0), second_token(1), rtol=1e-4, atol=1e-4)
    if not _isolates_rows[model]:
        raise FieldError(f"{type(model).__name__} lets a packed row attend to the row before it; use a padded batch")
