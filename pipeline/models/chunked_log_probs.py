"""Log-probs of tokens with a bound on the logits in memory, independent of rows, positions and vocabulary size.

A model's logits are its head applied to the last hidden states of its backbone, (N, H) -> (N, V), and V may be 150,000.
If the head alone produces them, it runs over a chunk of positions at a time, and again in the backward pass, at the
cost of one more product with the head there: 2**26 logits exist at once, not rows x positions x V. A model that changes
its logits after the head (caps or scales them), or has only ``.logits``, returns all of them; then only the number of
rows in the caller's batch bounds them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from pipeline.models.lora import without_other_hooks

CHUNK_ELEMENTS = 2**26
"""Logits at once if `chunk_tokens` is None: 256 MiB in float32, and as much again for their exp."""

_plain_heads: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Cache of `plain_head`: its test, a forward pass over two tokens, runs once a model."""


def plain_head(model: object, device: torch.device) -> nn.Linear | None:
    """Return the linear layer that alone turns the backbone's last hidden states into the model's logits.

    Args:
        model: Any object; one with ``base_model`` and ``get_output_embeddings``, as in transformers, may have such a
            layer.
        device: Device of the model's inputs; the model is tested once, on two tokens.

    Returns:
        The layer; None if the model has no such layer, or its logits are not exactly those of the layer.
    """
    if not isinstance(model, nn.Module):
        return None
    backbone, find_head = getattr(model, "base_model", None), getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    if not isinstance(backbone, nn.Module) or backbone is model or not isinstance(head, nn.Linear):
        return None
    if model not in _plain_heads:
        _plain_heads[model] = _head_makes_logits(head, model, backbone, device)
    return head if _plain_heads[model] else None


def head_log_probs(
    head: nn.Linear,
    states: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    chunk_tokens: int | None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-probs of tokens from hidden states, log softmax(head(states) / temperature), a chunk at a time.

    Args:
        head: Result of `plain_head`. If it has a method ``computed``, this calls a function, with its arguments, while
            the head's weight is whole (`pipeline.trainer.sharding`).
        states: ``(N, H)``, the last hidden states at the positions before the tokens.
        labels: ``(N,)`` int64, the tokens.
        temperature: The sampling temperature, above 0.
        chunk_tokens: Positions whose logits exist at once; None for 2**26 logits.
        with_entropy: Whether to compute the entropy of each position's distribution.

    Returns:
        Log-probs and entropies, each ``(N,)`` float32; the entropies are ``(0,)`` if `with_entropy` is False.
    """
    most = chunk_tokens or max(1, CHUNK_ELEMENTS // head.out_features)
    computed: Any = getattr(head, "computed", None)
    # The call of a sharded head would gather its weight for each chunk.
    apply: Any = head if computed is None else partial(without_other_hooks, head)

    def of_chunk(states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return logits_log_probs(
            apply(states), labels, temperature=temperature, chunk_tokens=most, with_entropy=with_entropy
        )

    def of_all(states: Tensor) -> tuple[Tensor, Tensor]:
        return _in_chunks(of_chunk, states, labels, most)

    result: tuple[Tensor, Tensor] = of_all(states) if computed is None else computed(of_all, states)
    return result


def _in_chunks(
    of_chunk: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], states: Tensor, labels: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    if len(states) <= most:
        return of_chunk(states, labels)
    # Without checkpointing, autograd keeps the logits of every chunk for the backward pass.
    again = partial(checkpoint, of_chunk, use_reentrant=False, preserve_rng_state=False)
    run: Any = again if torch.is_grad_enabled() else of_chunk
    parts = [run(*chunk) for chunk in zip(states.split(most), labels.split(most), strict=True)]
    log_probs, entropies = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)


def logits_log_probs(
    logits: Tensor, labels: Tensor, *, temperature: float, chunk_tokens: int | None, with_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-probs of tokens from logits, ``(N, V)``, one chunk in float32 at a time; else as `head_log_probs`."""
    chunk_tokens = chunk_tokens or max(1, CHUNK_ELEMENTS // logits.shape[-1])
    result: tuple[Tensor, Tensor] = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]
        logits, labels.to(logits.device), temperature, chunk_tokens, with_entropy
    )
    return result


@torch.no_grad()
def _head_makes_logits(head: nn.Linear, model: nn.Module, backbone: nn.Module, device: torch.device) -> bool:
    outputs: list[Any] = []
    hook = backbone.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    try:
        # Two tokens: one may be padding, with states of zero, whose logits a cap does not change.
        logits = model(input_ids=torch.tensor([[0, 1]], device=device)).logits
    finally:
        hook.remove()
    states = getattr(outputs[0], "last_hidden_state", None) if outputs else None
    return states is not None and bool(logits.any()) and torch.equal(head(states).float(), logits.float())


class _ChunkedLogProbs(torch.autograd.Function):
    """Log-probs and entropies of rows of logits; only one chunk is ever in float32, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, chunk_tokens: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        log_probs, normalizers, entropies = [], [], []
        for chunk, chunk_labels in zip(logits.split(chunk_tokens), labels.split(chunk_tokens), strict=True):
            scaled = chunk.float() if temperature == 1 else chunk.float() / temperature
            normalizer = scaled.logsumexp(dim=-1)
            log_probs.append(scaled.gather(-1, chunk_labels.unsqueeze(-1)).squeeze(-1) - normalizer)
            normalizers.append(normalizer)
            if with_entropy:
                probs = (scaled - normalizer.unsqueeze(-1)).exp()
                entropies.append(torch.special.entr(probs).sum(dim=-1))
        empty = logits.new_empty(0, dtype=torch.float32)
        entropy = torch.cat(entropies) if entropies else empty
        ctx.save_for_backward(logits, labels, torch.cat(normalizers) if normalizers else empty, entropy)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        return torch.cat(log_probs) if log_probs else empty, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, normalizers, entropies = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for start in range(0, len(logits), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            # In place, here and below: a chunk of logits is a large part of a step's memory.
            probs = (logits[rows].float() / ctx.temperature).sub_(normalizers[rows].unsqueeze(-1)).exp_()
            upstream = grad_log_probs[rows].unsqueeze(-1)
            slope = None
            if len(entropies):
                # dH/dx = -p (log p + H); xlogy keeps 0 log 0 at 0.
                slope = torch.special.xlogy(probs, probs) + probs * entropies[rows].unsqueeze(-1)
            chunk = probs.mul_(-upstream).scatter_add_(-1, labels[rows].unsqueeze(-1), upstream)
            if slope is not None:
                chunk -= slope.mul_(grad_entropy[rows].unsqueeze(-1))
            gradient[rows] = chunk.div_(ctx.temperature)
        return gradient, None, None, None, None
