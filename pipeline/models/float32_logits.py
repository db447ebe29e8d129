"""Logits in float32 from a head and hidden states of 16 bits, for models whose log-probs would be too coarse.

A bfloat16 number above 16 has steps of 0.125, and a log-prob is a difference of logits: the importance ratio of an
unchanged policy then differs from 1 wherever two passes over a row round in another way. The products of 16-bit numbers
are exact in float32 and summed in float32, so only the rounding of the result is left out: on a GPU at the speed of the
16-bit product. The backward pass is that of 16 bits.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.errors import ConfigError
from pipeline.models.float32_linear import float32_forward
from pipeline.models.inputs import inside
from pipeline.models.log_probs import action_log_probs

MOST_SPREAD = 0.02
"""Largest spread of the ratio of an unchanged policy with logits of 16 bits: a tenth of the usual clip range of 0.2."""

_ROWS = 8
_COLUMNS = 128
_MORE_COLUMNS = 40

log = logging.getLogger(__name__)


def use_float32_logits(
    model: nn.Module,
    tokens: Sequence[int],
    device: torch.device,
    *,
    dtype: str,
    given: bool | None,
    temperature: float = 1.0,
    most_columns: int = _COLUMNS,
) -> bool:
    """Have a model compute its logits in float32, if it is configured or the spread of its log-probs asks for it.

    Worker and trainer ask with the same weights and tokens, those of the start of the run, and get the same answer.

    Args:
        model: A causal language model, with the weights of the start of the run.
        tokens: Token ids that rows are made of, such as a prompt; none: nothing is measured.
        device: The model's.
        dtype: Dtype of the model's passes, as "bfloat16"; in float32 there is nothing to do.
        given: `model.float32_logits`; None: on a GPU, where the spread is above `MOST_SPREAD`.
        temperature: The sampling temperature.
        most_columns: Most tokens of a row.

    Returns:
        Whether the model's logits are float32 because of this call.

    Raises:
        ConfigError: If `given` is True and the model has no linear layer that makes its logits.
    """
    if dtype == "float32" or given is False:
        return False
    if given is None and (device.type == "cpu" or len(tokens) < 2 or most_columns < 4 or _head_of(model) is None):
        return False
    if given is None:
        spread = log_prob_spread(model, tokens, device, temperature=temperature, most_columns=most_columns)
        log.info("ratio of the unchanged policy: spread=%.4f float32_logits=%s", spread, spread > MOST_SPREAD)
        if spread <= MOST_SPREAD:
            return False
    compute_in_float32(model)
    return True


def compute_in_float32(model: nn.Module) -> None:
    """Have the linear layer that makes a model's logits return float32, whatever the dtype of the model.

    Raises:
        ConfigError: If the model has no such layer.
    """
    head = _head_of(model)
    if head is None:
        raise ConfigError(f"model.float32_logits: a {type(model).__name__} has no linear layer that makes its logits")
    # The method, not the layer: its hooks stay, such as adapters, whose change is not rounded to 16 bits either.
    for layer in (head, getattr(head, "lora_B", None)):
        if isinstance(layer, nn.Linear):
            layer.forward = types.MethodType(float32_forward, layer)  # type: ignore[method-assign]


def log_prob_spread(
    model: nn.Module,
    tokens: Sequence[int],
    device: torch.device,
    *,
    temperature: float = 1.0,
    most_columns: int = _COLUMNS,
) -> float:
    """Return the spread of the importance ratio of an unchanged policy, by rounding alone.

    It is the root mean square of the ratio less 1, between log-probs of the same rows in one pass, and in two passes
    with more padding.

    Args:
        model: A causal language model.
        tokens: Token ids, repeated to rows.
        device: The model's.
        temperature: The sampling temperature.
        most_columns: Most tokens of a row, at least 4.
    """
    columns = min(_COLUMNS, most_columns)
    rows = [[tokens[(row + column) % len(tokens)] for column in range(columns)] for row in range(_ROWS)]
    sequences = torch.tensor(rows, device=device)
    # Rows of several lengths, so that there is padding in the first pass too.
    mask = (torch.arange(columns) >= torch.arange(_ROWS).unsqueeze(1) % (columns // 2)).long().to(device)
    actions = columns // 2

    def passed(ids: Tensor, attention_mask: Tensor) -> Tensor:
        return inside(model, lambda: action_log_probs(model, ids, attention_mask, actions, temperature=temperature))

    more = (min(_MORE_COLUMNS, columns), 0)
    with torch.no_grad():
        whole = passed(sequences, mask)
        halves = zip(sequences.split(_ROWS // 2), mask.split(_ROWS // 2), strict=True)
        parts = torch.cat([passed(functional.pad(ids, more), functional.pad(kept, more)) for ids, kept in halves])
    return float((parts.double() - whole.double()).expm1().square().mean().sqrt())


def _head_of(model: Any) -> nn.Linear | None:
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    return head if isinstance(head, nn.Linear) else None
