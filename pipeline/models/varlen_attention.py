"""Attention of packed rows, each row by itself: no mask of T x T tokens, no product with padding or with another row.

    a kernel of a card   see `pipeline.models.card_attention`: GPU, 16 bits
    sdpa by rows         one call of torch's fused attention for each run of rows of equal length: CPUs, and the rest

The kernels take causal attention over whole rows, or over a sliding window of each. A model that also caps scores, adds
to them or has layers of another kind keeps its own attention, for which transformers makes the block mask from the
position ids.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.errors import FieldError
from pipeline.models.card_attention import BY_ROWS, Kernel, attend_by, causal_mask, kernel_of
from pipeline.models.critic import Critic
from pipeline.models.inputs import backbone_of, call_inside
from pipeline.models.prefix_attention import PrefixLayout, response_attention

NAME: Final = "rlhfd_varlen"
"""The attention's name in transformers' registry."""

_OTHER_ATTENTION: Final = ("softcap", "s_aux", "position_bias")
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
"""Kinds of layers, by their names in transformers."""


def use_varlen_attention(model: Any) -> bool:
    """Let a model compute the attention of packed rows by a kernel of this module; that of other passes stays sdpa.

    Args:
        model: A model of transformers, changed in place; any other model is left as it is.

    Returns:
        Whether packed rows take this kernel; False for a model whose attention is not sdpa, or has layers whose
        attention is neither over whole rows nor over a sliding window.
    """
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    if not isinstance(model, PreTrainedModel):
        return False
    text = model.config.get_text_config()
    kinds = {FULL, SLIDING, *(getattr(text, "layer_types", None) or [])}
    if text._attn_implementation != "sdpa" or len(kinds) > 2:
        return False
    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    # The encoder of images keeps its own.
    model.set_attn_implementation(NAME if text is model.config else {"text_config": NAME})
    return uses_varlen_attention(model)


def uses_varlen_attention(model: Any) -> bool:
    """Return whether a model's packed rows go through a kernel of this module."""
    return getattr(_text_config_of(model), "_attn_implementation", None) == NAME


def _text_config_of(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else None


def windows_of(model: Any) -> list[int | None]:
    """Return the tokens of the sliding window of each layer, None for whole rows; of transformers' models alone."""
    if (text := _text_config_of(model)) is None:
        return []
    # 0 for none, too.
    window = getattr(text, "sliding_window", None) or None
    kinds = getattr(text, "layer_types", None) or [SLIDING] * getattr(text, "num_hidden_layers", 1)
    return [window if kind == SLIDING else None for kind in kinds]


def problem_of_attention(
    model: nn.Module, check: Callable[[nn.Module], None], *, needs_kernel: bool = True
) -> str | None:
    """Let a model's rows share a pass; return the reason for which they cannot, with the attention as it was, or None.

    Args:
        model: A causal language model, changed in place, or a critic.
        check: Raises FieldError if rows of one pass would attend to each other in a backbone.
        needs_kernel: Whether a model that keeps its own attention, with a block mask, cannot.
    """
    owner: Any = model.backbone if isinstance(model, Critic) else model
    backbone = owner if isinstance(model, Critic) else backbone_of(model)
    if backbone is None:
        return "only a language model of transformers can"
    if getattr(owner.config.get_text_config(), "attention_chunk_size", None) is not None:
        # Rows below a chunk would pass the check.
        return "its attention counts tokens from the start of a pass"
    was_chosen = uses_varlen_attention(owner)
    problem: str | None = "its attention is not sdpa over whole rows or sliding windows"
    if was_chosen or use_varlen_attention(owner):
        problem = _problem_inside(model, lambda: _check_kernel(owner, lambda: check(backbone), is_new=not was_chosen))
        if problem is not None and not was_chosen:
            owner.set_attn_implementation("sdpa")
    if problem is None or needs_kernel or was_chosen:
        return problem
    return _problem_inside(model, lambda: check(backbone))


def _problem_inside(model: nn.Module, check: Callable[[], None]) -> str | None:
    """Return the error of a check in one line; None if there is none."""
    try:
        call_inside(model, check)
    except (FieldError, ValueError, TypeError, RuntimeError) as error:
        # The others are transformers' own, of layers that cannot keep rows apart, or take no such pass.
        return str(error).strip().partition("\n")[0]
    return None


def _check_kernel(model: Any, check: Callable[[], None], *, is_new: bool) -> None:
    """Call a check of passes by `varlen_attention`.

    The windows that layers give to it are compared with those of the configuration: a layer of some models has its
    window in its mask alone, which a packed pass does not make.

    Args:
        model: The model.
        check: The check; of a model that it knows already it makes no pass.
        is_new: Whether the model has had no such passes yet.

    Raises:
        FieldError: If windows differ, the attention refuses a layer, or the check raises it.
    """
    from transformers import AttentionInterface

    given: list[int | None] = []
    refused: list[FieldError] = []

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **keywords: Any) -> Any:
        given.append(keywords.get("sliding_window") or None)
        try:
            return varlen_attention(module, query, key, value, *others, **keywords)
        except FieldError as error:
            # An error that leaves a layer would leave its shards whole. No check takes NaN for a number.
            refused.append(error)
            return value.new_full((len(query), query.shape[2], query.shape[1], value.shape[3]), torch.nan), None

    AttentionInterface.register(NAME, attention)
    try:
        check()
    except FieldError as error:
        raise refused[0] if refused else error from None
    finally:
        AttentionInterface.register(NAME, varlen_attention)
    if refused:
        raise refused[0]
    windows = windows_of(model)
    slides = any(windows) or any(given)
    if slides and ((is_new and not given) or given != windows * (len(given) // len(windows))):
        raise FieldError(f"{type(model).__name__} does not give the windows of its layers to the attention")


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    row_lengths: list[int] | None = None,
    attend: Kernel | None = None,
    prefix_layout: PrefixLayout | None = None,
    sliding_window: int | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Return the attention of packed rows, ``(1, T, heads, size)``; called by the layers of a model of transformers.

    Args:
        module: The attention layer.
        query: ``(1, heads, T, size)``.
        key: ``(1, KV heads, T, size)``; each head of keys serves an equal number of query heads.
        value: As `key`.
        attention_mask: Of a padded pass; one element in a packed one.
        scaling: Factor of the scores; None for 1 / sqrt(size).
        cu_seq_lens_q: ``(B + 1,)`` int32, the starts of the rows, and T; None in a padded pass, which sdpa computes.
        max_length_q: Tokens of the longest row, read in a compiled pass.
        row_lengths: Tokens of each row; None in a compiled pass.
        attend: The kernel of a compiled pass, which needs the starts and the longest row alone; else None.
        prefix_layout: The places of prompts and responses in a pass that computes each prompt once; else None.
        sliding_window: Tokens to which one attends, itself among them; None and 0 for all before it.
        **keywords: Other arguments of transformers' attention.

    Raises:
        FieldError: If the layer caps its scores, adds to them or changes the mask, or slides a window in a pass that
            computes each prompt once.
    """
    if cu_seq_lens_q is not None or prefix_layout is not None:
        other = [name for name in _OTHER_ATTENTION if keywords.get(name) is not None]
        # The mask of a packed pass has one element; a layer that adds to it makes a larger one.
        if attention_mask is not None and attention_mask.numel() > 1:
            other.append("a mask of its own")
        if other:
            raise FieldError(f"{type(module).__name__} has {other[0]}, with which rows cannot be packed")
    if prefix_layout is not None:
        if sliding_window:
            raise FieldError(f"{type(module).__name__} slides a window")
        tokens = sum(prefix_layout.prompt_lengths)
        parts = query[:, :, :tokens], key[:, :, :tokens], value[:, :, :tokens]
        prompts = _causal(*parts, prefix_layout.prompt_lengths, prefix_layout.prompt_starts, scaling, None)
        responses = response_attention(query, key, value, prefix_layout, scaling)
        return torch.cat([prompts[0], *responses]).unsqueeze(0), None
    if cu_seq_lens_q is not None and attend is not None and max_length_q is not None:
        return _by_kernel(attend, query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window or None), None
    if cu_seq_lens_q is None or row_lengths is None:
        is_one_token = query.shape[2] == 1 and attention_mask is not None and attention_mask.shape[1] == 1
        if is_one_token and all(keywords.get(name) is None for name in _OTHER_ATTENTION):
            return _one_token(query, key, value, attention_mask, scaling, keywords.get("dropout", 0.0)), None
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        padded: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **keywords
        )
        return padded
    return _causal(query, key, value, row_lengths, cu_seq_lens_q, scaling, sliding_window or None), None


def _one_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, dropout: float
) -> Tensor:
    """Return the attention of one token a row to its cache, ``(rows, 1, heads, size)``.

    The query heads of a KV head are more queries to it, as in `response_attention`: earlier versions of transformers
    repeat the whole cache for them, in each layer.
    """
    heads = query.shape[1]
    folded = query.reshape(len(query), key.shape[1], heads // key.shape[1], -1)
    output = functional.scaled_dot_product_attention(folded, key, value, mask, dropout, scale=scaling)
    return output.reshape(len(output), 1, heads, -1)


def _causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row_lengths: list[int],
    starts: Tensor,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return the attention of rows by the device's kernel, ``(1, T, heads, size)``."""
    kernel = kernel_of(query.device, query.dtype, query.shape[-1], window is not None)
    if kernel == BY_ROWS:
        return _by_rows(query, key, value, row_lengths, scaling, window)
    return _by_kernel(attend_by(kernel), query, key, value, starts, max(row_lengths), scaling, window)


def _by_kernel(
    attend: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    by_token = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return attend(*by_token, starts, longest, scaling, window).unsqueeze(0)


def _by_rows(
    query: Tensor, key: Tensor, value: Tensor, row_lengths: list[int], scaling: float | None, window: int | None
) -> Tensor:
    """Return the attention, ``(1, T, heads, size)``; rows of equal length that follow each other are one call."""
    runs = [(length, sum(1 for _ in run)) for length, run in groupby(row_lengths)]
    tokens = [length * count for length, count in runs]
    split = query.split(tokens, dim=2), key.split(tokens, dim=2), value.split(tokens, dim=2)
    outputs = []
    for (length, count), q, k, v in zip(runs, *split, strict=True):
        rows = (count, length)
        slides = window is not None and window < length
        output = functional.scaled_dot_product_attention(
            q[0].unflatten(1, rows).transpose(0, 1),  # (rows, heads, length, size)
            k[0].unflatten(1, rows).transpose(0, 1),
            v[0].unflatten(1, rows).transpose(0, 1),
            attn_mask=causal_mask(length, window, query.device) if slides else None,
            is_causal=not slides,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).unsqueeze(0)
